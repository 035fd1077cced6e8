"""Weighted sum of each token's K rows, and its gradient: one program a token, float32 in registers."""
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# (to pyright a kernel is the Python function that it looks like)

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from rsi_kernels.aot import BF16, F32, I32, Case
from rsi_kernels.impl import on_device

BLOCK = 1024
"""Columns of a program (forward) or of a step (backward)."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def forward_kernel(
    ROWS, WEIGHTS, INV, Y, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(INV + t * K + k).to(tl.int64)
        # a slot of nobody has row -1: what lies there is not read, it may be NaN
        value = tl.load(ROWS + row * H + c, mask=(c < H) & (row >= 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(WEIGHTS + t * K + k)
        total += value
    tl.store(Y + t * H + c, total.to(Y.dtype.element_ty), mask=c < H)


@triton.jit
def backward_kernel(
    D_Y, ROWS, WEIGHTS, INV, D_ROWS, D_WEIGHTS, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(K):
        row = tl.load(INV + t * K + k).to(tl.int64)
        dot = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, H, BLOCK):
            c = start + tl.arange(0, BLOCK)
            ok = (c < H) & (row >= 0)
            d = tl.load(D_Y + t * H + c, mask=c < H, other=0.0).to(tl.float32)
            if WEIGHTED:
                dot += d * tl.load(ROWS + row * H + c, mask=ok, other=0.0).to(tl.float32)
                d = d * tl.load(WEIGHTS + t * K + k)
            tl.store(D_ROWS + row * H + c, d.to(D_ROWS.dtype.element_ty), mask=ok)
        if WEIGHTED:
            tl.store(D_WEIGHTS + t * K + k, tl.sum(dot, 0))


def forward(rows: Tensor, weights: Tensor | None, inv: Tensor, k: int) -> Tensor:
    tokens, hidden = rows.shape[0] // k, rows.shape[1]
    y = rows.new_empty((tokens, hidden))
    if tokens:
        with on_device(rows):
            forward_kernel[(tokens, triton.cdiv(hidden, BLOCK))](
                rows, rows if weights is None else weights.contiguous(), inv, y, H=hidden, K=k, BLOCK=BLOCK,
                WEIGHTED=weights is not None, **OPTIONS,
            )  # fmt: skip
    return y


def backward(
    grad: Tensor, rows: Tensor, weights: Tensor | None, inv: Tensor, k: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(gradient of rows, 0 in rows of nobody; of weights, empty if there are none)."""
    tokens, hidden = rows.shape[0] // k, rows.shape[1]
    grad_rows = torch.zeros_like(rows)
    grad_weights = rows.new_empty(0 if weights is None else (tokens, k), dtype=torch.float32)
    if tokens:
        with on_device(rows):
            backward_kernel[(tokens,)](
                grad, rows, rows if weights is None else weights.contiguous(), inv, grad_rows, grad_weights, H=hidden,
                K=k, BLOCK=BLOCK, WEIGHTED=weights is not None, **OPTIONS,
            )  # fmt: skip
    return grad_rows, grad_weights


def aot_cases() -> Iterator[Case]:
    for weighted in (True, False):
        label = "weighted" if weighted else "sum"
        constants = {"H": 2048, "K": 8, "BLOCK": BLOCK, "WEIGHTED": weighted}
        pointers = {"ROWS": BF16, "WEIGHTS": F32, "INV": I32, "Y": BF16}
        yield Case(f"combine {label}", forward_kernel, pointers, constants, tuple(pointers), OPTIONS)
    pointers = {"D_Y": BF16, "ROWS": BF16, "WEIGHTS": F32, "INV": I32, "D_ROWS": BF16, "D_WEIGHTS": F32}
    constants = {"H": 2048, "K": 8, "BLOCK": BLOCK, "WEIGHTED": True}
    yield Case("combine backward weighted", backward_kernel, pointers, constants, tuple(pointers), OPTIONS)
