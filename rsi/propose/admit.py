"""The host's ruling on one submission: the gates, then calibration against the current solver.

The gates are functions of the files alone, so their result is kept by content digest: the tool that the proposer runs,
the admission after it, and an equal submission in the same round pay for it once. Calibration is kept by task id for
the round, in which the solver does not change.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rsi.admission.calibrate import CalibrateConfig, Calibration, calibrate
from rsi.admission.contamination import HeldOut
from rsi.admission.duplicates import Nearest
from rsi.admission.evidence import AdmissionConfig
from rsi.admission.validate import GateResult, Validation, snapshot, validate
from rsi.chat import duplicate_message, hinted_instruction, invalid_message, revision_message
from rsi.episode import EpisodeLimits
from rsi.harbor.task import TaskError, check_files, digest, task_from_files, verifier_files
from rsi.rewards import Outcome
from rsi.solve import OnProgress, Site, attempt, silent
from rsi.types import Attempt, Lineage, Task

T = TypeVar("T")
Files = Mapping[str, bytes]

CONTENT = ("instruction.md", "environment/", "solution/")
NEAREST = 0.999


@dataclass(frozen=True)
class Ruling:
    """outcome: broken (fails a gate), duplicate (the pool has it), rejected (out of the band), admitted, unmeasured
    (our fault)."""

    outcome: Outcome
    message: str
    """What the proposer is told; empty when the task is admitted or the fault is ours."""
    task: Task | None = None
    """Once the gates are passed."""
    calibration: Calibration | None = None
    gates: tuple[GateResult, ...] = ()

    def evidence(self) -> dict[str, Any]:
        """What was seen of the task, for the pool's journal; without times, so that a redone step says the same."""
        gates = [{"name": gate.name, "passed": gate.passed, "reason": gate.reason} for gate in self.gates]
        measured = self.calibration
        if measured is None:
            return {"gates": gates}
        attempts = [made.trajectory.id for made in measured.attempts]
        low, high = measured.ci95
        about = {"decision": measured.decision, "ci95": [round(low, 4), round(high, 4)], "attempts": attempts}
        return {"gates": gates, "calibration": about}


def content_key(task: Task) -> str:
    """Equal for twins: tasks of the same instruction, inputs and reference, whatever their names, limits and tests."""
    return digest({path: content for path, content in task.files.items() if path.startswith(CONTENT)})


class Admission:
    """One round of rulings; see `Ruling`. Safe for concurrent use."""

    def __init__(
        self,
        validate: Callable[[Files], Awaitable[Validation]],
        snapshot: Callable[[Files], Awaitable[Files]],
        measure: Callable[[Task], Awaitable[Calibration]],
        likeness: Callable[[Task], float],
        near_duplicate: float = 1.0,
    ):
        """measure: runs the current solver on a valid task. likeness: how similar the most similar task of the pool is,
        1 for a twin. near_duplicate: see `PoolConfig`."""
        self.num_episodes = 0
        """Attempts of the solver that calibration has taken so far, whatever became of the task."""
        self._validate = validate
        self._snapshot = snapshot
        self._measure = measure
        self._likeness = likeness
        self.near_duplicate = near_duplicate
        self._kept: dict[Hashable, Any] = {}
        self._locks: defaultdict[Hashable, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def validate(self, files: Files) -> Validation:
        """The gates on these files. valid None (our side broke) is not kept: the next call tries again.

        Raises TaskError for paths and sizes that no task has."""
        check_files(files)
        return await self._once(("gates", digest(files)), lambda: self._validate(files), lambda v: v.valid is not None)

    async def snapshot(self, files: Files) -> dict[str, bytes]:
        """The files under tests/ that the reference implies, by path in the task.

        Raises TaskError, `<gate>: <reason>`, when there is no task yet or its reference does not run; SandboxError.
        """
        own = {path: content for path, content in files.items() if not path.startswith("tests/")}
        verifier = {f"tests/{path}": content for path, content in verifier_files().items()}
        try:
            task_from_files({**own, **verifier})
        except TaskError as error:
            raise TaskError(f"structure: {error}") from None
        try:
            return {f"tests/{path}": content for path, content in (await self._snapshot(own)).items()}
        except TaskError as error:
            raise TaskError(f"reference: {error}") from None

    async def rule(self, files: Files, domain: str, lineage: Lineage) -> Ruling:
        """Raises TaskError for paths and sizes that no task has."""
        validation = await self.validate(files)
        if validation.valid is None:
            return Ruling("unmeasured", "")
        if not validation.valid or validation.task is None:
            return Ruling("broken", invalid_message(validation.complaint))
        task = replace(validation.task, domain=domain, lineage=lineage)
        likeness = self._likeness(task)
        if likeness >= 1.0 or likeness > self.near_duplicate:
            return Ruling("duplicate", duplicate_message(likeness), task, gates=validation.gates)
        calibration: Calibration = await self._once(
            ("solver", task.id), lambda: self._calibrate(task), lambda c: c.decision != "unmeasured"
        )
        match calibration.decision:
            case "accept":
                return Ruling("admitted", "", task, calibration, validation.gates)
            case "unmeasured":
                return Ruling("unmeasured", "", task, gates=validation.gates)
            case decision:
                message = revision_message(decision, calibration.mean, calibration.hinted)
                return Ruling("rejected", message, task, calibration, validation.gates)

    async def _calibrate(self, task: Task) -> Calibration:
        calibration = await self._measure(task)
        self.num_episodes += len(calibration.attempts) + (calibration.hinted is not None)
        return calibration

    async def _once(self, key: Hashable, make: Callable[[], Awaitable[T]], keep: Callable[[T], bool]) -> T:
        async with self._locks[key]:
            if key in self._kept:
                return self._kept[key]
            made = await make()
            if keep(made):
                self._kept[key] = made
            return made


def open_admission(
    site: Site,
    config: AdmissionConfig,
    calibrate_config: CalibrateConfig,
    limits: EpisodeLimits,
    *,
    held_out: HeldOut | None,
    known: Collection[Task],
    near_duplicate: float = 1.0,
    step: int,
    seed: int,
    on_progress: OnProgress = silent,
) -> Admission:
    """The rulings of one round. limits: of the solver's attempts while calibrating. known: the pool's tasks.
    near_duplicate: see `PoolConfig`."""
    keys = {content_key(task) for task in known}
    nearest = Nearest(known if near_duplicate < 1.0 else ())

    def likeness(task: Task) -> float:
        # Equal instructions and solutions over other inputs are as near as a task can be without being a twin.
        return 1.0 if content_key(task) in keys else min(nearest.find(task)[1], NEAREST)

    return Admission(
        validate=lambda files: validate(files, site.grader, held_out, config),
        snapshot=lambda files: snapshot(files, site.grader),
        measure=lambda task: measure(
            site, task, calibrate_config, limits, name=f"calibrate-{step}", seed=seed, on_progress=on_progress
        ),
        likeness=likeness,
        near_duplicate=near_duplicate,
    )


async def measure(
    site: Site,
    task: Task,
    config: CalibrateConfig,
    limits: EpisodeLimits,
    *,
    name: str,
    seed: int,
    on_progress: OnProgress = silent,
) -> Calibration:
    """Calibrate `task` against the current solver. `name`, the task and `seed` decide its episodes."""

    async def draw(index: int | str, instruction: str = "") -> Attempt | None:
        id = f"{name}-{task.id.removeprefix('sha256:')[:16]}-{index}"
        return await attempt(site, task, limits, id=id, seed=seed, instruction=instruction, on_progress=on_progress)

    async def draw_hinted() -> Attempt | None:
        solution = task.under("solution").get("solve.sh", b"").decode(errors="replace")
        return await draw("hinted", hinted_instruction(task.instruction, solution))

    return await calibrate(draw, config, draw_hinted)
