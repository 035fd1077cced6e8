"""What a step's loss says of the policy and of the engine that sampled for it.

Every mean is over the step's loss tokens, so the parts of microbatches and ranks add up (`merge_metrics`); what is not
linear in them is derived once, at the end (`derive`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FAR = math.log(2)
"""|ln ratio| beyond which a token counts as far from the sampler."""


def loss_metrics(
    log_ratio: Tensor, dropped: Tensor, advantages: Tensor, factor: Tensor | None, num_loss_tokens: int
) -> dict[str, float]:
    """log_ratio: float [M], ln p - ln p_sampler, detached; dropped: bool [M], no gradient; factor: correction or None.

    masked_pos_frac, masked_neg_frac: tokens without gradient, by the sign of their advantage, of all loss tokens.
    mismatch_k3: mean of w - 1 - ln w, an estimate of KL(sampler || policy). mismatch_mean: |ln w|, nats.
    far_frac: |ln w| > ln 2. rejected_frac: tokens that a correction gave weight 0; correction_mean: their mean weight.
    """
    if not len(log_ratio):
        return {}
    ratio = log_ratio.exp()
    k3 = ratio - 1 - log_ratio
    positive, negative = advantages > 0, advantages < 0
    weight = factor if factor is not None else ratio.new_ones(ratio.shape)
    sums = {
        "masked_pos_frac": (dropped & positive).sum(),
        "masked_neg_frac": (dropped & negative).sum(),
        "pos_frac": positive.sum(),
        "neg_frac": negative.sum(),
        "mismatch_k3": k3.sum(),
        "mismatch_mean": log_ratio.abs().sum(),
        "far_frac": (log_ratio.abs() > FAR).sum(),
        "ratio_mean": ratio.sum(),
        "ratio_sq_mean": ratio.square().sum(),
        "ratio_pos_sum": ratio.masked_fill(~positive, 0.0).sum(),
        "ratio_neg_sum": ratio.masked_fill(~negative, 0.0).sum(),
        "rejected_frac": (weight == 0).sum(),
        "correction_mean": weight.sum(),
    }
    extremes = {
        "max_mismatch": log_ratio.abs().max(),
        "max_k3": k3.max(),
        "max_ratio": ratio.max(),
        "min_ratio": ratio.min(),
    }
    means = {name: float(value) / num_loss_tokens for name, value in sums.items()}
    return means | {name: float(value) for name, value in extremes.items()}


def merge_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of one step from those of its microbatches: `max_*` and `min_*` by extreme, all others by their sum."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            elif name.startswith("max_"):
                merged[name] = max(merged[name], value)
            elif name.startswith("min_"):
                merged[name] = min(merged[name], value)
            else:
                merged[name] = merged[name] + value
    return merged


def derive(merged: Mapping[str, float]) -> dict[str, float]:
    """The step's metrics from its merged ones.

    ess: (sum w)^2 / (N sum w^2) of w = p / p_sampler, in (0, 1]. chi2: mean w^2 - 1. ratio_pos_mean, ratio_neg_mean:
    over the tokens of that sign; left out where there are none.
    """
    metrics = dict(merged)
    if "ratio_mean" not in metrics:
        return metrics
    square = metrics.pop("ratio_sq_mean")
    metrics["ess"] = metrics["ratio_mean"] ** 2 / square if square else 0.0
    metrics["chi2"] = square - 1
    for sign in ("pos", "neg"):
        total, share = metrics.pop(f"ratio_{sign}_sum"), metrics[f"{sign}_frac"]
        if share:
            metrics[f"ratio_{sign}_mean"] = total / share
    return metrics
