"""The policy losses, as pure functions of per-token log-probabilities.

Every loss is summed over tokens and divided by the step's global token count, so that microbatches and ranks add up to
one large batch. torch is imported for its types alone: reading a config that holds a LossConfig does not load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossConfig:
    """The `loss:` block of a recipe."""

    loss: Literal["dppo", "grpo", "sft"] = "dppo"
    """sft imitates: -log p times the advantage, which then is a loss weight."""
    delta: float = 0.1
    """dppo: total-variation threshold, a difference of probabilities (AutoEnvScaling and Tmax use 0.1)."""
    clip_low: float = 0.2
    """grpo: the ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """grpo: and above 1 + clip_high; 0.28 is DAPO's."""

    def __post_init__(self) -> None:
        if not 0 < self.delta <= 1:
            raise ValueError(
                f"loss.delta={self.delta} is a difference of probabilities; use a value in (0, 1], usually 0.1"
            )
        if not 0 <= self.clip_low < 1 or self.clip_high < 0:
            raise ValueError(
                f"loss.clip_low={self.clip_low}, loss.clip_high={self.clip_high} leave no ratio around 1; "
                "use 0 <= clip_low < 1 and clip_high >= 0"
            )


def policy_loss(
    config: LossConfig, logp: Tensor, logp_sampler: Tensor, advantages: Tensor, mask: Tensor, num_loss_tokens: int
) -> tuple[Tensor, dict[str, float]]:
    """The loss that `config` names; arguments and result as in `dppo_loss`."""
    match config.loss:
        case "dppo":
            return dppo_loss(logp, logp_sampler, advantages, mask, num_loss_tokens, config.delta)
        case "grpo":
            return grpo_loss(logp, logp_sampler, advantages, mask, num_loss_tokens, config.clip_low, config.clip_high)
        case "sft":
            return sft_loss(logp, advantages, mask, num_loss_tokens)


def dppo_loss(
    logp: Tensor, logp_sampler: Tensor, advantages: Tensor, mask: Tensor, num_loss_tokens: int, delta: float = 0.1
) -> tuple[Tensor, dict[str, float]]:
    """-ratio * advantage, without the tokens whose probability already moved more than `delta` the way they are pushed.

    The ratio is to the sampler, so one mask covers staleness and engine mismatch. A token is left out iff
    |p - p_sampler| > delta and its ratio is above 1 (advantage > 0) or below 1 (advantage < 0); it stays in the count.
    The ratio of a kept token is not bounded: watch max_ratio.

    logp, logp_sampler, advantages: float32 [N], nats; mask: bool [N], True where the policy sampled.
    num_loss_tokens: over all ranks and microbatches. Returns (scalar loss, metrics; see `merge_metrics`).
    DPPO with binary total variation, arXiv:2602.04879.
    """
    logp, logp_sampler = logp.masked_fill(~mask, 0.0), logp_sampler.masked_fill(~mask, 0.0)
    log_ratio = logp - logp_sampler
    ratio = log_ratio.exp()
    moved = (logp.detach().exp() - logp_sampler.exp()).abs() > delta
    pushed = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    dropped = moved & pushed & mask
    losses = (-ratio * advantages).masked_fill(dropped | ~mask, 0.0)
    return losses.sum() / num_loss_tokens, _metrics(log_ratio.detach(), dropped, advantages, mask, num_loss_tokens)


def grpo_loss(
    logp: Tensor,
    logp_sampler: Tensor,
    advantages: Tensor,
    mask: Tensor,
    num_loss_tokens: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, float]]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A); arguments and result as in `dppo_loss`.

    PPO's clip with the sampler as the old policy, as in GRPO (arXiv:2402.03300); asymmetric clip from DAPO
    (2503.14476).
    """
    log_ratio = (logp - logp_sampler).masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -(ratio * advantages).minimum(clipped * advantages).masked_fill(~mask, 0.0)
    dropped = (ratio * advantages > clipped * advantages).detach() & mask
    return losses.sum() / num_loss_tokens, _metrics(log_ratio.detach(), dropped, advantages, mask, num_loss_tokens)


def sft_loss(logp: Tensor, weights: Tensor, mask: Tensor, num_loss_tokens: int) -> tuple[Tensor, dict[str, float]]:
    """-weight * log p: imitation of given tokens; arguments and result as in `dppo_loss`. There is no sampler to differ
    from, so ratios are 1 and nothing is masked."""
    losses = (-logp * weights).masked_fill(~mask, 0.0)
    same = logp.new_zeros(logp.shape)
    return losses.sum() / num_loss_tokens, _metrics(same, mask & False, weights, mask, num_loss_tokens)


def merge_metrics(parts: list[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of one step from those of its microbatches: `max_*` by their maximum, all others by their sum."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = max(merged[name], value) if name.startswith("max_") else merged[name] + value
    return merged


def _metrics(
    log_ratio: Tensor, dropped: Tensor, advantages: Tensor, mask: Tensor, num_loss_tokens: int
) -> dict[str, float]:
    """log_ratio is 0 outside the mask. Every mean and fraction is over the step's loss tokens, so parts add up.

    masked_pos_frac, masked_neg_frac: tokens without gradient, by the sign of their advantage. mismatch_k3: mean of
    w - 1 - ln w, an estimate of KL(sampler || policy). mismatch_mean, max_mismatch: |ln w|, nats.
    """
    ratio = log_ratio.exp()
    any_tokens = bool(mask.any())
    return {
        "masked_pos_frac": float((dropped & (advantages > 0)).sum()) / num_loss_tokens,
        "masked_neg_frac": float((dropped & (advantages < 0)).sum()) / num_loss_tokens,
        "mismatch_k3": float((ratio - 1 - log_ratio).sum()) / num_loss_tokens,
        "mismatch_mean": float(log_ratio.abs().sum()) / num_loss_tokens,
        "max_mismatch": float(log_ratio.abs().max()) if any_tokens else 0.0,
        "max_ratio": float(ratio.masked_fill(~mask, 0.0).max()) if any_tokens else 0.0,
    }
