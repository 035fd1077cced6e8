"""Groups of attempts to samples with advantages: reward minus the mean of its own group, no division by std.

Solvers are compared within one environment, proposers within one assignment; the roles never share a mean. A group
whose rewards do not vary teaches nothing and is dropped. (AutoEnvScaling, arXiv 2610.14163; the drop is DAPO's,
2503.14476.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rsi.types import Group, Sample, Stop, Trajectory

SPREAD = 1e-6
"""A group is useful if max - min of its rewards exceeds this (SkyRL's tolerance)."""


def centred(rewards: Sequence[float]) -> tuple[float, ...]:
    """Each reward minus their mean; a group of one gets 0."""
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, found {list(rewards)}; a fault has no reward and leaves its group")
    mean = math.fsum(rewards) / max(1, len(rewards))
    return tuple(reward - mean for reward in rewards)


def is_useful(group: Group) -> bool:
    """Whether the group's rewards vary."""
    return len(group.rewards) > 1 and max(group.rewards) - min(group.rewards) > SPREAD


def to_samples(groups: Sequence[Group]) -> list[Sample]:
    """The samples of all useful groups, in order. A trajectory that sampled nothing counts in its group's mean only."""
    samples = []
    for group in groups:
        if not is_useful(group):
            continue
        for attempt, advantage in zip(group.attempts, centred(group.rewards), strict=True):
            if attempt.trajectory.stop is Stop.FAULT:
                raise ValueError(
                    f"group {group.key} holds trajectory {attempt.trajectory.id}, a fault; leave faults out"
                )
            if attempt.trajectory.num_sampled:
                samples.append(flatten(attempt.trajectory, advantage))
    return samples


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
