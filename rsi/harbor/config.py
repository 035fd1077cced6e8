"""task.toml as frozen records: every key of Harbor's task schema 1.4 and older, with its rules (harbor.md section 2).

Reading says what it understood and, as notes, what it did not: unknown keys and retired ones. Old spellings become the
present ones (`version`, `memory = "2G"`, `storage`, `allow_internet`), so the records know one way of saying a thing.
Nothing here reads the host's environment: `${VAR}` is resolved by `resolve_env` from a mapping that the caller gives.
"""

from __future__ import annotations

import ipaddress
import math
import re
import tomllib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Literal

import tomli_w

from rsi.harbor.records import FormatError, plain, read_record

SCHEMA = "1.4"
MAIN = "main"
"""The compose service that the agent is in; without compose the only one."""
ARTIFACTS = "/logs/artifacts"
"""Always collected."""
MAX_CONFIG_BYTES = 256 << 10
MAX_DOTS = 1024
"""On a line: tomllib's time for one key grows with the square of its parts."""

NetworkMode = Literal["no-network", "public", "allowlist"]
User = str | int
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")
_SERVICE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_HOST_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_EMBEDDED = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_SECRET = re.compile(r"KEY|SECRET|TOKEN(?!S)|PASSWORD|CREDENTIAL|AUTH", re.IGNORECASE)
_ONLY_VARIABLES = re.compile(r"\s*(?:[A-Za-z]+\s+)?\$\{\w+(?::-)?\}(?:[\s:-]*\$\{\w+(?::-)?\})*\s*", re.ASCII)


# ---- rules that more than one record has -----------------------------------------------------------------------------


def check_name(name: str) -> None:
    """`org/name`, as tasks and datasets are called. Raises ValueError."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"{ascii(name)} is not a name; write org/name with letters, digits, '.', '_' and '-'")


def check_step_name(name: str) -> None:
    """One directory name on every system. Raises ValueError."""
    device = re.fullmatch(
        r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(?:COM|LPT)[1-9¹²³])", name.partition(".")[0].rstrip(" "), re.IGNORECASE
    )
    bad = re.search(r'[<>:"/\\|?*\x00-\x1f\x7f]', name)
    if not name.strip() or name in (".", "..") or name.endswith((".", " ")) or bad or device:
        raise ValueError(f"{ascii(name)} is not a step name; write a directory name that every system takes")
    if len(name.encode(errors="surrogatepass")) > 255:
        raise ValueError(f"the step name {ascii(name[:20])}... has more than 255 bytes; shorten it")


def _check_service(service: str) -> None:
    if not _SERVICE.fullmatch(service.strip()):
        raise ValueError(f"{ascii(service)} is not a service name; write letters, digits, '_', '.' and '-'")


def _check_destination(destination: str | None) -> None:
    if not destination:
        return
    path = PurePosixPath(destination)
    if "\\" in destination or path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"the artifact destination {ascii(destination)} is not a relative path with forward slashes")
    if destination.rstrip("/") == "manifest.json":
        raise ValueError("the artifact destination manifest.json is taken by the list of artifacts; choose another")


def _check_network(config: AgentConfig | VerifierConfig | EnvironmentConfig) -> None:
    hosts = config.allowed_hosts
    if hosts is None:
        return
    object.__setattr__(config, "allowed_hosts", tuple(_host(host) for host in hosts))
    if config.network_mode != "allowlist" and (hosts or config.network_mode is None):
        raise ValueError('allowed_hosts is for network_mode = "allowlist"; change one of the two')


def _host(text: str) -> str:
    """A host name, `*.suffix`, address or network, as it is compared. Raises ValueError."""
    host = text.strip().lower().rstrip(".")
    mend = "write a host name, *.suffix, an address or a network, without scheme, port or path"
    try:
        if "%" in host:
            raise ValueError
        if "/" in host:
            return ipaddress.ip_network(host, strict=True).compressed
        if ":" in host:
            return ipaddress.IPv6Address(host).compressed
    except ValueError:
        raise ValueError(f"allowed_hosts: {ascii(text)} cannot be allowed; {mend}") from None
    name = host.removeprefix("*.")
    if not all(_HOST_LABEL.fullmatch(label) for label in name.split(".")) or host != name and _is_address(name):
        raise ValueError(f"allowed_hosts: {ascii(text)} cannot be allowed; {mend}")
    return host


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _check_header(name: str, value: str) -> None:
    """A header of an MCP server: no credential may stand in a file that is published."""
    if not _HEADER.fullmatch(name) or "\r" in value or "\n" in value:
        raise ValueError(f"{ascii(name)} is not an HTTP header on one line; rename it")
    templates = _EMBEDDED.findall(value)
    if "${" in _EMBEDDED.sub(" ", value) or any("${" in default for _, default in templates):
        raise ValueError(f"header {name} has a broken variable; write ${{VAR}} or ${{VAR:-default}}")
    is_secret = bool(_SECRET.search(name)) or name.lower() in ("cookie", "set-cookie")
    has_default = any(default and (is_secret or _SECRET.search(variable)) for variable, default in templates)
    if has_default or is_secret and value.strip() and not _ONLY_VARIABLES.fullmatch(value):
        raise ValueError(f"header {name} holds a credential; write ${{VAR}} without a default in its place")


def resolve_env(env: Mapping[str, str], host: Mapping[str, str]) -> dict[str, str]:
    """`${VAR}` and `${VAR:-default}`, where they are a whole value, from `host`. Raises FormatError for a missing one.

    `host` is what the caller is willing to show the task: a task that a stranger wrote asks for what it likes.
    """
    resolved = {}
    for name, value in env.items():
        match = _TEMPLATE.fullmatch(value)
        if match is None:
            resolved[name] = value
        elif match.group(1) in host:
            resolved[name] = host[match.group(1)]
        elif match.group(2) is not None:
            resolved[name] = match.group(2)
        else:
            raise FormatError(f"the task wants {match.group(1)} for {name}; give it among the variables of the run")
    return resolved


# ---- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Author:
    name: str
    email: str | None = None


@dataclass(frozen=True)
class PackageInfo:
    """`[task]`: what the task is called in a registry."""

    name: str
    version: str | None = None
    description: str = ""
    authors: tuple[Author, ...] = ()
    keywords: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.version == "":
            raise ValueError("version is empty; write a label or leave it out")


@dataclass(frozen=True)
class NetworkPolicy:
    """What one container may reach in one phase."""

    mode: NetworkMode = "public"
    allowed_hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class AgentConfig:
    """`[agent]`, and `[steps.agent]`, where null falls back to the task's."""

    timeout_sec: float | None = None
    user: User | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_network(self)

    @property
    def policy(self) -> NetworkPolicy | None:
        return None if self.network_mode is None else NetworkPolicy(self.network_mode, self.allowed_hosts or ())


@dataclass(frozen=True)
class Healthcheck:
    """Run after the start until it exits with 0; failures within the start period do not count."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


@dataclass(frozen=True)
class TpuSpec:
    type: str
    topology: str

    def __post_init__(self) -> None:
        if not self.type:
            raise ValueError("type is empty; write one such as v6e")
        topology = self.topology.strip()
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", topology):
            raise ValueError(f"topology {topology!r} is not dimensions; write them as 2x4 or 2x2x1")
        object.__setattr__(self, "topology", topology)


@dataclass(frozen=True)
class McpServer:
    name: str
    transport: Literal["stdio", "sse", "streamable-http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.transport == "stdio" and not self.command:
            raise ValueError("transport stdio needs a command; write command = ...")
        if self.transport != "stdio" and not self.url:
            raise ValueError(f"transport {self.transport} needs a url; write url = ...")
        if self.transport == "stdio" and self.headers:
            raise ValueError("headers are for HTTP transports; remove them")
        for name, value in self.headers.items():
            _check_header(name, value)


@dataclass(frozen=True)
class EnvironmentConfig:
    """`[environment]` and `[verifier.environment]`; None for a limit leaves it to the provider."""

    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: int | float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: tuple[str, ...] | None = None
    tpu: TpuSpec | None = None
    network_mode: NetworkMode = "public"
    allowed_hosts: tuple[str, ...] | None = None
    mcp_servers: tuple[McpServer, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None

    def __post_init__(self) -> None:
        _check_network(self)
        if isinstance(self.cpus, float):
            if not math.isfinite(self.cpus):
                raise ValueError("cpus is not a positive finite number; write one such as 1")
            if self.cpus.is_integer():
                object.__setattr__(self, "cpus", int(self.cpus))

    @property
    def policy(self) -> NetworkPolicy:
        return NetworkPolicy(self.network_mode, self.allowed_hosts or ())


@dataclass(frozen=True)
class CollectHook:
    """`[[verifier.collect]]`: a command between the agent and the copying of artifacts."""

    command: str
    service: str = MAIN
    timeout_sec: float = 60.0
    user: User | None = None

    def __post_init__(self) -> None:
        _check_service(self.service)


@dataclass(frozen=True)
class VerifierConfig:
    timeout_sec: float = 600.0
    env: Mapping[str, str] = field(default_factory=dict)
    user: User | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentConfig | None = None
    collect: tuple[CollectHook, ...] = ()

    def __post_init__(self) -> None:
        _check_network(self)
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError('environment_mode = "shared" has no environment of its own; remove one of the two')

    @property
    def policy(self) -> NetworkPolicy | None:
        return None if self.network_mode is None else NetworkPolicy(self.network_mode, self.allowed_hosts or ())

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        """None: not said at this level."""
        return self.environment_mode or ("separate" if self.environment is not None else None)


@dataclass(frozen=True)
class Artifact:
    """What is kept of a container; a bare string in task.toml is its source alone."""

    source: str
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: str | None = None

    def __post_init__(self) -> None:
        if ".." in PurePosixPath(self.source).parts:
            raise ValueError(f"the artifact source {self.source!r} has a '..' in it; write the path without it")
        _check_destination(self.destination)
        if self.destination == "":
            object.__setattr__(self, "destination", None)
        if self.service is not None:
            _check_service(self.service)
        absolute = self.source.startswith("/") or re.match(r"[A-Za-z]:[/\\]", self.source)
        if self.service not in (None, MAIN) and not absolute:
            raise ValueError(f"the artifact source {self.source!r} of service {self.service} is not absolute")


@dataclass(frozen=True)
class SolutionConfig:
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepConfig:
    name: str
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    min_reward: float | Mapping[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: tuple[str | Artifact, ...] = ()

    def __post_init__(self) -> None:
        check_step_name(self.name)


@dataclass(frozen=True)
class TaskConfig:
    """The whole of task.toml."""

    schema_version: str = SCHEMA
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    artifacts: tuple[str | Artifact, ...] = ()
    task: PackageInfo | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    solution: SolutionConfig = SolutionConfig()
    steps: tuple[StepConfig, ...] | None = None

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for step in self.steps or ():
            key = unicodedata.normalize("NFC", step.name).casefold()
            if key in seen:
                raise ValueError(f"steps {seen[key]!r} and {step.name!r} are one directory on some systems; rename one")
            seen[key] = step.name
        for entry in [*self.artifacts, *(entry for step in self.steps or () for entry in step.artifacts)]:
            artifact_of(entry)  # a bare string obeys the same rules

    def verifier_mode(self, step: StepConfig | None = None) -> Literal["shared", "separate"]:
        """Step, then task, then shared."""
        return (step.verifier.mode if step else None) or self.verifier.mode or "shared"


def artifact_of(entry: str | Artifact) -> Artifact:
    return Artifact(entry) if isinstance(entry, str) else entry


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParsedConfig:
    """notes: unknown and retired keys, one line each; what `rsi harbor lint` would show."""

    config: TaskConfig
    notes: tuple[str, ...]


def read_toml(
    content: bytes, name: str = "task.toml", max_bytes: int = MAX_CONFIG_BYTES, max_dots: int = MAX_DOTS
) -> dict[str, Any]:
    """TOML that a stranger wrote, parsed. Raises FormatError."""
    if len(content) > max_bytes:
        raise FormatError(f"{name} has {len(content)} bytes; at most {max_bytes} are allowed")
    if any(line.count(b".") > max_dots for line in content.splitlines()):
        raise FormatError(f"{name} has a line with more than {max_dots} dots; write plain tables")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError:
        raise FormatError(f"{name} is not utf-8; write it as plain text") from None
    except RecursionError:
        raise FormatError(f"{name} is nested too deeply; write plain tables") from None
    except ValueError as error:
        raise FormatError(f"{name} cannot be read: {str(error)[:100]}") from None


def parse_config(content: bytes) -> ParsedConfig:
    """task.toml. Raises FormatError with the key that is wrong."""
    return config_from_table(read_toml(content))


def config_from_table(table: Mapping[str, Any]) -> ParsedConfig:
    """The parsed task.toml, of any schema up to 1.4. Raises FormatError."""
    notes: list[str] = []
    modern = _modern(table, notes)
    unknown: list[str] = []
    config = read_record(TaskConfig, modern, unknown=unknown)
    return ParsedConfig(config, (*(f"{key} is not a key of task.toml and is ignored" for key in unknown), *notes))


def _modern(table: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The table with old spellings replaced."""
    modern = dict(table)
    if "version" in modern:
        notes.append("version is retired; write schema_version")
        modern.setdefault("schema_version", modern.pop("version"))
        modern.pop("version", None)
    if isinstance(modern.get("environment"), Mapping):
        modern["environment"] = _modern_environment(modern["environment"], "environment", notes)
    if isinstance(modern.get("verifier"), Mapping):
        modern["verifier"] = _modern_verifier(modern["verifier"], "verifier", notes)
    if isinstance(modern.get("steps"), list):
        modern["steps"] = [_modern_step(step, f"steps[{i}]", notes) for i, step in enumerate(modern["steps"])]
    return modern


def _modern_step(step: Any, where: str, notes: list[str]) -> Any:
    if not isinstance(step, Mapping) or not isinstance(step.get("verifier"), Mapping):
        return step
    return {**step, "verifier": _modern_verifier(step["verifier"], f"{where}.verifier", notes)}


def _modern_verifier(verifier: Mapping[str, Any], where: str, notes: list[str]) -> Mapping[str, Any]:
    environment = verifier.get("environment")
    if not isinstance(environment, Mapping):
        return verifier
    return {**verifier, "environment": _modern_environment(environment, f"{where}.environment", notes)}


def _modern_environment(environment: Mapping[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    modern = dict(environment)
    for name in ("memory", "storage"):
        if name in modern:
            notes.append(f"{where}.{name} is retired; write {name}_mb")
            _modern_size(modern, name, where)
    if "allow_internet" in modern:
        allowed = modern.pop("allow_internet")
        if allowed is not None:
            notes.append(f"{where}.allow_internet is retired; write network_mode")
            if not isinstance(allowed, bool):
                raise FormatError(f"{where}.allow_internet is not true or false")
            if "network_mode" not in modern and modern.get("allowed_hosts") is None:
                modern["network_mode"] = "public" if allowed else "no-network"
    if isinstance(modern.get("os"), str):
        modern["os"] = modern["os"].lower()
    if isinstance(modern.get("mcp_servers"), list):
        modern["mcp_servers"] = [
            {**server, "transport": "streamable-http"}
            if isinstance(server, Mapping) and server.get("transport") == "http"
            else server
            for server in modern["mcp_servers"]
        ]
    return modern


def _modern_size(environment: dict[str, Any], name: str, where: str) -> None:
    old = environment.pop(name)
    if not isinstance(old, str):
        return
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([GMK])\s*", old, re.IGNORECASE | re.ASCII)
    if match is None:
        raise FormatError(f"{where}.{name} is not a size; write {name}_mb = 2048")
    factor = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}[match.group(2).upper()]
    megabytes = int(float(match.group(1)) * factor)
    if environment.setdefault(f"{name}_mb", megabytes) != megabytes:
        raise FormatError(f"{where}.{name} and {where}.{name}_mb differ; remove {name}")


# ---- writing ---------------------------------------------------------------------------------------------------------


def config_toml(config: TaskConfig) -> bytes:
    """task.toml of schema 1.4: what is set, with the network mode and the time limits always said."""
    return _toml(plain(replace(config, schema_version=SCHEMA), keep_empty=False))


def config_toml_1_1(config: TaskConfig) -> bytes:
    """task.toml for readers of schema 1.1, with `allow_internet` for the network.

    Raises FormatError for what 1.1 has no word for: such a reader would skip the key and run another task.
    """
    table = plain(replace(config, schema_version="1.1"), keep_empty=False)
    for key in ("steps", "multi_step_reward_strategy", "artifacts", "source"):
        if key in table:
            raise FormatError(f"{key} is unknown to schema 1.1; export the task as {SCHEMA}")
    for section, keys in _AFTER_1_1.items():
        for key in keys:
            if key in table.get(section, {}):
                raise FormatError(f"{section}.{key} is unknown to schema 1.1; export the task as {SCHEMA}")
    environment = table["environment"]
    if environment["network_mode"] == "allowlist":
        raise FormatError(f"an allowlist network is unknown to schema 1.1; export the task as {SCHEMA}")
    if environment.get("os", "linux") != "linux":
        raise FormatError(f"environment.os is unknown to schema 1.1; export the task as {SCHEMA}")
    if isinstance(environment.get("cpus"), float):
        raise FormatError("environment.cpus is a whole number in schema 1.1; round it")
    environment["allow_internet"] = environment.pop("network_mode") == "public"
    return _toml(table)


_AFTER_1_1: Mapping[str, tuple[str, ...]] = {
    "agent": ("network_mode", "allowed_hosts"),
    "verifier": ("network_mode", "allowed_hosts", "environment_mode", "environment", "collect"),
    "environment": ("tpu", "allowed_hosts"),
}


def _toml(table: dict[str, Any]) -> bytes:
    environment = table.get("environment", {})
    if environment.get("os") == "linux":
        del environment["os"]
    return tomli_w.dumps(table).encode()
