"""Attempts at tasks: a fresh sandbox each, graded in another that the solver never touched.

A group is the attempts at one environment. Groups whose rewards do not vary teach nothing: they are measured (the pool
hears of them) but not trained on, and further environments are drawn in their place (DAPO), up to a cap. An attempt in
which our side broke is left out and counted; it is never a reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rsi.advantages import is_useful
from rsi.chat import SYSTEM, Chat
from rsi.engine import Engine
from rsi.episode import EpisodeLimits, run_episode
from rsi.harbor.grade import Grader
from rsi.harbor.outputs import collect
from rsi.sandbox import Backend, BuildError, Limits, SandboxError
from rsi.types import Attempt, Group, Role, Stop, Task

Event = Literal["start", "end", "fault"]
OnProgress = Callable[[Role, Event, float | None], None]
"""Told of every episode: that it began, that it ended with a reward, or that our side broke."""


@dataclass(frozen=True)
class SolveConfig:
    """The `solve:` block of a recipe; defaults are AutoEnvScaling's."""

    envs_per_step: int = 16
    """Useful groups that a solver update wants."""
    attempts: int = 16
    """At each environment; at least 2."""
    max_draws: int = 64
    """Environments drawn in one step, refills of zero-variance groups included; after that we train on less."""
    concurrency: int = 64
    """Episodes alive at once."""
    episode: EpisodeLimits = EpisodeLimits()

    def __post_init__(self) -> None:
        if self.attempts < 2:
            raise ValueError(f"solve.attempts={self.attempts} gives zero advantage; use 2 or more (16 is usual)")
        if self.max_draws < self.envs_per_step:
            raise ValueError(
                f"solve.max_draws={self.max_draws} is below solve.envs_per_step={self.envs_per_step}; make it larger"
            )


@dataclass(frozen=True)
class Site:
    """What every episode of a run needs around it."""

    engine: Engine
    chat: Chat
    backend: Backend
    grader: Grader


@dataclass(frozen=True)
class SolveResult:
    """groups: for training, rewards vary. measured: all of this step's groups, in the order drawn."""

    groups: tuple[Group, ...]
    measured: tuple[Group, ...]
    num_draws: int
    num_episodes: int
    num_faults: int

    @property
    def useful_frac(self) -> float:
        return len(self.groups) / max(1, self.num_draws)


def silent(role: Role, event: Event, reward: float | None) -> None:
    """The OnProgress of who does not look."""


async def attempt(
    site: Site,
    task: Task,
    limits: EpisodeLimits,
    *,
    id: str,
    seed: int,
    temperature: float | None = None,
    instruction: str = "",
    on_progress: OnProgress = silent,
) -> Attempt | None:
    """One episode at `task` and its verdict; None when our side broke or the verifier gave no reward.

    instruction: what the solver reads instead of the task's own. The tests enter only after the solver's sandbox is
    gone: its files are carried into a fresh one.
    """
    on_progress("solver", "start", None)
    made = await _attempt(site, task, limits, id, seed, temperature, instruction or task.instruction)
    on_progress("solver", "fault" if made is None else "end", None if made is None else made.verdict.reward)
    return made


async def _attempt(
    site: Site, task: Task, limits: EpisodeLimits, id: str, seed: int, temperature: float | None, instruction: str
) -> Attempt | None:
    try:
        image = await site.grader.build(task)
        sandbox = await site.backend.create(image, sandbox_limits(task), site.grader.agent_network(task))
        try:
            await site.grader.prepare(sandbox, task)
            trajectory = await run_episode(
                site.engine,
                site.chat,
                sandbox,
                id=id,
                task_id=task.id,
                role="solver",
                system=SYSTEM["solver"],
                user=instruction,
                limits=replace(limits, wall_s=min(limits.wall_s, task.limits.agent_timeout_s)),
                cwd=task.workdir,
                seed=seed,
                temperature=temperature,
            )
            if trajectory.stop is Stop.FAULT:
                return None
            outputs = await collect(sandbox, task)
        finally:
            await sandbox.close()
        verdict = await site.grader.grade(task, outputs)
    except (SandboxError, BuildError):
        return None
    return None if verdict.reward is None else Attempt(trajectory, verdict)


LIFE_S = 3600.0
"""Of a solver's sandbox. An episode's own limits end it earlier; this covers the time that it waits for the engine."""


def sandbox_limits(task: Task) -> Limits:
    granted = task.limits
    return Limits(granted.cpus, granted.memory_mb, disk_mb=granted.storage_mb, wall_s=LIFE_S)


def group_of(role: Role, key: str, attempts: Sequence[Attempt]) -> Group:
    """A comparison set of attempts that all have a reward."""
    rewards = []
    for made in attempts:
        assert made.verdict.reward is not None, "a fault is not a member of a group"
        rewards.append(made.verdict.reward)
    return Group(role, key, tuple(attempts), tuple(rewards))


async def solve(
    site: Site,
    draw: Callable[[int], Sequence[Task]],
    config: SolveConfig,
    *,
    step: int,
    seed: int,
    record: Callable[[Sequence[Group]], None] = lambda groups: None,
    on_progress: OnProgress = silent,
) -> SolveResult:
    """One step's solver groups: environments are drawn until envs_per_step of them are useful, or max_draws is met.

    draw(n): up to n environments of the pool; none when it has no more. record(groups): told of every group that was
    measured, before more are drawn, so that the pool draws tasks that teach nothing less often. Equal seeds and steps
    give equal episodes, whatever order they finish in.
    """
    gate = asyncio.Semaphore(config.concurrency)

    async def one(task: Task, number: int, index: int) -> Attempt | None:
        async with gate:
            id = f"solve-{step}-{number}-{index}"
            return await attempt(site, task, config.episode, id=id, seed=seed, on_progress=on_progress)

    async def group(task: Task, number: int) -> tuple[Group, int]:
        made = await asyncio.gather(*(one(task, number, index) for index in range(config.attempts)))
        members = [member for member in made if member is not None]
        return group_of("solver", task.id, members), len(made) - len(members)

    measured: list[Group] = []
    useful: list[Group] = []
    num_draws = num_faults = 0
    while len(useful) < config.envs_per_step and num_draws < config.max_draws:
        want = min(config.envs_per_step - len(useful), config.max_draws - num_draws)
        tasks = draw(want)
        if not tasks:
            break
        finished = await asyncio.gather(*(group(task, num_draws + i) for i, task in enumerate(tasks)))
        num_draws += len(tasks)
        num_faults += sum(faults for _, faults in finished)
        groups = [made for made, _ in finished if made.attempts]
        record(groups)
        measured += groups
        useful += filter(is_useful, groups)
    num_episodes = num_draws * config.attempts
    return SolveResult(tuple(useful), tuple(measured), num_draws, num_episodes, num_faults)
