"""Policy-gradient loss straight from hidden states: statistics, loss and gradients of a chunk of tokens in one visit.

    L = sum_t w_t l_t       r = exp(logp - old), the exponent held in [-20, 20]

    clip    l = -min(r A, clip(r, 1 - lo, 1 + hi) A)        PPO's clip, asymmetric as in DAPO (arXiv 2503.14476)
    dppo    l = -M r A; M = 0 where p - p_old > hi and A > 0, or p_old - p > lo and A < 0 (DPPO, arXiv 2602.04879)
    + log_ratio_sq (logp - old)^2 + beta (exp(d) - d - 1), d = ref - logp held in [-20, 20] (k3)

The gradients are made in the forward, while the chunk's logits are there: three products in all against four for
`linear_logprob` and a loss on top of it, two for a frozen head. Backward only scales them, in float32: a bfloat16 scale
would cost them 8 bits.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rsi_kernels.head import Head, check_operands, chunks
from rsi_kernels.impl import Impl, resolve
from rsi_kernels.linear_logprob import exp_and_sums, linear_logprob, linear_logprob_reference, rowwise_dot

MAX_LOG_RATIO = 20.0
LOGP, ENTROPY, K3, CUT = range(4)
"""Rows of the metrics."""


def linear_grpo(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    advantage: Tensor,
    token_weight: Tensor,
    *,
    temperature: float,
    loss: Literal["dppo", "clip"],
    lo: float,
    hi: float,
    beta: float = 0.0,
    log_ratio_sq: float = 0.0,
    chunk: int = 0,
    fp32_logits: bool = True,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """(scalar loss, metrics float32 [4, T]: logp, entropy, k3, cut), the metrics without gradient, 0 in masked rows.

    hidden [T, H], weight [V, H], target [T], temperature, chunk, fp32_logits: as in `linear_logprob`.
    old_logp: float32 [T], the sampler's, nats; None takes the policy's own, ratio 1. ref_logp: float32 [T], read only
    where beta is not 0; without it k3 is reported as 0. advantage: float32 [T].
    token_weight: float32 [T]: mask / (loss tokens of the step, over all ranks and microbatches) times any constant
    weight of the token; 0 masks a row. Nothing is divided here, so accumulation equals one large batch.
    cut: 1 where the token gives no policy gradient. Differentiable once in hidden and weight.
    """
    check_operands(hidden, weight, target, temperature, chunk)
    _check_loss(loss, lo, hi, beta, ref_logp, hidden, (old_logp, ref_logp, advantage, token_weight))
    reference = ref_logp if beta != 0.0 else None
    needs = hidden.requires_grad, weight.requires_grad
    if not torch.is_grad_enabled() or not any(needs):
        logp, entropy = linear_logprob(
            hidden, weight, target, temperature=temperature, chunk=chunk, fp32_logits=fp32_logits, impl=impl
        )
        value, _, k3, cut = loss_terms(logp, old_logp, reference, advantage, loss, lo, hi, beta, log_ratio_sq)
        metrics = torch.stack([logp, entropy, k3, cut.to(logp.dtype)])
        live = token_weight != 0
        return (value * token_weight).masked_fill(~live, 0.0).sum(), metrics.masked_fill(~live, 0.0)
    value, metrics, _, _ = _forward(
        hidden, weight, target, old_logp, reference, advantage, token_weight, 1.0 / temperature, loss, lo, hi, beta,
        log_ratio_sq, chunk, fp32_logits, impl, *needs,
    )  # fmt: skip
    return value, metrics.detach()


def linear_grpo_reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    advantage: Tensor,
    token_weight: Tensor,
    *,
    temperature: float,
    loss: Literal["dppo", "clip"],
    lo: float,
    hi: float,
    beta: float = 0.0,
    log_ratio_sq: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The same in float64, differentiated by autograd."""
    logp, entropy = linear_logprob_reference(hidden, weight, target, temperature)
    old = logp.detach() if old_logp is None else old_logp.double()
    ratio = (logp - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if loss == "clip":
        clipped = ratio.clamp(1 - lo, 1 + hi)
        value = -torch.minimum(ratio * advantage, clipped * advantage)
        cut = ratio * advantage > clipped * advantage
    else:
        moved = (logp.exp() - old.exp()).detach()
        cut = ((advantage > 0) & (moved > hi)) | ((advantage < 0) & (-moved > lo))
        value = torch.where(cut, 0.0, -ratio * advantage)
    value = value + log_ratio_sq * (logp - old) ** 2
    k3 = torch.zeros_like(logp)
    if ref_logp is not None and beta != 0:
        d = (ref_logp.double() - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        k3 = d.exp() - d - 1
        value = value + beta * k3
    metrics = torch.stack([logp, entropy, k3, cut.double()]).detach()
    return (value * token_weight).sum(), metrics.masked_fill(token_weight == 0, 0.0)


def loss_terms(
    logp: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    advantage: Tensor,
    loss: str,
    lo: float,
    hi: float,
    beta: float,
    log_ratio_sq: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, d loss / d logp, k3, cut), each [n], before the token weight. Written out, since autograd does not reach
    into an op, and as the Triton kernel has it."""
    log_ratio = torch.zeros_like(logp) if old is None else logp - old
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    inside = log_ratio.abs() <= MAX_LOG_RATIO
    if loss == "clip":
        clipped = ratio.clamp(1 - lo, 1 + hi)
        cut = ratio * advantage > clipped * advantage
        value = -torch.minimum(ratio * advantage, clipped * advantage)
    else:
        moved = logp.exp() - (logp if old is None else old).exp()
        cut = ((advantage > 0) & (moved > hi)) | ((advantage < 0) & (moved < -lo))
        value = torch.where(cut, 0.0, -ratio * advantage)
    value = value + log_ratio_sq * log_ratio**2
    dlogp = torch.where(cut | ~inside, 0.0, -ratio * advantage) + 2 * log_ratio_sq * log_ratio
    k3 = torch.zeros_like(logp)
    if ref is not None:
        d = ref - logp
        e = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        k3 = e - d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) - 1
        value = value + beta * k3
        dlogp = dlogp + torch.where(d.abs() <= MAX_LOG_RATIO, beta * (1 - e), 0.0)
    return value, dlogp, k3, cut


def _check_loss(
    loss: str, lo: float, hi: float, beta: float, ref: Tensor | None, hidden: Tensor, rows: tuple[Tensor | None, ...]
) -> None:
    if loss not in ("dppo", "clip"):
        raise ValueError(f"loss={loss!r} is not one of dppo, clip; put other losses on top of linear_logprob")
    if lo < 0 or hi < 0:
        raise ValueError(f"lo={lo}, hi={hi}; both are widths, use values >= 0")
    if beta != 0.0 and ref is None:
        raise ValueError(f"beta={beta} weighs the distance to a reference; give ref_logp, or beta=0")
    for row in rows:
        if row is not None and row.shape != hidden.shape[:1]:
            raise ValueError(
                f"old_logp, ref_logp, advantage and token_weight are [T] = {list(hidden.shape[:1])}; found "
                f"{list(row.shape)}"
            )


@torch.library.custom_op("rsi::linear_grpo", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    advantage: Tensor,
    token_weight: Tensor,
    inv_temperature: float,
    loss: str,
    lo: float,
    hi: float,
    beta: float,
    log_ratio_sq: float,
    chunk: int,
    fp32_logits: bool,
    impl: str,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, metrics [4, T], gradient of hidden, of weight); a gradient that is not needed comes back empty."""
    impl = resolve(impl, hidden.device)
    target, advantage, token_weight = target.contiguous(), advantage.contiguous(), token_weight.contiguous()
    old, ref = (None if row is None else row.contiguous() for row in (old, ref))
    parts = chunks(hidden.shape[0], weight.shape[0], chunk, hidden.device)
    head = Head(weight, parts[0].stop if parts else 0, fp32_logits)
    values = hidden.new_empty(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))
    metrics = values.new_empty(4, hidden.shape[0])
    grad_hidden = torch.empty_like(hidden if need_hidden else hidden[:0])
    grad_weight = head.new_weight_grad() if need_weight else weight.new_empty(0)
    options = (loss, lo, hi, beta, log_ratio_sq, inv_temperature)
    for rows in parts:
        x = hidden[rows]
        z, dz = head.logits(x), head.dlogits(x.shape[0])
        before, reference = (None if row is None else row[rows] for row in (old, ref))
        operands = (target[rows], before, reference, advantage[rows], token_weight[rows], values[rows])
        if impl == "triton":
            from rsi_kernels import head_triton

            head_triton.loss_rows(z, dz, *operands, metrics[:, rows], *options)
        else:
            _loss_rows(z, dz, *operands, metrics[:, rows], *options)
        if need_hidden:
            head.hidden_grad(dz, grad_hidden[rows])
        if need_weight:
            head.add_weight_grad(grad_weight, dz, x)
    return values.sum(), metrics, grad_hidden, grad_weight.to(weight.dtype)


def _loss_rows(
    z: Tensor,
    dz: Tensor,
    target: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    advantage: Tensor,
    token_weight: Tensor,
    values: Tensor,
    metrics: Tensor,
    loss: str,
    lo: float,
    hi: float,
    beta: float,
    log_ratio_sq: float,
    inv_temperature: float,
) -> None:
    """One chunk: logits in, weighted losses [n], metrics [4, n] and dlogits out; dz may be z itself."""
    z = z.to(values.dtype).mul_(inv_temperature)
    _, e, total = exp_and_sums(z)
    log_total = total.log()
    logp = z.gather(1, target[:, None])[:, 0] - log_total
    entropy = log_total - rowwise_dot(e, z) / total
    value, dlogp, k3, cut = loss_terms(logp, old, ref, advantage, loss, lo, hi, beta, log_ratio_sq)
    masked = token_weight == 0
    torch.mul(value, token_weight, out=values).masked_fill_(masked, 0.0)
    torch.stack([logp, entropy, k3, cut.to(logp.dtype)], out=metrics).masked_fill_(masked, 0.0)
    g = (dlogp * token_weight * inv_temperature).masked_fill_(masked, 0.0)
    torch.mul(e, (-g / total)[:, None], out=z).scatter_add_(1, target[:, None], g[:, None])
    if z.data_ptr() != dz.data_ptr():
        dz.copy_(z)


@_forward.register_fake
def _(
    hidden, weight, target, old, ref, advantage, token_weight, inv_temperature, loss, lo, hi, beta, log_ratio_sq, chunk,
    fp32_logits, impl, need_hidden, need_weight,
):  # fmt: skip
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=dtype),
        hidden.new_empty((4, hidden.shape[0]), dtype=dtype),
        torch.empty_like(hidden if need_hidden else hidden[:0]),
        torch.empty_like(weight) if need_weight else weight.new_empty(0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[2], output[3])
    ctx.num_inputs = len(inputs)


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * ctx.num_inputs
    if grad_loss is None:
        return nothing
    grad_hidden, grad_weight = (
        (grad.to(grad_loss.dtype) * grad_loss).to(grad.dtype) if needed else None
        for grad, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
    )
    return (grad_hidden, grad_weight, *nothing[2:])


_forward.register_autograd(_differentiate, setup_context=_setup)
