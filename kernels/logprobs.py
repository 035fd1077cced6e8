"""Log-probabilities of labels and entropies from hidden states, without ever keeping the logits.

65,536 tokens over Qwen3.5's 248,320 words are 65 GB of float32 logits. Here a chunk of rows is projected at a time, in
forward and again in backward, and only one log-sum-exp and one entropy a row are kept. The head is computed in float32
whatever the dtype of its operands: logits of 20.06 and 20.00 are equal in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 1024
"""Rows of logits that live at once: 1 GB at 248,320 words (slime's default)."""


def token_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """log_softmax(hidden @ weight.T)[labels] and the entropy of that softmax.

    hidden: float [N, H]; weight: float [V, H], the head; labels: int64 [N] in [0, V). Any float dtype; logits are
    float32. Returns (logp, entropy), float32 [N], nats; both differentiable once in hidden and weight.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected hidden [N, H], weight [V, H], labels [N]; found {list(hidden.shape)}, {list(weight.shape)}, "
            f"{list(labels.shape)}"
        )
    if chunk < 1:
        raise ValueError(f"chunk={chunk} rows; use at least 1")
    return _TokenLogprobs.apply(hidden, weight, labels, chunk)  # pyright: ignore[reportReturnType]


def token_logprobs_reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same in float64 by plain autograd, with the logits kept: what `token_logprobs` is tested against."""
    logp_NV = (hidden.double() @ weight.double().T).log_softmax(-1)
    logp = logp_NV.gather(-1, labels[:, None])[:, 0]
    return logp, -(logp_NV.exp() * logp_NV).sum(-1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        n = hidden.shape[0]
        weight_f = weight.float()
        logp, entropy, lse = (torch.empty(n, dtype=torch.float32, device=hidden.device) for _ in range(3))
        for start in range(0, n, chunk):
            rows = slice(start, start + chunk)
            logits = hidden[rows].float() @ weight_f.T
            lse[rows] = logits.logsumexp(-1)
            logp[rows] = logits.gather(-1, labels[rows, None])[:, 0] - lse[rows]
            # entropy = lse - sum(p * logits); p is finite and in [0, 1] because logits <= lse
            probs = (logits - lse[rows, None]).exp_()
            entropy[rows] = lse[rows] - probs.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, labels, lse, entropy)
        ctx.chunk = chunk
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """d logp / d logit_j = [j = label] - p_j;  d entropy / d logit_j = -p_j (ln p_j + entropy)."""
        hidden, weight, labels, lse, entropy = ctx.saved_tensors
        weight_f = weight.float()
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight_f)
        with_entropy = bool((grad_entropy != 0).any())
        for start in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            hidden_f = hidden[rows].float()
            logp_V = (hidden_f @ weight_f.T).sub_(lse[rows, None])
            grad = logp_V.exp()
            if with_entropy:
                coefficient = grad_logp[rows, None] + grad_entropy[rows, None] * (logp_V + entropy[rows, None])
                grad.mul_(coefficient.neg_())
            else:
                grad.mul_(-grad_logp[rows, None])
            grad.scatter_add_(-1, labels[rows, None], grad_logp[rows, None])
            grad_hidden[rows] = (grad @ weight_f).to(hidden.dtype)
            grad_weight.addmm_(grad.T, hidden_f)
        return grad_hidden, grad_weight.to(weight.dtype), None, None
