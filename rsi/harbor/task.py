"""Harbor task directories, held in memory as `Task` and on disk as Harbor lays them out.

Whatever a proposer wrote comes in through `task_from_files`, so everything here assumes a hostile author: sizes are
checked before bytes are parsed, paths before they are used. `Task.files` holds exactly the files that Harbor's digest
covers (and a .gitignore, which says what those are): tasks with one id are equal, which is what verdicts are memoised
on. A model writes the plain kind of task
(WRITTEN): one instruction, one Dockerfile, one test script beside it. People's tasks (PEOPLE) may be all that the
format has.
"""

from __future__ import annotations

import base64
import functools
import posixpath
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rsi.harbor.config import (
    EnvironmentConfig,
    StepConfig,
    TaskConfig,
    VerifierConfig,
    check_name,
    config_from_table,
    read_toml,
)
from rsi.harbor.digest import (
    GITIGNORE,
    HARBORIGNORE,
    covered,
    digest,
    directory_digest,
    list_tree,
)
from rsi.harbor.records import FormatError
from rsi.sandbox import Entry
from rsi.sandbox.dockerfile import RESERVED, dockerfile_workdir
from rsi.types import Lineage, Task, TaskLimits

MAX_FILES = 200
MAX_FILE_BYTES = 1 << 20
MAX_TOTAL_BYTES = 4 << 20
MAX_CONFIG_BYTES = 16 << 10
MAX_DOTS = 64
MAX_INSTRUCTION_BYTES = 64 << 10
REQUIRED = ("task.toml", "instruction.md", "environment/Dockerfile", "solution/solve.sh", "tests/test.sh")
EXECUTABLE = frozenset({"solve.sh", "test.sh", "setup.sh"})
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


@dataclass(frozen=True)
class Bounds:
    """What a task may be, by who wrote it."""

    num_files: int = MAX_FILES
    file_bytes: int = MAX_FILE_BYTES
    total_bytes: int = MAX_TOTAL_BYTES
    config_bytes: int = MAX_CONFIG_BYTES
    instruction_bytes: int = MAX_INSTRUCTION_BYTES
    ceilings: TaskLimits = CEILINGS
    floors: TaskLimits = FLOORS
    defaults: TaskLimits = TaskLimits()
    """Where task.toml says nothing."""
    only_plain: bool = True
    """Refuse what the plain kind of task does not have: steps, prebuilt images, own verifiers, ignore files."""


WRITTEN = Bounds()
"""By a model."""
PEOPLE = Bounds(
    num_files=20_000,
    file_bytes=256 << 20,
    total_bytes=1 << 30,
    config_bytes=256 << 10,
    instruction_bytes=1 << 20,
    ceilings=TaskLimits(86400.0, 86400.0, 86400.0, cpus=1024.0, memory_mb=4 << 20, storage_mb=16 << 20),
    defaults=TaskLimits(86400.0, 600.0, 600.0, cpus=1.0, memory_mb=2048, storage_mb=10240),
    only_plain=False,
)
"""By someone whose benchmark we run; limits are Harbor's, and none that it leaves out."""


class TaskError(FormatError):
    """What an author wrote is not a task. One line; says what was found and what to do."""


def task_from_files(
    files: Mapping[str, bytes], domain: str = "", lineage: Lineage = SEED, bounds: Bounds = WRITTEN
) -> Task:
    """The task that these files are, by POSIX path relative to the task directory. Raises TaskError.

    Unknown keys of task.toml and files outside Harbor's folders are ignored; limits are clamped to the bounds. The
    instruction of a task with steps is empty: each step has its own (`step_instruction`).
    """
    check_files(files, bounds)
    return _task(_covered(files), domain, lineage, bounds)


def _covered(files: Mapping[str, bytes], targets: Mapping[str, str] | None = None) -> dict[str, bytes]:
    """What is covered; and the .gitignore, without which the defaults would drop what it keeps."""
    try:
        kept = covered(files, targets)
    except FormatError as error:
        raise TaskError(str(error)) from None
    return kept | ({GITIGNORE: files[GITIGNORE]} if GITIGNORE in files else {})


def _task(covered_files: Mapping[str, bytes], domain: str, lineage: Lineage, bounds: Bounds) -> Task:
    kept = {path: bytes(covered_files[path]) for path in sorted(covered_files)}
    if "task.toml" not in kept:
        raise TaskError("task.toml is missing")
    raw = read_config(kept, bounds)
    config = _parsed(raw)
    if bounds.only_plain:
        _check_plain(config)
    _check_present(kept, config, bounds)
    return Task(
        id=digest(kept),
        domain=domain,
        instruction="" if config.steps else _instruction("instruction.md", kept["instruction.md"], bounds),
        files=kept,
        limits=_limits(config, raw, bounds),
        workdir=_workdir(config, kept.get("environment/Dockerfile", b""), bounds),
        lineage=lineage,
    )


def task_config(task: Task) -> TaskConfig:
    """The whole of a task's task.toml."""
    return _config_of(task.files.get("task.toml", b""))


@functools.lru_cache(maxsize=1024)
def _config_of(content: bytes) -> TaskConfig:
    return config_from_table(read_toml(content)).config


def _parsed(raw: Mapping[str, Any]) -> TaskConfig:
    try:
        return config_from_table(raw).config
    except FormatError as error:
        raise TaskError(f"task.toml: {error}") from None


def _check_plain(config: TaskConfig) -> None:
    """Only what every task of the loop has; the rest would run other code than what the gates look at."""
    if config.steps:
        raise TaskError("task.toml has [[steps]]; multi-step tasks are not supported here, write one instruction.md")
    plain = EnvironmentConfig()
    sections = (
        ("environment", config.environment, ("docker_image", "os", "gpus", "gpu_types", "tpu", "mcp_servers", "env")),
        ("environment", config.environment, ("skills_dir", "healthcheck")),
        ("verifier", config.verifier, ("env", "user", "environment_mode", "environment", "collect")),
        ("agent", config.agent, ("user",)),
        ("solution", config.solution, ("env",)),
    )
    for name, section, keys in sections:
        default = plain if name == "environment" else type(section)()
        for key in keys:
            if getattr(section, key) != getattr(default, key):
                raise TaskError(f"task.toml: {name}.{key} is not supported here; remove it")


def _check_present(files: Mapping[str, bytes], config: TaskConfig, bounds: Bounds) -> None:
    """The files that a task of this config has. Raises TaskError."""
    if bounds.only_plain:
        for path in REQUIRED:
            if path not in files:
                raise TaskError(f"{path} is missing")
        return
    if not config.environment.docker_image and not any(path.startswith("environment/") for path in files):
        raise TaskError("environment/ is missing; write environment/Dockerfile or environment.docker_image")
    for step in config.steps or ():
        if f"steps/{step.name}/instruction.md" not in files:
            raise TaskError(f"steps/{step.name}/instruction.md is missing")
    if not config.steps and "instruction.md" not in files:
        raise TaskError("instruction.md is missing")
    for step in config.steps or (None,):
        script = test_script(files, config, step)
        if script is not None and script not in files:
            raise TaskError(f"{script} is missing")


def bundled_tests(files: Mapping[str, bytes], config: TaskConfig, step: StepConfig | None = None) -> str | None:
    """Where a separate verifier's own image comes from: a folder with a Dockerfile or compose file, or the prebuilt
    image's name after `image:`; None where the tests are uploaded (harbor.md section 3)."""
    if config.verifier_mode(step) == "shared":
        return None
    levels: list[tuple[VerifierConfig, str]] = [(config.verifier, "tests")]
    if step is not None:
        levels.insert(0, (step.verifier, f"steps/{step.name}/tests"))
    for verifier, folder in levels:
        if verifier.environment is not None and verifier.environment.docker_image:
            return f"image:{verifier.environment.docker_image}"
        if any(f"{folder}/{name}" in files for name in ("Dockerfile", "docker-compose.yaml")):
            return folder
    return None


def test_script(files: Mapping[str, bytes], config: TaskConfig, step: StepConfig | None = None) -> str | None:
    """The path of the script that grades, a step's own before the task's; None where an image bundles it."""
    if bundled_tests(files, config, step) is not None:
        return None
    environment = verifier_environment(config, step) or config.environment
    name = "test.bat" if "windows" in (environment.os, config.environment.os) else "test.sh"
    own = f"steps/{step.name}/tests/{name}" if step is not None else ""
    return own if own in files else f"tests/{name}"


def verifier_environment(config: TaskConfig, step: StepConfig | None = None) -> EnvironmentConfig | None:
    """Of a separate verifier: step, then task, then the task's own environment; None for a shared one."""
    if config.verifier_mode(step) == "shared":
        return None
    return (step and step.verifier.environment) or config.verifier.environment or config.environment


def step_instruction(task: Task, step: StepConfig) -> str:
    """What the agent reads at a step. Raises TaskError."""
    path = f"steps/{step.name}/instruction.md"
    return _instruction(path, task.files[path], PEOPLE)


def check_files(files: Mapping[str, bytes], bounds: Bounds = WRITTEN) -> None:
    """Paths and sizes, before anything is parsed. Raises TaskError."""
    if len(files) > bounds.num_files:
        raise TaskError(f"the task has {len(files)} files; at most {bounds.num_files} are allowed")
    for path, content in files.items():
        check_path(path)
        if len(content) > bounds.file_bytes:
            raise TaskError(f"{path} has {len(content)} bytes; at most {bounds.file_bytes} are allowed")
        if bounds.only_plain and (path == GITIGNORE or posixpath.basename(path) == HARBORIGNORE):
            raise TaskError(f"{path} is not supported; remove it")
    total = sum(len(content) for content in files.values())
    if total > bounds.total_bytes:
        raise TaskError(f"the task has {total} bytes; at most {bounds.total_bytes} are allowed")
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


def read_config(files: Mapping[str, bytes], bounds: Bounds = WRITTEN) -> dict[str, Any]:
    """task.toml, parsed. Raises TaskError."""
    try:
        return read_toml(files["task.toml"], max_bytes=bounds.config_bytes, max_dots=MAX_DOTS)
    except FormatError as error:
        raise TaskError(str(error)) from None


def _limits(config: TaskConfig, raw: Mapping[str, Any], bounds: Bounds) -> TaskLimits:
    """What task.toml grants, within the bounds; where it says nothing, their defaults and not Harbor's."""
    default, environment = asdict(bounds.defaults), config.environment
    verifier_s = config.verifier.timeout_sec if "timeout_sec" in raw.get("verifier", {}) else None
    build_s = environment.build_timeout_sec if "build_timeout_sec" in raw.get("environment", {}) else None
    floors, ceilings = asdict(bounds.floors), asdict(bounds.ceilings)

    def granted(name: str, key: str, value: float | None) -> float:
        # A TOML integer may be larger than any float, and float() of it would raise OverflowError.
        if value is not None and not 0 < value < 1e12:
            raise TaskError(f"task.toml: {key} is not a positive finite number; write one such as {default[name]:g}")
        return min(max(default[name] if value is None else value, floors[name]), ceilings[name])

    return TaskLimits(
        agent_timeout_s=float(granted("agent_timeout_s", "agent.timeout_sec", config.agent.timeout_sec)),
        verifier_timeout_s=float(granted("verifier_timeout_s", "verifier.timeout_sec", verifier_s)),
        build_timeout_s=float(granted("build_timeout_s", "environment.build_timeout_sec", build_s)),
        cpus=float(granted("cpus", "environment.cpus", environment.cpus)),
        memory_mb=int(granted("memory_mb", "environment.memory_mb", environment.memory_mb)),
        storage_mb=int(granted("storage_mb", "environment.storage_mb", environment.storage_mb)),
    )


def _workdir(config: TaskConfig, dockerfile: bytes, bounds: Bounds) -> str:
    workdir = config.environment.workdir
    if workdir is None:
        workdir = dockerfile_workdir(dockerfile.decode(errors="replace"))
    if not workdir.startswith("/") or len(workdir) > 256:
        raise TaskError("environment.workdir is not an absolute path; write /app")
    if posixpath.normpath(workdir) != workdir or any(ord(char) < 32 for char in workdir):
        raise TaskError("environment.workdir is not a plain path; write /app")
    if bounds.only_plain and is_reserved(workdir):
        raise TaskError(f"the workdir {workdir} belongs to the system; use /app")
    return workdir


def is_reserved(workdir: str) -> bool:
    """Whether a directory cannot be emptied and filled for grading."""
    return workdir == "/" or any(workdir == taken or workdir.startswith(taken + "/") for taken in RESERVED)


def _instruction(path: str, content: bytes, bounds: Bounds) -> str:
    if len(content) > bounds.instruction_bytes:
        raise TaskError(f"{path} has {len(content)} bytes; at most {bounds.instruction_bytes} are allowed")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise TaskError(f"{path} is not utf-8; write it as plain text") from None
    if "\0" in text:
        raise TaskError(f"{path} has a NUL character; remove it")
    text = strip_canary(text).strip()
    if not text and bounds.only_plain:
        raise TaskError(f"{path} is empty; say what is to be done")
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


def read_task(path: Path, domain: str = "", lineage: Lineage = SEED, bounds: Bounds = WRITTEN) -> Task:
    """The task in a directory. Links to files inside it are followed; one that leads out raises TaskError."""
    root = path.resolve()
    if not root.is_dir():
        raise TaskError(f"{path} is not a directory; name one that holds task.toml")
    try:
        tree = list_tree(root, bounds.num_files)
    except FormatError as error:
        raise TaskError(str(error)) from None
    if tree.folder_links:
        raise TaskError(f"{ascii(tree.folder_links[0])} is a link to a directory; copy the directory in")
    files = {}
    total = 0
    for name in tree.paths:
        size = (root / name).stat().st_size
        total += size
        if size > bounds.file_bytes or total > bounds.total_bytes:
            raise TaskError(
                f"{ascii(name)} has {size} bytes; at most {bounds.file_bytes} are allowed, "
                f"and {bounds.total_bytes} of all files together"
            )
        files[name] = (root / name).read_bytes()
    check_files(files, bounds)
    return _task(_covered(files, tree.targets), domain, lineage, bounds)


def write_task(task: Task, path: Path) -> None:
    """Write a task as a Harbor directory, whole or not at all. Raises FileExistsError if something else is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        if _is_task(path, task.id):
            return
        raise FileExistsError(f"{path} holds something else; remove it or choose another directory")
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for relative, content in task.files.items():
            target = staging / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(0o755 if target.name in EXECUTABLE else 0o644)
        staging.chmod(0o755)
        staging.rename(path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _is_task(path: Path, id: str) -> bool:
    try:
        return path.is_dir() and directory_digest(path) == id
    except FormatError:
        return False


def task_toml(name: str, limits: TaskLimits) -> bytes:
    """task.toml of schema 1.4 with every limit explicit and no network; `name` is `org/name` or `name`."""
    full = name if "/" in name else f"rsi/{name}"
    try:
        check_name(full)
    except ValueError:
        raise TaskError(f"{ascii(name)} is not a task name; use letters, digits, '.', '_' and '-'") from None
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
