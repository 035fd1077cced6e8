"""The policy losses, as pure functions of per-token log-probabilities; `policy_loss` puts one together.

A loss gives one number a token and says which tokens it left without gradient; a correction (rsi.corrections) weighs
tokens; the normaliser divides by a count of the whole step, so that microbatches and ranks add up to one large batch.
torch is imported for its types alone: reading a config that holds a LossConfig does not load it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rsi.corrections import CorrectionConfig, correction, mean_by, sum_by
from rsi.loss_metrics import loss_metrics

if TYPE_CHECKING:
    from torch import Tensor

Name = Literal["dppo", "grpo", "dapo", "dr_grpo", "gspo", "cispo", "sft"]
Normaliser = Literal["token", "sequence", "constant"]

CLIPS: dict[str, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
}
"""(low, high) of each clipped loss as its paper has it."""

NORMALISERS: dict[str, Normaliser] = {"gspo": "sequence", "dr_grpo": "constant"}
"""Of losses that are not divided by the step's tokens."""

MAX_LOG_SEQUENCE_RATIO = 10.0
"""GSPO: verl's bound on the mean log-ratio, against overflow."""


@dataclass(frozen=True)
class LossConfig:
    """The `loss:` block of a recipe."""

    loss: Name = "dppo"
    """dppo (arXiv 2602.04879), grpo (2402.03300), dapo (2503.14476: grpo with a wider upper clip), dr_grpo (2503.20783:
    grpo over a constant), gspo (2507.18071), cispo (2506.13585). sft imitates: -log p times the advantage, which then
    is a loss weight."""
    delta: float = 0.1
    """dppo: threshold of the divergence; as tv a difference of probabilities (AutoEnvScaling and Tmax use 0.1)."""
    divergence: Literal["tv", "kl"] = "tv"
    """dppo: |p - p_sampler|, or the KL of the two coins (then delta is about 0.05)."""
    clip_low: float | None = None
    """The ratio is clipped below 1 - clip_low. null: as the loss's paper has it (grpo, dapo 0.2; gspo 3e-4)."""
    clip_high: float | None = None
    """And above 1 + clip_high. null: grpo 0.2, dapo 0.28, gspo 4e-4."""
    cap: float = 5.0
    """cispo: the ratio that weighs a token is at most this (SkyRL, slime and TRL use 5)."""
    dual_clip: float | None = None
    """Of grpo, dapo, dr_grpo: a negative advantage A costs at most dual_clip * |A| a token. 3 is verl's; null: no
    bound."""
    old: Literal["sampler", "trainer"] = "sampler"
    """What the ratio of a clipped loss compares with: the engine's log-probabilities, or the trainer's own before the
    step (then the two implementations' difference is left to `correct`). dppo always takes the sampler."""
    normalise: Normaliser | None = None
    """token: the sum over tokens divided by the step's tokens; sequence: the mean of sequence means; constant: divided
    by sequences * max_len. null: as the loss's paper has it (gspo sequence, dr_grpo constant, all others token)."""
    max_len: int = 0
    """constant: sampled tokens that an episode may have."""
    correct: CorrectionConfig = CorrectionConfig()

    def __post_init__(self) -> None:
        if not 0 < self.delta <= 1:
            raise ValueError(
                f"loss.delta={self.delta} is a difference of probabilities; use a value in (0, 1], usually 0.1"
            )
        low, high = self.clip
        if not 0 <= low < 1 or high < 0:
            raise ValueError(
                f"loss.clip_low={low}, loss.clip_high={high} leave no ratio around 1; "
                "use 0 <= clip_low < 1 and clip_high >= 0"
            )
        if self.cap <= 0 or (self.dual_clip is not None and self.dual_clip <= 1):
            raise ValueError(
                f"loss.cap={self.cap}, loss.dual_clip={self.dual_clip} would bound on-policy tokens; use cap > 0 and "
                "dual_clip > 1"
            )
        if self.dual_clip is not None and self.loss not in ("grpo", "dapo", "dr_grpo"):
            raise ValueError(f"loss.dual_clip bounds a clipped ratio, which {self.loss} has not; use grpo, or null")
        if self.normaliser == "constant" and self.max_len < 1:
            raise ValueError(
                f"loss.loss={self.loss} divides by sequences * max_len and loss.max_len={self.max_len}; set it to "
                "solve.episode.max_tokens"
            )
        self._check_correction()

    def _check_correction(self) -> None:
        weighs, holds_w = self.correct.weighs, self.loss == "dppo" or self.old == "sampler"
        if self.loss == "sft" and self.correct != CorrectionConfig():
            raise ValueError("loss.loss=sft has no sampler to correct for; leave loss.correct out")
        if weighs and holds_w:
            mend = "leave it out" if self.loss == "dppo" else "set loss.old=trainer"
            raise ValueError(
                f"loss.correct.{weighs[0]} with loss.loss={self.loss}, loss.old={self.old} would count the mismatch "
                f"twice: the ratio to the sampler holds it already; {mend} (geometric, sequence_veto and opsm may stay)"
            )

    @property
    def clip(self) -> tuple[float, float]:
        """(low, high) of the clipped ratio."""
        low, high = CLIPS.get(self.loss, (0.2, 0.2))
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def normaliser(self) -> Normaliser:
        return self.normalise or NORMALISERS.get(self.loss, "token")


@dataclass(frozen=True)
class LossTokens:
    """The loss tokens of some whole sequences: M tokens of one microbatch, every field [M] on one device."""

    logp: Tensor
    """float32, nats, under the weights as they are; the gradient runs through it."""
    logp_old: Tensor
    """float32, under the weights before the step; with one step a batch that is logp, detached."""
    logp_sampler: Tensor
    """float32, as the engine returned it."""
    advantages: Tensor
    """float32."""
    sequence: Tensor
    """int64: which sequence of the microbatch a token belongs to, from 0."""
    num_sequences: int


@dataclass(frozen=True)
class Counts:
    """Of the whole step, over all microbatches and ranks: what a loss is divided by."""

    tokens: int
    sequences: int


def policy_loss(config: LossConfig, tokens: LossTokens, counts: Counts) -> tuple[Tensor, dict[str, float]]:
    """(scalar loss, metrics; see `loss_metrics`) of one microbatch; those of a step add up."""
    advantages = tokens.advantages
    losses, dropped = token_losses(config, tokens)
    if config.dual_clip is not None:
        losses, capped = dual_clip(losses, advantages, config.dual_clip)
        dropped = dropped | capped
    factor = correction(
        config.correct,
        tokens.logp,
        tokens.logp_old,
        tokens.logp_sampler,
        advantages,
        tokens.sequence,
        tokens.num_sequences,
    )
    if factor is not None:
        losses = losses * factor
        dropped = dropped | (factor == 0)
    loss = normalised(losses, tokens.sequence, tokens.num_sequences, counts, config.normaliser, config.max_len)
    log_ratio = (tokens.logp - tokens.logp_sampler).detach()
    if config.loss == "sft":  # there is no sampler to differ from
        log_ratio = log_ratio * 0.0
    return loss, loss_metrics(log_ratio, dropped, advantages, factor, counts.tokens)


def token_losses(config: LossConfig, tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """(losses float32 [M], dropped bool [M]) of the loss that `config` names, before corrections and division."""
    old = tokens.logp_sampler if config.old == "sampler" else tokens.logp_old
    match config.loss:
        case "dppo":
            return dppo(tokens.logp, tokens.logp_sampler, tokens.advantages, config.delta, config.divergence)
        case "grpo" | "dapo" | "dr_grpo":
            return grpo(tokens.logp, old, tokens.advantages, *config.clip)
        case "gspo":
            return gspo(tokens.logp, old, tokens.advantages, tokens.sequence, tokens.num_sequences, *config.clip)
        case "cispo":
            return cispo(tokens.logp, old, tokens.advantages, config.cap)
        case "sft":
            return sft(tokens.logp, tokens.advantages)


def dppo(
    logp: Tensor,
    logp_sampler: Tensor,
    advantages: Tensor,
    delta: float = 0.1,
    divergence: Literal["tv", "kl"] = "tv",
) -> tuple[Tensor, Tensor]:
    """-ratio * advantage, without the tokens whose probability already moved more than `delta` the way they are pushed.

    The ratio is to the sampler, so one mask covers staleness and engine mismatch. A token is left out iff its
    divergence exceeds delta and its ratio is above 1 (advantage > 0) or below 1 (advantage < 0); it stays in the count.
    The ratio of a kept token is not bounded: watch max_ratio.

    logp, logp_sampler, advantages: float32 [M], nats. Returns (losses, dropped), [M].
    DPPO with binary total variation or binary KL, arXiv:2602.04879.
    """
    log_ratio = logp - logp_sampler
    moved = divergence_of(logp.detach(), logp_sampler, divergence) > delta
    pushed = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    dropped = moved & pushed
    return (-log_ratio.exp() * advantages).masked_fill(dropped, 0.0), dropped


def divergence_of(logp: Tensor, logp_sampler: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """Between the coins "this token or any other": |p - q|, or q ln(q/p) + (1-q) ln((1-q)/(1-p)), q the sampler's."""
    p, q = logp.exp(), logp_sampler.exp()
    if kind == "tv":
        return (p - q).abs()
    tiny = 1e-7  # 1 - p of a certain token; float32 does not hold less below 1
    rest_p, rest_q = (1 - p).clamp(min=tiny), (1 - q).clamp(min=tiny)
    return q * (logp_sampler - logp) + rest_q * (rest_q.log() - rest_p.log())


def grpo(
    logp: Tensor, logp_old: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A): PPO's clip, as in GRPO (arXiv:2402.03300).

    DAPO (2503.14476) is clip_high 0.28. Returns (losses, dropped), [M].
    """
    ratio = (logp - logp_old).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    dropped = (ratio * advantages > clipped * advantages).detach()
    return -(ratio * advantages).minimum(clipped * advantages), dropped


def gspo(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    num_sequences: int,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, Tensor]:
    """PPO's clip on s = exp(mean ln ratio) of the whole sequence, the same on each of its tokens (arXiv:2507.18071)."""
    mean = mean_by(logp - logp_old, sequence, num_sequences).clamp(max=MAX_LOG_SEQUENCE_RATIO)[sequence]
    return grpo(mean, mean.new_zeros(mean.shape), advantages, clip_low, clip_high)


def cispo(logp: Tensor, logp_old: Tensor, advantages: Tensor, cap: float = 5.0) -> tuple[Tensor, Tensor]:
    """-min(ratio, cap) * A * ln p with the weight detached: every token keeps its gradient (arXiv:2506.13585)."""
    weight = (logp - logp_old).exp().clamp(max=cap).detach()
    return -weight * advantages * logp, weight < 0  # none is dropped


def sft(logp: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """-weight * log p: imitation of given tokens."""
    return -logp * weights, weights.new_zeros(weights.shape).bool()


def dual_clip(losses: Tensor, advantages: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """(losses with min(loss, bound * |A|) where A < 0, where that took the gradient)."""
    most = bound * advantages.abs()
    capped = ((advantages < 0) & (losses > most)).detach()
    return losses.where(~capped, most), capped


def normalised(
    losses: Tensor, sequence: Tensor, num_sequences: int, counts: Counts, normaliser: Normaliser, max_len: int = 0
) -> Tensor:
    """This microbatch's part of the step's loss; counts are the whole step's. Tokens without gradient count too."""
    match normaliser:
        case "token":
            return losses.sum() / counts.tokens
        case "sequence":
            lengths = sum_by(losses.new_ones(losses.shape), sequence, num_sequences)
            return (losses / lengths[sequence]).sum() / counts.sequences
        case "constant":
            return losses.sum() / (counts.sequences * max_len)
