"""The experts' SwiGLU over rows in expert order: grouped products around two elementwise passes.

    [g; u] = W1_e x         a = silu(g) u          y_t = sum_k w_tk W2_e a
    da' = W2_e^T dy         dw = <a, da'>          da = w da'
    dg = da u s (1 + g (1 - s))                    du = da silu(g)                    s = sigmoid(g)
    dW2_e = sum_r dy (w a)^T                       dW1_e = sum_r [dg; du] x^T         dx_t = sum_k W1_e^T [dg; du]

Backward keeps x and [g; u] alone: the weight's gradient comes from da', so the experts' output need not be kept
(SonicMoE, arXiv 2512.14080). Products are torch's `grouped_mm`; rows past the last expert come out of it uninitialised,
and no step here reads them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rsi_kernels.combine import combine
from rsi_kernels.impl import Impl, resolve


def experts(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    perm: Tensor,
    inv: Tensor,
    offs: Tensor,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """y [T, H], in the dtype of x.

    x: [T, H]; w_gate_up: [E, 2I, H], gate rows first; w_down: [E, H, I]; one dtype. weights: float32 [T, K]; perm, inv,
    offs: of `permute(ids, E)`. bfloat16 wants H and I divisible by 8 (rows of grouped_mm begin at multiples of 16
    bytes). Differentiable once in x, both matrices and weights. Raises ValueError for shapes and dtypes.
    """
    num_experts, twice_inner, hidden = w_gate_up.shape
    if x.shape[1:] != (hidden,) or w_down.shape != (num_experts, hidden, twice_inner // 2) or twice_inner % 2:
        raise ValueError(
            f"expected x [T, H], w_gate_up [E, 2I, H], w_down [E, H, I]; found {list(x.shape)}, "
            f"{list(w_gate_up.shape)}, {list(w_down.shape)}"
        )
    if not x.dtype == w_gate_up.dtype == w_down.dtype:
        raise ValueError(f"x is {x.dtype}, w_gate_up {w_gate_up.dtype}, w_down {w_down.dtype}; use one dtype")
    if weights.numel() != perm.numel() or weights.shape[:1] != x.shape[:1] or offs.shape != (num_experts + 1,):
        raise ValueError(
            f"expected weights [T, K], perm [T * K], offs [E + 1] for T={x.shape[0]}, E={num_experts}; found "
            f"{list(weights.shape)}, {list(perm.shape)}, {list(offs.shape)}"
        )
    y, _ = _forward(x, w_gate_up, w_down, weights, perm, inv, offs, impl)
    return y


def experts_reference(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """In float64 by a loop over experts and autograd. ids: int [T, K] as `permute` takes them."""
    x, w_gate_up, w_down, weights = (t.double() for t in (x, w_gate_up, w_down, weights))
    y = torch.zeros_like(x)
    for expert in range(w_gate_up.shape[0]):
        token, choice = torch.where(ids == expert)
        gate, up = (x[token] @ w_gate_up[expert].T).chunk(2, -1)
        y = y.index_add(0, token, (F.silu(gate) * up) @ w_down[expert].T * weights[token, choice, None])
    return y


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """F.grouped_mm with group ends offs[1:]. It knows no float64, which gradcheck wants; nor no rows at all."""
    ends = offs[1:]
    if a.dtype != torch.float64 and a.numel():
        return F.grouped_mm(a, b, offs=ends)
    starts_ends = list(zip(offs[:-1].tolist(), ends.tolist(), strict=True))
    if b.dim() == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in starts_ends])
    out = a.new_zeros(a.shape[0], b.shape[2])
    for e, (start, end) in enumerate(starts_ends):
        out[start:end] = a[start:end] @ b[e]
    return out


@torch.library.custom_op("rsi::experts", mutates_args=())
def _forward(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, perm: Tensor, inv: Tensor, offs: Tensor, impl: str
) -> tuple[Tensor, Tensor]:
    """(y, pre-activations [T * K, 2I])."""
    impl = resolve(impl, x.device)
    k = weights.shape[1]
    pre = grouped_mm(x.index_select(0, perm // k), w_gate_up.transpose(1, 2), offs)
    if impl == "triton":
        from rsi_kernels import swiglu_triton

        activated = swiglu_triton.forward(pre.contiguous())
    else:
        gate, up = pre.chunk(2, -1)
        activated = F.silu(gate).mul_(up)
    return combine(grouped_mm(activated, w_down.transpose(1, 2), offs), weights, inv, k, impl=impl), pre


@torch.library.custom_op("rsi::experts_backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    perm: Tensor,
    inv: Tensor,
    offs: Tensor,
    pre: Tensor,
    impl: str,
    need_hidden: bool,
    need_gate_up: bool,
    need_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(gradients of x, w_gate_up, w_down, weights); the first three come back empty where they are not needed."""
    impl = resolve(impl, x.device)
    k = weights.shape[1]
    token = perm // k
    grad_rows = grad.index_select(0, token)
    row_weights = weights.reshape(-1)[perm.long()]
    grad_activated = grouped_mm(grad_rows, w_down, offs)
    if impl == "triton":
        from rsi_kernels import swiglu_triton

        grad_pre, weighted, grad_row_weights = swiglu_triton.backward(
            pre.contiguous(), grad_activated.contiguous(), row_weights
        )
    else:
        grad_pre, weighted, grad_row_weights = _swiglu_backward(pre, grad_activated, row_weights)
    grad_down = grouped_mm(grad_rows.t(), weighted, offs) if need_down else x.new_empty(0)
    del grad_rows, weighted, grad_activated
    grad_gate_up = grouped_mm(grad_pre.t(), x.index_select(0, token), offs) if need_gate_up else x.new_empty(0)
    grad_x = x.new_empty(0)
    if need_hidden:
        grad_x = combine(grouped_mm(grad_pre, w_gate_up, offs), None, inv, k, impl=impl)
    grad_weights = grad_row_weights[inv.clamp(min=0).long()].masked_fill_(inv < 0, 0).view(weights.shape)
    return grad_x, grad_gate_up, grad_down, grad_weights.to(weights.dtype)


def _swiglu_backward(pre: Tensor, grad_activated: Tensor, row_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """pre: [R, 2I]; grad_activated: [R, I], of the unweighted rows; row_weights: [R].

    Returns (gradient of pre, weighted activations [R, I], gradient of row_weights).
    """
    wide = torch.promote_types(pre.dtype, torch.float32)
    gate, up = pre.to(wide).chunk(2, -1)
    da = grad_activated.to(wide)
    s = gate.sigmoid()
    silu = gate * s
    a = silu * up
    grad_row_weights = torch.linalg.vecdot(a, da)
    w = row_weights.to(wide)[:, None]
    da = da * w
    grad_pre = torch.empty_like(pre)
    inner = up.shape[1]
    # d silu = s (1 + g (1 - s)) = s + silu (1 - s)
    grad_pre[:, :inner] = da * up * (s + silu * (1 - s))
    grad_pre[:, inner:] = da * silu
    return grad_pre, a.mul_(w).to(pre.dtype), grad_row_weights


@_forward.register_fake
def _(x, w_gate_up, w_down, weights, perm, inv, offs, impl):
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty((perm.shape[0], w_gate_up.shape[1]))


@_backward.register_fake
def _(
    grad, x, w_gate_up, w_down, weights, perm, inv, offs, pre, impl, need_hidden, need_gate_up, need_down
):  # fmt: skip
    return (
        x.new_empty(x.shape if need_hidden else (0,)),
        w_gate_up.new_empty(w_gate_up.shape if need_gate_up else (0,)),
        w_down.new_empty(w_down.shape if need_down else (0,)),
        weights.new_empty(weights.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, impl = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])
    ctx.impl = impl


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 8
    if grad is None:
        return nothing
    grads = _backward(grad.contiguous(), *ctx.saved_tensors, ctx.impl, *ctx.needs_input_grad[:3])
    return (*(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad[:4], strict=True)), *nothing[4:])


_forward.register_autograd(_differentiate, setup_context=_setup)
