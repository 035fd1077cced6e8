"""Terminal-Bench v1 tasks, imported as Harbor tasks (harbor.md section 11).

As `harbor task migrate` does it, but for the verifier: Harbor appends lines to run-tests.sh that turn its exit status
into a reward, and a script that ends early never comes to them. Here the script runs as a child. What would be graded
otherwise than its author meant is refused by name.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from rsi.harbor.config import AgentConfig, EnvironmentConfig, PackageInfo, TaskConfig, VerifierConfig, config_toml
from rsi.harbor.records import FormatError, read_record

MAX_YAML_BYTES = 1 << 20
MAX_MERGES = 4
MAX_FILES = 20_000
MAX_TOTAL_BYTES = 1 << 30
RUN_TESTS = "run-tests.sh"
TEST_SH = f"""#!/bin/bash
export TEST_DIR=/tests
bash /tests/{RUN_TESTS}
status=$?
mkdir -p /logs/verifier
if [ "$status" -eq 0 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
exit "$status"
"""
_LOGS = {
    "${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}",
    "${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}",
}
_PLAIN_KEYS = frozenset(
    "build image container_name command volumes environment working_dir expose entrypoint platform".split()
)
"""Of a compose service that is no more than its image."""
_REPLACED = ("build", "image", "container_name", "command", "environment", "volumes", "deploy")
_MAIN = {
    "build": {"context": "${CONTEXT_DIR}"},
    "image": "${MAIN_IMAGE_NAME}",
    "command": ["sh", "-c", "sleep infinity"],
    "environment": ["TEST_DIR=${TEST_DIR}"],
    "deploy": {"resources": {"limits": {"cpus": "${CPUS}", "memory": "${MEMORY}"}}},
}
"""What Harbor fills in for the agent's service."""


@dataclass(frozen=True)
class V1Task:
    """task.yaml."""

    instruction: str
    difficulty: Literal["easy", "medium", "hard", "unknown"] = "unknown"
    author_name: str = "unknown"
    author_email: str = "unknown"
    category: str = "software_engineering"
    tags: tuple[str, ...] = ()
    parser_name: str = "pytest"
    max_agent_timeout_sec: float = 360.0
    max_test_timeout_sec: float = 60.0
    run_tests_in_same_shell: bool = False
    disable_asciinema: bool = False
    estimated_duration_sec: float | None = None
    expert_time_estimate_min: float | None = None
    junior_time_estimate_min: float | None = None


@dataclass(frozen=True)
class Imported:
    """files: the Harbor task, by path. notes: what a reader should look at, a line each: leaks, unknown keys."""

    files: Mapping[str, bytes]
    notes: tuple[str, ...]


def import_directory(path: Path, name: str | None = None) -> Imported:
    """A v1 task directory; name: `org/name` of the new task. Raises FormatError with what is refused."""
    root = path.resolve()
    files: dict[str, bytes] = {}
    total = 0
    for file in sorted(root.rglob("*")):
        if file.is_dir() and not file.is_symlink():
            continue
        relative = file.relative_to(root).as_posix()
        real = file.resolve()
        if not real.is_relative_to(root) or not real.is_file():
            raise FormatError(f"{ascii(relative)} is not a regular file inside the task; copy it in or remove it")
        total += real.stat().st_size
        if total > MAX_TOTAL_BYTES or len(files) > MAX_FILES:
            raise FormatError(f"{path} has more than {MAX_FILES} files or {MAX_TOTAL_BYTES} bytes")
        files[relative] = real.read_bytes()
    return import_files(files, name)


def import_files(files: Mapping[str, bytes], name: str | None = None) -> Imported:
    """The files of a v1 task, by path relative to it, as a Harbor task. Raises FormatError."""
    for required in ("task.yaml", RUN_TESTS):
        if required not in files:
            raise FormatError(f"{required} is missing; this is no Terminal-Bench v1 task")
    if "solution.yaml" in files:
        raise FormatError("solution.yaml cannot be run as a script; write solution.sh")
    notes: list[str] = []
    task = read_record(V1Task, _yaml(files["task.yaml"], "task.yaml"), "task.yaml", notes)
    notes = [f"{key} is not a key of task.yaml and is ignored" for key in notes]
    if task.parser_name != "pytest":
        raise FormatError(f"parser_name = {task.parser_name} cannot be graded by an exit status; only pytest can")
    if task.run_tests_in_same_shell:
        raise FormatError("run_tests_in_same_shell grades the agent's own shell; a fresh verifier has none")
    environment, taken = _environment(files, notes)
    rest = {path: content for path, content in files.items() if path.split("/")[0] not in taken}
    tests = {path: content for path, content in files.items() if path.startswith("tests/")}
    imported = {
        "task.toml": config_toml(_config(task, name)),
        "instruction.md": task.instruction.rstrip("\n").encode() + b"\n",
        **{f"environment/{path}": content for path, content in {**rest, **environment}.items()},
        **tests,
        f"tests/{RUN_TESTS}": files[RUN_TESTS],
        "tests/test.sh": TEST_SH.encode(),
    }
    if "solution.sh" in files:
        imported["solution/solve.sh"] = files["solution.sh"]
    return Imported(imported, tuple(notes))


def _yaml(content: bytes, name: str) -> Any:
    if len(content) > MAX_YAML_BYTES:
        raise FormatError(f"{name} has {len(content)} bytes; at most {MAX_YAML_BYTES} are read")
    # Merge keys copy: a few lines of them may unfold to more than any memory.
    if content.count(b"<<") > MAX_MERGES:
        raise FormatError(f"{name} has more than {MAX_MERGES} merge keys (<<); write them out")
    try:
        return yaml.safe_load(content)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise FormatError(f"{name} is not YAML: {str(error)[:200]}") from None


def _config(task: V1Task, name: str | None) -> TaskConfig:
    metadata = {
        key: getattr(task, key)
        for key in (
            "author_name author_email difficulty category tags estimated_duration_sec expert_time_estimate_min "
            "junior_time_estimate_min"
        ).split()
    }
    return TaskConfig(
        task=PackageInfo(name) if name else None,
        metadata={key: list(value) if key == "tags" else value for key, value in metadata.items() if value is not None},
        agent=AgentConfig(timeout_sec=task.max_agent_timeout_sec),
        verifier=VerifierConfig(timeout_sec=task.max_test_timeout_sec),
        environment=EnvironmentConfig(),
    )


def _environment(files: Mapping[str, bytes], notes: list[str]) -> tuple[dict[str, bytes], set[str]]:
    """The environment/ of the new task, and the top names of the old one that it (or another folder) has taken."""
    taken = {"task.yaml", "solution.sh", RUN_TESTS, "tests", "docker-compose.yaml"}
    compose = _yaml(files["docker-compose.yaml"], "docker-compose.yaml") if "docker-compose.yaml" in files else {}
    services = compose.get("services") if isinstance(compose, dict) else None
    if services is None:
        services = {}
    if not isinstance(services, dict) or not all(isinstance(service, dict) for service in services.values()):
        raise FormatError("docker-compose.yaml: services is not a table of services")
    main_name = "client" if "client" in services else next(iter(services), "client")
    main = services.get(main_name, {})
    context = _context(main)
    environment = _below(files, context) if context else {}
    if context:
        taken.add(context.split("/")[0])
    else:
        taken.add("Dockerfile")
        environment = {"Dockerfile": files["Dockerfile"]} if "Dockerfile" in files else {}
    dockerfile = environment.get("Dockerfile")
    if dockerfile is None and "image" not in main:
        raise FormatError("the main service has no Dockerfile; v1 tasks from a bare image are not supported")
    if dockerfile is not None:
        environment |= _copied_secrets(files, dockerfile, notes)
        environment["Dockerfile"] = _dockerfile(dockerfile, main)
    if not _is_plain(compose, services):
        for name, service in services.items():
            if name != main_name and (other := _context(service)):
                environment |= {f"{other}/{path}": content for path, content in _below(files, other).items()}
                taken.add(other.split("/")[0])
        environment["docker-compose.yaml"] = _compose(compose, services, main_name)
        notes.append("docker-compose.yaml: more than one plain service; our sandboxes do not run it")
    return environment, taken


def _is_plain(compose: Any, services: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether compose says nothing that a Dockerfile cannot."""
    if not services:
        return True
    if len(services) > 1 or not set(compose) <= {"services", "version"}:
        return False
    service = next(iter(services.values()))
    return set(service) <= _PLAIN_KEYS and all(
        isinstance(volume, str) and volume in _LOGS for volume in _list(service.get("volumes"))
    )


def _context(service: Mapping[str, Any]) -> str:
    """Where a service is built, relative to the task; empty for the task's own directory."""
    build = service.get("build") or {}
    context = posixpath.normpath(_text(build.get("context", ".") if isinstance(build, dict) else build, "build"))
    if context.startswith(("/", "..")) or "$" in context:
        raise FormatError(f"docker-compose.yaml: the build context {context!r} lies outside the task; copy it in")
    return "" if context == "." else context


def _below(files: Mapping[str, bytes], folder: str) -> dict[str, bytes]:
    return {path[len(folder) + 1 :]: content for path, content in files.items() if path.startswith(f"{folder}/")}


def _copied_secrets(files: Mapping[str, bytes], dockerfile: bytes, notes: list[str]) -> dict[str, bytes]:
    """Tests and solution that the image copies: they have to be in its context, and whoever solves can read them."""
    text = dockerfile.decode(errors="replace")
    found: dict[str, bytes] = {}
    for name in ("tests", "solution.sh"):
        if re.search(rf"^\s*(COPY|ADD)\s+(?:--\S+\s+)*(?:\./)?{re.escape(name)}\b", text, re.MULTILINE | re.IGNORECASE):
            found |= {path: content for path, content in files.items() if f"{path}/".startswith(f"{name}/")}
            notes.append(f"leak: the Dockerfile copies {name} into the image, where the agent can read it")
    return found


def _dockerfile(content: bytes, service: Mapping[str, Any]) -> bytes:
    """The Dockerfile with what compose said of its service."""
    text = content.decode(errors="surrogateescape")
    if "platform" in service:
        platform = f"--platform={_text(service['platform'], 'platform')} "
        text = re.sub(r"^(FROM\s+)(?:--platform=\S+\s+)?", lambda found: found[1] + platform, text, flags=re.M | re.I)
    lines = ["ENV TEST_DIR=/tests"]
    for name, value in _variables(service.get("environment")):
        quoted = value.replace('"', '\\"')
        lines.append(f'ENV {name}="{quoted}"')
    if "working_dir" in service and "${" not in (workdir := _text(service["working_dir"], "working_dir")):
        lines.append(f"WORKDIR {workdir}")
    lines += [f"EXPOSE {_text(port, 'expose')}" for port in _list(service.get("expose"))]
    if words := [_text(word, "entrypoint") for word in _list(service.get("entrypoint"))]:
        lines.append(f"ENTRYPOINT {json.dumps(words)}")
    said = "\n".join(lines)
    return f"{text.rstrip()}\n\n# From docker-compose.yaml\n{said}\n".encode(errors="surrogateescape")


def _variables(environment: Any) -> list[tuple[str, str]]:
    """Of compose's list or table, without TEST_DIR, which is set here. Raises FormatError for one without a value."""
    if isinstance(environment, dict):
        pairs = [(_text(name, "environment"), value) for name, value in environment.items()]
    else:
        words = [_text(item, "environment").partition("=") for item in _list(environment)]
        pairs = [(name, value if equals else None) for name, equals, value in words]
    pairs = [(name, value) for name, value in pairs if name != "TEST_DIR"]
    for name, value in pairs:
        if value is None or isinstance(value, str) and "$" in value.replace("$$", ""):
            raise FormatError(f"docker-compose.yaml: the variable {name} comes from the host; give it a value")
    return [(name, _text(value, f"environment.{name}").replace("$$", "\\$")) for name, value in pairs]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _text(value: Any, key: str) -> str:
    """A scalar as text; a nested value may be endless once it is written out."""
    if isinstance(value, list | dict) or value is None:
        raise FormatError(f"docker-compose.yaml: {key} is not plain text; write a string")
    return str(value)


def _compose(compose: Mapping[str, Any], services: Mapping[str, Mapping[str, Any]], main_name: str) -> bytes:
    """Harbor's compose file: the main service renamed, and what Harbor supplies left to it."""
    kept = {key: value for key, value in services[main_name].items() if key not in _REPLACED}
    others = {name: _renamed(service, main_name) for name, service in services.items() if name != main_name}
    rest = {key: value for key, value in compose.items() if key not in ("services", "version")}
    text = yaml.safe_dump({"services": {"main": {**_MAIN, **kept}, **others}, **rest}, sort_keys=False)
    return text.replace("${T_BENCH_TASK_DOCKER_NAME_PREFIX}", "hb").encode()


def _renamed(service: Mapping[str, Any], main_name: str) -> dict[str, Any]:
    """A service that waits for the main one waits for `main`."""
    waits = service.get("depends_on")
    if isinstance(waits, list):
        return {**service, "depends_on": ["main" if name == main_name else name for name in waits]}
    if isinstance(waits, dict):
        return {**service, "depends_on": {"main" if name == main_name else name: how for name, how in waits.items()}}
    return dict(service)
