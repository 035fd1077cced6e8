"""Grading in a sandbox that the solver never touched, and runs of the reference solution.

The agent owns the sandbox that it worked in (its bash, its python, whatever waits there for /tests), so only the files
of its workdir cross over, and the tests come in after it is gone. A verdict depends on the task and those files alone,
so it is kept: many attempts of a group leave the same files. A verifier that writes no usable reward gives
Verdict(None); a sandbox that breaks raises SandboxError; neither is ever reward 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from rsi.harbor.image import image_spec
from rsi.sandbox import Backend, Entry, ExecResult, Image, Limits, Sandbox, SandboxError
from rsi.types import Task, TestResult, Verdict

MAX_REWARD_BYTES = 64 << 10
MAX_CTRF_BYTES = 256 << 10
MAX_OUTPUT_BYTES = 80 << 20
"""Of a workdir; above the disk that a task is granted by default, so that filling the disk is still gradable."""
SPARE_MB = 16
SPARE_INODES = 4096
"""Disk of a grading sandbox beyond the task's: a solver that filled its own leaves room for the tests here."""
MAX_LOG_CHARS = 2000
MAX_TESTS = 1000
MAX_MESSAGE_CHARS = 200
KEPT_VERDICTS = 4096
STAGE = "/.rsi-outputs"
NOT_FOR_OUTPUTS = ("/tests", "/solution", "/logs", "/proc", "/dev/fd")
"""Where no link of an output may lead: to the expected files, and to the ways round by which one gets there."""
MAX_HOPS = 40
"""Of one path through links; the kernel follows no more."""


@dataclass(frozen=True)
class SolutionRun:
    """What a solution left in the workdir; exit_code is None where it ran out of time. log: stderr, else stdout."""

    outputs: Mapping[str, Entry]
    exit_code: int | None
    log: str


async def collect(sandbox: Sandbox, workdir: str) -> dict[str, Entry]:
    """The files of a workdir after every process there is dead. Raises SandboxError."""
    await sandbox.kill_all()
    return await sandbox.get(workdir, MAX_OUTPUT_BYTES)


def outputs_digest(outputs: Mapping[str, Entry]) -> str:
    """Equal for equal files: path, kind, mode, content, target."""
    total = hashlib.sha256()
    for path in sorted(outputs):
        entry = outputs[path]
        content = hashlib.sha256(entry.content).hexdigest()
        total.update(repr((path, entry.kind, entry.mode, content, entry.target)).encode(errors="surrogatepass"))
    return total.hexdigest()


class Grader:
    """Runs a task's tests and reference in fresh sandboxes of one backend, and keeps the verdicts."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._verdicts: dict[tuple[str, str], Verdict] = {}
        self._pending: dict[tuple[str, str], asyncio.Task[Verdict]] = {}
        self._initial: dict[str, dict[str, Entry]] = {}

    @property
    def backend(self) -> Backend:
        return self._backend

    async def grade(self, task: Task, outputs: Mapping[str, Entry], fresh: bool = False) -> Verdict:
        """The verdict on a workdir. `fresh`: run the tests even if the verdict is known.

        Raises SandboxError for our faults and BuildError for a task without an image.
        """
        if fresh:
            return await self._run_tests(task, outputs)
        key = (task.id, outputs_digest(outputs))
        if key in self._verdicts:
            return self._verdicts[key]
        if key not in self._pending:
            self._pending[key] = asyncio.create_task(self._run_tests(task, outputs))
            self._pending[key].add_done_callback(lambda done: self._keep(key, done))
        # Shielded: an attempt that is cancelled must not take the verdict from the others that wait for it.
        return await asyncio.shield(self._pending[key])

    def _keep(self, key: tuple[str, str], done: asyncio.Task[Verdict]) -> None:
        self._pending.pop(key, None)
        if done.cancelled() or done.exception() is not None:
            return
        verdict = done.result()
        if verdict.reward is None:
            return  # a time-out is not a function of the files alone
        if len(self._verdicts) >= KEPT_VERDICTS:
            self._verdicts.pop(next(iter(self._verdicts)))
        self._verdicts[key] = verdict

    async def build(self, task: Task) -> Image:
        """The task's image. Raises BuildError for what its author wrote, SandboxError for our faults."""
        return await self._backend.build(image_spec(task), task.limits.build_timeout_s)

    async def initial(self, task: Task) -> dict[str, Entry]:
        """The workdir as the image has it."""
        image = await self.build(task)
        if image.id not in self._initial:
            if len(self._initial) >= KEPT_VERDICTS // 16:
                self._initial.clear()
            async with self._fresh(task, 10.0) as sandbox:
                self._initial[image.id] = await sandbox.get(task.workdir, MAX_OUTPUT_BYTES)
        return dict(self._initial[image.id])

    async def run_solution(self, task: Task, solution: bytes | None = None) -> SolutionRun:
        """Run solution/solve.sh, or `solution` in its place, in a fresh instance under the agent's time limit."""
        files = task.under("solution")
        if solution is not None:
            files["solve.sh"] = solution
        async with self._fresh(task, task.limits.agent_timeout_s) as sandbox:
            await sandbox.put("/solution", files)
            done = await sandbox.exec(
                ["bash", "/solution/solve.sh"], timeout_s=task.limits.agent_timeout_s, cwd=task.workdir
            )
            outputs = await collect(sandbox, task.workdir)
        log = _tail(done.stderr) or _tail(done.stdout)
        return SolutionRun(outputs, None if done.timed_out else done.exit_code, log)

    async def _run_tests(self, task: Task, outputs: Mapping[str, Entry]) -> Verdict:
        """One put, one exec, one get: each costs milliseconds, and there is one of these for each attempt."""
        _check_outputs(outputs)
        staged: dict[str, bytes | Entry] = {
            STAGE.lstrip("/"): Entry("dir", 0o755),
            "tests": Entry("dir", 0o755),
            "logs/verifier": Entry("dir", 0o777),
        }
        for path, entry in outputs.items():
            if entry.kind != "other" and not leads_to_tests(path, outputs, task.workdir):
                staged[f"{STAGE}/{path}".lstrip("/")] = entry
        for path, content in task.under("tests").items():
            staged[f"tests/{path}"] = Entry("file", 0o755 if path.endswith(".sh") else 0o644, content)
        workdir = shlex.quote(task.workdir)
        command = (
            f"rm -rf -- {workdir} && mkdir -p {shlex.quote(_parent(task.workdir))} && mv -T -- {STAGE} {workdir} "
            f"&& cd {workdir} || {{ echo 'rsi: cannot place the outputs' >&2; exit 125; }}; exec /tests/test.sh"
        )
        async with self._fresh(task, task.limits.verifier_timeout_s, SPARE_MB, SPARE_INODES, as_root=True) as sandbox:
            await sandbox.put("/", staged)
            done = await sandbox.exec(command, timeout_s=task.limits.verifier_timeout_s, cwd="/")
            if done.timed_out:
                return Verdict(None, (), f"the verifier ran longer than {task.limits.verifier_timeout_s:g} s")
            if done.exit_code == 125 and b"rsi: cannot place the outputs" in done.stderr:
                raise SandboxError(f"grading could not fill {task.workdir}: {_tail(done.stderr)}")
            logs = await sandbox.get("/logs/verifier", MAX_OUTPUT_BYTES)
        return read_verdict(logs, done)

    @asynccontextmanager
    async def _fresh(
        self, task: Task, timeout_s: float, spare_mb: int = 0, spare_inodes: int = 0, as_root: bool = False
    ) -> AsyncIterator[Sandbox]:
        limits = task.limits
        granted = Limits(
            cpus=limits.cpus,
            memory_mb=limits.memory_mb,
            disk_mb=limits.storage_mb + spare_mb,
            inodes=Limits().inodes + spare_inodes,
            wall_s=timeout_s + 60.0,
        )
        # As root, whatever the image's USER: outputs come back without owners, and the tests must read all of them.
        image = await self.build(task)
        sandbox = await self._backend.create(replace(image, user="") if as_root else image, granted)
        try:
            yield sandbox
        finally:
            await sandbox.close()


def read_verdict(logs: Mapping[str, Entry], done: ExecResult) -> Verdict:
    """What /logs/verifier says, by harbor.md section 4; `done` gives the log and nothing else."""
    log = _tail(done.stdout + b"\n" + done.stderr)
    reward, complaint = read_reward(logs)
    tests = _read_ctrf(logs.get("ctrf.json"))
    if complaint and done.oom:
        complaint += "; the verifier ran out of memory"
    return Verdict(reward, tests, f"{complaint}\n{log}".strip()[:MAX_LOG_CHARS] if complaint else log)


def read_reward(logs: Mapping[str, Entry]) -> tuple[float | None, str]:
    """(reward, "") or (None, what is wrong). reward.json comes first, reward.txt only where that is absent."""
    name = "reward.json" if "reward.json" in logs else "reward.txt"
    entry = logs.get(name)
    if entry is None:
        return None, "the verifier wrote no reward"
    if entry.kind != "file" or len(entry.content) > MAX_REWARD_BYTES:
        return None, f"{name} is not a regular file of at most {MAX_REWARD_BYTES} bytes"
    try:
        text = entry.content.decode()
        value = _json_reward(text) if name == "reward.json" else _plain_decimal(text)
    except (ValueError, RecursionError, OverflowError) as error:
        return None, f"{name} is not a reward: {str(error)[:100]}"
    if not math.isfinite(value) or not 0.0 <= value <= 1.0:
        return None, f"{name} says {value}, which is outside [0, 1]"
    return value, ""


def _plain_decimal(text: str) -> float:
    stripped = text.strip()
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", stripped, re.ASCII):
        raise ValueError("write one plain decimal")
    return float(stripped)


def _json_reward(text: str) -> float:
    parsed = json.loads(text)
    if not isinstance(parsed, dict) or "reward" not in parsed:
        raise ValueError('write an object with the key "reward"')
    if not all(isinstance(value, bool | int | float) and math.isfinite(value) for value in parsed.values()):
        raise ValueError("every value must be a finite number")
    return float(parsed["reward"])


def _read_ctrf(entry: Entry | None) -> tuple[TestResult, ...]:
    """The tests of a ctrf.json; none where it is missing or malformed, since it decides nothing."""
    if entry is None or entry.kind != "file" or len(entry.content) > MAX_CTRF_BYTES:
        return ()
    try:
        tests = json.loads(entry.content)["results"]["tests"][:MAX_TESTS]
        return tuple(_read_test(test) for test in tests)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


def _read_test(test: Mapping[str, Any]) -> TestResult:
    name, message = str(test["name"])[:MAX_MESSAGE_CHARS], str(test.get("message") or "")[:MAX_MESSAGE_CHARS]
    return TestResult(name, test["status"] == "passed", message)


def _check_outputs(outputs: Mapping[str, Entry]) -> None:
    """Nothing may be written through a link: that would land in /tests, or anywhere."""
    for path in outputs:
        parts = path.split("/")
        above = ["/".join(parts[:i]) for i in range(1, len(parts))]
        plain = all(part not in ("", ".", "..") for part in parts)
        if not plain or any(parent in outputs and outputs[parent].kind != "dir" for parent in above):
            raise SandboxError(
                f"the collected path {ascii(path[:60])} is not below a directory; the backend's get is broken"
            )


def leads_to_tests(path: str, outputs: Mapping[str, Entry], workdir: str) -> bool:
    """Whether an output is a link by which a test would read its own expected files: it does not cross over.

    Followed by its text, through the other links among the outputs; what the image itself holds is its author's.
    """
    links = {f"{workdir}/{name}": entry.target for name, entry in outputs.items() if entry.kind == "link"}
    here, pending, num_hops = "", [*reversed(f"{workdir}/{path}".split("/"))], 0
    while pending and num_hops <= MAX_HOPS:
        part = pending.pop()
        if part in ("", "."):
            continue
        if part == "..":
            here = _parent(here).rstrip("/")
            continue
        above, here = here, f"{here}/{part}"
        if here in NOT_FOR_OUTPUTS:
            return True
        target = links.get(here)
        if target is not None:
            num_hops += 1
            pending += reversed(target.split("/"))
            here = "" if target.startswith("/") else above
    return False


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _tail(output: bytes) -> str:
    """The end of an output, as text of at most MAX_LOG_CHARS; the last lines are where an error stands."""
    return output.decode(errors="replace").strip()[-MAX_LOG_CHARS:]
