"""`rsi validate`: directories in, a verdict on each out.

Whatever a directory holds, it gets a verdict and the next one its turn. `jobs` is how many sandboxes work at once, over
all tasks and gates together: it is the backend's `max_alive`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rsi.admission.contamination import HeldOut
from rsi.admission.evidence import AdmissionConfig
from rsi.admission.start_state import Eyes
from rsi.admission.validate import ALL_GATES, GateResult, Validation, validate_fully
from rsi.harbor.grade import Grader
from rsi.harbor.records import FormatError
from rsi.harbor.task import read_task
from rsi.sandbox import SandboxConfig, build_backend

Show = Callable[[Path, Validation], None]


@dataclass(frozen=True)
class CommandConfig:
    """The blocks that the command reads, with its own defaults: all gates, any verifier, a sandbox a CPU."""

    admission: AdmissionConfig = AdmissionConfig(gates=ALL_GATES, managed_verifier=False)
    sandbox: SandboxConfig = SandboxConfig(max_alive=len(os.sched_getaffinity(0)))

    def narrowed(self, gates: str, strict: bool, rubric_model: str) -> CommandConfig:
        """With what the options say. Raises ValueError for a gate that there is not."""
        names = {name.strip() for name in gates.split(",") if name.strip()}
        if unknown := names - set(ALL_GATES):
            raise ValueError(f"no gate is called {min(unknown)}; the gates are {', '.join(ALL_GATES)}")
        wanted = tuple(name for name in ALL_GATES if not names or name in names or name == "structure")
        admission = replace(self.admission, gates=wanted if names else self.admission.gates)
        admission = replace(
            admission, strict=strict or admission.strict, rubric_model=rubric_model or admission.rubric_model
        )
        return replace(self, admission=admission)


async def validate_directories(
    paths: Sequence[Path], config: CommandConfig, held_out: HeldOut | None, show: Show
) -> list[Validation]:
    """The verdicts, in the order of the paths; each is shown when those before it are."""
    backend = build_backend(config.sandbox)
    grader, eyes = Grader(backend), Eyes(backend)
    turn = asyncio.Semaphore(config.sandbox.max_alive)

    async def judge(path: Path) -> Validation:
        async with turn:
            return await _judge(path, grader, held_out, config.admission, eyes)

    tasks = [asyncio.create_task(judge(path)) for path in paths]
    validations = []
    try:
        for path, task in zip(paths, tasks, strict=True):
            validations.append(await task)
            show(path, validations[-1])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await backend.close()
    return validations


async def _judge(
    path: Path, grader: Grader, held_out: HeldOut | None, config: AdmissionConfig, eyes: Eyes
) -> Validation:
    try:
        task = await asyncio.to_thread(read_task, path)
    except (FormatError, OSError, RecursionError) as error:
        return _all_after("structure", False, f"{error}" if not isinstance(error, RecursionError) else "too deep")
    try:
        return await validate_fully(task.files, grader, held_out, config, eyes)
    except Exception as error:  # a mistake of ours must not take the verdicts of the other tasks with it
        return _all_after("structure", None, f"rsi broke ({type(error).__name__}: {error}); please report it")


def _all_after(first: str, passed: bool | None, reason: str) -> Validation:
    later = (GateResult(name, None, f"not run: {first} failed", 0.0) for name in ALL_GATES[1:])
    return Validation(None, (GateResult(first, passed, " ".join(ascii(reason)[1:-1].split())[:200], 0.0), *later))


def exit_status(validations: Sequence[Validation]) -> int:
    """0: all sound. 1: one is not. 2: none is unsound, but one could not be judged."""
    verdicts = [validation.valid for validation in validations]
    return 1 if False in verdicts else 2 if None in verdicts else 0


def to_json(path: Path, validation: Validation) -> dict[str, Any]:
    """The line that programs read. valid is false for what could not be judged too: its gates say which it is."""
    gates = [
        {"name": gate.name, "passed": gate.passed, "reason": gate.reason, "seconds": round(gate.seconds, 3)}
        for gate in validation.gates
    ]
    return {"task": str(path), "valid": validation.valid is True, "gates": gates}


class Printer:
    """Shows verdicts as they come: JSON lines to programs, tables to people."""

    def __init__(self, as_json: bool, num_tasks: int):
        self._as_json, self._whole = as_json, num_tasks == 1

    def show(self, path: Path, validation: Validation) -> None:
        if self._as_json:
            print(json.dumps(to_json(path, validation)), flush=True)
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        word = {True: "sound", False: "unsound", None: "could not be judged"}[validation.valid]
        table = Table("gate", "verdict", "seconds", "reason", title=Text(f"{path}: {word}"), title_justify="left")
        before = ""
        for gate in validation.gates:
            if self._whole or gate.passed is not True and gate.asked and not gate.reason.startswith("not run"):
                style = {True: "green", False: "bold red", None: "yellow"}[gate.passed]
                verdict = Text({True: "passed", False: "failed", None: "-"}[gate.passed], style)
                told = "the same" if gate.reason and gate.reason == before else gate.reason
                table.add_row(gate.name, verdict, f"{gate.seconds:.1f}", Text(told))
                before = gate.reason
        if table.row_count:
            Console().print(table)
        else:
            Console().print(Text(f"{path}: {word}"))
