"""How the tasks of the corpus are written down: one function a task, one a style of verifier.

Nothing here comes from a benchmark. A task is its files by path, as `rsi validate` would read them from a directory.
A text that begins with a line break is written as indented as the code around it, and is put down without that.
"""

from __future__ import annotations

import io
import tarfile
import textwrap
from collections.abc import Mapping

from rsi.harbor.task import task_toml, verifier_files
from rsi.types import TaskLimits

Files = dict[str, bytes]
LIMITS = TaskLimits(agent_timeout_s=60.0, verifier_timeout_s=60.0, build_timeout_s=60.0)


def task(
    instruction: str,
    solution: str,
    tests: Mapping[str, str | bytes],
    inputs: Mapping[str, str | bytes] | None = None,
    dockerfile: str = "",
    limits: TaskLimits = LIMITS,
) -> Files:
    """inputs: of the workdir, /app. dockerfile: lines after the copying of the inputs."""
    copied = "COPY files/ /app/\n" if inputs else ""
    files: dict[str, str | bytes] = {
        "task.toml": task_toml("corpus", limits),
        "instruction.md": instruction,
        "environment/Dockerfile": f"FROM rsi/base\nWORKDIR /app\n{copied}{dockerfile}",
        "solution/solve.sh": f"#!/bin/bash\nset -e\n{flush(solution)}",
        **{f"environment/files/{path}": content for path, content in (inputs or {}).items()},
        **{f"tests/{path}": content for path, content in tests.items()},
    }
    return {path: _bytes(content) for path, content in files.items()}


def changed(files: Files, changes: Mapping[str, str | bytes | None]) -> Files:
    """A task with other files, or (None) without some."""
    whole: dict[str, str | bytes | None] = {**files, **changes}
    return {path: _bytes(content) for path, content in whole.items() if content is not None}


def _bytes(content: str | bytes) -> bytes:
    return flush(content).encode() if isinstance(content, str) else content


def flush(text: str) -> str:
    return textwrap.dedent(text).removeprefix("\n") if text.startswith("\n") else text


# ---- verifiers


def managed(source: str) -> dict[str, str | bytes]:
    """Ours: plain test functions, reward = passed / total."""
    return {**verifier_files(), "test_outputs.py": source}


def by_pytest(source: str) -> dict[str, str | bytes]:
    """pytest out of reach of the workdir, all or nothing."""
    script = """\
#!/bin/bash
cd /
if python3 -I -m pytest -q -p no:cacheprovider /tests/test_state.py; then reward=1; else reward=0; fi
echo $reward >/logs/verifier/reward.txt
"""
    return {"test.sh": script, "test_state.py": source}


def by_bash(*checks: str, before: str = "") -> dict[str, str | bytes]:
    """Commands that must all succeed, each worth the same."""
    lines = "\n".join(f"check {check}" for check in checks)
    script = f"""\
#!/bin/bash
passed=0 total=0
check() {{ total=$((total + 1)); if "$@" 2>/dev/null; then passed=$((passed + 1)); else echo "failed: $*"; fi; }}
has() {{ [ "$(cat "$1")" = "$2" ]; }}
{before}
{lines}
awk "BEGIN {{ print $passed / $total }}" >/logs/verifier/reward.txt
"""
    return {"test.sh": script}


def by_script(script: str, **more: str | bytes) -> dict[str, str | bytes]:
    """A test.sh of its own kind."""
    return {"test.sh": f"#!/bin/bash\n{flush(script)}", **more}


def tarred(members: Mapping[str, str]) -> bytes:
    """A tar archive whose bytes are the same every time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(text.encode())
            archive.addfile(header, io.BytesIO(text.encode()))
    return buffer.getvalue()
