"""Off-policy corrections: one factor a token, detached, that multiplies the loss.

w = p_old / p_sampler compares the trainer before the update with the engine that sampled: both hold the same weights,
so w is what separates two implementations. Each correction is a function of its own and none knows the loss. torch is
imported for its types alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG = 20.0
"""exp of more overflows float32 when squared; no bound that makes sense is near e^20."""


@dataclass(frozen=True)
class CorrectionConfig:
    """The `loss.correct:` block of a recipe. null leaves a correction out; several multiply."""

    token_tis: float | None = None
    """Truncated importance sampling: each token weighs min(w, this). 2 is usual (SkyRL, slime, verl)."""
    sequence_mis: tuple[float, float] | None = None
    """Masked importance sampling: all tokens of a sequence weigh the product of its w if that lies within, else 0.
    [0.5, 2] is verl's."""
    sequence_veto: float | None = None
    """A sequence with any w below this weighs 0. 1e-4 is slime's."""
    geometric: tuple[float, float] | None = None
    """A sequence weighs 0 unless the geometric mean of its w lies within. [0.99, 1.01] is SkyRL's for MoE."""
    icepop: tuple[float, float] | None = None
    """Each token weighs w if that lies within, else 0. [0.5, 5] is usual."""
    opsm: float | None = None
    """A sequence of negative advantage weighs 0 if the policy's log-probability fell by more than this a token.
    1e-4 is slime's."""

    def __post_init__(self) -> None:
        for name in ("sequence_mis", "geometric", "icepop"):
            band = getattr(self, name)
            if band is not None and not 0 <= band[0] < band[1]:
                raise ValueError(
                    f"loss.correct.{name}={list(band)} is no band of ratios; use [low, high], 0 <= low < high"
                )
        for name in ("token_tis", "sequence_veto"):
            bound = getattr(self, name)
            if bound is not None and bound <= 0:
                raise ValueError(f"loss.correct.{name}={bound} bounds a ratio; use a positive number, or null for none")

    @property
    def weighs(self) -> tuple[str, ...]:
        """Those that put w itself into the loss; the others only leave tokens out."""
        return tuple(name for name in ("token_tis", "sequence_mis", "icepop") if getattr(self, name) is not None)


def correction(
    config: CorrectionConfig,
    logp: Tensor,
    logp_old: Tensor,
    logp_sampler: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    num_sequences: int,
) -> Tensor | None:
    """The product of all that `config` names, detached, [M]; None where it names none.

    logp, logp_old, logp_sampler, advantages: float [M], nats; sequence: int64 [M], which of num_sequences a token is
    of. Sequences are whole: a product over a part of one would be another number.
    """
    log_w = (logp_old - logp_sampler).detach()
    factors: list[Tensor] = []
    if config.token_tis is not None:
        factors.append(token_tis(log_w, config.token_tis))
    if config.sequence_mis is not None:
        factors.append(sequence_mis(log_w, sequence, num_sequences, *config.sequence_mis))
    if config.sequence_veto is not None:
        factors.append(sequence_veto(log_w, sequence, num_sequences, config.sequence_veto))
    if config.geometric is not None:
        factors.append(geometric_rejection(log_w, sequence, num_sequences, *config.geometric))
    if config.icepop is not None:
        factors.append(icepop(log_w, *config.icepop))
    if config.opsm is not None:
        fallen = (logp_old - logp).detach()
        factors.append(opsm(fallen, advantages, sequence, num_sequences, config.opsm))
    if not factors:
        return None
    product = factors[0]
    for factor in factors[1:]:
        product = product * factor
    return product


def token_tis(log_w: Tensor, cap: float) -> Tensor:
    """min(w, cap) by token."""
    return log_w.clamp(max=MAX_LOG).exp().clamp(max=cap)


def icepop(log_w: Tensor, low: float, high: float) -> Tensor:
    """w by token if low <= w <= high, else 0."""
    w = log_w.clamp(max=MAX_LOG).exp()
    return w.masked_fill((w < low) | (w > high), 0.0)


def sequence_mis(log_w: Tensor, sequence: Tensor, num_sequences: int, low: float, high: float) -> Tensor:
    """The product of a sequence's w on each of its tokens if that lies in [low, high], else 0."""
    w = sum_by(log_w, sequence, num_sequences).clamp(max=MAX_LOG).exp()
    return w.masked_fill((w < low) | (w > high), 0.0)[sequence]


def sequence_veto(log_w: Tensor, sequence: Tensor, num_sequences: int, lowest: float) -> Tensor:
    """0 on every token of a sequence that has a w below `lowest`, else 1."""
    vetoes = sum_by((log_w.exp() < lowest).to(log_w.dtype), sequence, num_sequences)
    return (vetoes == 0).to(log_w.dtype)[sequence]


def geometric_rejection(log_w: Tensor, sequence: Tensor, num_sequences: int, low: float, high: float) -> Tensor:
    """1 on every token of a sequence whose exp(mean ln w) lies in [low, high], else 0."""
    w = mean_by(log_w, sequence, num_sequences).clamp(max=MAX_LOG).exp()
    return ((w >= low) & (w <= high)).to(log_w.dtype)[sequence]


def opsm(fallen: Tensor, advantages: Tensor, sequence: Tensor, num_sequences: int, delta: float) -> Tensor:
    """Off-policy sequence masking: 0 where A < 0 and mean(ln p_old - ln p) of the sequence exceeds delta, else 1.

    fallen: ln p_old - ln p by token. What the policy has already moved away from is not pushed further.
    """
    far = mean_by(fallen, sequence, num_sequences)[sequence] > delta
    return (~(far & (advantages < 0))).to(fallen.dtype)


def sum_by(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """[num_sequences]: the sum of each sequence's values [M]."""
    return values.new_zeros(num_sequences).index_add(0, sequence, values)


def mean_by(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """[num_sequences]: the mean of each sequence's values [M]; 0 for one without tokens."""
    lengths = sum_by(values.new_ones(values.shape), sequence, num_sequences)
    return sum_by(values, sequence, num_sequences) / lengths.clamp(min=1)
