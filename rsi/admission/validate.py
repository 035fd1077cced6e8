"""The gates that a proposed task passes before anyone attempts it, and the reference run that snapshot tests come from.

Cheap gates come first and the first failure ends it: the proposer is shown one short line to mend. A gate that our side
broke is neither passed nor failed (None), so that a full disk is never charged to the proposer. Two things are stricter
than the paper: the reference must end with exit code 0, since one that fails half-way and still scores 1 has tests that
do not look; and the verifier must be the managed one, byte for byte, so that a reward means tests passed / total.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from rsi.admission.contamination import HeldOut, task_texts
from rsi.harbor.grade import Grader, SolutionRun
from rsi.harbor.image import image_spec
from rsi.harbor.snapshot import snapshot_tests
from rsi.harbor.task import SEED, TaskError, check_files, read_config, task_from_files, verifier_files
from rsi.sandbox import BuildError, SandboxError
from rsi.types import Lineage, Task, Verdict

MAX_COMPLAINT_CHARS = 200


@dataclass(frozen=True)
class ValidateConfig:
    """The `validate:` block of a recipe."""

    noop_below: float = 0.5
    """The empty solution must earn less than this; the paper is stricter across domains (use 1e-9 for exactly 0)."""
    reference_runs: int = 2
    """Fresh instances in which the reference must earn 1."""
    managed_verifier: bool = True
    """tests/test.sh and tests/verify.py must be ours; False takes any verifier that writes a reward."""

    def __post_init__(self) -> None:
        if self.reference_runs < 1:
            raise ValueError(
                f"validate.reference_runs={self.reference_runs} checks nothing; use >= 1 (the paper has 2)"
            )


PAPER = ValidateConfig()


@dataclass(frozen=True)
class GateResult:
    """passed: None where our side broke before the gate could tell. reason: empty when it passed."""

    name: str
    passed: bool | None
    reason: str
    seconds: float


@dataclass(frozen=True)
class Validation:
    """The gates that ran, in order; task is None where the files are none."""

    task: Task | None
    gates: tuple[GateResult, ...]

    @property
    def valid(self) -> bool | None:
        """False where a gate failed, None where our side broke, else True."""
        verdicts = [gate.passed for gate in self.gates]
        return False if False in verdicts else None if None in verdicts else True

    @property
    def complaint(self) -> str:
        """`gate: reason` of the first gate that did not pass, on one line; empty for a valid task."""
        for gate in self.gates:
            if gate.passed is not True:
                return _line(f"{gate.name}: {gate.reason}")
        return ""


async def validate(
    files: Mapping[str, bytes],
    grader: Grader,
    held_out: HeldOut | None = None,
    config: ValidateConfig = PAPER,
    domain: str = "",
    lineage: Lineage = SEED,
) -> Validation:
    """Pass the files of a proposal through the gates, up to the first that does not let them through."""
    started = time.monotonic()
    try:
        task = structure(files, config, domain, lineage)
    except (TaskError, BuildError) as error:
        return Validation(None, (GateResult("structure", False, _line(str(error)), time.monotonic() - started),))
    gates = [GateResult("structure", True, "", time.monotonic() - started)]
    later: tuple[tuple[str, Callable[[], Awaitable[str]]], ...] = (
        ("contamination", lambda: contamination(task, held_out)),
        ("build", lambda: build(task, grader)),
        ("reference", lambda: reference(task, grader, config)),
        ("noop", lambda: noop(task, grader, config)),
    )
    for name, gate in later:
        gates.append(await _run_gate(name, gate))
        if gates[-1].passed is not True:
            break
    return Validation(task, tuple(gates))


async def _run_gate(name: str, gate: Callable[[], Awaitable[str]]) -> GateResult:
    started = time.monotonic()
    try:
        reason = _line(await gate())
        passed: bool | None = not reason
    except SandboxError as error:
        passed, reason = None, _line(str(error))
    return GateResult(name, passed, reason, time.monotonic() - started)


def structure(files: Mapping[str, bytes], config: ValidateConfig, domain: str, lineage: Lineage) -> Task:
    """A task that can be read, with an image within the subset and our verifier. Raises TaskError, BuildError."""
    task = task_from_files(files, domain, lineage)
    network = read_config(task.files).get("environment", {}).get("network_mode")
    if network != "no-network":
        raise TaskError('task.toml has no network_mode = "no-network" under [environment]; add it')
    image_spec(task)
    if config.managed_verifier:
        tests = task.under("tests")
        for path, content in verifier_files().items():
            if tests.get(path) != content:
                raise TaskError(f"tests/{path} is not the managed one; run tools/new-task or tools/snapshot-tests")
        if not any(path.startswith("test_") and path.endswith(".py") for path in tests):
            raise TaskError("tests/ has no test_*.py; write tests/test_outputs.py or run tools/snapshot-tests")
    return task


async def contamination(task: Task, held_out: HeldOut | None) -> str:
    """No 13-gram of the instruction or the solution is held out."""
    for text in task_texts(task) if held_out is not None else ():
        found = held_out.overlap(text) if held_out is not None else None
        if found:
            return f"{found}; write another task"
    return ""


async def build(task: Task, grader: Grader) -> str:
    """The image builds."""
    try:
        await grader.build(task)
    except BuildError as error:
        return _last_line(str(error)) or "the image does not build"
    return ""


async def reference(task: Task, grader: Grader, config: ValidateConfig) -> str:
    """The reference solution earns 1 on each of several fresh instances, and the tests run anew on each."""
    for _ in range(config.reference_runs):
        run = await grader.run_solution(task)
        if complaint := _exit_complaint(run):
            return complaint
        verdict = await grader.grade(task, run.outputs, fresh=True)
        if verdict.reward != 1.0:
            return _verdict_complaint(verdict)
    return ""


async def noop(task: Task, grader: Grader, config: ValidateConfig) -> str:
    """Doing nothing earns little."""
    verdict = await grader.grade(task, await grader.initial(task))
    if verdict.reward is None:
        return _verdict_complaint(verdict)
    if verdict.reward >= config.noop_below:
        return f"doing nothing earns {verdict.reward:.2f}; test more of what the solution changes"
    return ""


async def snapshot(files: Mapping[str, bytes], grader: Grader) -> dict[str, bytes]:
    """The files of tests/ that `tools/snapshot-tests` writes for a task whose tests are not written yet.

    Raises TaskError with a short reason for what its author has to mend, SandboxError for our faults.
    """
    check_files(files)
    own = {path: content for path, content in files.items() if not path.startswith("tests/")}
    task = task_from_files({**own, **{f"tests/{path}": content for path, content in verifier_files().items()}})
    try:
        before = await grader.initial(task)
    except BuildError as error:
        raise TaskError(_last_line(str(error)) or "the image does not build") from None
    run = await grader.run_solution(task)
    if complaint := _exit_complaint(run):
        raise TaskError(_line(complaint))
    return snapshot_tests(before, run.outputs)


def _exit_complaint(run: SolutionRun) -> str:
    if run.exit_code == 0:
        return ""
    if run.exit_code is None:
        return "solution/solve.sh ran out of time; make it quicker"
    return _last_line(run.log) or f"solution/solve.sh ended with exit code {run.exit_code}"


def _verdict_complaint(verdict: Verdict) -> str:
    if verdict.reward is None:
        return verdict.log.splitlines()[0] if verdict.log else "the verifier wrote no reward"
    failed = [test for test in verdict.tests if not test.passed]
    if failed:
        return failed[0].message or f"{failed[0].name} fails"
    return f"the tests give {verdict.reward:.2f}, not 1"


def _last_line(text: str) -> str:
    """The last line of an error output, without bash's `/solution/solve.sh: line 3: ` before it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("/solution/solve.sh: ") if lines else ""


def _line(text: str) -> str:
    """Printable, on one line, at most MAX_COMPLAINT_CHARS: it is shown to a model and written to logs."""
    plain = "".join(char if char.isprintable() else " " for char in " ".join(text.split()))
    return plain if len(plain) <= MAX_COMPLAINT_CHARS else plain[: MAX_COMPLAINT_CHARS - 3] + "..."
