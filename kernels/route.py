"""Router of a mixture of experts: scores, the best K, their weights, and counts; or the weights of given experts.

    p = softmax(logits) or sigmoid(logits), float32, over all E      S = top K by logit, ties to the lower index
    w_k = p_S, divided by their sum if renorm
    d logit_e = [e in S] w_e (dw_e - sum_k w_k dw_k)                   softmax, renorm
              = [e in S] w_e dw_e - p_e sum_k w_k dw_k                 softmax
              = [e in S] (1 - p_e) w_e (dw_e - sum_k w_k dw_k)         sigmoid, renorm
              = [e in S] (1 - p_e) w_e dw_e                            sigmoid

Chosen by logit, since distinct logits can share one float32 probability. Replayed experts (arXiv 2510.11370) take their
weights from the full live softmax: gathered from a softmax of which the others were dropped, the router would get no
gradient.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rsi_kernels import route_cuda
from rsi_kernels.impl import Impl, resolve


def route(
    logits: Tensor,
    k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    renorm: bool = True,
    forced_ids: Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(weights float32 [T, K], ids int32 [T, K] by falling logit, counts int32 [E], prob_sum float32 [E]).

    logits: [T, E], finite. forced_ids: integers [T, K] in [0, E), distinct in a row; they replace the choice and keep
    their order. counts: how many tokens chose each expert; prob_sum: sum of p over tokens. Both are for metrics (on a
    GPU prob_sum is summed in no fixed order). Differentiable once, through weights. Raises ValueError for shapes.
    """
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"expected logits [T, E] and 1 <= k <= E; found {list(logits.shape)}, k={k}")
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"score={score!r} is not one of softmax, sigmoid")
    if forced_ids is not None and forced_ids.shape != (logits.shape[0], k):
        raise ValueError(f"expected forced_ids [T, K] = {[logits.shape[0], k]}; found {list(forced_ids.shape)}")
    return _forward(logits, k, score == "softmax", renorm, forced_ids, impl)


def route_reference(
    logits: Tensor, k: int, *, score: str = "softmax", renorm: bool = True, forced_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same in float64, differentiated by autograd."""
    p = logits.double().softmax(-1) if score == "softmax" else logits.double().sigmoid()
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k] if forced_ids is None else forced_ids.long()
    weights = p.gather(-1, ids)
    if renorm:
        weights = weights / weights.sum(-1, keepdim=True)
    counts = torch.bincount(ids.reshape(-1), minlength=logits.shape[1])
    return weights, ids.int(), counts.int(), p.detach().sum(0)


def _scores(logits: Tensor, softmax: bool) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.softmax(-1) if softmax else logits.sigmoid()


@torch.library.custom_op("rsi::route", mutates_args=())
def _forward(
    logits: Tensor, k: int, softmax: bool, renorm: bool, forced_ids: Tensor | None, impl: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = logits.contiguous()
    match resolve(impl, logits.device, has_cuda_source=route_cuda.fits(logits, k)):
        case "cuda":
            return route_cuda.forward(logits, k, softmax, renorm, forced_ids)
        case "triton":
            from rsi_kernels import route_triton

            return route_triton.forward(logits, k, softmax, renorm, forced_ids)
    p = _scores(logits, softmax)
    if forced_ids is None:
        ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    else:
        ids = forced_ids.long()
    weights = p.gather(-1, ids)
    if renorm:
        weights /= weights.sum(-1, keepdim=True)
    counts = torch.bincount(ids.reshape(-1), minlength=logits.shape[1]).int()
    return weights, ids.int(), counts, p.sum(0)


@torch.library.custom_op("rsi::route_backward", mutates_args=())
def _backward(
    grad_weights: Tensor, logits: Tensor, ids: Tensor, weights: Tensor, softmax: bool, renorm: bool, impl: str
) -> Tensor:
    logits = logits.contiguous()
    match resolve(impl, logits.device, has_cuda_source=route_cuda.fits(logits, ids.shape[1])):
        case "cuda":
            return route_cuda.backward(grad_weights, logits, ids, weights, softmax, renorm)
        case "triton":
            from rsi_kernels import route_triton

            return route_triton.backward(grad_weights, logits, ids, weights, softmax, renorm)
    d = weights * grad_weights
    total = d.sum(-1, keepdim=True)
    if renorm:
        d -= weights * total
    p = _scores(logits, softmax)
    grad = p * -total if softmax and not renorm else torch.zeros_like(p)
    if not softmax:
        d *= 1 - p.gather(-1, ids.long())
    return grad.scatter_add_(-1, ids.long(), d).to(logits.dtype)


@_forward.register_fake
def _(logits, k, softmax, renorm, forced_ids, impl):
    tokens, experts = logits.shape
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return (
        logits.new_empty((tokens, k), dtype=dtype),
        logits.new_empty((tokens, k), dtype=torch.int32),
        logits.new_empty((experts,), dtype=torch.int32),
        logits.new_empty((experts,), dtype=dtype),
    )


@_backward.register_fake
def _(grad_weights, logits, ids, weights, softmax, renorm, impl):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, softmax, renorm, _, impl = inputs
    weights, ids, counts, prob_sum = output
    ctx.mark_non_differentiable(ids, counts, prob_sum)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, ids, weights)
    ctx.options = (softmax, renorm, impl)


def _differentiate(ctx: Any, grad_weights: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    grad = None if grad_weights is None else _backward(grad_weights.contiguous(), *ctx.saved_tensors, *ctx.options)
    return grad, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup)
