"""A grader on the real namespace backend, closed after each test."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rsi.harbor.grade import Grader
from rsi.sandbox import Backend, SandboxConfig, build_backend

Run = Callable[[Callable[[Grader, Backend], Awaitable[Any]]], Any]


@pytest.fixture
def with_grader() -> Run:
    """Runs a coroutine function with a grader and its backend."""

    def run(main: Callable[[Grader, Backend], Awaitable[Any]]) -> Any:
        async def body() -> Any:
            backend = build_backend(SandboxConfig())
            try:
                return await main(Grader(backend), backend)
            finally:
                await backend.close()

        return asyncio.run(body())

    return run
