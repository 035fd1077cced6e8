"""The `harbor` backend: any environment provider of the harbor package behind our Protocol. And, as
`NamespaceEnvironment`, our namespace sandboxes as a provider for Harbor itself (`harbor_environment.py`).

A Harbor environment runs one text command and moves one file, so a command here goes through a script of bash and
coreutils in the container, which keeps its output apart, its bytes whole and its time. Departs from the other backends:
a provider tells nothing of OOM kills, has no snapshots, and only what it declares of its limits counts as enforced.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import logging
import math
import os
import posixpath
import secrets
import shlex
import tempfile
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rsi.sandbox import (
    ENFORCEABLE,
    BuildError,
    Capabilities,
    Entry,
    ExecResult,
    Image,
    ImageSpec,
    Limits,
    Network,
    SandboxConfig,
    SandboxDied,
    SandboxError,
    Step,
    check_enforced,
    host,
    keys,
    streams,
    tar,
)

T = TypeVar("T")

MISSING = (
    "the harbor backend needs Python 3.12 and the harbor package: run scripts/harbor_venv.sh and use .venv-harbor, "
    "or pip install 'rsi[harbor]'"
)
START_S = 900.0
"""For a provider to pull, build and start; a cloud's queue may take long."""
SPARE_S = 60.0
"""Beyond a command's own time, for the provider to answer."""
MAX_COMMAND = 60 << 10
"""A longer command or input goes as a file: one argument of a process has at most 128 KiB."""
LIMITS = Limits()

# Arguments: nonce, bytes kept of each end of a stream, seconds, directory, file or base64 of the input, command. A
# process group of its own (`timeout` makes it) leaves alone what an earlier command left behind. What bash would add to
# the environment is taken out again.
RUN = r"""
nonce=$1 keep=$2 seconds=$3 cwd=$4 input=$5; shift 5
folder=/tmp/.$nonce
umask 077; mkdir "$folder" || exit 99
case $input in /*) exec 3<"$input" ;; *) printf %s "$input" | base64 -d >"$folder/in" && exec 3<"$folder/in" ;; esac
umask 022
cd -- "$cwd" 2>/dev/null || cd /
began=$(date +%s%N)
env -u PWD -u OLDPWD -u SHLVL -u _ timeout -s KILL "$seconds" "$@" <&3 3<&- >"$folder/out" 2>"$folder/err"
code=$? ms=$((($(date +%s%N) - began) / 1000000))
"""
# Where the command killed this script too, REPORT is run by itself, and the code is that of the kill.
REPORT = r"""
nonce=$1 keep=$2 folder=/tmp/.$nonce
code=${code:-137} ms=${ms:-0} open=0
for fd in /proc/[0-9]*/fd/[12]; do case $(readlink "$fd" 2>/dev/null) in "$folder"/*) open=1; break ;; esac; done
echo "$nonce $code $ms $open"
for stream in out err; do
    size=$(wc -c <"$folder/$stream")
    echo "$nonce $size $(if [ "$size" -le $((2 * keep)) ]; then head -c "$size" "$folder/$stream"
        else head -c "$keep" "$folder/$stream"; tail -c "$keep" "$folder/$stream"; fi | base64 -w 0)"
done
rm -rf "$folder"
"""
# Whoever still holds a stream of a command that ran out of time; in rounds, for what forks on meanwhile.
END = r"""
for round in 1 2 3; do for fd in /proc/[0-9]*/fd/[012]; do
case $(readlink "$fd" 2>/dev/null) in "/tmp/.$1"/*) fd=${fd#/proc/}; kill -9 "${fd%%/*}" ;; esac; done; done
rm -rf "/tmp/.$1"
"""
CLEAR = r"""
cd -- "$1" && while read -r -d "" p; do [ -L "$p" ] || [ ! -d "$p" ] || rm -rf -- "$p"; done <"$2"; rm -f "$2"
"""
PUT = 'mkdir -p -- "$1" && tar -C "$1" --no-same-owner --keep-directory-symlink -xpf "$2"'
GET = r"""
if [ -d "$1" ] && [ ! -L "$1" ]; then cd -- "$1" && set -- . "$2" "$3"
elif [ -e "$1" ] || [ -L "$1" ]; then cd -- "${1%/*}/" && set -- "./${1##*/}" "$2" "$3"
else : >"$2"; exit 0; fi
tar --format=gnu --numeric-owner --hard-dereference -cf - "$1" | head -c "$3" >"$2"
case ${PIPESTATUS[0]} in 0|1|141) exit 0 ;; *) exit 3 ;; esac
"""
RUN_AND_REPORT = f'{RUN}set -- "$nonce" "$keep"{REPORT}'
INPUTS = "/tmp/.rsi-exec-"
MAX_PATH = 4096
"""A longer one cannot be named by any call of the kernel."""


def __getattr__(name: str) -> Any:
    """NamespaceEnvironment is a subclass of Harbor's own, so it is made when somebody asks for it."""
    if name == "NamespaceEnvironment":
        from rsi.sandbox.harbor_environment import namespace_environment

        return namespace_environment()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class HarborSandbox:
    """One started environment of a provider."""

    def __init__(self, backend: HarborBackend, image: Image, environment: Any, limits: Limits, name: str) -> None:
        self.image, self.name = image, name
        self._backend, self._environment = backend, environment
        self._numbers = itertools.count()
        self._dead = ""
        self._closing: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._life = loop.call_later(limits.wall_s, self._end_of_life, limits.wall_s)

    def _end_of_life(self, wall_s: float) -> None:
        self._dead = self._dead or f"it is older than wall_s={wall_s:g} s"
        self._closing = self._closing or asyncio.get_running_loop().create_task(self._close())

    def _check_alive(self) -> None:
        if self._dead:
            raise SandboxDied(f"sandbox {self.name} is gone: {self._dead}")

    async def _call(self, what: str, call: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """A provider's call, with a deadline; whatever it raises is our fault."""
        try:
            return await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            raise SandboxError(f"{what} in sandbox {self.name} took more than {timeout_s:g} s") from None
        except Exception as error:
            self._check_alive()  # it was closed meanwhile
            raise SandboxError(f"{what} in sandbox {self.name} failed: {_first_line(error)}") from error

    async def _plain(self, script: str, *arguments: str, timeout_s: float = 120.0) -> Any:
        """A command of our own, as root."""
        command = shlex.join(["bash", "-c", script, "rsi", *arguments])
        call = self._environment.exec(command=command, cwd="/", timeout_sec=math.ceil(timeout_s), user="root")
        return await self._call("a command of ours", call, timeout_s + SPARE_S)

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
        """See the Protocol. A timeout kills the command's process group and whoever holds its streams; a daemon that
        left both is left to `kill_all`. Output lies on the sandbox's disk until the command ends. `oom` is never
        known."""
        self._check_alive()
        argv = ["bash", "-c", command] if isinstance(command, str) else command
        encoded = base64.b64encode(stdin).decode()
        if len(encoded) + sum(map(len, argv)) > MAX_COMMAND:
            argv, encoded = await self._as_files(command, argv, stdin)
        nonce = f"rsi-{secrets.token_hex(8)}"
        where = cwd if cwd is not None else self.image.workdir
        wrapped = [
            "bash",
            "-c",
            RUN_AND_REPORT,
            "rsi",
            nonce,
            str(max_output),
            f"{timeout_s:.3f}",
            where,
            encoded,
            *argv,
        ]
        call = self._environment.exec(
            command=shlex.join(wrapped),
            cwd="/",
            env={**dict(self.image.env), **(env or {})},
            timeout_sec=math.ceil(timeout_s + SPARE_S),
            user=(self.image.user or "root") if user is None else user,
        )
        try:
            done = await self._call("a command", call, timeout_s + 2 * SPARE_S)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):  # a provider may only stop listening
                await self._plain(END, nonce)
            raise
        finally:
            if encoded.startswith("/"):
                with contextlib.suppress(SandboxError):
                    await self._plain('rm -f "$@"', *(word for word in (encoded, *argv) if word.startswith(INPUTS)))
        result = _read_report(str(done.stdout or ""), nonce, timeout_s, max_output)
        if result is None and done.return_code == 137:
            again = await self._plain(REPORT, nonce, str(max_output))
            result = _read_report(str(again.stdout or ""), nonce, timeout_s, max_output)
        if result is None:
            said = f"{done.stdout or ''}{done.stderr or ''}".strip()[-300:]
            raise SandboxError(f"sandbox {self.name} cannot start a command (status {done.return_code}): {said}")
        if result.timed_out:
            await self._plain(END, nonce)
        return result

    async def _as_files(self, command: str | list[str], argv: list[str], stdin: bytes) -> tuple[list[str], str]:
        """A command's words and its input, where they are too long for words: as files that anyone can read."""
        name = f"{INPUTS}{next(self._numbers)}"
        files = {f"{name}-in": Entry("file", 0o444, stdin)}
        if isinstance(command, str):
            files[f"{name}-script"] = Entry("file", 0o444, command.encode("utf-8", "surrogateescape"))
            argv = ["bash", f"{name}-script"]
        await self.put("/", {path[1:]: entry for path, entry in files.items()})
        return argv, f"{name}-in"

    async def put(self, directory: str, files: Mapping[str, bytes | Entry]) -> None:
        self._check_alive()
        inside = f"/tmp/.rsi-put-{next(self._numbers)}"
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder, "put.tar")
            archive.write_bytes(tar.pack(files))
            await self._call(f"put {directory}", self._environment.upload_file(archive, inside), 120.0)
        target = posixpath.join("/", directory)
        done = await self._plain(PUT, target, inside)
        if done.return_code != 0 and "File exists" in f"{done.stdout}{done.stderr}":
            await self._clear(target, files)
            done = await self._plain(PUT, target, inside)
        await self._plain('rm -f "$1"', inside)
        if done.return_code != 0:
            said = f"{done.stdout or ''}{done.stderr or ''}".strip()[-300:]
            raise SandboxError(f"put {directory} in sandbox {self.name} failed: {said}")

    async def _clear(self, target: str, files: Mapping[str, bytes | Entry]) -> None:
        """Remove the directories that stand where files are to be, which tar does not."""
        inside = f"/tmp/.rsi-clear-{next(self._numbers)}"
        names = [path for path, entry in files.items() if isinstance(entry, bytes) or entry.kind != "dir"]
        with tempfile.TemporaryDirectory() as folder:
            listing = Path(folder, "names")
            listing.write_bytes(b"".join(name.encode("utf-8", "surrogateescape") + b"\0" for name in names))
            await self._call(f"put {target}", self._environment.upload_file(listing, inside), 120.0)
        await self._plain(CLEAR, target, inside)

    async def get(self, path: str, max_bytes: int = 16 << 20) -> dict[str, Entry]:
        self._check_alive()
        inside = f"/tmp/.rsi-get-{next(self._numbers)}"
        limit = max_bytes + tar.MAX_ENTRIES * 2048
        target = posixpath.normpath(posixpath.join("/", path))
        done = await self._plain(GET, target, inside, str(limit))
        if done.return_code != 0:
            raise SandboxError(
                f"get {path} in sandbox {self.name} failed: {done.stdout or ''}{done.stderr or ''}"[:500]
            )
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder, "get.tar")
            await self._call(f"get {path}", self._environment.download_file(inside, archive), 120.0)
            raw = archive.read_bytes()
        await self._plain('rm -f "$1"', inside)
        if len(raw) >= limit:
            raise SandboxError(f"get {path} in sandbox {self.name}: more than {max_bytes} bytes came from the sandbox")
        entries = tar.parse(raw, max_bytes)
        if any(len(name) > MAX_PATH for name in entries):
            raise SandboxError(f"get {path} in sandbox {self.name}: a path has more than {MAX_PATH} characters")
        return {name.removeprefix("./"): entry for name, entry in entries.items() if name != "."}

    async def snapshot(self) -> Image:
        raise SandboxError("Harbor's environments have no snapshots; use the namespace or docker backend for forks")

    async def kill_all(self) -> None:
        """All but the provider's own first process. `kill -1` spares the shell that calls it."""
        self._check_alive()
        await self._plain("kill -9 -1; true")

    async def close(self) -> None:
        self._dead = self._dead or "it was closed"
        self._life.cancel()
        self._closing = self._closing or asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await stop(self._environment)
        self._backend.forget(self)


def _read_report(text: str, nonce: str, timeout_s: float, max_output: int) -> ExecResult | None:
    """What RUN printed, amid what the provider may have; None where that is not all there."""
    rows = [line.split(" ") for line in text.splitlines() if line.startswith(f"{nonce} ")]
    if len(rows) != 3 or len(rows[0]) != 4 or not all(len(row) == 3 for row in rows[1:]):
        return None
    code, ms, is_open = map(int, rows[0][1:])
    kept = []
    for _, size, encoded in rows[1:]:
        stream = streams.Kept(max_output, max_output)
        stream.feed(base64.b64decode(encoded))
        stream.total = int(size)
        kept.append(stream)
    stdout, stderr, dropped = streams.cut(kept[0], kept[1], max_output)
    timed_out = code in (124, 137) and ms >= timeout_s * 1000
    return ExecResult(
        exit_code=None if timed_out else code,
        stdout=stdout,
        stderr=stderr,
        dropped_bytes=dropped,
        timed_out=timed_out,
        oom=False,
        streams_open=bool(is_open),
        duration_s=ms / 1000,
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:1000]}"


async def stop(environment: Any) -> None:
    """End an environment and what it holds; never raises, and waits a minute at most."""
    try:
        await asyncio.wait_for(environment.stop(delete=True), 60.0)
    except Exception as error:
        logging.getLogger(__name__).warning("a Harbor environment was not stopped: %s", _first_line(error))


class HarborBackend:
    """Images are Dockerfiles that the provider builds; sandboxes are its environments. Belongs to one event loop."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.options = {key: _option(text) for key, text in config.harbor.options.items()}
        self.provider = _provider(config.harbor.environment)
        self.name = f"rsi-{os.getpid()}-{host.start_time(os.getpid())}"
        self.cache = os.path.join(os.path.abspath(host.cache_dir(config)), "harbor")
        self._numbers = itertools.count()
        self._alive: set[HarborSandbox] = set()
        self._slots = asyncio.Semaphore(config.max_alive)
        self._builds: dict[str, asyncio.Task[Image]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="rsi-harbor-")
        self._closed = False

    # -- what the provider says of itself

    async def probe(self) -> Capabilities:
        """What the provider declares: Harbor has no way to try a limit, and none for processes, disk and inodes."""
        declared = self.provider.resource_capabilities()
        unnamed = f"{self.config.harbor.environment} does not declare that it enforces it"
        missing = {limit: "Harbor has no such limit" for limit in ("pids", "disk", "inodes")}
        if declared is None or not declared.memory_limit:
            missing["memory"] = unnamed
        if declared is None or not declared.cpu_limit:
            missing["cpu"] = unnamed
        try:  # Harbor has a provider refuse at once what it cannot enforce
            self._environment(self._write(ImageSpec()), Image("probe", ()), LIMITS, "none")
        except ValueError as error:
            missing["network"] = _first_line(error)
        return Capabilities(frozenset(ENFORCEABLE) - missing.keys(), missing)

    # -- images

    async def build(self, spec: ImageSpec, timeout_s: float = 60.0) -> Image:
        """See the Protocol. The provider builds it when it starts it, so the first time it is started once. Where that
        fails and the base alone starts, the spec is to blame."""
        whole = json.dumps([spec.base, self._from(spec.base), spec.env, spec.workdir, spec.user])
        key = keys.digest(self.config.harbor.environment, whole, *(keys.step_key(step) for step in spec.steps))
        task = self._builds.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._build(key, spec, timeout_s))
            self._builds[key] = task
        try:
            return await asyncio.shield(task)
        except (BuildError, SandboxError):
            self._builds.pop(key, None)  # the next call tries again
            raise

    async def _build(self, key: str, spec: ImageSpec, timeout_s: float) -> Image:
        image = Image(key, (self._write(spec),), spec.env, spec.workdir, user=spec.user)
        plain = ImageSpec(base=spec.base)
        if spec == plain:
            await (await self._start(image, LIMITS, "none", START_S)).close()
            return image
        await self.build(plain)
        try:
            await (await self._start(image, LIMITS, "none", timeout_s + SPARE_S, build_s=timeout_s)).close()
        except SandboxError as error:
            raise BuildError(f"the image does not build within {timeout_s:g} s: {str(error)[-2000:]}") from None
        return image

    def _from(self, base: str) -> str:
        return self.config.harbor.bases.get(base, base)

    def _write(self, spec: ImageSpec) -> str:
        """The folder of a spec's Dockerfile and context, which lives as long as the backend."""
        folder = Path(self._folder.name, str(next(self._numbers)))
        folder.mkdir()
        lines = [f"FROM {self._from(spec.base)}", "USER root"]
        for number, step in enumerate(spec.steps):
            lines += _copy_lines(folder, number, step) if step.copy is not None else []
            if step.run:
                lines += [f"USER {step.user or 'root'}", _run_line(spec, step.run), "USER root"]
        lines.append(_run_line(spec, f"mkdir -p -- {shlex.quote(spec.workdir)}"))
        (folder / "Dockerfile").write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")
        return str(folder)

    # -- sandboxes

    async def create(self, image: Image, limits: Limits = LIMITS, network: Network = "none") -> HarborSandbox:
        check_enforced(await self.probe(), self.config, network)
        return await self._start(image, limits, network, START_S)

    async def _start(
        self, image: Image, limits: Limits, network: Network, timeout_s: float, build_s: float = START_S
    ) -> HarborSandbox:
        if self._closed:
            raise SandboxError("this sandbox backend is closed; build another")
        if not image.layers or not os.path.isdir(image.layers[0]):
            raise SandboxError(f"image {image.id} was built by another backend; call build here as well")
        await self._slots.acquire()
        try:
            environment = self._environment(image.layers[0], image, limits, network, build_s)
            try:
                await asyncio.wait_for(environment.start(force_build=False), timeout_s)
                sandbox = HarborSandbox(self, image, environment, limits, environment.session_id)
            except BaseException:
                await stop(environment)
                raise
        except TimeoutError:
            self._slots.release()
            raise SandboxError(f"{self.config.harbor.environment} did not start within {timeout_s:g} s") from None
        except Exception as error:
            self._slots.release()
            raise SandboxError(f"{self.config.harbor.environment} did not start: {_first_line(error)}") from error
        except BaseException:
            self._slots.release()
            raise
        self._alive.add(sandbox)
        return sandbox

    def _environment(
        self, folder: str, image: Image, limits: Limits, network: Network, build_s: float = START_S
    ) -> Any:
        """A provider's environment that is not started. Raises what the provider does for what it cannot enforce."""
        from harbor.models.task.config import (  # pyright: ignore[reportMissingImports]
            EnvironmentConfig,
            NetworkMode,
            NetworkPolicy,
        )
        from harbor.models.trial.paths import TrialPaths  # pyright: ignore[reportMissingImports]

        declared = self.provider.resource_capabilities()
        fractional = declared is not None and declared.fractional_cpus
        mode = NetworkMode.NO_NETWORK if network == "none" else NetworkMode.PUBLIC
        session = f"{self.name}-{next(self._numbers)}"
        paths = TrialPaths(Path(self._folder.name, "trials", session))
        paths.mkdir()
        config = EnvironmentConfig(
            build_timeout_sec=build_s,
            cpus=limits.cpus if fractional else math.ceil(limits.cpus),
            memory_mb=limits.memory_mb,
            storage_mb=limits.disk_mb,
            network_mode=mode,
            workdir=image.workdir,
        )
        return self.provider(
            environment_dir=Path(folder),
            environment_name="rsi",
            session_id=session,
            trial_paths=paths,
            task_env_config=config,
            logger=logging.getLogger(__name__),
            network_policy=NetworkPolicy(network_mode=mode),
            auto_mounts=[],
            **self.options,
        )

    def forget(self, sandbox: HarborSandbox) -> None:
        if sandbox in self._alive:
            self._alive.discard(sandbox)
            self._slots.release()

    async def close(self) -> None:
        self._closed = True
        for task in self._builds.values():
            task.cancel()
        await asyncio.gather(*self._builds.values(), return_exceptions=True)
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._alive)))
        with contextlib.suppress(OSError):
            self._folder.cleanup()


def _provider(name: str) -> Any:
    """The class of a provider. Raises SandboxError where harbor is missing, ValueError for an unknown name."""
    try:
        from harbor.environments.factory import EnvironmentFactory  # pyright: ignore[reportMissingImports]
        from harbor.models.environment_type import EnvironmentType  # pyright: ignore[reportMissingImports]
    except (ImportError, SyntaxError) as error:
        raise SandboxError(f"{MISSING} ({_first_line(error)})") from error
    if ":" in name:
        return EnvironmentFactory.get_environment_class(None, name)
    try:
        kind = EnvironmentType(name)
    except ValueError:
        known = ", ".join(sorted(EnvironmentFactory.registered_names()))
        raise ValueError(f"sandbox.harbor.environment={name!r}: harbor has {known}; or write module:Class") from None
    return EnvironmentFactory.get_environment_class(kind)


def _option(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _copy_lines(folder: Path, number: int, step: Step) -> list[str]:
    """One COPY for each directory that gets files, which is written beside the Dockerfile."""
    by_folder: dict[str, dict[str, bytes]] = {}
    for path, content in (step.copy or {}).items():
        if not path.startswith("/") or posixpath.normpath(path) != path or path == "/":
            raise BuildError(f"COPY to {path!r}: give a normalised absolute path of a file")
        by_folder.setdefault(posixpath.dirname(path), {})[posixpath.basename(path)] = content
    lines = []
    for index, (target, files) in enumerate(sorted(by_folder.items())):
        source = folder / f"copy-{number}-{index}"
        source.mkdir()
        for name, content in files.items():
            (source / name).write_bytes(content)
            (source / name).chmod(tar.default_mode(content))
        words = [f"{source.name}/", target.rstrip("/") + "/"]
        lines.append(f"COPY {json.dumps(words)}")
    return lines


def _run_line(spec: ImageSpec, command: str) -> str:
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in spec.env)
    return f"RUN {json.dumps(['bash', '-c', exports + command])}"
