"""Log-probabilities of tokens and entropies from hidden states; the logits are made and dropped a chunk at a time.

    z = hidden @ weight.T / temperature      logp = z[target] - lse(z)      entropy = lse(z) - sum(softmax(z) * z)

Backward makes each chunk's logits again (four products in all), so any loss of logp and entropy can be put on top.
`linear_grpo` needs three, for the losses it knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rsi_kernels.head import Head, check_operands, chunks
from rsi_kernels.impl import Impl, resolve


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float,
    chunk: int = 0,
    fp32_logits: bool = True,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """(logp of target, entropy of the softmax), float32 [T], nats, of the distribution at `temperature`.

    hidden: [T, H]; weight: [V, H], the head, same dtype; target: int64 [T] in [0, V), in masked rows too. Any V.
    Differentiable once in hidden and in weight; under no_grad, or with neither asking for a gradient, it only scores.
    chunk: rows of logits that live at once, 0 for the device's default. fp32_logits False keeps the logits of bfloat16
    operands in bfloat16. Raises ValueError for operands that do not fit.
    """
    check_operands(hidden, weight, target, temperature, chunk)
    logp, entropy, _ = _forward(hidden, weight, target, 1.0 / temperature, chunk, fp32_logits, impl)
    return logp, entropy


def linear_logprob_reference(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same in float64 by plain autograd, with the logits kept: what every implementation is tested against."""
    logp_TV = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    return logp_TV.gather(-1, target[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)


def exp_and_sums(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z: [n, V], overwritten by z - max. Returns (max [n], exp(z - max) [n, V], its sum [n])."""
    top = z.amax(-1)
    e = z.sub_(top[:, None]).exp()
    return top, e, e.sum(-1)


def rowwise_dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a, b)


@torch.library.custom_op("rsi::linear_logprob", mutates_args=())
def _forward(
    hidden: Tensor, weight: Tensor, target: Tensor, inv_temperature: float, chunk: int, fp32_logits: bool, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse), each [T]."""
    impl = resolve(impl, hidden.device)
    target = target.contiguous()
    parts = chunks(hidden.shape[0], weight.shape[0], chunk, hidden.device)
    logp, entropy, lse = (_rows_like(hidden) for _ in range(3))
    head = Head(weight, parts[0].stop if parts else 0, fp32_logits)
    for rows in parts:
        z = head.logits(hidden[rows])
        out = (logp[rows], entropy[rows], lse[rows])
        if impl == "triton":
            from rsi_kernels import head_triton

            head_triton.statistics(z, target[rows], inv_temperature, *out)
        else:
            _statistics(z, target[rows], inv_temperature, *out)
    return logp, entropy, lse


def _statistics(z: Tensor, target: Tensor, inv_temperature: float, logp: Tensor, entropy: Tensor, lse: Tensor) -> None:
    """Of one chunk's logits, into the last three."""
    z = z.to(lse.dtype).mul_(inv_temperature)
    top, e, total = exp_and_sums(z)
    log_total = total.log()
    torch.add(top, log_total, out=lse)
    torch.sub(z.gather(1, target[:, None])[:, 0], log_total, out=logp)
    torch.sub(log_total, rowwise_dot(e, z) / total, out=entropy)


@torch.library.custom_op("rsi::linear_logprob_backward", mutates_args=())
def _backward(
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    entropy: Tensor,
    lse: Tensor,
    inv_temperature: float,
    chunk: int,
    fp32_logits: bool,
    impl: str,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """(gradient of hidden, of weight); one that is not needed comes back empty."""
    impl = resolve(impl, hidden.device)
    target = target.contiguous()
    parts = chunks(hidden.shape[0], weight.shape[0], chunk, hidden.device)
    head = Head(weight, parts[0].stop if parts else 0, fp32_logits)
    grad_hidden = torch.empty_like(hidden if need_hidden else hidden[:0])
    grad_weight = head.new_weight_grad() if need_weight else weight.new_empty(0)
    for rows in parts:
        x = hidden[rows]
        z = head.logits(x)  # rounded as in the forward, or p would not sum to 1
        dz = head.dlogits(x.shape[0])
        h = None if grad_entropy is None else grad_entropy[rows]
        args = (target[rows], entropy[rows], lse[rows], grad_logp[rows], h, inv_temperature)
        if impl == "triton":
            from rsi_kernels import head_triton

            head_triton.dlogits(z, dz, *args)
        else:
            _dlogits(z, dz, *args)
        if need_hidden:
            head.hidden_grad(dz, grad_hidden[rows])
        if need_weight:
            head.add_weight_grad(grad_weight, dz, x)
    return grad_hidden, grad_weight.to(weight.dtype)


def _dlogits(
    z: Tensor, dz: Tensor, target: Tensor, entropy: Tensor, lse: Tensor, g: Tensor, h: Tensor | None, inv_t: float
) -> None:
    """dz_j = (g ([j = target] - p_j) - h p_j (ln p_j + entropy)) / temperature; dz may be z itself."""
    log_p = z.to(lse.dtype).mul_(inv_t).sub_(lse[:, None])
    if h is None:
        d = log_p.exp_().mul_(-(g * inv_t)[:, None])
    else:
        p = log_p.exp()
        d = log_p.add_(entropy[:, None]).mul_(h[:, None]).add_(g[:, None]).mul_(p).mul_(-inv_t)
    d.scatter_add_(1, target[:, None], (g * inv_t)[:, None])
    if d.data_ptr() != dz.data_ptr():
        dz.copy_(d)


def _rows_like(hidden: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))


@_forward.register_fake
def _(hidden, weight, target, inv_temperature, chunk, fp32_logits, impl):
    return tuple(_rows_like(hidden) for _ in range(3))


@_backward.register_fake
def _(
    grad_logp, grad_entropy, hidden, weight, target, entropy, lse, inv_temperature, chunk, fp32_logits, impl,
    need_hidden, need_weight,
):  # fmt: skip
    return (
        torch.empty_like(hidden if need_hidden else hidden[:0]),
        torch.empty_like(weight) if need_weight else weight.new_empty(0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, *options = inputs
    _, entropy, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, target, entropy, lse)
    ctx.options = options


def _differentiate(
    ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    *operands, entropy, lse = ctx.saved_tensors
    grad_logp = torch.zeros_like(lse) if grad_logp is None else grad_logp.contiguous()
    grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    grad_hidden, grad_weight = _backward(
        grad_logp, grad_entropy, *operands, entropy, lse, *ctx.options, need_hidden, need_weight
    )
    return grad_hidden if need_hidden else None, grad_weight if need_weight else None, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup)
