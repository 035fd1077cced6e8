"""The CUDA sources: compiled where there is nvcc, loaded and called without a GPU, done without where there is none."""

from __future__ import annotations

import logging
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
