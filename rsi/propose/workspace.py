"""The proposer's workspace: what is put into its sandbox, and what is read out of it.

Everything that comes out of the sandbox was written by a model that is paid for getting past the gates, so it is read
under limits, links are never followed, and what cannot be a task is a TaskError (the proposal is broken), no crash.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.resources import files as package_files

from rsi.harbor.task import MAX_TOTAL_BYTES, TaskError, check_files, files_from_entries, new_task_files
from rsi.sandbox import Backend, Entry, ImageSpec, Limits, Sandbox, SandboxError
from rsi.types import Assignment, Task

WORKDIR = "/work"
OUTPUT = "/work/output/task"
HOST = "/work/.host"
"""Where the tools meet the host: fifos `request` and `reply`, and a lock."""
SKELETON = "/work/tools/.skeleton"

SOLVE_HEAD = b"#!/bin/bash\nset -e\n"
LIFE_S = 3600.0
"""Of a workspace: it waits while the engine and the calibrations of others are busy, so this is only against leaks."""
LIMITS = Limits(cpus=1.0, memory_mb=512, pids=128, disk_mb=64, wall_s=LIFE_S)

LESSONS = b"""# Lessons

index.jsonl lists environments of the pool with the solver's mean reward: near 1 it can do them, near 0 not yet.
"""

ASK = """\
#!/bin/bash
# One request to the host and its answer; the first line of the answer is the exit status.
exec 9>HOST/lock
flock -w TIMEOUT 9 || { echo "the host is busy"; exit 2; }
timeout TIMEOUT bash -c 'echo "$1" > HOST/request; { read -r status; cat; } < HOST/reply; exit "$status"' ask "$1"
status=$?
[ $status = 124 ] && echo "the host does not answer"
exit $status
"""
TOOL = """\
#!/bin/bash
# HELP
exec HOST/ask NAME
"""
NEW_TASK = """\
#!/bin/bash
# Begins a new task in output/task: task.toml, a Dockerfile, the verifier, the head of solution/solve.sh.
set -e
cp -r SKELETON/. OUTPUT/
mkdir -p OUTPUT/environment/files
"""
HELP = {
    "validate": "Runs the host's gates on output/task: prints 'valid', or the first gate that fails and why.",
    "snapshot-tests": "Writes output/task/tests from what the reference solution changes.",
}


def workspace_files(assignment: Assignment, memory: Mapping[str, bytes], tool_timeout_s: float) -> dict[str, Entry]:
    """All that a fresh workspace holds, by path relative to WORKDIR. memory: by path below memory/."""
    plain: dict[str, bytes] = {"assignment/assignment.json": assignment_json(assignment)}
    if assignment.parent is not None:
        plain |= {f"assignment/parent/{path}": content for path, content in assignment.parent.files.items()}
    plain |= {f"skills/{name}": content for name, content in skill_files().items()}
    plain |= {f"memory/{path}": content for path, content in memory.items()}
    skeleton = {**new_task_files(assignment.domain), "solution/solve.sh": SOLVE_HEAD}
    plain |= {f"tools/.skeleton/{path}": content for path, content in skeleton.items()}
    tools = {f"tools/{name}": TOOL.replace("HELP", text).replace("NAME", name) for name, text in HELP.items()}
    tools |= {"tools/new-task": NEW_TASK, ".host/ask": ASK.replace("TIMEOUT", f"{tool_timeout_s:g}")}
    places = {"HOST": HOST, "OUTPUT": OUTPUT, "SKELETON": SKELETON}
    entries = {path: Entry("file", 0o644, content) for path, content in plain.items()}
    for path, text in tools.items():
        for word, place in places.items():
            text = text.replace(word, place)
        entries[path] = Entry("file", 0o755, text.encode())
    return entries


def memory_files(past: Iterable[tuple[Task, float]], limit: int = 50) -> dict[str, bytes]:
    """The memory/ folder: the newest `limit` environments of `past` (oldest first) with their pass rates."""
    recent = list(past)[-limit:]
    lines = (
        json.dumps({"id": task.id, "pass_rate": round(rate, 3), "instruction": task.instruction[:200]}) + "\n"
        for task, rate in recent
    )
    return {"index.jsonl": "".join(lines).encode(), "lessons.md": LESSONS}


def assignment_json(assignment: Assignment) -> bytes:
    fields = {
        "id": assignment.id,
        "domain": assignment.domain,
        "direction": assignment.direction,
        "parent": None if assignment.parent is None else assignment.parent.id,
        "pass_rate": assignment.pass_rate,
        "num_attempts": assignment.num_attempts,
        "failure": assignment.failure,
    }
    return (json.dumps(fields, indent=2) + "\n").encode()


def skill_files() -> dict[str, bytes]:
    """The pages under rsi/skills that tell the proposer how to build a task; the same for every episode."""
    pages = package_files("rsi").joinpath("skills").iterdir()
    return {page.name: page.read_bytes() for page in pages if page.name.endswith(".md")}


async def open_workspace(
    backend: Backend, assignment: Assignment, memory: Mapping[str, bytes], tool_timeout_s: float
) -> Sandbox:
    """A fresh sandbox of the base image that holds the workspace; the caller closes it. Raises SandboxError."""
    sandbox = await backend.create(await backend.build(ImageSpec(workdir=WORKDIR)), LIMITS)
    try:
        await sandbox.put(WORKDIR, workspace_files(assignment, memory, tool_timeout_s))
        made = await sandbox.exec(f"mkdir -p {OUTPUT} && mkfifo -m 600 {HOST}/request {HOST}/reply")
        if made.exit_code != 0:
            raise SandboxError(f"the workspace has no fifos: {made.stderr.decode(errors='replace')[:200]}")
    except BaseException:
        await sandbox.close()
        raise
    return sandbox


async def read_output(sandbox: Sandbox) -> dict[str, bytes]:
    """The files of output/task, by path relative to it.

    Raises TaskError for what cannot be a task (links, fifos, too many or too large files, an empty folder),
    SandboxError when the sandbox is dead.
    """
    try:
        entries = await sandbox.get(OUTPUT, max_bytes=2 * MAX_TOTAL_BYTES)
    except SandboxError as error:
        # too big, cut and late look alike from here; a sandbox that still answers was given something unreadable
        await sandbox.exec(["true"], timeout_s=5.0)
        raise TaskError("output/task cannot be read; write plain files of a few KiB into that folder") from error
    files = files_from_entries(entries)
    if not files:
        raise TaskError("output/task is empty; begin with tools/new-task or a copy of assignment/parent")
    check_files(files)
    return files
