"""Whether a valid task teaches the current solver: its rewards must lie in the band and differ from one another.

Four attempts, eight where four cannot tell on which side of an edge the mean lies. The paper does not say which
standard deviation it means; ours is the population's. A task that is too hard gets one diagnostic attempt with the
reference as a hint, which tells its author whether the solver lacks the way or the skill; it counts for nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rsi.stats import wilson
from rsi.types import Attempt

Decision = Literal["accept", "too_hard", "too_easy", "no_spread", "unmeasured"]
TOLERANCE = 1e-9
"""0.4 - 0.25 > 0.15 in floating point."""


@dataclass(frozen=True)
class CalibrateConfig:
    """The `calibrate:` block of a recipe; the defaults are the paper's."""

    attempts: int = 4
    """Of the first round; each round adds as many."""
    max_attempts: int = 8
    margin: float = 0.15
    """Distance of the mean from an edge of the band, in reward, within which another round is run."""
    low: float = 0.25
    high: float = 0.75
    min_std: float = 0.1
    """Population standard deviation of the rewards."""
    hinted: bool = True
    """Run that diagnostic attempt."""
    max_faults: int = 4
    """Attempts that our side broke are drawn again, this many times in all; then the task is unmeasured."""

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= self.max_attempts:
            raise ValueError(
                f"calibrate.attempts={self.attempts}, max_attempts={self.max_attempts}; use 1 <= attempts <= max"
            )
        if not 0.0 <= self.low < self.high <= 1.0:
            raise ValueError(f"calibrate.low={self.low} and high={self.high}; use 0 <= low < high <= 1")


@dataclass(frozen=True)
class Calibration:
    """mean and std are of `rewards`, one for each of `attempts`; both 0 where there is none."""

    decision: Decision
    attempts: tuple[Attempt, ...]
    rewards: tuple[float, ...]
    mean: float
    std: float
    hinted: float | None = None
    """Reward of the diagnostic attempt; None where there was none or our side broke."""

    @property
    def ci95(self) -> tuple[float, float]:
        """Wilson interval of the mean reward."""
        return wilson(sum(self.rewards), len(self.rewards))


def decide(
    rewards: Sequence[float], config: CalibrateConfig
) -> Literal["accept", "extend", "too_hard", "too_easy", "no_spread"]:
    """What the rewards so far (at least one) say of the task."""
    mean, std = float(np.mean(rewards)), float(np.std(rewards))
    # Attempts that all fail alike, or all succeed, end it at once, whatever the margin.
    if max(rewards) <= 0.0:
        return "too_hard"
    if min(rewards) >= 1.0:
        return "too_easy"
    near = min(abs(mean - config.low), abs(mean - config.high)) <= config.margin + TOLERANCE
    if near and len(rewards) < config.max_attempts:
        return "extend"
    if mean < config.low - TOLERANCE:
        return "too_hard"
    if mean > config.high + TOLERANCE:
        return "too_easy"
    return "accept" if std >= config.min_std - TOLERANCE else "no_spread"


async def calibrate(
    attempt: Callable[[int], Awaitable[Attempt | None]],
    config: CalibrateConfig,
    attempt_hinted: Callable[[], Awaitable[Attempt | None]] | None = None,
) -> Calibration:
    """Run attempts of the current solver, a round at a time and concurrently within it, until the task is decided.

    attempt(i): the i-th draw, counted from 0; None, or a verdict without a reward, is a fault, and is drawn again.
    attempt_hinted: the diagnostic attempt; None: there is none.
    """
    attempts: list[Attempt] = []
    rewards: list[float] = []
    drawn = 0
    wanted = config.attempts
    while True:
        missing = wanted - len(rewards)
        round_ = await _gather(attempt, range(drawn, drawn + missing))
        drawn += missing
        for done in round_:
            if done is not None and done.verdict.reward is not None:
                attempts.append(done)
                rewards.append(done.verdict.reward)
        if len(rewards) < wanted:
            if drawn - len(rewards) > config.max_faults:
                return _calibration("unmeasured", attempts, rewards)
            continue
        decision = decide(rewards, config)
        if decision != "extend":
            made = await attempt_hinted() if decision == "too_hard" and config.hinted and attempt_hinted else None
            return replace(_calibration(decision, attempts, rewards), hinted=made.verdict.reward if made else None)
        wanted = min(wanted + config.attempts, config.max_attempts)


async def _gather(attempt: Callable[[int], Awaitable[Attempt | None]], draws: range) -> list[Attempt | None]:
    """All of them, or the first exception after all have ended: no attempt runs on unwatched."""
    results = await asyncio.gather(*(attempt(i) for i in draws), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def _calibration(decision: Decision, attempts: list[Attempt], rewards: list[float]) -> Calibration:
    mean = float(np.mean(rewards)) if rewards else 0.0
    std = float(np.std(rewards)) if rewards else 0.0
    return Calibration(decision, tuple(attempts), tuple(rewards), mean, std)
