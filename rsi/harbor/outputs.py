"""What of an agent's sandbox crosses over to grading: the files of its workdir, or the artifacts where the verifier has
a container of its own (harbor.md section 3). Nothing else does, and no link leads from there to the tests.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Mapping
from fnmatch import fnmatchcase

from rsi.harbor.config import ARTIFACTS, Artifact, StepConfig, TaskConfig, artifact_of
from rsi.harbor.task import task_config
from rsi.sandbox import Entry, Sandbox, SandboxError
from rsi.types import Task

MAX_OUTPUT_BYTES = 80 << 20
"""Of a workdir; above the disk that a task is granted by default, so that filling the disk is still gradable."""
NOT_FOR_OUTPUTS = ("/tests", "/solution", "/logs", "/proc", "/dev/fd")
"""Where no link of an output may lead: to the expected files, and to the ways round by which one gets there."""
MAX_HOPS = 40
"""Of one path through links; the kernel follows no more."""


async def collect(sandbox: Sandbox, task: Task, step: StepConfig | None = None, end: bool = True) -> dict[str, Entry]:
    """What a grading of `task` is given, by path relative to the workdir, or to / where the verifier is separate.

    The task's collect hooks run first; then every process is killed, unless the agent has another step (`end` False).
    Raises SandboxError.
    """
    config = task_config(task)
    await run_hooks(sandbox, config, step)
    if end:
        await sandbox.kill_all()
    if config.verifier_mode(step) == "shared":
        return await sandbox.get(task.workdir, MAX_OUTPUT_BYTES)
    return await get_artifacts(sandbox, config, step)


async def run_hooks(sandbox: Sandbox, config: TaskConfig, step: StepConfig | None = None) -> None:
    """The commands that put a service's state into files. One that fails is no fault: what it should have written is
    missing, and the verifier sees that."""
    for hook in (*config.verifier.collect, *(step.verifier.collect if step else ())):
        user = None if hook.user is None else str(hook.user)
        await sandbox.exec(hook.command, timeout_s=hook.timeout_sec, user=user)


async def get_artifacts(sandbox: Sandbox, config: TaskConfig, step: StepConfig | None) -> dict[str, Entry]:
    """The declared artifacts and /logs/artifacts, by path relative to /; one that is missing is left out."""
    found: dict[str, Entry] = {}
    for artifact in artifacts(config, step):
        source = posixpath.normpath(artifact.source)
        entries = await sandbox.get(source, MAX_OUTPUT_BYTES)
        if set(entries) == {posixpath.basename(source)} and not await _is_folder(sandbox, source):
            found[source.lstrip("/")] = entries[posixpath.basename(source)]
            continue
        kept = {path: entry for path, entry in entries.items() if not is_excluded(path, artifact.exclude)}
        if entries or await _is_folder(sandbox, source):
            found.setdefault(source.lstrip("/"), Entry("dir", 0o755))
        found.update({f"{source}/{path}".lstrip("/"): entry for path, entry in kept.items()})
    size = sum(len(entry.content) for entry in found.values())
    if size > MAX_OUTPUT_BYTES:
        raise SandboxError(f"the artifacts have {size} bytes; at most {MAX_OUTPUT_BYTES} cross over to a verifier")
    return {path: entry for path, entry in found.items() if path}


def artifacts(config: TaskConfig, step: StepConfig | None = None) -> list[Artifact]:
    """What is collected of the agent's container, /logs/artifacts first unless an entry is about it."""
    entries = [artifact_of(entry) for entry in (*config.artifacts, *(step.artifacts if step else ()))]
    named = any(entry.source.rstrip("/") == ARTIFACTS for entry in entries)
    return entries if named else [Artifact(ARTIFACTS), *entries]


def is_excluded(path: str, patterns: tuple[str, ...]) -> bool:
    """As tar's --exclude has it: a pattern matches from any component on, and takes what is below."""
    parts = path.split("/")
    pieces = ["/".join(parts[i:j]) for j in range(1, len(parts) + 1) for i in range(j)]
    return any(fnmatchcase(piece, pattern.rstrip("/")) for piece in pieces for pattern in patterns)


async def _is_folder(sandbox: Sandbox, path: str) -> bool:
    return (await sandbox.exec(["test", "-d", path, "-a", "!", "-L", path], cwd="/")).exit_code == 0


def outputs_digest(outputs: Mapping[str, Entry]) -> str:
    """Equal for equal files: path, kind, mode, content, target."""
    total = hashlib.sha256()
    for path in sorted(outputs):
        entry = outputs[path]
        content = hashlib.sha256(entry.content).hexdigest()
        total.update(repr((path, entry.kind, entry.mode, content, entry.target)).encode(errors="surrogatepass"))
    return total.hexdigest()


def check_outputs(outputs: Mapping[str, Entry]) -> None:
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
            here = parent_of(here).rstrip("/")
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


def parent_of(path: str) -> str:
    return path.rpartition("/")[0] or "/"
