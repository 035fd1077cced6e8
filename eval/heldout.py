"""The held-out suite: tasks that no seed, cold start or pool contains, with words that none of them uses.

A pass is a reward of exactly 1. Attempts in which our side broke are left out and counted, so `n` is what was measured.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsi.episode import EpisodeLimits
from rsi.harbor.task import TaskError, task_from_files, verifier_files
from rsi.solve import OnProgress, Site, attempt, silent
from rsi.stats import wilson
from rsi.types import Task

SUITE = Path(__file__).with_name("heldout.jsonl")


@dataclass(frozen=True)
class HeldoutTask:
    """depth: chores that the task chains."""

    task: Task
    depth: int


@dataclass(frozen=True)
class EvalResult:
    """passes and measured attempts by depth."""

    suite: str
    passes: Mapping[int, int]
    attempts: Mapping[int, int]
    num_faults: int

    def pass_rate(self, depth: int) -> float:
        return self.passes[depth] / self.attempts[depth]

    def to_json(self) -> dict[str, Any]:
        """The keys that other tools read; a depth of which nothing was measured is left out."""
        depths = [depth for depth in sorted(self.attempts) if self.attempts[depth]]
        return {
            "suite": self.suite,
            "n": sum(self.attempts.values()),
            "pass_rate": {str(depth): self.pass_rate(depth) for depth in depths},
            "ci95": {str(depth): list(wilson(self.passes[depth], self.attempts[depth])) for depth in depths},
            "faults": self.num_faults,
        }


def load_suite(path: Path = SUITE) -> tuple[HeldoutTask, ...]:
    """The tasks of a suite, each a line {depth, domain, files}; the verifier's own files are added.

    Its bytes are held against the digest beside it (`sha256sum` layout). Raises ValueError when the file is missing,
    was changed, or holds what is not a task.
    """
    digest_path = path.with_suffix(".sha256")
    if not path.is_file() or not digest_path.is_file():
        raise ValueError(f"the suite {path} or its digest {digest_path.name} is missing; restore both files")
    content = path.read_bytes()
    [expected, *_] = digest_path.read_text().split() or [""]
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ValueError(f"{path} has digest {found}, but {digest_path.name} says {expected}; restore both files")
    managed = {f"tests/{name}": content for name, content in verifier_files().items()}
    tasks = []
    for number, line in enumerate(content.decode().splitlines(), start=1):
        record = json.loads(line)
        try:
            files = managed | {name: content.encode() for name, content in record["files"].items()}
            tasks.append(HeldoutTask(task_from_files(files, record["domain"]), int(record["depth"])))
        except (TaskError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} line {number} is not a held-out task: {error}") from error
    return tuple(tasks)


async def evaluate(
    site: Site,
    tasks: Sequence[HeldoutTask],
    *,
    attempts: int,
    limits: EpisodeLimits,
    seed: int,
    temperature: float = 1.0,
    concurrency: int = 64,
    suite: str = "heldout",
    on_progress: OnProgress = silent,
) -> EvalResult:
    """Run every task `attempts` times with the engine's current weights. temperature 0 is greedy."""
    gate = asyncio.Semaphore(concurrency)

    async def one(number: int, index: int) -> float | None:
        async with gate:
            made = await attempt(
                site,
                tasks[number].task,
                limits,
                id=f"eval-{suite}-{number}-{index}",
                seed=seed,
                temperature=temperature,
                on_progress=on_progress,
            )
            return None if made is None else made.verdict.reward

    jobs = [(number, index) for number in range(len(tasks)) for index in range(attempts)]
    rewards = await asyncio.gather(*(one(number, index) for number, index in jobs))
    passes: dict[int, int] = defaultdict(int)
    measured: dict[int, int] = defaultdict(int)
    for (number, _), reward in zip(jobs, rewards, strict=True):
        if reward is not None:
            measured[tasks[number].depth] += 1
            passes[tasks[number].depth] += reward == 1.0
    return EvalResult(suite, dict(passes), dict(measured), sum(reward is None for reward in rewards))
