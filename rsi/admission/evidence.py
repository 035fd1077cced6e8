"""What the gates look at. Every run of a task is made once, however many gates ask for it, and as many at a time as the
backend lets live; a gate is then a short function of what was seen.

Two time limits are in use: the task's own for the reference and the no-op, and a hurried one (a multiple of what the
reference took) for the many runs that are expected to fail, so that a mutant that waits for ever costs seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from rsi.admission.contamination import HeldOut
from rsi.admission.start_state import Eyes, StartState
from rsi.harbor.grade import Grader, SolutionRun
from rsi.harbor.image import image_spec
from rsi.sandbox import Backend, Entry, ExecResult, Image, ImageSpec, Limits, Network, Sandbox, Step
from rsi.types import Task, Verdict

T = TypeVar("T")
Outputs = Mapping[str, Entry]

GateName = Literal[
    "structure",
    "build",
    "reference",
    "noop",
    "reset",
    "determinism",
    "leakage",
    "contamination",
    "tampering",
    "mutation",
    "plausible_wrong",
    "verifier_health",
    "cost",
    "rubric",
]
LOOP_GATES: tuple[GateName, ...] = ("structure", "contamination", "build", "reference", "noop")
"""Cheap ones first: what a proposal passes while a run trains."""
LIMITS = Limits()
HURRY_FACTOR, HURRY_FLOOR_S = 5.0, 5.0
"""A hurried run may take this many times what the reference took, and never less than the floor: a loaded machine."""


@dataclass(frozen=True)
class AdmissionConfig:
    """The `admission:` block of a recipe."""

    gates: tuple[GateName, ...] = LOOP_GATES
    """Which gates run, in this order; the first that a task fails ends it. `rsi validate` runs all of them."""
    noop_below: float = 0.5
    """The empty solution must earn less than this; `strict` asks for exactly 0."""
    strict: bool = False
    """What the paper asks of other domains: a no-op earns 0, a wrong answer less than `noop_below`, a rebuilt image has
    the same files, and the verifier gives what the agent wrote no power over the reward."""
    reference_runs: int = 2
    """Fresh instances in which the reference must earn 1."""
    managed_verifier: bool = True
    """tests/test.sh and tests/verify.py must be ours; False takes any verifier that writes a reward."""
    mutants: int = 8
    """Altered references that are tried, at most."""
    min_mutation_score: float = 0.6
    """Share of the mutants with other outputs that must lose reward."""
    max_build_s: float = 300.0
    max_tests_s: float = 60.0
    """Of one grading: the solver is graded thousands of times."""
    max_image_mb: float = 256.0
    """What the image adds to its base."""
    max_time_share: float = 0.5
    """Of its own time limit that the reference or the tests may take; a busy machine takes twice as long."""
    rubric_model: str = ""
    """Ask this model for a review; its endpoint is $OPENAI_BASE_URL, its key $OPENAI_API_KEY. Empty: no review."""

    def __post_init__(self) -> None:
        if self.reference_runs < 1:
            raise ValueError(
                f"admission.reference_runs={self.reference_runs} checks nothing; use >= 1 (the paper has 2)"
            )
        if not self.gates or self.gates[0] != "structure" or len(set(self.gates)) != len(self.gates):
            raise ValueError(f"admission.gates={list(self.gates)}; name each gate once, and structure first")


PAPER = AdmissionConfig()


@dataclass(frozen=True)
class Finding:
    """What a gate has to say: a complaint fails the task, a note is shown and does not."""

    complaint: str = ""
    note: str = ""


SOUND = Finding()
NOT_ASKED = "not asked for"


class Unjudged(Exception):
    """A gate cannot tell, for a reason that is not a fault of ours: the reference earns nothing to compare with."""


@dataclass(frozen=True)
class Graded:
    """A run of a solution, and the tests on what it left; seconds that their commands took."""

    run: SolutionRun
    verdict: Verdict
    run_s: float
    tests_s: float

    @property
    def is_right(self) -> bool:
        return self.run.exit_code == 0 and self.verdict.reward == 1.0


class Evidence:
    """One task before the gates. Close it: what was asked for and is no longer wanted is cancelled."""

    def __init__(
        self,
        task: Task,
        grader: Grader,
        config: AdmissionConfig = PAPER,
        held_out: HeldOut | None = None,
        eyes: Eyes | None = None,
    ):
        """eyes: shared by tasks of one backend, since what they know of a base holds for all."""
        self.task, self.grader, self.config, self.held_out = task, grader, config, held_out
        self._eyes = eyes or Eyes(grader.backend)
        self._made: dict[str, asyncio.Task[Any]] = {}

    async def once(self, name: str, make: Callable[[], Awaitable[T]]) -> T:
        """What `make` gave under this name, now or before; an exception is kept as well."""
        if name not in self._made:
            self._made[name] = asyncio.ensure_future(make())
        return await asyncio.shield(self._made[name])

    async def close(self) -> None:
        for made in self._made.values():
            made.cancel()
        await asyncio.gather(*self._made.values(), return_exceptions=True)

    # ---- the plain runs

    async def build_s(self) -> float:
        """Seconds that the image took, little if it was cached. Raises BuildError."""

        async def make() -> float:
            started = time.monotonic()
            await self.grader.build(self.task)
            return time.monotonic() - started

        return await self.once("build", make)

    async def reference(self, index: int) -> Graded:
        """The reference in the index-th fresh instance; its tests run anew even if its outputs are known."""
        return await self.once(f"reference {index}", lambda: run_and_grade(self.grader, self.task))

    async def right_reference(self) -> Graded:
        """The first one. Raises Unjudged where it earns less than 1: then nothing can be compared with it."""
        first = await self.reference(0)
        if not first.is_right:
            raise Unjudged("the reference does not earn 1, so there is nothing to compare with")
        return first

    async def initial(self) -> Outputs:
        """The workdir as the image has it."""
        return await self.once("initial", lambda: self.grader.initial(self.task))

    async def noop(self) -> Verdict:
        async def make() -> Verdict:
            return await self.grader.grade(self.task, await self.initial())

        return await self.once("noop", make)

    async def nothing(self) -> Verdict:
        """The verdict on an empty workdir."""

        async def make() -> Verdict:
            return await self.grader.grade(await self.hurried(), {})

        return await self.once("nothing", make)

    async def volatile(self) -> frozenset[str]:
        """Paths that two references leave different: nothing can be concluded from them."""
        first, second = (await self.reference(0)).run.outputs, (await self.reference(1)).run.outputs
        return frozenset(path for path in {*first, *second} if first.get(path) != second.get(path))

    # ---- the many runs that should fail

    async def hurried(self) -> Task:
        """The task under time limits of what its reference took, several times over."""
        first = await self.reference(0)
        limits = self.task.limits
        return replace(
            self.task,
            limits=replace(
                limits,
                agent_timeout_s=min(limits.agent_timeout_s, HURRY_FLOOR_S + HURRY_FACTOR * first.run_s),
                verifier_timeout_s=min(limits.verifier_timeout_s, HURRY_FLOOR_S + HURRY_FACTOR * first.tests_s),
            ),
        )

    async def attempt(self, script: bytes) -> Graded:
        """Run a script in place of the reference and grade what it leaves."""
        return await run_and_grade(self.grader, await self.hurried(), script, fresh=False)

    async def grade(self, outputs: Outputs) -> Verdict:
        return await self.grader.grade(await self.hurried(), outputs)

    # ---- the start state

    async def look(self, index: int) -> StartState:
        """What the image adds to its base, as the index-th fresh instance shows it."""

        async def make() -> StartState:
            return await self._eyes.look(await self.grader.build(self.task), image_spec(self.task).base)

        return await self.once(f"look {index}", make)

    async def look_rebuilt(self) -> StartState:
        """The same of an image whose every step was run again."""

        async def make() -> StartState:
            rebuilt = Grader(RebuildingBackend(self.grader.backend))
            return await self._eyes.look(await rebuilt.build(self.task), image_spec(self.task).base)

        return await self.once("look rebuilt", make)


async def run_and_grade(grader: Grader, task: Task, script: bytes | None = None, fresh: bool = True) -> Graded:
    """Run the reference, or `script` in its place, in a fresh instance, and the tests on what it leaves."""
    timed = TimedBackend(grader.backend)
    run = await Grader(timed).run_solution(task, script)
    run_s = timed.seconds
    verdict = await (Grader(timed) if fresh else grader).grade(task, run.outputs, fresh=fresh)
    return Graded(run, verdict, run_s, timed.seconds - run_s)


class RebuildingBackend:
    """Builds every image behind one more step, so that no layer that is cached is taken for it."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self.probe, self.create, self.close = backend.probe, backend.create, backend.close

    async def build(self, spec: ImageSpec, timeout_s: float = 60.0) -> Image:
        again = Step(run=": once more, from the first step on")
        return await self._backend.build(replace(spec, steps=(again, *spec.steps)), timeout_s)


class TimedBackend:
    """Counts the seconds of its sandboxes' commands; the wait for a free sandbox is none of the task's."""

    def __init__(self, backend: Backend):
        self.seconds = 0.0
        self._backend = backend
        self.probe, self.build, self.close = backend.probe, backend.build, backend.close

    async def create(self, image: Image, limits: Limits = LIMITS, network: Network = "none") -> Sandbox:
        return TimedSandbox(await self._backend.create(image, limits, network), self)


class TimedSandbox:
    """See `TimedBackend`."""

    def __init__(self, sandbox: Sandbox, clock: TimedBackend):
        self._sandbox, self._clock = sandbox, clock
        self.put, self.get, self.snapshot = sandbox.put, sandbox.get, sandbox.snapshot
        self.kill_all, self.close = sandbox.kill_all, sandbox.close

    async def exec(
        self,
        command: str | list[str],
        *,
        timeout_s: float = 30.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output: int = 10_000,
        user: str | None = None,
    ) -> ExecResult:
        done = await self._sandbox.exec(
            command, timeout_s=timeout_s, cwd=cwd, env=env, stdin=stdin, max_output=max_output, user=user
        )
        self._clock.seconds += done.duration_s
        return done
