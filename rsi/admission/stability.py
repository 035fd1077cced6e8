"""Whether a task is the same task the next time: the start state (reset), and the verdicts elsewhere (determinism).

What is varied: PYTHONHASHSEED, TZ and locale by variables (unless the image sets them, which is its right), the number
of CPUs by affinity, clock and host name by a preloaded library (`elsewhere.c`, compiled with the C compiler of this
machine; without one, or in static programs, clock and name stay and the gate says so). What is not: the kernel, the
file system, the CPU's kind, how busy the machine is, and locales that the image does not have.
"""

from __future__ import annotations

import asyncio
import functools
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rsi.admission.evidence import SOUND, Evidence, Finding, Graded, RebuildingBackend, run_and_grade
from rsi.admission.start_state import StartState
from rsi.harbor.grade import Grader
from rsi.harbor.image import image_spec
from rsi.harbor.verify import archive_members
from rsi.sandbox import Backend, Entry, ExecResult, Image, Limits, Network, Sandbox
from rsi.types import Verdict

SHIM = "/run/elsewhere.so"
SHIFT_S = 404 * 86400 + 7 * 3600 + 11 * 60
"""Another year, month, day of the week, hour and minute."""
FORGETFUL = ("/.git/", "/__pycache__/", "/var/log/", "/var/cache/", "/etc/", "/tmp/", "/.cache/")
"""Where a rebuild writes its own date, as every image does: nothing follows from a difference there."""
LIMITS = Limits()


# ---- reset


async def reset(evidence: Evidence) -> Finding:
    """A fresh instance has the start state again; so has one of an image that was built again from its first step.

    A rebuilt text must be the same. Other files may hold the time of their making, as an archive or a database does:
    they fail where the reference does.
    """
    before = await evidence.look(0)
    await evidence.reference(0)
    if changed := before.differences(await evidence.look(1)):
        return Finding(f"two fresh instances differ in {_names(changed)}; start from files that nothing changes")
    if not any(step.run for step in image_spec(evidence.task).steps):
        return SOUND
    after = await evidence.look_rebuilt()
    changed = [path for path in before.differences(after) if _counts(path, before, after)]
    if not changed:
        return SOUND
    texts = [path for path in changed if _is_text(before.files.get(path)) or _is_text(after.files.get(path))]
    if texts or evidence.config.strict:
        return Finding(f"a rebuilt image differs in {_names(texts or changed)}; write the same in every build")
    rebuilt = await run_and_grade(Grader(RebuildingBackend(evidence.grader.backend)), evidence.task)
    if not rebuilt.is_right and (await evidence.reference(0)).is_right:
        earns = _reward(rebuilt.verdict)
        return Finding(f"a rebuilt image differs in {_names(changed)}, and there the reference earns {earns}")
    return Finding(note=f"a rebuilt image differs in {_names(changed)}; the reference earns 1 there too")


def _counts(path: str, before: StartState, after: StartState) -> bool:
    """Whether something follows from a difference there: not for directories, nor for what every build dates anew."""
    seen = before.tree.get(path) or after.tree[path]
    if seen.kind == "d" and path in before.tree and path in after.tree or any(name in f"{path}/" for name in FORGETFUL):
        return False
    members = [archive_members(path, state.files.get(path, b"")) for state in (before, after)]
    return members[0] is None or members[0] != members[1]


def _is_text(content: bytes | None) -> bool:
    try:
        return content is not None and b"\0" not in content and content.decode() is not None
    except UnicodeDecodeError:
        return False


def _names(paths: Sequence[str]) -> str:
    return f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}"


# ---- determinism


@dataclass(frozen=True)
class Place:
    """Where a sandbox seems to be. Empty fields are left as they are."""

    env: Mapping[str, str] = field(default_factory=dict)
    one_cpu: bool = False
    shim: bytes = b""


def places(shim: bytes) -> dict[str, Place]:
    """The conditions, by the name that a complaint gives them."""
    varied = {
        "hash seed": Place({"PYTHONHASHSEED": "4242"}),
        "time zone": Place({"TZ": "XYZ-11:30"}),
        "locale": Place({"LC_ALL": "POSIX", "LANG": "POSIX"}),
        "number of CPUs": Place(one_cpu=True),
    }
    if shim:
        varied["clock"] = Place({"ELSEWHERE_SHIFT": str(SHIFT_S), "LD_PRELOAD": SHIM}, shim=shim)
        varied["host name"] = Place({"ELSEWHERE_HOST": "orchid", "LD_PRELOAD": SHIM}, shim=shim)
    return varied


def everywhere(varied: Mapping[str, Place]) -> Place:
    env = {name: value for place in varied.values() for name, value in place.env.items()}
    shim = max((place.shim for place in varied.values()), key=len)
    return Place(env, any(place.one_cpu for place in varied.values()), shim)


async def determinism(evidence: Evidence) -> Finding:
    """The reference earns 1 and the no-op what it earned, with the same tests passed, in another place."""
    first, start, noop = await evidence.right_reference(), await evidence.initial(), await evidence.noop()
    varied = places(await asyncio.to_thread(shim_for_this_machine))
    task, backend = evidence.task, evidence.grader.backend  # under its own time limits: these runs should succeed

    async def moved(place: Place) -> Graded:
        return await run_and_grade(Grader(MovedBackend(backend, place)), task)

    there, nothing = await asyncio.gather(
        moved(everywhere(varied)), Grader(MovedBackend(backend, everywhere(varied))).grade(task, start)
    )
    if not _same(nothing, noop):
        return Finding(f"a no-op earns {_reward(noop)} here and {_reward(nothing)} {_elsewhere(varied)}")
    if _same(there.verdict, first.verdict) and there.run.exit_code == 0:
        return Finding(note="" if "clock" in varied else "clock and host name were not varied: no C compiler (cc) here")
    alone = await asyncio.gather(*(moved(place) for place in varied.values()))
    to_blame = [name for name, graded in zip(varied, alone, strict=True) if not _same(graded.verdict, first.verdict)]
    blamed = f"under another {' and another '.join(to_blame)}" if to_blame else _elsewhere(varied)
    return Finding(f"the reference earns 1 here and {_reward(there.verdict)} {blamed}; make solution and tests fix it")


def _elsewhere(varied: Mapping[str, Place]) -> str:
    return f"with another {', '.join(varied)}"


def _same(one: Verdict, other: Verdict) -> bool:
    results = [sorted((test.name, test.passed) for test in verdict.tests) for verdict in (one, other)]
    return one.reward == other.reward and results[0] == results[1]


def _reward(verdict: Verdict) -> str:
    return "no reward" if verdict.reward is None else f"{verdict.reward:.2f}"


@functools.cache
def shim_for_this_machine() -> bytes:
    """`elsewhere.c`, compiled; empty where there is no C compiler or it fails. Blocking, 0.1 s, once a process."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or platform.system() != "Linux":
        return b""
    with tempfile.TemporaryDirectory(prefix="rsi-shim-") as folder:
        target = Path(folder, "elsewhere.so")
        source = Path(__file__).with_name("elsewhere.c")
        command = [compiler, "-shared", "-fPIC", "-O2", "-nostdlib", "-o", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        return target.read_bytes() if done.returncode == 0 else b""


class MovedBackend:
    """A backend whose sandboxes are in another place. Builds are the same: an image is what its author made of it."""

    def __init__(self, backend: Backend, place: Place):
        self._backend, self._place = backend, place
        self.probe, self.build, self.close = backend.probe, backend.build, backend.close

    async def create(self, image: Image, limits: Limits = LIMITS, network: Network = "none") -> Sandbox:
        sandbox = await self._backend.create(image, limits, network)
        given = {name for name, _ in image.env}
        env = {name: value for name, value in self._place.env.items() if name not in given}
        if self._place.shim:
            env["ELSEWHERE_SINCE"] = str(int(time.time()))
            await sandbox.put("/", {SHIM.lstrip("/"): Entry("file", 0o755, self._place.shim)})
        return MovedSandbox(sandbox, replace(self._place, env=env))


ONE_CPU = """\
cpus=$(taskset -cp $$ 2>/dev/null) && taskset -cp "$(sed 's/.*: *//; s/[-,].*//' <<<"$cpus")" $$ >/dev/null 2>&1
exec "$@"
"""


class MovedSandbox:
    """A sandbox whose commands start in another place; files move as before."""

    def __init__(self, sandbox: Sandbox, place: Place):
        self._sandbox, self._place = sandbox, place
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
        argv = ["bash", "-c", command] if isinstance(command, str) else command
        if self._place.one_cpu:
            argv = ["bash", "-c", ONE_CPU, "bash", *argv]
        there = {**self._place.env, **(env or {})}
        return await self._sandbox.exec(
            argv, timeout_s=timeout_s, cwd=cwd, env=there, stdin=stdin, max_output=max_output, user=user
        )
