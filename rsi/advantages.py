"""Groups of attempts to samples with advantages: by default reward minus the mean of its own group, no division by std.

Solvers are compared within one environment, proposers within one assignment; the roles never share a mean. A group
whose rewards do not vary teaches nothing and is dropped. (AutoEnvScaling, arXiv 2610.14163; the drop is DAPO's,
2503.14476.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rsi.types import Attempt, Group, Sample, Stop, Trajectory

Estimator = Literal["centred", "leave_one_out", "std", "std_sample"]

TRUNCATED = (Stop.MAX_TURNS, Stop.MAX_TOKENS, Stop.TIMEOUT)
"""A limit ended the episode, not the policy."""


@dataclass(frozen=True)
class AdvantageConfig:
    """The `advantage:` block of a recipe."""

    estimator: Estimator = "centred"
    """centred: reward - mean (AutoEnvScaling, Tmax). leave_one_out: minus the mean of the others. std: centred, divided
    by the population's standard deviation (GRPO); std_sample: by the sample's (verl, TRL)."""
    solver_weight: float = 1.0
    """Factor on every advantage of the solver; 0 leaves its samples out."""
    proposer_weight: float = 1.0
    """And of the proposer."""
    truncated: Literal["grade", "mask", "drop"] = "grade"
    """An attempt that a limit ended: graded as it stands; without loss, its reward still in the group's mean; or no
    member of the group."""
    overlong_limit: int = 0
    """Sampled tokens from which on a solver's attempt loses a whole point of reward (DAPO's soft punishment, applied
    after groups without variance were dropped); 0: none."""
    overlong_buffer: int = 0
    """Tokens before overlong_limit over which that point is lost linearly."""

    def __post_init__(self) -> None:
        if self.solver_weight < 0 or self.proposer_weight < 0:
            raise ValueError(
                f"advantage.solver_weight={self.solver_weight}, proposer_weight={self.proposer_weight}: a negative "
                "weight rewards failing; use 0 to leave a role out"
            )
        if not 0 <= self.overlong_buffer <= self.overlong_limit or (self.overlong_limit and not self.overlong_buffer):
            raise ValueError(
                f"advantage.overlong_buffer={self.overlong_buffer} is not within overlong_limit={self.overlong_limit}; "
                "set both, DAPO's ratio is 1 to 4"
            )


SPREAD = 1e-6
"""A group is useful if max - min of its rewards exceeds this (SkyRL's tolerance)."""


def centred(rewards: Sequence[float]) -> tuple[float, ...]:
    """Each reward minus their mean; a group of one gets 0."""
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, found {list(rewards)}; a fault has no reward and leaves its group")
    mean = math.fsum(rewards) / max(1, len(rewards))
    return tuple(reward - mean for reward in rewards)


def leave_one_out(rewards: Sequence[float]) -> tuple[float, ...]:
    """Each reward minus the mean of the others; a group of one gets 0. RLOO, arXiv:2402.14740."""
    count = len(rewards)
    return tuple(value * count / max(1, count - 1) for value in centred(rewards))


def standardised(rewards: Sequence[float], sample: bool = False) -> tuple[float, ...]:
    """centred, divided by the standard deviation: the population's, or the sample's. All equal: zeros."""
    values = centred(rewards)
    degrees = len(values) - 1 if sample else len(values)
    if max(rewards, default=0.0) - min(rewards, default=0.0) <= SPREAD:
        return tuple(0.0 for _ in values)
    std = math.sqrt(math.fsum(value * value for value in values) / degrees)
    return tuple(value / std for value in values)


def estimate(rewards: Sequence[float], estimator: Estimator) -> tuple[float, ...]:
    """The advantage of each member of a group."""
    match estimator:
        case "centred":
            return centred(rewards)
        case "leave_one_out":
            return leave_one_out(rewards)
        case "std":
            return standardised(rewards)
        case "std_sample":
            return standardised(rewards, sample=True)


def overlong_penalty(num_sampled: int, limit: int, buffer: int) -> float:
    """0 up to limit - buffer tokens, then linearly down to -1 at limit, and no lower. DAPO, arXiv:2503.14476."""
    return -min(1.0, max(0.0, (num_sampled - (limit - buffer)) / buffer))


def is_useful(group: Group) -> bool:
    """Whether the group's rewards vary."""
    return len(group.rewards) > 1 and max(group.rewards) - min(group.rewards) > SPREAD


def to_samples(groups: Sequence[Group], config: AdvantageConfig = AdvantageConfig()) -> list[Sample]:
    """The samples of all useful groups, in order. A trajectory that sampled nothing counts in its group's mean only."""
    samples = []
    for group in groups:
        weight = config.solver_weight if group.role == "solver" else config.proposer_weight
        group = without_truncated(group) if config.truncated == "drop" else group
        if not is_useful(group) or not weight:
            continue
        advantages = estimate([shaped(group, i, config) for i in range(len(group.rewards))], config.estimator)
        for attempt, advantage in zip(group.attempts, advantages, strict=True):
            if attempt.trajectory.stop is Stop.FAULT:
                raise ValueError(
                    f"group {group.key} holds trajectory {attempt.trajectory.id}, a fault; leave faults out"
                )
            masked = config.truncated == "mask" and is_truncated(attempt)
            if attempt.trajectory.num_sampled and not masked:
                samples.append(flatten(attempt.trajectory, weight * advantage))
    return samples


def is_truncated(attempt: Attempt) -> bool:
    return attempt.trajectory.stop in TRUNCATED


def without_truncated(group: Group) -> Group:
    """The group of those attempts that the policy itself ended."""
    kept = [i for i, attempt in enumerate(group.attempts) if not is_truncated(attempt)]
    return Group(group.role, group.key, tuple(group.attempts[i] for i in kept), tuple(group.rewards[i] for i in kept))


def shaped(group: Group, index: int, config: AdvantageConfig) -> float:
    """A member's reward, a solver's less its overlong penalty."""
    reward = group.rewards[index]
    if group.role != "solver" or not config.overlong_limit:
        return reward
    num_sampled = group.attempts[index].trajectory.num_sampled
    return reward + overlong_penalty(num_sampled, config.overlong_limit, config.overlong_buffer)


def flatten(trajectory: Trajectory, advantage: float) -> Sample:
    """A trajectory as one row of tokens, masked where the policy sampled. version: the oldest that sampled any of
    it."""
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    for turn in trajectory.turns:
        if len(turn.logprobs) != len(turn.sampled):
            raise ValueError(
                f"trajectory {trajectory.id} has a turn of {len(turn.sampled)} sampled ids and {len(turn.logprobs)} "
                "logprobs; an engine returns one for each"
            )
        tokens += [*turn.observed, *turn.sampled]
        mask += [False] * len(turn.observed) + [True] * len(turn.sampled)
        logprobs += [0.0] * len(turn.observed) + list(turn.logprobs)
    version = min((turn.version_min for turn in trajectory.turns), default=0)
    return Sample(tuple(tokens), tuple(mask), tuple(logprobs), advantage, trajectory.role, version)
