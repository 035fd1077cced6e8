"""What holds for every test: no network for model hubs, one thread a process (two cores are shared by everything), and
Triton in its interpreter where there is no GPU (Triton reads that when it is first imported, by whomever)."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rsi.harbor.grade import Grader
from rsi.sandbox import Backend, SandboxConfig, build_backend

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is first imported
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


Run = Callable[[Callable[[Grader, Backend], Awaitable[Any]]], Any]


@pytest.fixture(scope="session")
def repo() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def with_grader() -> Run:
    """Runs a coroutine function with a grader on the real namespace backend, closed after each test."""

    def run(main: Callable[[Grader, Backend], Awaitable[Any]]) -> Any:
        async def body() -> Any:
            backend = build_backend(SandboxConfig())
            try:
                return await main(Grader(backend), backend)
            finally:
                await backend.close()

        return asyncio.run(body())

    return run
