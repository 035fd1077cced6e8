"""Uninitialised memory is NaN (or the largest integer) in every kernel test: what a kernel forgets to write shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rsi_kernels import permute_triton


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter sorts 1,024 keys in 4 s; more tiles are the better test anyway."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(permute_triton, "TILE", 16)
