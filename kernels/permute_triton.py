"""A stable counting sort in three launches: histogram of each tile, where each tile's experts begin, scatter.

No atomics: their order, and so the order of tokens, would differ from run to run.
"""
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# (to pyright a kernel is the Python function that it looks like)

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from rsi_kernels.aot import I32, Case
from rsi_kernels.impl import on_device

TILE = 1024
TILES_AT_ONCE = 16
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


@triton.jit
def histogram_kernel(IDS, HIST, N, E: tl.constexpr, EP: tl.constexpr, TILE: tl.constexpr):
    pid = tl.program_id(0)
    o = pid * TILE + tl.arange(0, TILE)
    ids = tl.load(IDS + o, mask=o < N, other=E)
    owned = ids < E
    tl.store(HIST + pid * EP + tl.arange(0, EP), tl.histogram(tl.where(owned, ids, 0), EP, mask=owned))


@triton.jit
def base_kernel(HIST, BASE, OFFS, tiles, E: tl.constexpr, EP: tl.constexpr, TB: tl.constexpr):
    """OFFS[e]: first row of expert e. BASE[tile, e] + (place in the sorted tile): the row of a slot."""
    e = tl.arange(0, EP)
    r = tl.arange(0, TB)
    total = tl.zeros((EP,), tl.int32)
    for t0 in range(0, tiles, TB):
        h = tl.load(HIST + (t0 + r)[:, None] * EP + e[None, :], mask=(t0 + r)[:, None] < tiles, other=0)
        total += tl.sum(h, 0)
    end = tl.cumsum(total, 0)
    tl.store(OFFS + e, end - total, mask=e < E)
    tl.store(OFFS + 1 + e, end, mask=e == E - 1)
    run = end - total
    for t0 in range(0, tiles, TB):
        live = (t0 + r)[:, None] < tiles
        h = tl.load(HIST + (t0 + r)[:, None] * EP + e[None, :], mask=live, other=0)
        before_tile = tl.cumsum(h, 0) - h
        before_expert = tl.cumsum(h, 1) - h
        tl.store(BASE + (t0 + r)[:, None] * EP + e[None, :], run[None, :] + before_tile - before_expert, mask=live)
        run += tl.sum(h, 0)


@triton.jit
def scatter_kernel(IDS, BASE, PERM, INV, N, E: tl.constexpr, EP: tl.constexpr, TILE: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, TILE)
    o = pid * TILE + i
    ids = tl.minimum(tl.load(IDS + o, mask=o < N, other=E), E)
    key = tl.sort(ids * TILE + i, 0)  # (E + 1) * TILE < 2^31; the position breaks ties, so the sort is stable
    expert = key // TILE
    owned = expert < E
    row = tl.load(BASE + pid * EP + expert, mask=owned, other=0) + i
    slot = pid * TILE + key % TILE
    tl.store(PERM + row, slot, mask=owned)
    tl.store(INV + slot, tl.where(owned, row, -1), mask=slot < N)


def permute(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids: int32 [N]. Returns (perm, inv, offs) as `permute` does."""
    n = ids.numel()
    tiles = triton.cdiv(n, TILE)
    padded = triton.next_power_of_2(num_experts)
    perm, inv = ids.new_zeros(n), ids.new_empty(n)
    offs = ids.new_zeros(num_experts + 1)
    if not n:
        return perm, inv, offs
    hist, base = (torch.empty(tiles, padded, dtype=torch.int32, device=ids.device) for _ in range(2))
    shape = {"E": num_experts, "EP": padded}
    with on_device(ids):
        histogram_kernel[(tiles,)](ids, hist, n, **shape, TILE=TILE, **OPTIONS)
        base_kernel[(1,)](hist, base, offs, tiles, **shape, TB=TILES_AT_ONCE, **OPTIONS)
        scatter_kernel[(tiles,)](ids, base, perm, inv, n, **shape, TILE=TILE, **OPTIONS)
    return perm, inv, offs


def aot_cases() -> Iterator[Case]:
    for experts in (128, 256):
        shape = {"E": experts, "EP": experts}
        tile = shape | {"TILE": TILE}
        ids = {"IDS": I32, "N": "i32"}
        yield Case(
            f"permute histogram E={experts}", histogram_kernel, ids | {"HIST": I32}, tile, ("IDS", "HIST", "N"), OPTIONS
        )
        pointers = {"HIST": I32, "BASE": I32, "OFFS": I32}
        yield Case(
            f"permute base E={experts}",
            base_kernel,
            pointers | {"tiles": "i32"},
            shape | {"TB": TILES_AT_ONCE},
            tuple(pointers),
            OPTIONS,
        )
        pointers = {"IDS": I32, "BASE": I32, "PERM": I32, "INV": I32}
        yield Case(
            f"permute scatter E={experts}", scatter_kernel, pointers | {"N": "i32"}, tile, (*pointers, "N"), OPTIONS
        )
