"""The CUDA sources: compiled where there is nvcc, loaded and called without a GPU, done without where there is none."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rsi_kernels import cuda_library

NO_DEVICE = {35, 100}
"""cudaErrorInsufficientDriver, cudaErrorNoDevice."""

needs_nvcc = pytest.mark.skipif(cuda_library.find_nvcc() is None, reason="no nvcc")


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    cuda_library.load.cache_clear()
    yield
    cuda_library.load.cache_clear()


@needs_nvcc
def test_the_library_is_built_once_and_found_again(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("RSI_CACHE", str(tmp_path))
    library = cuda_library.load()
    assert library is not None
    [built] = list(tmp_path.iterdir())
    if not torch.cuda.is_available():  # a launch says that there is no device, and does not crash
        arguments = [None] * 6, [1, 1, 128, 8, 1, 1]
        assert library.rsi_route_forward(*arguments[0], *arguments[1], None) in NO_DEVICE
        assert library.rsi_route_backward(*arguments[0][:5], *arguments[1], None) in NO_DEVICE
    assert library.rsi_route_forward(*[None] * 6, 1, 1, 100, 8, 1, 1, None) == 1  # cudaErrorInvalidValue: E = 100
    assert library.rsi_route_forward(*[None] * 6, 1, 1, 128, 33, 1, 1, None) == 1  # K = 33
    cuda_library.load.cache_clear()
    monkeypatch.setattr(cuda_library, "build", lambda *_: pytest.fail("built again"))
    assert cuda_library.load() is not None and list(tmp_path.iterdir()) == [built]


def test_without_nvcc_nothing_fails(monkeypatch, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    monkeypatch.delenv("RSI_NVCC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO):
        assert cuda_library.load() is None
    assert "Triton and torch remain" in caplog.text


def test_a_broken_nvcc_is_a_warning(monkeypatch, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("RSI_NVCC", "/bin/false")
    monkeypatch.setenv("RSI_CACHE", str(tmp_path))
    assert cuda_library.load() is None
    assert "/bin/false --version failed" in caplog.text


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("RSI_SKIP_CUDA", "1")
    assert cuda_library.find_nvcc() is None and cuda_library.load() is None


@pytest.mark.parametrize(
    ("nvcc", "said", "built"),
    [
        ("#!/bin/sh\nfor out; do :; done; echo library > $out", "", True),
        ("#!/bin/sh\necho this compiler is broken >&2; exit 1", "left out: .*this compiler is broken", False),
        (None, "no nvcc, CUDA kernels left out", False),
    ],
)
def test_an_install_never_fails_for_want_of_a_compiler(repo: Path, tmp_path: Path, nvcc, said: str, built: bool):
    source = tmp_path / "source"
    for name in ("setup.py", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(repo / name, source / name)
    for room in ("rsi", "eval", "kernels"):
        shutil.copytree(repo / room, source / room)
    env = os.environ | {"RSI_SKIP_CUDA": "1"}
    if nvcc is not None:
        (tmp_path / "nvcc").write_text(nvcc)
        (tmp_path / "nvcc").chmod(0o755)
        env |= {"RSI_SKIP_CUDA": "0", "RSI_NVCC": str(tmp_path / "nvcc")}
    command = [sys.executable, "setup.py", "build_py", "--build-lib", str(tmp_path / "built")]
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(said, done.stdout, re.S)
    files = {path.name for path in (tmp_path / "built" / "rsi_kernels").rglob("*")}
    assert (cuda_library.SHIPPED in files) == built
    assert {"route.cu", "route.py", "cuda_library.py"} <= files
