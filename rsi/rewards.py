"""What each role earns. Pure tables: the paper's, with None for whatever says nothing about the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rsi.types import Verdict

Outcome = Literal["broken", "duplicate", "rejected", "admitted", "unmeasured"]
"""Of a proposal: fails validation; valid, but a task that the pool has; valid, but out of the band or without spread;
in the pool; our side broke."""


@dataclass(frozen=True)
class RewardConfig:
    """The `reward:` block of a recipe; AutoEnvScaling's values."""

    invalid: float = -1.0
    duplicate: float = -1.0
    """Of a task that the pool has. The paper does not say; at -0.25 a copy of the parent is the safe answer, and within
    12 steps a third of the tiny model's proposals were copies."""
    uncalibrated: float = -0.25
    admitted: float = 1.0


def proposer_reward(outcome: Outcome, config: RewardConfig = RewardConfig()) -> float | None:
    """None: no reward, no gradient; the attempt is not a member of its group."""
    match outcome:
        case "broken":
            return config.invalid
        case "duplicate":
            return config.duplicate
        case "rejected":
            return config.uncalibrated
        case "admitted":
            return config.admitted
        case "unmeasured":
            return None


def solver_reward(verdict: Verdict) -> float | None:
    """The fraction of tests passed, as the verifier wrote it; None where it could not be graded."""
    return verdict.reward
