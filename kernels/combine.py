"""Back from expert order to token order: each token's K rows, weighted and summed in float32.

    r = inv[t * K + k]      y_t = sum_k w_tk row_r      d row_r = w_tk dy_t      dw_tk = <dy_t, row_r>

A slot with inv -1 adds nothing, whatever lies in the rows past the last expert: 0 * NaN is NaN, so a zero weight would
not do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rsi_kernels.impl import Impl, resolve


def combine(rows: Tensor, weights: Tensor | None, inv: Tensor, k: int, *, impl: Impl = "auto") -> Tensor:
    """y [T, H] in the dtype of rows.

    rows: [T * K, H] in expert order; weights: float32 [T, K], None for ones; inv: int32 [T * K], of `permute`.
    Differentiable once in rows and in weights.
    """
    if rows.dim() != 2 or inv.shape != rows.shape[:1] or rows.shape[0] % k:
        raise ValueError(f"expected rows [T * K, H], inv [T * K]; found {list(rows.shape)}, {list(inv.shape)}, k={k}")
    if weights is not None and weights.shape != (rows.shape[0] // k, k):
        raise ValueError(f"expected weights [T, K] = {[rows.shape[0] // k, k]}; found {list(weights.shape)}")
    return _forward(rows, weights, inv, k, impl)


def combine_reference(rows: Tensor, weights: Tensor | None, inv: Tensor, k: int) -> Tensor:
    """The same in float64, differentiated by autograd."""
    picked = _pick(rows.double(), inv).view(-1, k, rows.shape[1])
    return (picked if weights is None else picked * weights.double()[..., None]).sum(1)


def _pick(rows: Tensor, inv: Tensor) -> Tensor:
    """rows[inv], zeros where inv is -1."""
    picked = rows.index_select(0, inv.clamp(min=0))
    nobody = inv < 0
    if inv.is_cuda or nobody.any():  # to ask a GPU would be to wait for it
        picked = picked.masked_fill(nobody[:, None], 0)
    return picked


@torch.library.custom_op("rsi::combine", mutates_args=())
def _forward(rows: Tensor, weights: Tensor | None, inv: Tensor, k: int, impl: str) -> Tensor:
    if resolve(impl, rows.device) == "triton":
        from rsi_kernels import combine_triton

        return combine_triton.forward(rows.contiguous(), weights, inv.contiguous(), k)
    wide = torch.promote_types(rows.dtype, torch.float32)
    picked = _pick(rows, inv).view(-1, k, rows.shape[1]).to(wide)
    if weights is None:
        return picked.sum(1).to(rows.dtype)
    return torch.bmm(weights[:, None].to(wide), picked)[:, 0].to(rows.dtype)


@torch.library.custom_op("rsi::combine_backward", mutates_args=())
def _backward(
    grad: Tensor, rows: Tensor, weights: Tensor | None, inv: Tensor, k: int, impl: str
) -> tuple[Tensor, Tensor]:
    """(gradient of rows, 0 in rows of nobody; of weights, empty if there are none)."""
    if resolve(impl, rows.device) == "triton":
        from rsi_kernels import combine_triton

        return combine_triton.backward(grad, rows.contiguous(), weights, inv.contiguous(), k)
    wide = torch.promote_types(rows.dtype, torch.float32)
    grad_slots = grad[:, None].to(wide).expand(-1, k, -1)
    grad_weights = rows.new_empty(0, dtype=wide)
    if weights is not None:
        grad_weights = torch.linalg.vecdot(grad_slots, _pick(rows, inv).view(-1, k, rows.shape[1]).to(wide))
        grad_slots = grad_slots * weights[..., None]
    grad_rows = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    owned = inv >= 0
    grad_rows[inv[owned].long()] = grad_slots.reshape(-1, rows.shape[1])[owned].to(rows.dtype)
    return grad_rows, grad_weights


@_forward.register_fake
def _(rows, weights, inv, k, impl):
    return rows.new_empty((rows.shape[0] // k, rows.shape[1]))


@_backward.register_fake
def _(grad, rows, weights, inv, k, impl):
    wide = torch.promote_types(rows.dtype, torch.float32)
    grad_weights = rows.new_empty((0,) if weights is None else (rows.shape[0] // k, k), dtype=wide)
    return torch.empty_like(rows, memory_format=torch.contiguous_format), grad_weights


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, inv, k, impl = inputs
    ctx.save_for_backward(rows, weights, inv)
    ctx.options = (k, impl)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, inv = ctx.saved_tensors
    grad_rows, grad_weights = _backward(grad.contiguous(), rows, weights, inv, *ctx.options)
    return grad_rows, None if weights is None else grad_weights.to(weights.dtype), None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup)
