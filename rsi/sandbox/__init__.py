"""Where everything that a model wrote is run: the Protocol that backends meet, and `build_backend`.

A backend builds images and creates sandboxes from them; a sandbox runs commands and moves files as tar. What breaks on
our side raises `SandboxError`, which callers count as a fault and never as a result of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol

Network = Literal["none", "host"]
BASE = "rsi/base"
"""The FROM that every backend knows: its default base file system."""


class SandboxError(RuntimeError):
    """Our side broke (a dead sandbox, a full disk, no user namespaces). The message names the mend."""


class SandboxDied(SandboxError):
    """The sandbox is gone: killed, past its life, closed, or what launched it ended."""


class BuildError(ValueError):
    """An image could not be built from what its author wrote: a failing RUN, an instruction outside the subset."""


@dataclass(frozen=True)
class DockerConfig:
    """What only the `docker` backend reads; which engine it talks to is DOCKER_HOST's to say."""

    base: str = ""
    """The engine's image under every ImageSpec; empty: `rootfs` or the host's packages, imported without a registry."""
    images: Mapping[str, str] = field(default_factory=dict)
    """What the FROM of a Dockerfile stands for: {ubuntu:24.04: an image that the engine has}."""
    build_network: Literal["none", "bridge", "host"] = "none"
    """Of builds. `host` reaches services on the engine's loopback: only for Dockerfiles that people wrote."""
    ca_bundle: str = ""
    """PEM file that builds trust, for a network whose TLS is re-signed (often $SSL_CERT_FILE); empty: the image's."""


@dataclass(frozen=True)
class HarborConfig:
    """What only the `harbor` backend reads."""

    environment: str = "docker"
    """A provider of the `harbor` package (docker, daytona, modal, e2b, ...), or module:Class of another."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The provider's own, as after `harbor run --ek`; JSON where they are no text."""
    bases: Mapping[str, str] = field(default_factory=dict)
    """The image that a FROM stands for; one that is not named here is left as it is. {rsi/base: debian:12}"""


@dataclass(frozen=True)
class SandboxConfig:
    """The `sandbox:` block of a recipe."""

    backend: Literal["namespace", "docker", "harbor"] = "namespace"
    rootfs: str = ""
    """Directory with an unpacked base file system; empty: built once from the host's packages, without network."""
    bases: Mapping[str, str] = field(default_factory=dict)
    """What else the FROM of a Dockerfile may name in the `namespace` backend: {ubuntu:24.04: a directory like `rootfs`,
    or empty for the same base}. `rsi/base` is always that one."""
    cache_dir: str = ""
    """Where the base and built images are kept; empty: $RSI_CACHE, else ~/.cache/rsi."""
    cgroups: bool = True
    """Use cgroups where they can be used; False: rlimits only, what a plain user gets."""
    accept_missing: tuple[str, ...] = ("memory", "cpu")
    """Limits that may go unenforced where this host cannot enforce them (see `probe`); any other stops the run."""
    max_alive: int = 64
    """Sandboxes alive at once; further `create` calls wait."""
    docker: DockerConfig = DockerConfig()
    harbor: HarborConfig = HarborConfig()


@dataclass(frozen=True)
class Limits:
    """For the commands of one sandbox; our supervisor stands outside."""

    cpus: float = 1.0
    memory_mb: int = 512
    pids: int = 128
    disk_mb: int = 64
    inodes: int = 16384
    wall_s: float = 600.0
    """Life of the sandbox; it is killed after that."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not value > 0:
                usual = f"give more than 0 ({limit.default} is usual)"
                raise ValueError(f"limit {limit.name}={value} lets nothing run; {usual}")


@dataclass(frozen=True)
class ExecResult:
    """exit_code: 128 + n for signal n; None if the command timed out before an exit was seen."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    dropped_bytes: int
    """Output cut from the middle of the two streams together; each keeps its head and tail."""
    timed_out: bool
    oom: bool
    streams_open: bool
    """A background process still holds an output stream."""
    duration_s: float


@dataclass(frozen=True)
class Entry:
    """One file that `get` brought out. Only regular files have content; a link is its target, never followed."""

    kind: Literal["file", "dir", "link", "other"]
    mode: int
    content: bytes = b""
    target: str = ""


@dataclass(frozen=True)
class Step:
    """One step of an image: run a command, or copy files; what it leaves is one cached layer."""

    run: str = ""
    copy: Mapping[str, bytes] | None = None
    """Absolute path inside the image -> content; mode 0755 where the content begins with `#!`, else 0644."""
    user: str = ""
    """Of `run`: a name or id that the image knows, perhaps with `:group`; empty: root."""


@dataclass(frozen=True)
class ImageSpec:
    """The base and the steps over it; equal specs give the same image."""

    steps: tuple[Step, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    workdir: str = "/app"
    """Made if it is missing."""
    base: str = BASE
    """The FROM: a name that the backend's config maps to a file system."""
    user: str = ""
    """Of commands that run in it (files are put and got as root); empty: root."""


@dataclass(frozen=True)
class Image:
    """A built image; `id` is the content hash of its spec (or of a snapshot)."""

    id: str
    layers: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    workdir: str = "/app"
    base: str = ""
    """What lies below the layers, as the backend names it; empty: its default."""
    user: str = ""


@dataclass(frozen=True)
class Capabilities:
    """What this host enforces, tried in a throwaway sandbox; never inferred from versions."""

    enforced: frozenset[str]
    """Of memory, pids, cpu, disk, inodes, network."""
    missing: Mapping[str, str]
    """limit -> why it is not enforced here, and the mend."""


ENFORCEABLE = ("memory", "pids", "cpu", "disk", "inodes", "network")


def check_enforced(found: Capabilities, config: SandboxConfig, network: Network) -> None:
    """Raise SandboxError for a limit that does not hold and that config.accept_missing does not allow to be missing."""
    allowed = {*config.accept_missing, *(("network",) if network == "host" else ())}
    refused = [limit for limit in found.missing if limit not in allowed]
    if refused:
        reasons = "; ".join(f"{limit}: {found.missing[limit]}" for limit in refused)
        raise SandboxError(
            f"this machine does not enforce {reasons}. Or list it in sandbox.accept_missing to run without that limit"
        )


class Sandbox(Protocol):
    """One live sandbox. Concurrent `exec` calls are fine. A dead sandbox raises SandboxError, never an exit code."""

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
        """Run a command: str = `bash -c`, list = argv. Returns when the command's own process exits, not at end of
        stream. A timeout kills all that it started. The environment is the image's plus `env`, and nothing else. user:
        a name or id that the sandbox knows, in place of the image's."""
        ...

    async def put(self, directory: str, files: Mapping[str, bytes | Entry]) -> None:
        """Write files by relative path below `directory`, unpacked by a process inside the sandbox."""
        ...

    async def get(self, path: str, max_bytes: int = 16 << 20) -> dict[str, Entry]:
        """All below `path`, by relative path, packed inside; raises SandboxError where it is cut, late or too big."""
        ...

    async def snapshot(self) -> Image: ...

    async def kill_all(self) -> None:
        """Kill every process but PID 1; returns when they are gone."""
        ...

    async def close(self) -> None:
        """Idempotent, bounded, never raises; takes everything with it."""
        ...


class Backend(Protocol):
    async def probe(self) -> Capabilities: ...

    async def build(self, spec: ImageSpec, timeout_s: float = 60.0) -> Image:
        """Content-hashed and cached. Raises BuildError for a failing step, SandboxError for our faults."""
        ...

    async def create(self, image: Image, limits: Limits = Limits(), network: Network = "none") -> Sandbox: ...

    async def close(self) -> None:
        """Destroys every sandbox that is still alive and stops the launcher."""
        ...


def build_backend(config: SandboxConfig) -> Backend:
    match config.backend:
        case "namespace":
            from rsi.sandbox.namespace import NamespaceBackend

            return NamespaceBackend(config)
        case "docker":
            from rsi.sandbox.docker import DockerBackend

            return DockerBackend(config)
        case "harbor":
            from rsi.sandbox.harbor import HarborBackend

            return HarborBackend(config)
