"""Our namespace sandboxes as an environment provider for Harbor, which then needs no Docker.

    harbor run -p TASK -a oracle --env rsi.sandbox.harbor:NamespaceEnvironment --ek 'bases={"ubuntu:24.04": ""}'

All trials of a job share one backend; the last environment that stops ends it. Policies are enforced exactly or
refused: a task that may use the public network runs only where `host_network` allows it, since that is the host's own.
What comes down from a sandbox is regular files and directories: a link that an agent left is neither followed nor made.
"""

from __future__ import annotations

import asyncio
import functools
import os
import posixpath
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rsi.sandbox import BuildError, Entry, Image, ImageSpec, Limits, Sandbox, SandboxConfig, SandboxError
from rsi.sandbox.dockerfile import dockerfile_spec
from rsi.sandbox.namespace import NamespaceBackend

DAY_S = 86400.0
"""Of a sandbox's life, and of a command without a limit of its own; Harbor has its own clocks."""
MAX_OUTPUT = 8 << 20
MAX_CONTEXT_BYTES = 1 << 30
MAX_DOWNLOAD_BYTES = 1 << 30
PIDS = 1024
INODES = 1 << 20


class _Backends:
    """The backend of every config that is in use, by event loop, and how many environments use it."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], tuple[NamespaceBackend, int]] = {}

    def take(self, config: SandboxConfig) -> NamespaceBackend:
        key = self._key(config)
        backend, users = self._open.get(key) or (NamespaceBackend(config), 0)
        self._open[key] = (backend, users + 1)
        return backend

    async def release(self, config: SandboxConfig) -> None:
        key = self._key(config)
        backend, users = self._open.pop(key)
        if users > 1:
            self._open[key] = (backend, users - 1)
        else:
            await backend.close()

    @staticmethod
    def _key(config: SandboxConfig) -> tuple[int, str]:
        return id(asyncio.get_running_loop()), repr(config)


_backends = _Backends()


def read_folder(folder: Path, max_bytes: int) -> dict[str, Entry]:
    """What lies below a directory of the host; links as links. Raises ValueError for more than `max_bytes`."""
    entries: dict[str, Entry] = {}
    total = 0
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        mode, name = stat.S_IMODE(status.st_mode), path.relative_to(folder).as_posix()
        if stat.S_ISLNK(status.st_mode):
            entries[name] = Entry("link", mode, target=os.readlink(path))
        elif stat.S_ISDIR(status.st_mode):
            entries[name] = Entry("dir", mode)
        elif stat.S_ISREG(status.st_mode):
            total += status.st_size
            if total > max_bytes:
                raise ValueError(f"{folder} has more than {max_bytes} bytes")
            entries[name] = Entry("file", mode, path.read_bytes())
    return entries


def write_folder(folder: Path, entries: Mapping[str, Entry]) -> list[str]:
    """Write what came out of a sandbox; the paths that were left out, being neither files nor directories.

    Nothing is written through a link: not one that came along, for none is made, nor one that lies there.
    """
    root = folder.resolve()
    root.mkdir(parents=True, exist_ok=True)
    left_out = []
    for name in sorted(entries):
        entry, target = entries[name], root / name
        if target.parent.resolve() != target.parent or not target.is_relative_to(root) or target.is_symlink():
            raise SandboxError(f"{ascii(name)} would be written outside {folder}; empty the directory first")
        if entry.kind == "dir":
            target.mkdir(parents=True, exist_ok=True)
        elif entry.kind == "file":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(entry.content)
            target.chmod(entry.mode & 0o755 | 0o600)
        else:
            left_out.append(name)
    return left_out


def environment_spec(folder: Path, docker_image: str | None, workdir: str | None, force_build: bool) -> ImageSpec:
    """What to build for an environment directory: its Dockerfile, or the prebuilt image where that has precedence.

    Raises BuildError for what our Dockerfile subset does not have.
    """
    dockerfile = folder / "Dockerfile"
    if docker_image and not (force_build and dockerfile.is_file()):
        return ImageSpec(base=docker_image, workdir=workdir or "/app")
    if not dockerfile.is_file():
        raise BuildError(f"{folder}/Dockerfile is missing; compose is not supported by namespace sandboxes")
    context = {}
    for name, entry in read_folder(folder, MAX_CONTEXT_BYTES).items():
        if entry.kind == "link" and not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise BuildError(f"{name} leads out of {folder}; copy the file in")
        if (folder / name).is_file():
            context[name] = (folder / name).read_bytes()
    return dockerfile_spec(dockerfile.read_bytes(), context, workdir, f"{folder.name}/Dockerfile")


@functools.cache
def namespace_environment() -> Any:
    """The class; made here because its base is Harbor's, which the other backends do without."""
    from harbor.environments.base import (  # pyright: ignore[reportMissingImports]
        BaseEnvironment,
        ExecResult,
        SandboxBuildFailedError,
    )
    from harbor.environments.capabilities import (  # pyright: ignore[reportMissingImports]
        EnvironmentCapabilities,
        EnvironmentResourceCapabilities,
    )
    from harbor.environments.options import EnvironmentOptions  # pyright: ignore[reportMissingImports]
    from harbor.models.task.config import NetworkMode  # pyright: ignore[reportMissingImports]

    class NamespaceOptions(EnvironmentOptions):
        """What follows --ek."""

        rootfs: str = ""
        bases: dict[str, str] = {}
        cache_dir: str = ""
        host_network: bool = False
        accept_missing: list[str] = []

    class NamespaceEnvironment(BaseEnvironment):
        """A namespace sandbox for one trial."""

        options_model = NamespaceOptions

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._sandbox: Sandbox | None = None
            self._taken: SandboxConfig | None = None
            super().__init__(*args, **kwargs)

        @staticmethod
        def type() -> str:
            return "rsi-namespace"

        @property
        def capabilities(self) -> EnvironmentCapabilities:
            return EnvironmentCapabilities(disable_internet=True)

        @classmethod
        def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
            return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

        def _validate_definition(self) -> None:
            config = self.task_env_config
            environment_spec(self.environment_dir, config.docker_image, config.workdir, force_build=False)

        def validate_network_policy_support(self, network_policy: Any = None) -> None:
            super().validate_network_policy_support(network_policy)
            policy = network_policy or self._network_policy
            if policy.network_mode == NetworkMode.PUBLIC and not self.options.host_network:
                raise ValueError(
                    "the task may use the public network, which a namespace sandbox has only by sharing the host's, "
                    "loopback services included: allow it with --ek host_network=true, or write "
                    'network_mode = "no-network"'
                )

        async def start(self, force_build: bool) -> None:
            options, config = self.options, self.task_env_config
            self._taken = SandboxConfig(
                rootfs=options.rootfs,
                bases=options.bases,
                cache_dir=options.cache_dir,
                accept_missing=tuple(options.accept_missing),
            )
            backend = _backends.take(self._taken)
            spec = environment_spec(self.environment_dir, config.docker_image, config.workdir, force_build)
            try:
                image: Image = await backend.build(spec, config.build_timeout_sec)
            except BuildError as error:
                raise SandboxBuildFailedError(str(error)) from error
            limits = Limits(
                cpus=float(self._effective_cpus or 1.0),
                memory_mb=self._effective_memory_mb or 2048,
                disk_mb=self._effective_storage_mb or 1024,
                pids=PIDS,
                inodes=INODES,
                wall_s=DAY_S,
            )
            self._sandbox = await backend.create(image, limits, "host" if self._network_is_public else "none")
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()

        async def stop(self, delete: bool) -> None:
            sandbox, self._sandbox = self._sandbox, None
            taken, self._taken = self._taken, None
            if sandbox is not None:
                await sandbox.close()
            if taken is not None:
                await _backends.release(taken)

        @property
        def _box(self) -> Sandbox:
            if self._sandbox is None:
                raise RuntimeError("the sandbox is not started; call start first")
            return self._sandbox

        async def exec(
            self,
            command: str,
            cwd: str | None = None,
            env: dict[str, str] | None = None,
            timeout_sec: int | None = None,
            user: str | int | None = None,
        ) -> ExecResult:
            who = self._resolve_user(user)
            done = await self._box.exec(
                command,
                timeout_s=float(timeout_sec or DAY_S),
                cwd=cwd,
                env=self._merge_env(env),
                max_output=MAX_OUTPUT,
                user=None if who is None else str(who),
            )
            if done.timed_out:
                raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
            stdout, stderr = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
            return ExecResult(stdout=stdout, stderr=stderr, return_code=done.exit_code)

        async def upload_file(self, source_path: Path | str, target_path: str) -> None:
            source = Path(source_path)
            folder, name = posixpath.split(target_path)
            mode = stat.S_IMODE(source.stat().st_mode)
            await self._box.put(folder or "/", {name: Entry("file", mode, source.read_bytes())})

        async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
            await self._box.put(target_dir, read_folder(Path(source_dir), MAX_DOWNLOAD_BYTES))

        async def download_file(self, source_path: str, target_path: Path | str) -> None:
            found = await self._box.get(source_path, MAX_DOWNLOAD_BYTES)
            entry = found.get(posixpath.basename(source_path))
            if entry is None or entry.kind != "file":
                raise FileNotFoundError(f"{source_path} is not a regular file in the sandbox")
            target = Path(target_path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(entry.content)

        async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
            entries = await self._box.get(source_dir, MAX_DOWNLOAD_BYTES)
            for name in write_folder(Path(target_dir), entries):
                self.logger.warning("%s/%s is no regular file and was left in the sandbox", source_dir, name)

    NamespaceEnvironment.__module__ = "rsi.sandbox.harbor"
    NamespaceEnvironment.__qualname__ = "NamespaceEnvironment"
    return NamespaceEnvironment
