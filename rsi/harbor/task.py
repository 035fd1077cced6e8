"""Harbor task directories, held in memory as `Task` and on disk as Harbor lays them out.

Whatever a proposer wrote comes in through `task_from_files`, so everything here assumes a hostile author: sizes are
checked before bytes are parsed, paths before they are used. `Task.files` holds exactly the files that Harbor's digest
covers, and files which would steer that digest (.gitignore, .harborignore) are refused: two tasks with one id are
equal, which is what verdicts are memoised on. Harbor takes more: multi-step tasks and prebuilt images.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import posixpath
import re
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rsi.harbor.image import RESERVED, dockerfile_workdir
from rsi.sandbox import Entry
from rsi.types import Lineage, Task, TaskLimits

MAX_FILES = 200
MAX_FILE_BYTES = 1 << 20
MAX_TOTAL_BYTES = 4 << 20
MAX_CONFIG_BYTES = 16 << 10
MAX_DOTS = 64
MAX_INSTRUCTION_BYTES = 64 << 10
REQUIRED = ("task.toml", "instruction.md", "environment/Dockerfile", "solution/solve.sh", "tests/test.sh")
COVERED_FILES = frozenset({"task.toml", "instruction.md", "README.md", "trajectory.json"})
COVERED_FOLDERS = frozenset({"environment", "tests", "solution", "steps"})
"""What Harbor's digest covers; other files of the directory are not part of a task."""
EXECUTABLE = frozenset({"solution/solve.sh", "tests/test.sh"})
DOCKERFILE = b"FROM rsi/base\nWORKDIR /app\nCOPY files/ /app/\n"
TEST_SH = b"#!/bin/bash\nexec python3 -I -B /tests/verify.py\n"

CEILINGS = TaskLimits(
    agent_timeout_s=600.0, verifier_timeout_s=300.0, build_timeout_s=300.0, cpus=4.0, memory_mb=4096, storage_mb=1024
)
FLOORS = TaskLimits(
    agent_timeout_s=1.0, verifier_timeout_s=1.0, build_timeout_s=1.0, cpus=0.1, memory_mb=64, storage_mb=8
)

SEED = Lineage()
"""The lineage of a task that nobody proposed."""


class TaskError(ValueError):
    """What an author wrote is not a task. One line; says what was found and what to do."""


def task_from_files(files: Mapping[str, bytes], domain: str = "", lineage: Lineage = SEED) -> Task:
    """The task that these files are, by POSIX path relative to the task directory. Raises TaskError.

    Unknown keys of task.toml and files outside Harbor's folders are ignored; limits are clamped to CEILINGS and FLOORS.
    """
    check_files(files)
    kept = {path: bytes(files[path]) for path in sorted(files) if covered(path)}
    for path in REQUIRED:
        if path not in kept:
            raise TaskError(f"{path} is missing")
    config = read_config(kept)
    return Task(
        id=digest(kept),
        domain=domain,
        instruction=_instruction(kept["instruction.md"]),
        files=kept,
        limits=_limits(config),
        workdir=_workdir(config, kept["environment/Dockerfile"]),
        lineage=lineage,
    )


def check_files(files: Mapping[str, bytes]) -> None:
    """Paths and sizes, before anything is parsed. Raises TaskError."""
    if len(files) > MAX_FILES:
        raise TaskError(f"the task has {len(files)} files; at most {MAX_FILES} are allowed")
    for path, content in files.items():
        check_path(path)
        if len(content) > MAX_FILE_BYTES:
            raise TaskError(f"{path} has {len(content)} bytes; at most {MAX_FILE_BYTES} are allowed")
        if path == ".gitignore" or posixpath.basename(path) == ".harborignore":
            raise TaskError(f"{path} is not supported; remove it")
    total = sum(len(content) for content in files.values())
    if total > MAX_TOTAL_BYTES:
        raise TaskError(f"the task has {total} bytes; at most {MAX_TOTAL_BYTES} are allowed")
    for path in files:
        for parent in _parents(path):
            if parent in files:
                raise TaskError(f"{parent} is both a file and a directory; rename one of them")


def check_path(path: str) -> None:
    """A path as a task may have it: relative, normal, utf-8, printable. Raises TaskError."""
    shown = ascii(path[:60])
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise TaskError(f"the file name {shown} is not utf-8; rename it") from None
    if not path or len(encoded) > 512 or any(ord(char) < 32 or ord(char) == 127 for char in path):
        raise TaskError(f"the file name {shown} is empty, too long or has control characters; rename it")
    if path.startswith("/") or ".." in path.split("/") or posixpath.normpath(path) != path or path == ".":
        raise TaskError(f"the path {shown} is not relative and plain; write it without a leading '/', '.' or '..'")


def covered(path: str) -> bool:
    """Whether Harbor's digest covers a file (harbor.md section 8; the defaults that an absent .gitignore leaves)."""
    first, _, rest = path.partition("/")
    if path not in COVERED_FILES and not (rest and first in COVERED_FOLDERS):
        return False
    parts = path.split("/")
    if any(part == ".DS_Store" or part.endswith((".pyc", ".swp", ".swo", "~")) for part in parts):
        return False
    return "__pycache__" not in parts[:-1]


def digest(files: Mapping[str, bytes]) -> str:
    """Harbor's content digest, `sha256:<64 hex>`: SHA-256 over path + NUL + sha256hex + LF, in order of path."""
    total = hashlib.sha256()
    for path in sorted(filter(covered, files)):
        total.update(f"{path}\0{hashlib.sha256(files[path]).hexdigest()}\n".encode(errors="surrogatepass"))
    return f"sha256:{total.hexdigest()}"


def read_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """task.toml, parsed. Raises TaskError."""
    content = files["task.toml"]
    if len(content) > MAX_CONFIG_BYTES:
        raise TaskError(f"task.toml has {len(content)} bytes; at most {MAX_CONFIG_BYTES} are allowed")
    # tomllib takes seconds for one key of thousands of parts, in time that grows with their square.
    if any(line.count(b".") > MAX_DOTS for line in content.splitlines()):
        raise TaskError(f"task.toml has a line with more than {MAX_DOTS} dots; write plain tables")
    try:
        config = tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise TaskError("task.toml is not utf-8; write it as plain text") from None
    except RecursionError:
        raise TaskError("task.toml is nested too deeply; write plain tables") from None
    except ValueError as error:
        raise TaskError(f"task.toml cannot be read: {str(error)[:100]}") from None
    if "steps" in config:
        raise TaskError("task.toml has [[steps]]; multi-step tasks are not supported, write one instruction.md")
    return config


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, dict):
        raise TaskError(f"task.toml: {name} is not a table; write [{name}]")
    return table


def _limits(config: Mapping[str, Any]) -> TaskLimits:
    agent, verifier = _table(config, "agent"), _table(config, "verifier")
    environment = _table(config, "environment")
    default = TaskLimits()
    memory = _megabytes(environment, "memory", default.memory_mb)
    storage = _megabytes(environment, "storage", default.storage_mb)
    build = _number(environment, "environment.build_timeout_sec", default.build_timeout_s)
    return TaskLimits(
        agent_timeout_s=_clamp("agent_timeout_s", _number(agent, "agent.timeout_sec", default.agent_timeout_s)),
        verifier_timeout_s=_clamp(
            "verifier_timeout_s", _number(verifier, "verifier.timeout_sec", default.verifier_timeout_s)
        ),
        build_timeout_s=_clamp("build_timeout_s", build),
        cpus=_clamp("cpus", _number(environment, "environment.cpus", default.cpus)),
        memory_mb=int(_clamp("memory_mb", memory)),
        storage_mb=int(_clamp("storage_mb", storage)),
    )


def _clamp(name: str, value: float) -> float:
    floor, ceiling = asdict(FLOORS)[name], asdict(CEILINGS)[name]
    return min(max(value, floor), ceiling)


def _number(table: Mapping[str, Any], key: str, default: float) -> float:
    value = table.get(key.rpartition(".")[2], default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TaskError(f"task.toml: {key} is not a number; write one such as {default:g}")
    # A TOML integer may be larger than any float, and float() of it would raise OverflowError.
    if not (-1e12 < value < 1e12) or value <= 0 or not math.isfinite(value):
        raise TaskError(f"task.toml: {key} is not a positive finite number; write one such as {default:g}")
    return float(value)


def _megabytes(table: Mapping[str, Any], name: str, default: int) -> float:
    """`memory_mb = 2048`, or `memory = "2G"` as older schemas wrote it."""
    old = table.get(name)
    if f"{name}_mb" in table or not isinstance(old, str):
        return _number(table, f"environment.{name}_mb", default)
    match = re.fullmatch(r"(\d{1,9})([MG])", old)
    if match is None:
        raise TaskError(f"task.toml: environment.{name} is not a size; write {name}_mb = {default}")
    return float(match.group(1)) * (1024 if match.group(2) == "G" else 1)


def _workdir(config: Mapping[str, Any], dockerfile: bytes) -> str:
    workdir = _table(config, "environment").get("workdir")
    if workdir is None:
        workdir = dockerfile_workdir(dockerfile.decode(errors="replace"))
    if not isinstance(workdir, str) or not workdir.startswith("/") or len(workdir) > 256:
        raise TaskError("environment.workdir is not an absolute path; write /app")
    if posixpath.normpath(workdir) != workdir or any(ord(char) < 32 for char in workdir):
        raise TaskError("environment.workdir is not a plain path; write /app")
    if workdir == "/" or any(workdir == taken or workdir.startswith(taken + "/") for taken in RESERVED):
        raise TaskError(f"the workdir {workdir} belongs to the system; use /app")
    return workdir


def _instruction(content: bytes) -> str:
    if len(content) > MAX_INSTRUCTION_BYTES:
        raise TaskError(f"instruction.md has {len(content)} bytes; at most {MAX_INSTRUCTION_BYTES} are allowed")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise TaskError("instruction.md is not utf-8; write it as plain text") from None
    if "\0" in text:
        raise TaskError("instruction.md has a NUL character; remove it")
    text = strip_canary(text).strip()
    if not text:
        raise TaskError("instruction.md is empty; say what is to be done")
    return text


def strip_canary(text: str) -> str:
    """Without leading comment lines that hold a canary, and the blank lines after them (harbor.md section 1)."""
    lines = text.splitlines(keepends=True)
    start = 0
    while start < len(lines) and re.fullmatch(r"<!--.*canary.*-->|#.*canary.*", lines[start].strip(), re.IGNORECASE):
        start += 1
    while 0 < start < len(lines) and not lines[start].strip():
        start += 1
    return "".join(lines[start:])


def files_from_entries(entries: Mapping[str, Entry]) -> dict[str, bytes]:
    """The regular files that a sandbox's `get` brought out. Raises TaskError for links, devices and sockets."""
    files: dict[str, bytes] = {}
    for path, entry in entries.items():
        if entry.kind == "file":
            files[path] = entry.content
        elif entry.kind != "dir":
            raise TaskError(f"{ascii(path[:60])} is not a regular file; put a file there")
    return files


def read_task(path: Path, domain: str = "", lineage: Lineage = SEED) -> Task:
    """The task in a directory. Links to files inside it are followed; one that leads out raises TaskError."""
    root = path.resolve()
    if not root.is_dir():
        raise TaskError(f"{path} is not a directory; name one that holds task.toml")
    files: dict[str, bytes] = {}
    for folder, _, names in os.walk(root, followlinks=False):
        for name in names:
            relative = (Path(folder) / name).relative_to(root).as_posix()
            if len(files) >= MAX_FILES:
                raise TaskError(f"{path} has more than {MAX_FILES} files")
            files[relative] = _read_inside(root, relative)
    return task_from_files(files, domain, lineage)


def _read_inside(root: Path, relative: str) -> bytes:
    try:
        real = (root / relative).resolve(strict=True)
    except (OSError, RuntimeError):
        raise TaskError(f"{ascii(relative)} is a link to nothing; remove it") from None
    if not real.is_relative_to(root):
        raise TaskError(f"{ascii(relative)} leads out of the task directory; copy the file in")
    status = real.stat()
    if not stat.S_ISREG(status.st_mode):
        raise TaskError(f"{ascii(relative)} is not a regular file; remove it")
    if status.st_size > MAX_FILE_BYTES:
        raise TaskError(f"{ascii(relative)} has {status.st_size} bytes; at most {MAX_FILE_BYTES} are allowed")
    return real.read_bytes()


def write_task(task: Task, path: Path) -> None:
    """Write a task as a Harbor directory, whole or not at all. Raises FileExistsError if something else is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        if read_task(path).id == task.id:
            return
        raise FileExistsError(f"{path} holds something else; remove it or choose another directory")
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for relative, content in task.files.items():
            target = staging / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(0o755 if relative in EXECUTABLE else 0o644)
        staging.chmod(0o755)
        staging.rename(path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def task_toml(name: str, limits: TaskLimits) -> bytes:
    """task.toml of schema 1.4 with every limit explicit and no network; `name` is `org/name` or `name`."""
    full = name if "/" in name else f"rsi/{name}"
    part = r"[a-zA-Z0-9][a-zA-Z0-9._-]*"
    if not re.fullmatch(f"{part}/{part}", full) or ".." in full:
        raise TaskError(f"{ascii(name)} is not a task name; use letters, digits, '.', '_' and '-'")
    return f"""schema_version = "1.4"

[task]
name = "{full}"

[agent]
timeout_sec = {limits.agent_timeout_s:.1f}

[verifier]
timeout_sec = {limits.verifier_timeout_s:.1f}

[environment]
build_timeout_sec = {limits.build_timeout_s:.1f}
cpus = {limits.cpus:g}
memory_mb = {limits.memory_mb}
storage_mb = {limits.storage_mb}
network_mode = "no-network"
""".encode()


def verifier_files() -> dict[str, bytes]:
    """The managed verifier: what every generated task has in tests/ beside its own test files."""
    return {"test.sh": TEST_SH, "verify.py": Path(__file__).with_name("verify.py").read_bytes()}


def new_task_files(name: str) -> dict[str, bytes]:
    """What `tools/new-task` writes. Instruction, files, solution and test_outputs.py are left to the author, and their
    absence is a complaint of the structure gate."""
    verifier = {f"tests/{path}": content for path, content in verifier_files().items()}
    return {"task.toml": task_toml(name, TaskLimits()), "environment/Dockerfile": DOCKERFILE, **verifier}


def task_to_json(task: Task) -> dict[str, Any]:
    """One line of a suite: text files as strings, others as {"base64": ...}."""
    files = {path: _content_to_json(content) for path, content in task.files.items()}
    return {"id": task.id, "domain": task.domain, "lineage": asdict(task.lineage), "files": files}


def task_from_json(record: Mapping[str, Any]) -> Task:
    """The task of a suite's line. Raises TaskError where the record is malformed or its id is not its files' digest."""
    try:
        files = {path: _content_from_json(content) for path, content in record["files"].items()}
        task = task_from_files(files, record["domain"], Lineage(**record.get("lineage", {})))
        expected = record["id"]
    except (KeyError, TypeError, AttributeError) as error:
        raise TaskError(f"the record is not a task ({error!r}); write it with task_to_json") from None
    if task.id != expected:
        raise TaskError(f"the record says {expected} but its files are {task.id}; restore the file or write it anew")
    return task


def _content_to_json(content: bytes) -> str | dict[str, str]:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def _content_from_json(content: str | dict[str, str]) -> bytes:
    if isinstance(content, str):
        return content.encode()
    try:
        return base64.b64decode(content["base64"], validate=True)
    except ValueError as error:
        raise TaskError(f"a file of the record is not base64 ({error}); write it with task_to_json") from None


def _parents(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]
