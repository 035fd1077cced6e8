"""The elementwise middle of the experts, one program a row: SwiGLU, and its gradient with that of the row's weight."""
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# (to pyright a kernel is the Python function that it looks like)

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from rsi_kernels.aot import BF16, F32, Case
from rsi_kernels.impl import on_device

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def forward_kernel(PRE, A, INNER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    ok = c < INNER
    g = tl.load(PRE + row * 2 * INNER + c, mask=ok, other=0.0).to(tl.float32)
    u = tl.load(PRE + row * 2 * INNER + INNER + c, mask=ok, other=0.0).to(tl.float32)
    tl.store(A + row * INNER + c, (g * tl.sigmoid(g) * u).to(A.dtype.element_ty), mask=ok)


@triton.jit
def backward_kernel(PRE, D_A, WEIGHT, D_PRE, WEIGHTED, D_WEIGHT, INNER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    ok = c < INNER
    g = tl.load(PRE + row * 2 * INNER + c, mask=ok, other=0.0).to(tl.float32)
    u = tl.load(PRE + row * 2 * INNER + INNER + c, mask=ok, other=0.0).to(tl.float32)
    d = tl.load(D_A + row * INNER + c, mask=ok, other=0.0).to(tl.float32)
    w = tl.load(WEIGHT + row)
    s = tl.sigmoid(g)
    silu = g * s
    a = silu * u
    tl.store(D_WEIGHT + row, tl.sum(a * d, 0))
    d = d * w
    tl.store(WEIGHTED + row * INNER + c, (a * w).to(WEIGHTED.dtype.element_ty), mask=ok)
    # d silu = s (1 + g (1 - s)) = s + silu (1 - s)
    tl.store(D_PRE + row * 2 * INNER + c, (d * u * (s + silu * (1.0 - s))).to(D_PRE.dtype.element_ty), mask=ok)
    tl.store(D_PRE + row * 2 * INNER + INNER + c, (d * silu).to(D_PRE.dtype.element_ty), mask=ok)


def forward(pre: Tensor) -> Tensor:
    """silu(gate) * up of pre [R, 2I]; [R, I]."""
    rows, inner = pre.shape[0], pre.shape[1] // 2
    activated = pre.new_empty((rows, inner))
    if rows:
        with on_device(pre):
            forward_kernel[(rows,)](pre, activated, INNER=inner, BLOCK=triton.next_power_of_2(inner), **OPTIONS)
    return activated


def backward(pre: Tensor, grad_activated: Tensor, row_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of pre, weighted activations [R, I], gradient of row_weights [R])."""
    rows, inner = grad_activated.shape
    grad_pre = torch.empty_like(pre)
    weighted = torch.empty_like(grad_activated)
    grad_row_weights = torch.empty_like(row_weights)
    if rows:
        with on_device(pre):
            backward_kernel[(rows,)](
                pre, grad_activated, row_weights, grad_pre, weighted, grad_row_weights, INNER=inner,
                BLOCK=triton.next_power_of_2(inner), **OPTIONS,
            )  # fmt: skip
    return grad_pre, weighted, grad_row_weights


def aot_cases() -> Iterator[Case]:
    for inner, block in ((768, 1024), (512, 512)):
        constants = {"INNER": inner, "BLOCK": block}
        pointers = {"PRE": BF16, "A": BF16}
        yield Case(f"swiglu I={inner}", forward_kernel, pointers, constants, tuple(pointers), OPTIONS)
        pointers = {"PRE": BF16, "D_A": BF16, "WEIGHT": F32, "D_PRE": BF16, "WEIGHTED": BF16, "D_WEIGHT": F32}
        yield Case(f"swiglu backward I={inner}", backward_kernel, pointers, constants, tuple(pointers), OPTIONS)
