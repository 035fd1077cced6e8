"""The `docker` backend: images and containers of a Docker engine (or podman behind its socket), chosen by DOCKER_HOST.

The SDK's blocking calls run in threads, what streams on the event loop (`docker_wire`). Departs from the `namespace`
backend in what an engine cannot enforce (see `probe`), and in that a root inside is the host's root without most of its
capabilities. Containers carry a label with their host process, and `sweep` removes those of dead ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import json
import os
import posixpath
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, urlencode

from rsi.sandbox import (
    BASE,
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
    SandboxError,
    cgroups,
    check_enforced,
    docker_images,
    docker_seccomp,
    docker_wire,
    host,
    keys,
    rootfs,
    tar,
)
from rsi.sandbox.docker_container import KEEPER, DockerSandbox

REQUEST_S = 120.0
SHM_MB = 16
NUM_THREADS = 16

# What apt, useradd, su and sudo need; as the namespace backend leaves it.
CAPABILITIES = (
    "CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE SYS_CHROOT"  # no MKNOD, no NET_RAW
).split()

LIMITS = Limits()
BUILD_LIMITS = Limits(cpus=2.0, memory_mb=2048, pids=512, disk_mb=1024, inodes=131072)
NO_QUOTA = (
    "the engine's storage has no quota: put its data root on xfs mounted with pquota, or use its btrfs driver; "
    "only the size of one file is bounded"
)
NO_INODES = "an engine bounds no number of files; with a btrfs data root they count as disk"

_backends = itertools.count()


class DockerBackend:
    """Images and containers of the engine at DOCKER_HOST. Belongs to one event loop; the SDK runs in threads."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.mark = _host_mark()
        self.name = f"{self.mark}-{os.getpid()}-{host.start_time(os.getpid())}-{next(_backends)}"
        self.cache = os.path.join(os.path.abspath(host.cache_dir(config)), f"sandbox-{os.geteuid()}")
        self.api: Any = None
        self.address = docker_wire.Address()
        self.version = ""
        self.security: list[str] = []
        """Security options of every container."""
        self.base = ""
        """Image under every ImageSpec, by id; known once something was built or created."""
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="docker")
        self._numbers = itertools.count()
        self._alive: dict[str, DockerSandbox] = {}
        self._users: dict[str, str] = {}
        self._builds: dict[str, asyncio.Task[Image]] = {}
        self._slots = asyncio.Semaphore(config.max_alive)
        self._starting = asyncio.Lock()
        self._events: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._probe: asyncio.Task[Capabilities] | None = None
        self._has_quota: bool | None = None
        self._closed = False

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """A request of the SDK, in a thread; its errors as ours."""
        import docker.errors
        import requests

        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, functools.partial(function, *arguments, **named)
            )
        except docker.errors.APIError as error:
            status = error.response.status_code if error.response is not None else 500
            raise docker_wire.EngineError(status, str(error.explanation or error)) from error
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            raise SandboxError(f"the Docker engine does not answer: {error}") from error

    # -- start and end

    async def _start(self) -> None:
        first = self.api is None
        await self._connect()
        if first:
            await self.sweep()
        async with self._starting:
            if self._events is None or self._events.done():
                self._events = asyncio.get_running_loop().create_task(self._watch(await self._open_events()))
            if not self.base:
                self.base = await self._find_base()

    async def _connect(self) -> None:
        if self._closed:
            raise SandboxError("this sandbox backend is closed; build another")
        async with self._starting:
            if self.api is None:
                self.address = docker_wire.parse_address(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock")
                api = await asyncio.get_running_loop().run_in_executor(self._pool, _connect)
                self.security = _security_options(await self.call(api.version))
                self.version, self.api = api.api_version, api

    async def _open_events(self) -> asyncio.StreamReader:
        filters = {"event": ["oom", "die"], "label": [f"rsi.sandbox={self.name}"]}
        query = urlencode({"filters": json.dumps(filters)})
        reader, self._events_writer = await docker_wire.request(self.address, f"GET /v{self.version}/events?{query}")
        return reader

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        """Out-of-memory and deaths, as the engine saw them: nothing inside can forge or hide them."""
        with contextlib.suppress(OSError, ValueError):
            async for event in docker_wire.json_lines(reader):
                actor = event.get("Actor")
                attributes = actor.get("Attributes", {}) if isinstance(actor, dict) else {}
                sandbox = self._alive.get(attributes.get("name", ""))
                if sandbox:
                    sandbox.on_event(str(event.get("Action")))

    async def sweep(self) -> list[str]:
        """Remove what hosts that were killed left: their containers and snapshots. The names of those containers."""
        await self._connect()
        containers = await self.call(self.api.containers, all=True, filters={"label": "rsi.sandbox"})
        dead = [found for found in containers if self._is_orphan(found["Labels"]["rsi.sandbox"], found["State"])]
        for found in dead:
            await self.remove(found["Id"])
        for image in await self.call(self.api.images, filters={"label": "rsi.snapshot"}):
            if self._is_orphan(image["Labels"]["rsi.snapshot"], "running"):
                await self._remove_image(image["Id"])
        return [found["Names"][0].lstrip("/") for found in dead]

    def _is_orphan(self, owner: str, state: str) -> bool:
        """Of a dead host on this machine, or of any machine if it has ended (a sandbox never starts again)."""
        mark, _, rest = owner.partition("-")
        pid, _, rest = rest.partition("-")
        started = rest.partition("-")[0]
        if not pid.isdigit():
            return False
        if mark != self.mark:
            return state in ("exited", "dead")
        return host.start_time(int(pid)) != started

    async def remove(self, container: str) -> None:
        """Until it is gone, 20 s at most. Never raises: what stays is found by the next sweep."""
        pause = 0.02
        while pause < 5.0:
            try:
                await self.call(self.api.remove_container, container, force=True, v=True)
            except docker_wire.EngineError as error:
                if error.status == 404:
                    return
            except SandboxError:
                pass
            else:
                return
            await asyncio.sleep(pause)  # one that ended by itself is being removed by the engine: 409
            pause *= 1.5

    async def _remove_image(self, image: str) -> None:
        with contextlib.suppress(SandboxError):
            await self.call(self.api.remove_image, image, force=True)

    def forget(self, sandbox: DockerSandbox) -> None:
        if self._alive.pop(sandbox.name, None):
            self._slots.release()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for task in [*self._builds.values(), *([self._probe] if self._probe else [])]:
            task.cancel()
        await asyncio.gather(*self._builds.values(), *self._tasks, return_exceptions=True)
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._alive.values())))
        if self._events:
            self._events_writer.close()
            self._events.cancel()
        if self.api is not None:
            with contextlib.suppress(SandboxError):
                for image in await self.call(self.api.images, filters={"label": f"rsi.snapshot={self.name}"}):
                    await self._remove_image(image["Id"])
            self.api.close()
        self._pool.shutdown(wait=False)

    # -- sandboxes

    def user_of(self, image: Image) -> str:
        """The USER of its Dockerfile; "" is root."""
        return self._users.get(image.layers[-1] if image.layers else self.base, "")

    async def create(self, image: Image, limits: Limits = LIMITS, network: Network = "none") -> DockerSandbox:
        check_enforced(await self.probe(), self.config, network)
        return await self._create(image, limits, network)

    async def _create(self, image: Image, limits: Limits, network: str) -> DockerSandbox:
        await self._start()
        await self._slots.acquire()
        sandbox = DockerSandbox(self, image, limits, f"rsi-{self.name}-{next(self._numbers)}")
        self._alive[sandbox.name] = sandbox
        launching = asyncio.get_running_loop().create_task(self._launch(sandbox, network))
        try:
            await asyncio.shield(launching)
            return sandbox
        except BaseException as error:
            closing = asyncio.get_running_loop().create_task(self._abandon(sandbox, launching))
            self._tasks.add(closing)
            closing.add_done_callback(self._tasks.discard)
            if not isinstance(error, asyncio.CancelledError):
                await asyncio.shield(closing)
            raise

    async def _abandon(self, sandbox: DockerSandbox, launching: asyncio.Task[None]) -> None:
        """A thread cannot be cancelled: what it is about to start is removed once it has."""
        await asyncio.wait([launching])
        if not launching.cancelled():
            launching.exception()
        await sandbox.close()

    async def _launch(self, sandbox: DockerSandbox, network: str) -> None:
        image, limits = sandbox.image, sandbox.limits
        tag = image.layers[-1] if image.layers else self.base
        try:
            if tag not in self._users:
                found = await self.call(self.api.inspect_image, tag)
                _refuse_volumes(found["Config"].get("Volumes"))
                self._users[tag] = found["Config"].get("User") or ""
            created = await self._create_container(sandbox, tag, network, limits)
            await self.call(self.api.start, created["Id"])
        except docker_wire.EngineError as error:
            if error.status == 404:
                raise SandboxError(
                    f"the engine has no image {tag}; it was removed after its build, build it again"
                ) from error
            raise SandboxError(f"sandbox {sandbox.name} cannot start: {error}") from error
        sandbox.begin(created["Id"])

    async def _create_container(self, sandbox: DockerSandbox, tag: str, network: str, limits: Limits) -> Any:
        """With a quota on its disk where the engine's storage has one; that it has none is learnt from its refusal."""
        if self._has_quota is not False:
            try:
                created = await self._ask_container(sandbox, tag, network, limits, {"size": f"{limits.disk_mb}m"})
                self._has_quota = True
                return created
            except docker_wire.EngineError as error:
                if "storage" not in str(error).lower() and "quota" not in str(error).lower():
                    raise
                self._has_quota = False
        return await self._ask_container(sandbox, tag, network, limits, None)

    async def _ask_container(
        self, sandbox: DockerSandbox, tag: str, network: str, limits: Limits, storage: dict[str, str] | None
    ) -> Any:
        memory = f"{limits.memory_mb + SHM_MB}m"
        ulimits = [
            {"Name": "fsize", "Soft": limits.disk_mb << 20, "Hard": limits.disk_mb << 20},
            {
                "Name": "nofile",
                "Soft": 1024,
                "Hard": 4096,
            },  # podman gives none that it may set without CAP_SYS_RESOURCE
        ]
        host_config = self.api.create_host_config(
            network_mode=network,
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=limits.pids + 1,
            nano_cpus=int(limits.cpus * 1e9),
            cap_drop=["ALL"],
            cap_add=CAPABILITIES,
            security_opt=self.security,
            shm_size=f"{SHM_MB}m",
            ulimits=ulimits,
            storage_opt=storage,
            auto_remove=True,
            log_config={"Type": "none", "Config": {}},
        )
        return await self.call(
            self.api.create_container,
            tag,
            name=sandbox.name,
            hostname="sandbox",
            entrypoint=["/bin/bash", "--norc", "--noprofile", "-c", KEEPER],
            command=[],
            stdin_open=True,
            user="0",
            working_dir="/",
            labels={"rsi.sandbox": self.name},
            healthcheck={"test": ["NONE"]},
            host_config=host_config,
        )

    # -- images

    async def has_image(self, name: str) -> bool:
        try:
            await self.call(self.api.inspect_image, name)
        except docker_wire.EngineError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _find_base(self) -> str:
        """The id of the base: the configured one, or ours, imported on first use."""
        if name := self.config.docker.base:
            if not await self.has_image(name):
                raise SandboxError(
                    f"sandbox.docker.base={name!r}: the engine has no such image; run `docker pull {name}`, or leave "
                    "it empty for a base made from the host's packages"
                )
            return (await self.call(self.api.inspect_image, name))["Id"]
        arguments = (self.config.rootfs, self.cache, host.is_privileged())
        folder = await asyncio.to_thread(rootfs.prepare_base, *arguments)
        # A base of the cache is named by its content, one of the user's own by its place and time.
        cached = folder.startswith(f"{self.cache}/bases/")
        content = os.path.basename(folder) if cached else f"{folder} {os.stat(folder).st_mtime_ns}"
        tag = f"rsi/base:{hashlib.sha256(content.encode()).hexdigest()[:24]}"
        if not await self.has_image(tag):
            await self.call(self._import_base, folder, tag)
        return (await self.call(self.api.inspect_image, tag))["Id"]

    def _import_base(self, folder: str, tag: str) -> None:
        with contextlib.ExitStack() as stack:
            try:
                os.makedirs(self.cache, exist_ok=True)
                file = stack.enter_context(tempfile.NamedTemporaryFile(dir=self.cache, suffix=".tar"))
                docker_images.write_base(folder, file.name)
            except OSError as error:
                raise host.fault(error, self.cache) from error
            answer = self.api.import_image_from_file(file.name)
        # podman drops a tag given to the import.
        self.api.tag(json.loads(answer.strip().splitlines()[-1])["status"], *tag.split(":"))

    async def build(self, spec: ImageSpec, timeout_s: float = 60.0) -> Image:
        """See the Protocol. Equal specs are built once, also when asked for at the same time."""
        _refuse_what_differs(spec)
        await self._start()
        key = keys.digest(self._root_key(spec), *(keys.step_key(step) for step in spec.steps))
        return await self._build_once(key, lambda: self._build(key, spec, timeout_s))

    def _root_key(self, spec: ImageSpec) -> str:
        bundle = self.config.docker.ca_bundle
        trusted = hashlib.sha256(docker_images.read_ca_bundle(bundle)).hexdigest() if bundle else ""
        return keys.digest("1", self.base, json.dumps([spec.env, spec.workdir]), trusted)

    async def _build_once(self, key: str, work: Callable[[], Coroutine[Any, Any, Image]]) -> Image:
        task = self._builds.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(work())
            self._builds[key] = task
        try:
            return await asyncio.shield(task)
        except (BuildError, SandboxError):
            self._builds.pop(key, None)  # the next call tries again
            raise

    async def _build(self, key: str, spec: ImageSpec, timeout_s: float) -> Image:
        """A layer after every RUN, holding what was copied since the last one too, and one for what is left."""
        below, digest = self.base, self._root_key(spec)
        copies: dict[str, bytes] = {}
        for step in spec.steps:
            digest = keys.digest(digest, keys.step_key(step))
            copies |= _checked(step.copy or {})
            if step.run:
                below = await self._layer(Image(digest, (below,), spec.env, spec.workdir), copies, step.run, timeout_s)
                copies = {}
        if copies or below == self.base:
            below = await self._layer(Image(digest, (below,), spec.env, spec.workdir), copies, "", timeout_s)
        return Image(key, (below,), spec.env, spec.workdir)

    async def _layer(self, below: Image, copies: Mapping[str, bytes], command: str, timeout_s: float) -> str:
        """Copy, run, keep: the tag of the image. below.id is the digest of the layer to come."""
        tag = f"rsi/layer:{below.id}"
        if await self.has_image(tag):
            return tag
        limits = Limits(**{**vars(BUILD_LIMITS), "wall_s": timeout_s + 60})
        sandbox = await self._create(below, limits, self.config.docker.build_network)
        try:
            await sandbox.put(below.workdir, {})
            trusted: dict[str, str] = {}
            if bundle := self.config.docker.ca_bundle:
                await sandbox.put("/", {docker_images.CA_TARGET[1:]: docker_images.read_ca_bundle(bundle)})
                trusted = dict.fromkeys(docker_images.CA_VARIABLES, docker_images.CA_TARGET)
            if copies:
                await sandbox.put("/", {path[1:]: content for path, content in copies.items()})
            if command:
                result = await sandbox.exec(command, timeout_s=timeout_s, env=trusted, max_output=4000)
                _check_step(command, result, timeout_s)
                await sandbox.kill_all()
            await sandbox.commit(tag, {})
        finally:
            await sandbox.close()
        return tag

    async def build_dockerfile(
        self,
        files: Mapping[str, bytes | Entry],
        dockerfile: str = "Dockerfile",
        timeout_s: float = 600.0,
        network: str = "",
    ) -> Image:
        """Build a Dockerfile and its context (`files`, by relative path) with the engine's own builder.

        FROM is mapped by sandbox.docker.images; nothing is pulled. network: none, bridge or host; empty: the config's.
        Raises BuildError for what the author wrote, SandboxError for our faults.
        """
        await self._start()
        content = files.get(dockerfile)
        content = content.content if isinstance(content, Entry) else content
        if content is None:
            raise BuildError(
                f"{dockerfile} is missing among {', '.join(sorted(files)[:10]) or 'no files'}; write FROM NAME"
            )
        text, bundle = content.decode(errors="replace"), self.config.docker.ca_bundle
        mapped = docker_images.map_bases(text, self.config.docker.images, bool(bundle))
        for asked, name in mapped.bases:
            if not await self.has_image(name):
                raise BuildError(docker_images.missing_base(asked, name))
        context: dict[str, bytes | Entry] = {**files, dockerfile: mapped.text.encode()}
        if bundle:
            context[docker_images.CA_FILE] = docker_images.read_ca_bundle(bundle)
            if isinstance(ignored := context.get(".dockerignore"), bytes):
                context[".dockerignore"] = ignored + f"\n!{docker_images.CA_FILE}\n".encode()
        packed = tar.pack(context)
        bases = [(await self.call(self.api.inspect_image, name))["Id"] for _, name in mapped.bases]
        network = network or self.config.docker.build_network
        key = keys.digest(hashlib.sha256(packed).hexdigest(), dockerfile, network, *bases)
        return await self._build_once(key, lambda: self._build_context(key, packed, dockerfile, network, timeout_s))

    async def _build_context(self, key: str, packed: bytes, dockerfile: str, network: str, timeout_s: float) -> Image:
        tag = f"rsi/task:{key}"
        if not await self.has_image(tag):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._build_by_engine(tag, packed, dockerfile, network)
            except TimeoutError:
                raise BuildError(f"{dockerfile}: the build took more than {timeout_s:g} s") from None
        found = await self.call(self.api.inspect_image, tag)
        _refuse_volumes(found["Config"].get("Volumes"))
        env = tuple(
            (name, value) for name, _, value in (item.partition("=") for item in found["Config"].get("Env") or [])
        )
        return Image(key, (tag,), env, found["Config"].get("WorkingDir") or "/")

    async def _build_by_engine(self, tag: str, packed: bytes, dockerfile: str, network: str) -> None:
        """Hanging up, at our timeout or cancelled, ends the build."""
        query = {
            "t": tag,
            "dockerfile": dockerfile,
            "networkmode": network,
            "rm": "1",
            "forcerm": "1",
            "memory": str(BUILD_LIMITS.memory_mb << 20),
            "memswap": str(BUILD_LIMITS.memory_mb << 20),
        }
        line = f"POST /v{self.version}/build?{urlencode(query, quote_via=quote)}"
        try:
            reader, writer = await docker_wire.request(self.address, line, packed, "application/x-tar")
        except docker_wire.EngineError as error:
            if error.status == 400:  # a Dockerfile that cannot be parsed
                raise BuildError(f"{dockerfile}: {error}") from error
            raise
        said = ""
        try:
            async for message in docker_wire.json_lines(reader):
                said = (said + str(message.get("stream", "")))[-4000:]
                if "error" in message:
                    raise BuildError(f"{dockerfile}: {message['error']}\n{said.strip()[-2000:]}")
        finally:
            writer.close()
        if not await self.has_image(tag):
            raise SandboxError(f"the engine hung up in the middle of a build: {said.strip()[-500:]}")

    # -- what is enforced

    async def probe(self) -> Capabilities:
        """Tries every limit in a throwaway sandbox; asked once per backend."""
        await self._start()
        if self._probe is None:
            self._probe = asyncio.get_running_loop().create_task(self._try_limits())
        try:
            return await asyncio.shield(self._probe)
        except SandboxError:
            self._probe = None
            raise

    async def _try_limits(self) -> Capabilities:
        limits = Limits(cpus=0.5, memory_mb=64, pids=24, disk_mb=8, inodes=600, wall_s=600)
        async with self._throwaway(limits) as sandbox:
            missing = await _try_in(sandbox, limits)
        return Capabilities(frozenset(ENFORCEABLE) - missing.keys(), missing)

    @asynccontextmanager
    async def _throwaway(self, limits: Limits) -> AsyncIterator[DockerSandbox]:
        sandbox = await self._create(Image("base", (), (), "/"), limits, "none")
        try:
            yield sandbox
        finally:
            await sandbox.close()


async def _try_in(sandbox: DockerSandbox, limits: Limits) -> dict[str, str]:
    """limit -> what went through although it should not, and the mend, for those that do not hold."""
    held = "is the controller enabled on the engine's host?"
    found = {}
    over = 3 * (limits.memory_mb + SHM_MB)
    if (await sandbox.exec(f"head -c {over}m /dev/zero | tail -c {over}m | wc -c")).stdout == b"%d\n" % (over << 20):
        found["memory"] = f"{over} MiB went through a limit of {limits.memory_mb}; {held}"
    # sh and not bash, which tries again for seconds.
    forks = f"i=0; while [ $i -lt {limits.pids + 8} ]; do sleep 20 & i=$((i+1)); done; echo all"
    if (await sandbox.exec(["sh", "-c", forks])).stdout == b"all\n":
        found["pids"] = f"{limits.pids + 8} processes went through a limit of {limits.pids}; {held}"
    await sandbox.kill_all()
    quota = await sandbox.exec("cat /sys/fs/cgroup/cpu.max || cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    if quota.stdout.split()[:1] != [b"%d" % int(limits.cpus * 100_000)]:
        found["cpu"] = f"the quota that was asked for does not read back; {held}"
    # Several files, for one is bounded by RLIMIT_FSIZE anyway; sync, for btrfs counts late.
    fill = "for i in 1 2 3 4; do head -c 6m /dev/zero >/probe-$i && sync || exit 9; done"
    if (await sandbox.exec(fill, timeout_s=60)).exit_code == 0:
        found["disk"] = f"24 MiB went on a disk of {limits.disk_mb}; {NO_QUOTA}"
    many = "rm -f /probe-*; mkdir /p && for ((i = 0; i < 700; i++)); do : >/p/$i || exit 9; done"
    if (await sandbox.exec(many, timeout_s=60)).exit_code == 0:
        found["inodes"] = f"700 files went on {limits.inodes} inodes; {NO_INODES}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = await sandbox.exec(f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}")
    if reach.exit_code == 0:
        found["network"] = "a server of the host answers; the engine ignores network_mode=none"
    return found


def _connect() -> Any:
    """The SDK's client for DOCKER_HOST. Raises SandboxError, with the mend, for a missing package or engine."""
    try:
        import docker
        import docker.errors
    except ImportError as error:
        raise SandboxError("sandbox.backend=docker needs the Docker SDK: pip install 'rsi[docker]'") from error
    where = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock (DOCKER_HOST is not set)"
    try:
        return docker.APIClient(
            base_url=os.environ.get("DOCKER_HOST") or None,
            version="auto",
            timeout=int(REQUEST_S),
            max_pool_size=NUM_THREADS,
        )
    except docker.errors.DockerException as error:
        raise SandboxError(
            f"no Docker engine answers at {where}: start one (systemctl start docker, or as root "
            'eval "$(scripts/docker_engine.sh start)"), set DOCKER_HOST to one that runs (podman system service too), '
            f"and be allowed to use its socket; {error}"
        ) from error


def _security_options(version: Mapping[str, Any]) -> list[str]:
    """version: the engine's answer to /version. Podman takes a profile by its path on the engine's side only, so its
    own default stays (which allows no io_uring)."""
    podman = any("podman" in component.get("Name", "").lower() for component in version.get("Components") or ())
    return ["no-new-privileges", *([] if podman else [f"seccomp={docker_seccomp.profile()}"])]


def _host_mark() -> str:
    """Of this machine since its boot, and of our pid namespace: only there a pid tells whether a host is alive."""
    boot = cgroups.read_text("/proc/sys/kernel/random/boot_id").strip()
    return hashlib.sha256(f"{boot} {os.stat('/proc/self/ns/pid').st_ino}".encode()).hexdigest()[:8]


def _refuse_volumes(volumes: Mapping[str, object] | None) -> None:
    if volumes:
        raise BuildError(
            f"the image declares VOLUME {', '.join(volumes)}, a disk without limit beside the sandbox's; remove that "
            "line (or flatten the image: docker export, then docker import)"
        )


def _refuse_what_differs(spec: ImageSpec) -> None:
    """An ImageSpec has the backend's one base and runs as root; what asks for more is not built as if it had not."""
    if spec.base != BASE:
        raise BuildError(f"FROM {spec.base}: the docker backend builds specs on {BASE} alone; use build_dockerfile")
    if user := spec.user or next((step.user for step in spec.steps if step.user), ""):
        raise BuildError(f"USER {user}: the docker backend runs specs as root alone; use build_dockerfile")


def _checked(copy: Mapping[str, bytes]) -> Mapping[str, bytes]:
    for path in copy:
        if not path.startswith("/") or posixpath.normpath(path) != path or path == "/":
            raise BuildError(f"COPY to {path!r}: give a normalised absolute path of a file")
    return copy


def _check_step(command: str, result: ExecResult, timeout_s: float) -> None:
    if result.exit_code != 0:
        tail = (result.stdout + result.stderr).decode(errors="replace").strip()[-2000:]
        ended = f"took more than {timeout_s:g} s" if result.timed_out else f"ended with {result.exit_code}"
        raise BuildError(f"RUN {command[:200]}: {ended}\n{tail}")
