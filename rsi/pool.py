"""The active environments: what the solver is trained on, what it did there, and what the proposer is asked for next.

Tasks lie on disk as Harbor directories, and every event is one line of an append-only journal. A directory is never
removed by an eviction: a later task may name it as its parent, and a checkpoint of before the eviction still needs it.
`state` is small and goes into the trainer's checkpoint; `restore` cuts the journal back to it, so that a step which is
done again after a crash counts once. The paper does not say how environments are sampled or parents chosen; the rules
are at `sample` and `assign`. The journal holds no clock time: a redone step writes the same lines. A task's directory
is complete before its line is written, and a line that a kill tore is no line, so a pool can be read after any crash.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rsi.types import Assignment, Direction, Group, Lineage, Task, TaskLimits, TestResult, Verdict

JOURNAL = "journal.jsonl"
WINDOW = 16
"""Rewards that are remembered of a task: one group of the paper's size."""
WEIGHT_UNEVEN_OUTSIDE = 0.5
WEIGHT_EVEN = 0.1
"""How often tasks are drawn whose rewards vary around a mean outside the band, or do not vary: 1 is a useful task."""


@dataclass(frozen=True)
class PoolConfig:
    """The `pool:` block of a recipe."""

    capacity: int = 256
    review_every: int = 16
    """Solver updates after which a task is measured anew."""
    seed_share: float = 0.2
    """Of the draws, and of the capacity, that is kept for seeds while there are any."""
    low: float = 0.25
    high: float = 0.75
    """A reviewed task outside [low, high] is evicted."""
    quotas: Mapping[str, float] = field(default_factory=dict)
    """Greatest share of the capacity by domain: {terminal: 0.5}. A domain without one may fill the pool."""
    near_duplicate: float = 0.9
    """A proposal whose instruction and solution are more similar than this to a task of the pool, or to an earlier
    admitted one of its round, is a duplicate (Jaccard over triples of tokens, by MinHash); 1: only exact copies are."""

    def __post_init__(self) -> None:
        if wrong := {domain: share for domain, share in self.quotas.items() if not 0.0 < share <= 1.0}:
            raise ValueError(f"pool.quotas={wrong}; a quota is a share of the capacity, 0 < share <= 1")
        if not 0.0 < self.near_duplicate <= 1.0:
            raise ValueError(f"pool.near_duplicate={self.near_duplicate}; use 0 < similarity <= 1 (0.9 is usual)")
        if self.capacity < 1 or self.review_every < 1:
            raise ValueError(f"pool.capacity={self.capacity} and review_every={self.review_every}; use >= 1 for both")
        if not 0.0 <= self.seed_share <= 1.0 or not 0.0 <= self.low < self.high <= 1.0:
            raise ValueError(
                f"pool.seed_share={self.seed_share}, low={self.low}, high={self.high}; "
                "use 0 <= seed_share <= 1 and 0 <= low < high <= 1"
            )


@dataclass(frozen=True)
class Entry:
    """One active task and what is known of it."""

    task: Task
    added: int
    """Step."""
    reviewed: int
    """Step of the last review, or of the admission."""
    rewards: tuple[float, ...] = ()
    """The last WINDOW rewards of the solver."""
    failures: tuple[str, ...] = ()
    """Of the last WINDOW attempts that failed."""
    num_assigned: int = 0
    """How often it was a parent."""

    @property
    def seed(self) -> bool:
        return self.task.lineage.parent is None and self.task.lineage.assignment is None

    @property
    def mean(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def failure(self) -> str:
        """The most common failure, of equally common ones the first in the alphabet; empty if none of late failed."""
        if min(self.rewards, default=0.0) >= 1.0:
            return ""
        counts = Counter(self.failures)
        return min(counts, key=lambda text: (-counts[text], text)) if counts else ""


class Pool:
    """The active tasks under `root`. A new pool is empty: what lies there of an earlier run is removed."""

    def __init__(self, config: PoolConfig, root: Path):
        self.config = config
        self.root = root
        self._entries: dict[str, Entry] = {}
        self._num_admitted = 0
        self._num_evicted = 0
        (root / "tasks").mkdir(parents=True, exist_ok=True)
        self._cut(0)

    def _cut(self, journal_bytes: int) -> None:
        """Cut the journal to its first bytes, and remove the tasks that no line of it admits."""
        with (self.root / JOURNAL).open("ab") as file:
            file.truncate(journal_bytes)
        known = {self._folder(event["task"]).name for event in read_journal(self.root) if event["event"] == "admitted"}
        for path in (self.root / "tasks").iterdir():
            if path.name not in known:
                shutil.rmtree(path, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._entries

    @property
    def entries(self) -> tuple[Entry, ...]:
        """In the order of their admission."""
        return tuple(self._entries.values())

    @property
    def num_seeds_kept(self) -> int:
        """Seeds are not evicted when that would leave fewer than this."""
        return math.ceil(self.config.seed_share * self.config.capacity)

    def add(
        self,
        task: Task,
        step: int,
        rewards: Sequence[float] = (),
        failures: Sequence[str] = (),
        evidence: Mapping[str, Any] | None = None,
    ) -> bool:
        """Admit a task with its calibration rewards and what the failed attempts failed at (see `failure`); False where
        it is already in. Where the pool is full, the task whose mean is farthest from the middle of the band makes
        room; seeds only where more than `num_seeds_kept` are left. A domain at its quota makes room for itself.

        evidence: what admission saw, JSON for the journal (assignment, gates, calibration).
        """
        if task.id in self._entries:
            return False
        rivals = [entry for entry in self._entries.values() if entry.task.domain == task.domain]
        if len(rivals) >= self._places(task.domain):
            self._make_room(step, rivals, f"the quota of {task.domain} is met")
        elif len(self._entries) >= self.config.capacity:
            self._make_room(step, list(self._entries.values()), "the pool is full")
        _write_tree(task.files, self._folder(task.id))
        self._entries[task.id] = Entry(
            task, step, step, rewards=tuple(rewards)[-WINDOW:], failures=tuple(failures)[-WINDOW:]
        )
        self._num_admitted += 1
        measured = {"rewards": list(rewards), **_moments(rewards)}
        about = {"domain": task.domain, "lineage": asdict(task.lineage), **measured, **(evidence or {})}
        self._write_event("admitted", step, task.id, about)
        return True

    def record(self, groups: Iterable[Group], step: int) -> None:
        """Remember what the solver earned; groups of proposers and of tasks that are gone are passed over."""
        for group in groups:
            entry = self._entries.get(group.key)
            if group.role != "solver" or entry is None or not group.rewards:
                continue
            failures = [failure(attempt.verdict) for attempt in group.attempts if (attempt.verdict.reward or 0.0) < 1.0]
            self._entries[group.key] = replace(
                entry,
                rewards=(*entry.rewards, *group.rewards)[-WINDOW:],
                failures=(*entry.failures, *failures)[-WINDOW:],
            )
            attempts = [attempt.trajectory.id for attempt in group.attempts]
            about = {"rewards": list(group.rewards), **_moments(group.rewards), "attempts": attempts}
            self._write_event("recorded", step, group.key, about)

    def sample(self, num: int, rng: np.random.Generator) -> list[Task]:
        """`num` tasks to train on, distinct while the pool has enough.

        A share of seed_share (rounded up) is drawn from seeds, the rest from all that are left. Weight 1: not measured
        yet, or rewards that vary around a mean within the band; WEIGHT_UNEVEN_OUTSIDE: they vary around another mean;
        WEIGHT_EVEN: all equal, which gives no gradient unless the solver has changed.
        """
        if not self._entries:
            raise ValueError("the pool is empty; add the domain's seeds before sampling")
        drawn: list[Entry] = []
        while len(drawn) < num:
            wanted = min(num - len(drawn), len(self._entries))
            seeds = [entry for entry in self._entries.values() if entry.seed]
            first = self._draw(seeds, math.ceil(self.config.seed_share * wanted), rng)
            taken = {entry.task.id for entry in first}
            rest = [entry for entry in self._entries.values() if entry.task.id not in taken]
            drawn += first + self._draw(rest, wanted - len(first), rng)
        return [entry.task for entry in drawn]

    def assign(self, num: int, rng: np.random.Generator, domain: str) -> list[Assignment]:
        """`num` assignments with parents of `domain` that the solver has been measured on.

        A parent is drawn with weight 1 / (1 + times it was one), so that proposals do not pile up under one task. Below
        the band it is to be simplified, above it hardened; within, hardened with a probability that rises from 0 at
        `low` to 1 at `high`, which pulls proposals to the middle. Without a measured parent: explore.
        """
        assignments = []
        for _ in range(num):
            measured = [e for e in self._entries.values() if e.rewards and domain in ("", e.task.domain)]
            nonce = int(rng.integers(2**63))
            if not measured:
                assignments.append(Assignment(_assignment_id(domain, nonce), domain, "explore", None, None, 0, ""))
                continue
            weights = np.array([1.0 / (1 + entry.num_assigned) for entry in measured])
            entry = measured[int(rng.choice(len(measured), p=weights / weights.sum()))]
            self._entries[entry.task.id] = replace(entry, num_assigned=entry.num_assigned + 1)
            assignments.append(self._assignment(entry, nonce, rng))
        return assignments

    def stale(self, step: int) -> list[Task]:
        """Tasks admitted or reviewed at least review_every steps ago, the longest first."""
        due = [entry for entry in self._entries.values() if step - entry.reviewed >= self.config.review_every]
        return [entry.task for entry in sorted(due, key=lambda entry: entry.reviewed)]

    def review(self, task_id: str, rewards: Sequence[float], step: int, failures: Sequence[str] = ()) -> str | None:
        """Judge a task by fresh rewards of the solver: None if it stays, else the reason why it was evicted.

        No rewards (all attempts were faults): nothing is known, and it stays due.
        """
        entry = self._entries.get(task_id)
        if entry is None or not rewards:
            return None
        failures = (*entry.failures, *failures)[-WINDOW:]
        self._entries[task_id] = replace(entry, rewards=tuple(rewards)[-WINDOW:], failures=failures, reviewed=step)
        mean = sum(rewards) / len(rewards)
        reason = None
        if not self.config.low <= mean <= self.config.high:
            side = "too hard" if mean < self.config.low else "too easy"
            reason = f"{side}: mean {mean:.2f} over {len(rewards)} attempts"
        if reason is None or entry.seed and not self._seeds_to_spare:
            self._write_event("reviewed", step, task_id, {"rewards": list(rewards), "outside": reason})
            return None
        self._evict(task_id, step, reason)
        return reason

    def stats(self) -> dict[str, float]:
        """For logs."""
        means = [entry.mean for entry in self._entries.values() if entry.mean is not None]
        within = sum(self.config.low <= mean <= self.config.high for mean in means)
        return {
            "size": len(self._entries),
            "seeds": sum(entry.seed for entry in self._entries.values()),
            "admitted": self._num_admitted,
            "evicted": self._num_evicted,
            "measured": len(means),
            "mean_reward": sum(means) / len(means) if means else 0.0,
            "in_band_frac": within / len(means) if means else 0.0,
        }

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint; task contents stay in their directories, which `sha256` seals."""
        return {
            "journal_bytes": _journal_bytes(self.root),
            "num_admitted": self._num_admitted,
            "num_evicted": self._num_evicted,
            "entries": [_entry_to_json(entry) for entry in self._entries.values()],
        }

    @classmethod
    def restore(cls, config: PoolConfig, root: Path, state: Mapping[str, Any]) -> Pool:
        """The pool as it was at `state`. What happened after is cut off the journal, and tasks admitted after go.

        Raises ValueError where the journal or a task on disk is not what the state was taken of.
        """
        size = _journal_bytes(root)
        if size < state["journal_bytes"]:
            raise ValueError(
                f"{root / JOURNAL} has {size} bytes, the checkpoint was taken at {state['journal_bytes']}; "
                "restore the pool directory that belongs to the checkpoint"
            )
        entries = [_entry_from_json(record, root) for record in state["entries"]]
        pool = cls.__new__(cls)
        pool.config, pool.root = config, root
        pool._entries = {entry.task.id: entry for entry in entries}
        pool._num_admitted, pool._num_evicted = state["num_admitted"], state["num_evicted"]
        pool._cut(state["journal_bytes"])
        return pool

    @property
    def _seeds_to_spare(self) -> bool:
        return sum(entry.seed for entry in self._entries.values()) > self.num_seeds_kept

    def _places(self, domain: str) -> int:
        return max(1, math.floor(self.config.quotas.get(domain, 1.0) * self.config.capacity))

    def _make_room(self, step: int, rivals: list[Entry], reason: str) -> None:
        middle = (self.config.low + self.config.high) / 2
        candidates = [entry for entry in rivals if not entry.seed or self._seeds_to_spare]
        # Only where all that is left are seeds to keep: then one of them has to go all the same.
        worst = max(
            candidates or rivals, key=lambda e: (abs((middle if e.mean is None else e.mean) - middle), -e.added)
        )
        self._evict(worst.task.id, step, reason)

    def _evict(self, task_id: str, step: int, reason: str) -> None:
        entry = self._entries.pop(task_id)
        self._num_evicted += 1
        self._write_event("evicted", step, task_id, {"reason": reason, "rewards": list(entry.rewards)})

    def _draw(self, entries: list[Entry], num: int, rng: np.random.Generator) -> list[Entry]:
        num = min(num, len(entries))
        if num == 0:
            return []
        weights = np.array([self._weight(entry) for entry in entries])
        chosen = rng.choice(len(entries), size=num, replace=False, p=weights / weights.sum())
        return [entries[int(i)] for i in chosen]

    def _weight(self, entry: Entry) -> float:
        if entry.mean is None:
            return 1.0
        if max(entry.rewards) - min(entry.rewards) <= 1e-6:
            return WEIGHT_EVEN
        return 1.0 if self.config.low <= entry.mean <= self.config.high else WEIGHT_UNEVEN_OUTSIDE

    def _assignment(self, entry: Entry, nonce: int, rng: np.random.Generator) -> Assignment:
        mean = entry.mean
        assert mean is not None
        position = (mean - self.config.low) / (self.config.high - self.config.low)
        direction: Direction = "harden" if rng.random() < position else "simplify"
        task = entry.task
        name = _assignment_id(task.id, nonce)
        return Assignment(name, task.domain, direction, task, mean, len(entry.rewards), entry.failure)

    def _folder(self, task_id: str) -> Path:
        return task_folder(self.root, task_id)

    def _write_event(self, event: str, step: int, task_id: str, about: Mapping[str, Any]) -> None:
        line = json.dumps({"event": event, "step": step, "task": task_id, **about}) + "\n"
        with (self.root / JOURNAL).open("ab") as file:
            file.write(line.encode())


def failure(verdict: Verdict) -> str:
    """What an attempt failed at, in words: the message of its first failed test."""
    failed: list[TestResult] = [test for test in verdict.tests if not test.passed]
    if not failed:
        return "the tests failed"
    return failed[0].message or failed[0].name


def read_journal(root: Path) -> list[dict[str, Any]]:
    """A pool's journal, without a last line that a kill tore; a torn line elsewhere raises ValueError."""
    path = root / JOURNAL
    if not path.exists():
        return []
    events = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            events.append(json.loads(line))
        except ValueError:
            raise ValueError(f"{path} line {number} is not JSON; restore the file from a copy") from None
    return events


def _moments(rewards: Sequence[float]) -> dict[str, float]:
    if not rewards:
        return {}
    return {"mean": round(float(np.mean(rewards)), 6), "std": round(float(np.std(rewards)), 6)}


def _assignment_id(key: str, nonce: int) -> str:
    return "a-" + hashlib.sha256(f"{key}:{nonce}".encode()).hexdigest()[:12]


def task_folder(root: Path, task_id: str) -> Path:
    """Where the Harbor directory of a task lies in the pool at `root`."""
    return root / "tasks" / task_id.removeprefix("sha256:")[:12]


def _write_tree(files: Mapping[str, bytes], path: Path) -> None:
    """A Harbor directory, whole or not at all; a directory of that digest that is there already is the same task."""
    if path.exists():
        return
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    for relative, content in files.items():
        target = staging / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(0o755 if relative.endswith(".sh") else 0o644)
    staging.rename(path)


def _seal(files: Mapping[str, bytes]) -> str:
    """A hash of all files, to notice a directory that was edited after a checkpoint."""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path}\0{hashlib.sha256(files[path]).hexdigest()}\n".encode())
    return total.hexdigest()


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    task = entry.task
    described = {
        "id": task.id,
        "domain": task.domain,
        "instruction": task.instruction,
        "limits": asdict(task.limits),
        "workdir": task.workdir,
        "lineage": asdict(task.lineage),
        "sha256": _seal(task.files),
    }
    measured = {"rewards": list(entry.rewards), "failures": list(entry.failures), "num_assigned": entry.num_assigned}
    return {"task": described, "added": entry.added, "reviewed": entry.reviewed, **measured}


def _entry_from_json(record: Mapping[str, Any], root: Path) -> Entry:
    described = dict(record["task"])
    folder = task_folder(root, described["id"])
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if _seal(files) != described.pop("sha256"):
        raise ValueError(f"{folder} is not what the checkpoint was taken of; restore the pool directory of that time")
    limits, lineage = TaskLimits(**described.pop("limits")), Lineage(**described.pop("lineage"))
    task = Task(files=files, limits=limits, lineage=lineage, **described)
    rewards, failures = tuple(record["rewards"]), tuple(record["failures"])
    return Entry(task, record["added"], record["reviewed"], rewards, failures, record["num_assigned"])


def _journal_bytes(root: Path) -> int:
    path = root / JOURNAL
    return path.stat().st_size if path.exists() else 0
