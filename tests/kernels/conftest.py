"""Uninitialised memory is NaN (or the largest integer) in every kernel test: what a kernel forgets to write shows."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
