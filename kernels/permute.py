"""Slots (token t, choice k) in order of their expert: a stable counting sort, without a round trip to the host.

Slot t * K + k goes to sorted row inv[slot]; row r holds slot perm[r]. Ids at or above num_experts belong to another
rank (transformers' expert parallelism marks them so): such slots have no row, inv -1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rsi_kernels.impl import Impl, resolve


def permute(ids: Tensor, num_experts: int, *, impl: Impl = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """(perm [T * K], inv [T * K], offs [E + 1]), int32; offs[e] is expert e's first row, offs[0] = 0.

    ids: int32 or int64 [T, K], >= 0. Rows at and past offs[E] hold slot 0 and belong to nobody; `F.grouped_mm` takes
    offs[1:] and leaves its output there uninitialised. Order within an expert is that of the slots.
    """
    if ids.dim() != 2:
        raise ValueError(f"expected ids [T, K]; found {list(ids.shape)}")
    return _permute(ids, num_experts, impl)


@torch.library.custom_op("rsi::permute", mutates_args=())
def _permute(ids: Tensor, num_experts: int, impl: str) -> tuple[Tensor, Tensor, Tensor]:
    flat = ids.reshape(-1).int()
    if resolve(impl, ids.device) == "triton":
        from rsi_kernels import permute_triton

        return permute_triton.permute(flat, num_experts)
    flat = flat.clamp(max=num_experts)
    perm = torch.sort(flat, stable=True).indices.int()
    counts = torch.bincount(flat, minlength=num_experts)[:num_experts]
    offs = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=offs[1:])
    rows = torch.arange(len(flat), dtype=torch.int32, device=ids.device)
    owned = rows < offs[-1]
    inv = torch.empty_like(perm)
    inv[perm.long()] = torch.where(owned, rows, -1)
    return torch.where(owned, perm, 0), inv, offs


@_permute.register_fake
def _(ids, num_experts, impl):
    new = lambda size: ids.new_empty((size,), dtype=torch.int32)  # noqa: E731
    return new(ids.numel()), new(ids.numel()), new(num_experts + 1)
