"""permute is torch's stable sort, to the last slot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rsi_kernels.impl import Impl
from rsi_kernels.permute import permute
from tests.kernels.checks import BOTH, DEVICE, plant_in_module


def spread(tokens: int, experts: int, k: int) -> Tensor:
    """Distinct experts for each token; about half of the experts get nothing."""
    generator = torch.Generator().manual_seed(tokens)
    busy = torch.randperm(experts, generator=generator)[: max(k, experts // 2)]
    rows = [busy[torch.randperm(len(busy), generator=generator)[:k]] for _ in range(tokens)]
    return torch.stack(rows).int().to(DEVICE)


def check(impl: Impl, ids: Tensor, num_experts: int) -> None:
    """Raises AssertionError if a slot is not where a stable sort puts it."""
    perm, inv, offs = permute(ids, num_experts, impl=impl)
    flat = ids.reshape(-1).long()
    owned = flat < num_experts
    order = torch.sort(flat, stable=True).indices[: int(owned.sum())]
    counts = torch.bincount(flat[owned], minlength=num_experts)
    assert offs.tolist() == [0, *counts.cumsum(0).tolist()]
    assert torch.equal(perm[: len(order)].long(), order) and not perm[len(order) :].any()
    expected = torch.full_like(flat, -1)
    expected[order] = torch.arange(len(order), device=DEVICE)
    assert torch.equal(inv.long(), expected)
    assert perm.dtype == inv.dtype == offs.dtype == torch.int32


@BOTH
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 4, 1), (7, 11, 3), (71, 16, 4), (20, 256, 8)])
def test_slots_lie_where_a_stable_sort_puts_them(impl: Impl, tokens: int, experts: int, k: int):
    check(impl, spread(tokens, experts, k), experts)  # 284 slots are 18 small tiles, which base_kernel sums by 16


@BOTH
def test_one_expert_may_take_all(impl: Impl):
    check(impl, torch.full((90, 2), 5, dtype=torch.int32, device=DEVICE), 16)
    check(impl, torch.full((3, 1), 15, dtype=torch.int64, device=DEVICE), 16)


@BOTH
def test_experts_of_other_ranks_have_no_row(impl: Impl):
    ids = spread(71, 16, 4)
    ids[ids % 3 == 0] = 16  # transformers marks them so
    ids[0, 0] = 1000
    check(impl, ids, 16)
    check(impl, torch.full((3, 2), 8, dtype=torch.int32, device=DEVICE), 8)


@BOTH
def test_no_slots_give_no_rows(impl: Impl):
    perm, inv, offs = permute(torch.zeros(0, 8, dtype=torch.int32, device=DEVICE), 16, impl=impl)
    assert perm.numel() == inv.numel() == 0 and offs.tolist() == [0] * 17


def test_opcheck_finds_schema_and_fake_in_order():
    torch.library.opcheck(torch.ops.rsi.permute.default, (spread(7, 11, 3), 11, "auto"))


def test_ids_that_are_not_a_table_are_refused():
    with pytest.raises(ValueError, match=r"ids \[T, K\]"):
        permute(torch.zeros(5, dtype=torch.int32), 4)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ids * TILE + i, 0)", "ids * TILE + (TILE - 1 - i), 0)"),
        ("before_tile = tl.cumsum(h, 0) - h", "before_tile = tl.cumsum(h, 0)"),
        ("run += tl.sum(h, 0)", "pass"),
        ("owned = ids < E", "owned = ids <= E"),
        ("mask=o < N, other=E)\n    owned", "mask=o < N, other=0)\n    owned"),
        ("tl.where(owned, row, -1)", "row"),
        ("tl.store(OFFS + 1 + e, end, mask=e == E - 1)", "pass"),
    ],
)
def test_a_fault_planted_in_the_triton_kernels_is_caught(monkeypatch, tmp_path, old: str, new: str):
    plant_in_module(monkeypatch, tmp_path, "permute_triton", old, new)
    if DEVICE == "cpu":
        monkeypatch.setattr("rsi_kernels.permute_triton.TILE", 16)
    ids = spread(71, 16, 4)
    ids[ids % 3 == 0] = 16
    with pytest.raises((AssertionError, IndexError)):
        check("triton", ids, 16)
