"""From the files of a task to a verdict of every gate.

`validate` is the loop's: the gates of its config one after the other, cheap ones first, and the first failure ends it,
for the proposer is shown one short line to mend. `validate_fully` is `rsi validate`'s: all gates at once over shared
runs. A gate that our side broke, or that has nothing to compare with, is neither passed nor failed (None), so that a
full disk is never charged to the proposer. Two things are stricter than the paper: the reference must end with exit
code 0, since one that fails half-way and still scores 1 has tests that do not look; and in the loop the verifier must
be the managed one, byte for byte, so that a reward means tests passed / total.

Where a gate is: structure, build, reference, noop, verifier_health and cost in `basics`; reset and determinism in
`stability`; mutation and plausible_wrong in `wrong_answers`; the others in files of their names.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from rsi.admission import basics, leakage, rubric, stability, tampering, wrong_answers
from rsi.admission.basics import exit_complaint, last_line, structure
from rsi.admission.contamination import HeldOut, contaminated
from rsi.admission.evidence import NOT_ASKED, PAPER, AdmissionConfig, Evidence, Finding, GateName, Unjudged
from rsi.admission.start_state import Eyes
from rsi.harbor.grade import Grader
from rsi.harbor.snapshot import snapshot_tests
from rsi.harbor.task import SEED, TaskError, check_files, task_from_files, verifier_files
from rsi.sandbox import BuildError, SandboxError
from rsi.types import Lineage, Task

MAX_COMPLAINT_CHARS = 200
MAX_FAULT_CHARS = 1000
"""Of a fault of ours, which no model is shown: its mend stands at the end."""
ALL_GATES: tuple[GateName, ...] = get_args(GateName)
NEED_AN_IMAGE = frozenset(ALL_GATES) - {"structure", "build", "contamination", "rubric"}


@dataclass(frozen=True)
class GateResult:
    """passed: None where the gate could not tell, or was not asked. reason: of a failure or of None; a note else."""

    name: str
    passed: bool | None
    reason: str
    seconds: float

    @property
    def asked(self) -> bool:
        return self.passed is not None or self.reason != NOT_ASKED


@dataclass(frozen=True)
class Validation:
    """The gates that ran, in order; task is None where the files are none."""

    task: Task | None
    gates: tuple[GateResult, ...]

    @property
    def valid(self) -> bool | None:
        """False where a gate failed, None where one could not tell, else True."""
        verdicts = [gate.passed for gate in self.gates if gate.asked]
        return False if False in verdicts else None if None in verdicts else True

    @property
    def complaint(self) -> str:
        """`gate: reason` of the first gate that did not pass, on one line; empty for a valid task."""
        for gate in self.gates:
            if gate.asked and gate.passed is not True:
                return _line(f"{gate.name}: {gate.reason}")
        return ""


async def validate(
    files: Mapping[str, bytes],
    grader: Grader,
    held_out: HeldOut | None = None,
    config: AdmissionConfig = PAPER,
    domain: str = "",
    lineage: Lineage = SEED,
) -> Validation:
    """Pass the files of a proposal through the gates of the config, up to the first that does not let them through."""
    task, first = _structure(files, config, domain, lineage)
    if task is None:
        return Validation(None, (first,))
    gates = [first]
    evidence = Evidence(task, grader, config, held_out)
    try:
        for name in config.gates[1:]:
            gates.append(await _run_gate(name, evidence))
            if gates[-1].passed is not True:
                break
    finally:
        await evidence.close()
    return Validation(task, tuple(gates))


async def validate_fully(
    files: Mapping[str, bytes],
    grader: Grader,
    held_out: HeldOut | None = None,
    config: AdmissionConfig = PAPER,
    eyes: Eyes | None = None,
) -> Validation:
    """Every gate of the config at the same time, and one result for each gate that there is, in their order."""
    task, first = _structure(files, config, "", SEED)
    results: dict[str, GateResult] = {"structure": first}
    asked: list[GateName] = [name for name in ALL_GATES if name in config.gates and name != "structure"]
    if task is None:
        results |= {name: GateResult(name, None, "not run: structure failed", 0.0) for name in asked}
    else:
        evidence = Evidence(task, grader, config, held_out, eyes)
        try:
            ran = await asyncio.gather(*(_run_gate(name, evidence) for name in asked))
        finally:
            await evidence.close()
        results |= {result.name: result for result in ran}
    return Validation(task, tuple(results.get(name) or GateResult(name, None, NOT_ASKED, 0.0) for name in ALL_GATES))


def _structure(
    files: Mapping[str, bytes], config: AdmissionConfig, domain: str, lineage: Lineage
) -> tuple[Task | None, GateResult]:
    started = time.monotonic()
    try:
        task, finding = structure(files, config, domain, lineage)
    except (TaskError, BuildError) as error:
        return None, GateResult("structure", False, _line(str(error)), time.monotonic() - started)
    return task, GateResult("structure", True, _line(finding.note), time.monotonic() - started)


async def _run_gate(name: GateName, evidence: Evidence) -> GateResult:
    started = time.monotonic()
    try:
        finding = await _gate(name, evidence)
        passed, reason = not finding.complaint, finding.complaint or finding.note
    except BuildError as error:
        passed, reason = (False, last_line(str(error))) if name == "build" else (None, "not run: build failed")
    except (SandboxError, Unjudged) as error:
        passed, reason = None, str(error)
    most = MAX_FAULT_CHARS if passed is None else MAX_COMPLAINT_CHARS
    return GateResult(name, passed, _line(reason, most), time.monotonic() - started)


async def _gate(name: GateName, evidence: Evidence) -> Finding:
    if name in NEED_AN_IMAGE:
        await evidence.build_s()
    match name:
        case "build":
            return await basics.build(evidence)
        case "reference":
            return await basics.reference(evidence)
        case "noop":
            return await basics.noop(evidence)
        case "reset":
            return await stability.reset(evidence)
        case "determinism":
            return await stability.determinism(evidence)
        case "leakage":
            return await leakage.leakage(evidence)
        case "contamination":
            return Finding(contaminated(evidence.task, evidence.held_out))
        case "tampering":
            return await tampering.tampering(evidence)
        case "mutation":
            return await wrong_answers.mutation(evidence)
        case "plausible_wrong":
            return await wrong_answers.plausible_wrong(evidence)
        case "verifier_health":
            return await basics.verifier_health(evidence)
        case "cost":
            return await basics.cost(evidence)
        case "rubric":
            return await rubric.rubric(evidence)
        case "structure":
            raise AssertionError("it came first, since every other gate needs its task")


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
        raise TaskError(last_line(str(error))) from None
    run = await grader.run_solution(task)
    if complaint := exit_complaint(run):
        raise TaskError(_line(complaint))
    return snapshot_tests(before, run.outputs)


def _line(text: str, most: int = MAX_COMPLAINT_CHARS) -> str:
    """Printable, on one line, at most so long: it is shown to a model and written to logs."""
    plain = "".join(char if char.isprintable() else " " for char in " ".join(text.split()))
    return plain if len(plain) <= most else plain[: most - 3] + "..."
