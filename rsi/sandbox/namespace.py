"""The embedded `namespace` backend, host side: Linux namespaces, overlayfs and cgroups; no daemon, no image registry.

One launcher process (`zygote.py`) per backend; one socket per sandbox, read by the event loop, which hands replies to
commands by id. No threads: 64 sandboxes with a thread per pipe cost more than the commands they run.
Departs from a container runtime in that images are a base directory plus cached layers, and small files of an image
are no layer at all: PID 1 writes them when the sandbox starts, in less than 1 ms, and nothing of them lies on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import posixpath
import shutil
import signal
import socket
import stat
import subprocess
import tarfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
    SandboxDied,
    SandboxError,
    cgroups,
    check_enforced,
    host,
    keys,
    rootfs,
    streams,
    tar,
    zygote,
)

INLINE_COPY_BYTES = 1 << 20
"""Copy steps up to this size are written at every create (0.1 ms per file); larger ones become a layer on disk."""
GRACE_S = 0.05
"""How long the streams of an ended command may stay open before they count as held by a background process."""
DEATH_S = 5.0
"""A kill that is not answered by then means that the sandbox is broken."""

_backends = itertools.count()


# ---- one sandbox


@dataclass
class Running:
    """A command that PID 1 has been asked to run and has not answered for. The one mutable record here: the reader of
    replies, the timer and the caller share it."""

    number: int
    reply: asyncio.Future[Mapping[str, object]]
    group: str
    timed_out: bool = False


class NamespaceSandbox:
    """A live sandbox; made by `NamespaceBackend.create`."""

    def __init__(
        self,
        backend: NamespaceBackend,
        image: Image,
        limits: Limits,
        groups: cgroups.Groups,
        sock: socket.socket,
        name: str,
    ) -> None:
        self.image, self.limits, self.name = image, limits, name
        self._backend, self._groups, self._sock = backend, groups, sock
        self._loop = asyncio.get_running_loop()
        self._environment = host.ENVIRONMENT | dict(image.env)
        self._numbers = itertools.count(1)
        self._running: dict[int, Running] = {}
        self._captures: set[streams.Capture] = set()
        self._unsent: deque[tuple[bytes, list[int], list[int]]] = deque()
        self._dead = ""
        self.outer_pid = 0
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._closing: asyncio.Task[None] | None = None
        self._life: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._on_readable)

    async def wait_ready(self) -> None:
        """Until PID 1 serves; the sandbox's life begins here. Raises SandboxError with the mend."""
        await self._ready
        self._life = self._loop.call_later(self.limits.wall_s, self._end_of_life)

    # -- messages

    def _on_readable(self) -> None:
        while True:
            try:
                raw = self._sock.recv(streams.READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raw, self._dead = b"", self._dead or f"its socket broke: {error}"
            if not raw:
                self._loop.remove_reader(self._sock.fileno())
                self.die("its PID 1 ended (killed from outside, or the launcher ended)")
                if not self._gone.done():
                    self._gone.set_result(None)
                return
            self._dispatch(json.loads(raw))

    def _dispatch(self, message: Mapping[str, object]) -> None:
        if "ready" in message:
            self.outer_pid = int(str(message["ready"]))
            if not self._ready.done():
                self._ready.set_result(None)
            return
        number = message.get("id")
        if not isinstance(number, int):  # an exception of PID 1 or of its construction
            self.die(host.explain(str(message.get("error")), message.get("errno")))
            return
        running = self._running.pop(number, None)
        if running and not running.reply.done():
            running.reply.set_result(message)

    def die(self, reason: str) -> None:
        """Fail whoever waits; the reason of the first death stays."""
        self._dead = self._dead or reason
        error = SandboxDied(f"sandbox {self.name} is dead: {self._dead}")
        waiting = [running.reply for running in self._running.values()] + [self._ready]
        self._running.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever awaited it may have been cancelled

    def _end_of_life(self) -> None:
        self.die(f"it lived for its wall_s={self.limits.wall_s:g}; give it more if that was too short")
        self._kill_all_now()

    def _check_alive(self) -> None:
        if self._dead:
            raise SandboxDied(f"sandbox {self.name} is dead: {self._dead}")

    def _send(self, message: Mapping[str, object], fds: list[int], owned: list[int]) -> None:
        """Send now or when the socket has room, in order; `owned` descriptors are closed once they have gone."""
        raw, all_fds, extra = zygote.encode(dict(message), fds)
        self._unsent.append((raw, all_fds, owned if extra is None else [*owned, extra]))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._unsent:
            raw, fds, owned = self._unsent[0]
            try:
                zygote.send_fds(self._sock, raw, fds)
            except (BlockingIOError, OSError) as error:
                if isinstance(error, BlockingIOError):
                    self._loop.add_writer(self._sock.fileno(), self._flush)
                    return
                self.die(f"its socket broke: {error}")
            for fd in owned:
                os.close(fd)
            self._unsent.popleft()
        self._loop.remove_writer(self._sock.fileno())

    def _start(self, message: Mapping[str, object], fds: list[int], owned: list[int]) -> Running:
        """Ask PID 1 for a command; fds: stdin, stdout, stderr and perhaps a script."""
        number = next(self._numbers)
        group, joined, extra = "", [], []
        if fds:
            try:
                group, joined, extra = self._groups.open_command(number)
            except OSError as error:
                for fd in owned:
                    os.close(fd)
                raise SandboxError(f"cannot make a control group for a command: {error}") from error
        running = Running(number, self._loop.create_future(), group)
        self._running[number] = running
        self._send({**message, "id": number}, [*fds, *joined], [*owned, *extra])
        return running

    async def _ask(self, message: Mapping[str, object]) -> None:
        self._check_alive()
        running = self._start(message, [], [])
        timer = self._loop.call_later(DEATH_S, self._give_up, running)
        try:
            await running.reply
        finally:
            timer.cancel()

    # -- time

    def _on_timeout(self, running: Running) -> None:
        running.timed_out = True
        self._kill_command(running, self._loop.time() + DEATH_S)

    def _kill_command(self, running: Running, deadline: float) -> None:
        """Kill until PID 1 answers for it: a first kill may come before the command has joined its group."""
        if self._dead or running.number not in self._running:
            return
        if self._loop.time() > deadline:
            self._give_up(running)
            return
        try:
            if "tree" in self._backend.weaken:
                self._send({"op": "killleaders", "id": 0}, [], [])
            elif not self._groups.kill_command(running.group):
                # Without groups there is no finer knife: older jobs die too.
                self._send({"op": "killall", "id": 0}, [], [])
        except OSError as error:
            self.die(f"a command could not be killed: {error}")
            return
        self._loop.call_later(0.05, self._kill_command, running, deadline)

    def _give_up(self, running: Running) -> None:
        if running.number in self._running:
            self.die(f"it did not answer within {DEATH_S:g} s")
            self._kill_all_now()

    async def _run(
        self,
        message: Mapping[str, object],
        *,
        stdin: bytes,
        script: bytes | None,
        captures: tuple[streams.Capture, streams.Capture],
        timeout_s: float,
        grace_s: float,
    ) -> tuple[int, bool]:
        """(exit code, timed out) of one command, its streams drained. Cancelled, it takes its command with it."""
        owned = [capture.write_fd for capture in captures]
        source = self._backend.null
        if stdin:
            source = streams.memfd(stdin, "stdin")
            owned.append(source)
        fds = [source, captures[0].write_fd, captures[1].write_fd]
        if script is not None:
            fds.append(streams.memfd(script, "script"))
            owned.append(fds[-1])
        self._captures.update(captures)
        running = self._start(message, fds, owned)
        timer = self._loop.call_later(timeout_s, self._on_timeout, running)
        try:
            reply = await running.reply
        except asyncio.CancelledError:
            self._kill_command(running, self._loop.time() + DEATH_S)
            for capture in captures:
                capture.close()
            raise
        finally:
            timer.cancel()
            self._captures = {capture for capture in self._captures if capture.is_open}
        if "error" in reply:
            raise SandboxError(f"sandbox {self.name} cannot start a command: {reply['error']}")
        self._after_exit(running, int(str(reply.get("left", -1))))
        await self._end_streams(captures, grace_s)
        return int(str(reply["rc"])), running.timed_out

    def _after_exit(self, running: Running, num_left: int) -> None:
        """No command leaves a fork bomb to the next."""
        if "left" in self._backend.weaken:
            return
        try:
            self._groups.end_command(running.group)
        except OSError as error:
            self.die(f"the control group of a command broke: {error}")
        if num_left > cgroups.MAX_LEFT and not self._dead:
            self._send({"op": "killall", "id": 0}, [], [])

    async def _end_streams(self, captures: tuple[streams.Capture, streams.Capture], grace_s: float) -> None:
        # What the command wrote lies in the pipe when it has exited; only others may still hold the streams.
        for capture in captures:
            capture.drain()
        late = [capture.ended for capture in captures if capture.is_open]
        if late:
            await asyncio.wait(late, timeout=grace_s)
            for capture in captures:
                capture.drain()

    # -- the Protocol

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
        """See the Protocol. Where `cwd` is missing the command starts in `/`. Output beyond `max_output` (both streams
        together) is cut from the middle of a stream, and a line `[N bytes cut]` stands there."""
        self._check_alive()
        started = self._loop.time()
        script = None
        argv = command
        if isinstance(argv, str):
            encoded = argv.encode("utf-8", "surrogateescape")
            argv = ["bash", "-c", argv]
            if len(encoded) > host.MAX_ARGUMENT:
                argv, script = ["bash", "/dev/fd/3"], encoded
        message = {
            "op": "exec",
            "argv": argv,
            "env": self._environment | dict(env or {}),
            "cwd": cwd if cwd is not None else self.image.workdir,
            "user": self.image.user if user is None else "" if user in ("root", "0") else user,
            "script": script is not None,
        }
        out, err = (streams.Capture(self._loop, max_output, max_output) for _ in range(2))
        code, timed_out = await self._run(
            message, stdin=stdin, script=script, captures=(out, err), timeout_s=timeout_s, grace_s=GRACE_S
        )
        stdout, stderr, dropped = streams.cut(out, err, max_output)
        return ExecResult(
            exit_code=None if timed_out else 128 - code if code < 0 else code,
            stdout=stdout,
            stderr=stderr,
            dropped_bytes=dropped,
            timed_out=timed_out,
            oom=self._groups.saw_oom(),
            streams_open=out.is_open or err.is_open,
            duration_s=self._loop.time() - started,
        )

    async def put(self, directory: str, files: Mapping[str, bytes | Entry]) -> None:
        """See the Protocol. A bare bytes value gets mode 0755 where it begins with `#!`, else 0644."""
        self._check_alive()
        message = {"op": "put", "directory": posixpath.join("/", directory)}
        await self._transfer(message, tar.pack(files), 0, f"put {directory}")

    async def get(self, path: str, max_bytes: int = 16 << 20) -> dict[str, Entry]:
        """See the Protocol. A path that is no directory gives one entry under its base name; a missing one gives {}."""
        self._check_alive()
        message = {
            "op": "get",
            "path": posixpath.join("/", path),
            "max_bytes": max_bytes,
            "max_entries": tar.MAX_ENTRIES,
        }
        raw = await self._transfer(message, b"", max_bytes + tar.MAX_ENTRIES * 4 * tarfile.BLOCKSIZE, f"get {path}")
        return tar.parse(raw, max_bytes)

    async def _transfer(self, message: Mapping[str, object], stdin: bytes, max_output: int, what: str) -> bytes:
        out, err = streams.Capture(self._loop, max_output, 0), streams.Capture(self._loop, 2000, 0)
        code, timed_out = await self._run(
            message, stdin=stdin, script=None, captures=(out, err), timeout_s=30.0, grace_s=DEATH_S
        )
        if timed_out or code or out.total > max_output or out.is_open:
            reason = "it took more than 30 s" if timed_out else bytes(err.head).decode(errors="replace").strip()
            raise SandboxError(f"{what} in sandbox {self.name} failed: {reason or f'status {code}, {out.total} bytes'}")
        return bytes(out.head)

    async def snapshot(self) -> Image:
        """Everything is frozen, the upper copied, and thawed; the image lives as long as the backend."""
        self._check_alive()
        target = self._backend.new_snapshot()
        try:
            await self.copy_upper(target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        layers = tuple(layer for layer in self.image.layers if not layer.startswith(COPY)) + (target,)
        return replace(self.image, id=f"snapshot-{os.path.basename(target)}", layers=layers)

    async def copy_upper(self, target: str) -> None:
        """Copy what this sandbox wrote to a directory of the host."""
        frozen = self._groups.freeze(True)
        if not frozen:
            await self._ask({"op": "signal", "signal": signal.SIGSTOP})
        try:
            await self._backend.copy_upper(self.outer_pid, target)
        finally:
            if frozen:
                self._groups.freeze(False)
            else:
                await self._ask({"op": "signal", "signal": signal.SIGCONT})

    async def kill_all(self) -> None:
        await self._ask({"op": "killall"})

    async def count_forks(self, wanted: int) -> int:
        """How many of `wanted` children one command can have at once; `probe` asks."""
        out, err = streams.Capture(self._loop, 100, 0), streams.Capture(self._loop, 1000, 0)
        message = {"op": "forks", "wanted": wanted}
        await self._run(message, stdin=b"", script=None, captures=(out, err), timeout_s=10.0, grace_s=GRACE_S)
        return int(out.head or b"0")

    def read_cpu_quota(self) -> str:
        return cgroups.read_text(self._groups.layout.cpu_file) if self._groups.layout.cpu_file else ""

    def read_cpu_stat(self) -> str:
        """cpu.stat of all that runs here, our supervisor included; "" without cgroup 2."""
        top = self._groups.layout.top
        return cgroups.read_text(f"{top}/cpu.stat") if top else ""

    async def close(self) -> None:
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    def _kill_all_now(self) -> None:
        """PID 1 and all below it, by the group, else by hanging up: PID 1 ends at end of stream."""
        if not self._groups.kill():
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    async def _close(self) -> None:
        if self._life:
            self._life.cancel()
        self.die("it was closed")
        self._kill_all_now()
        if not self._gone.done():
            await asyncio.wait([self._gone], timeout=2.0)
            if not self._gone.done():  # PID 1 is stuck: its parent's death takes it
                self._backend.kill_outer(self.outer_pid)
                await asyncio.wait([self._gone], timeout=2.0)
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        for _, _, owned in self._unsent:
            for fd in owned:
                os.close(fd)
        self._unsent.clear()
        self._sock.close()
        for capture in self._captures:
            capture.close()
        self._captures.clear()
        await self._groups.remove()
        self._backend.forget(self)


# ---- the backend

LIMITS = Limits()
COPY = "copy:"
"""Marks a layer of an Image that is files in memory, written at create; the rest is the hash of their tar."""


class NamespaceBackend:
    """Images from a base directory and cached layers; sandboxes from the launcher. Belongs to one event loop."""

    def __init__(
        self, config: SandboxConfig, cgroup_root: str = cgroups.ROOT, weaken: frozenset[str] = frozenset()
    ) -> None:
        """weaken: defences to switch off in the sandboxes made from now on (zygote.weakened), for the attack suite; an
        argument and no key of the config, so that no recipe can."""
        self.config = config
        self.weaken = weaken
        self.driver = cgroups.find_driver(config.cgroups, cgroup_root)
        self.privileged = host.is_privileged()
        self.name = f"sbx-{os.getpid()}-{host.start_time(os.getpid())}-{next(_backends)}"
        # Where a host path goes into mount options, these two would be separators.
        self.cache = os.path.join(os.path.abspath(host.cache_dir(config)), f"sandbox-{os.geteuid()}")
        if ":" in self.cache or "," in self.cache:
            raise SandboxError(f"sandbox.cache_dir={self.cache!r} may hold neither ':' nor ','; choose another")
        self.null = -1
        self._numbers = itertools.count()
        self._copies: dict[str, bytes] = {}
        self._builds: dict[str, asyncio.Task[Image]] = {}
        self._alive: set[NamespaceSandbox] = set()
        self._slots = asyncio.Semaphore(config.max_alive)
        self._starting = asyncio.Lock()
        self._launcher: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self.base = ""
        """The lowest layer of every sandbox; known once one was built or created."""
        self._run_dir = ""
        self._probe: asyncio.Task[Capabilities] | None = None
        self._closed = False

    # -- start and end

    async def _start(self) -> None:
        if self._closed:
            raise SandboxError("this sandbox backend is closed; build another")
        async with self._starting:
            if not self._run_dir:
                self._run_dir = self._make_run_dir()
            if not self.base:
                arguments = (self.config.rootfs, self.cache, self.privileged)
                self.base = await asyncio.to_thread(rootfs.prepare_base, *arguments)
            if self.null < 0:
                self.null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            if self._launcher and self._launcher[0].poll() is not None:
                self._launcher[1].close()
                self._launcher = None  # it was killed, and all its sandboxes with it; the next ones get a new one
            if not self._launcher:
                self._launcher = host.start_launcher(self._run_dir, "environment" in self.weaken)

    def _make_run_dir(self) -> str:
        """A directory of ours (mount point, launcher log) among those of other hosts; those of dead ones are swept."""
        top = host.runs_dir()
        run_dir = os.path.join(top, self.name)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(top, 0o700)
            if os.lstat(top).st_uid != os.geteuid() or not stat.S_ISDIR(os.lstat(top).st_mode):
                raise SandboxError(f"{top} is not ours; remove it or set TMPDIR to a directory of your own")
            host.sweep(top)
            os.mkdir(run_dir)
            os.mkdir(f"{run_dir}/mnt")
            with open(f"{run_dir}/traces.json", "w") as file:
                traces = {"groups": sorted(set(self.driver.parents.values())), "snapshots": self._snapshots}
                json.dump(traces, file)
        except OSError as error:
            raise host.fault(error, run_dir) from error
        return run_dir

    @property
    def _snapshots(self) -> str:
        return f"{self.cache}/snapshots/{self.name}"

    async def close(self) -> None:
        self._closed = True
        for task in [*self._builds.values(), *([self._probe] if self._probe else [])]:
            task.cancel()
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._alive)))
        if self._launcher:
            process, sock = self._launcher
            sock.close()
            for _ in range(200):
                if process.poll() is not None:
                    break
                await asyncio.sleep(0.005)
            else:
                process.kill()
                process.wait()
            self._launcher = None
        if self.null >= 0:
            os.close(self.null)
            self.null = -1
        if self._run_dir:
            shutil.rmtree(self._run_dir, ignore_errors=True)
            host.remove_tree(self._snapshots)

    # -- the launcher

    def _request(self, message: Mapping[str, object], fds: list[int]) -> None:
        assert self._launcher, "started before anything is asked of it"
        try:
            zygote.send_fds(self._launcher[1], json.dumps(message).encode(), fds)
        except OSError as error:
            raise SandboxError(f"the sandbox launcher is gone: {error}; the next create starts another") from error

    def kill_outer(self, pid: int) -> None:
        with contextlib.suppress(SandboxError):
            self._request({"op": "kill", "pid": pid}, [])

    async def copy_upper(self, outer: int, target: str) -> None:
        """Copy the upper of the sandbox whose OUTER has this pid to `target` (which must not exist)."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours:
            ours.setblocking(False)
            message = {
                "op": "copy",
                "outer": outer,
                "privileged": self.privileged,
                "mount_point": f"{self._run_dir}/mnt",
                "target": target,
            }
            try:
                self._request(message, [theirs.fileno()])
            finally:
                theirs.close()
            raw = await asyncio.get_running_loop().sock_recv(ours, streams.READ_BYTES)
        reply = json.loads(raw or b'{"error": "the launcher ended"}')
        if reply.get("rc") != 0:
            reason = reply.get("error") or f"cp ended with {reply['rc']}; is there room below {target}?"
            raise SandboxError(f"cannot copy a sandbox to {target}: {reason}")

    @property
    def launcher_pid(self) -> int | None:
        return self._launcher[0].pid if self._launcher else None

    def forget(self, sandbox: NamespaceSandbox) -> None:
        self._alive.discard(sandbox)
        self._slots.release()

    def new_snapshot(self) -> str:
        try:
            os.makedirs(self._snapshots, exist_ok=True)
        except OSError as error:
            raise host.fault(error, self._snapshots) from error
        return f"{self._snapshots}/{next(self._numbers)}"

    # -- sandboxes

    async def create(self, image: Image, limits: Limits = LIMITS, network: Network = "none") -> NamespaceSandbox:
        check_enforced(await self.probe(), self.config, network)
        return await self._create(image, limits, network)

    async def _create(self, image: Image, limits: Limits, network: Network) -> NamespaceSandbox:
        await self._start()
        await self._slots.acquire()
        sandbox = None
        try:
            sandbox = self._launch(image, limits, network)
            self._alive.add(sandbox)
            await sandbox.wait_ready()
            return sandbox
        except BaseException:
            if sandbox:
                await sandbox.close()
            else:
                self._slots.release()
            raise

    def _launch(self, image: Image, limits: Limits, network: Network) -> NamespaceSandbox:
        name = f"{self.name}-{next(self._numbers)}"
        copies = [self._copy_of(layer) for layer in image.layers if layer.startswith(COPY)]
        if network == "host" and (resolver := cgroups.read_text("/etc/resolv.conf")):
            copies.append(tar.pack({"etc/resolv.conf": resolver.encode()}))
        layers = [layer for layer in image.layers if not layer.startswith(COPY)]
        groups = cgroups.Groups(self.driver.layout(name, limits, zygote.SHM_BYTES))
        message = {
            "op": "create",
            "mount_point": f"{self._run_dir}/mnt",
            "lowers": [*reversed(layers), image.base or self.base],
            "cgroups": list(groups.layout.supervisor),
            "privileged": self.privileged,
            "disk": limits.disk_mb << 20,
            "inodes": limits.inodes,
            "host_network": network == "host",
            "workdir": image.workdir,
            "weaken": sorted(self.weaken),
            "max_pids": 0 if "pids" in self.driver.parents else limits.pids + 2,
            "max_memory": 0 if "memory" in self.driver.parents else limits.memory_mb << 20,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [theirs.fileno()] + ([streams.memfd(tar.join(copies), "files")] if copies else [])
        sandbox = NamespaceSandbox(self, image, limits, groups, ours, name)
        try:
            self._request(message, fds)
        except SandboxError as error:
            sandbox.die(str(error))
        finally:
            theirs.close()
            for fd in fds[1:]:
                os.close(fd)
        return sandbox

    def _copy_of(self, layer: str) -> bytes:
        if layer not in self._copies:
            raise SandboxError(f"image layer {layer} lives in the process that built it; call build here as well")
        return self._copies[layer]

    # -- images

    async def build(self, spec: ImageSpec, timeout_s: float = 60.0) -> Image:
        """See the Protocol. Equal specs are built once, also when asked for at the same time."""
        await self._start()
        whole = json.dumps([spec.base, spec.env, spec.workdir, spec.user])
        key = keys.digest(self.base, whole, *(keys.step_key(step) for step in spec.steps))
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
        layers: tuple[str, ...] = ()
        image = Image(key, (), spec.env, spec.workdir, await self._find_base(spec.base), spec.user)
        self._check_users({spec.user, *(step.user for step in spec.steps)})
        digest = keys.digest(image.base or self.base, json.dumps([spec.env, spec.workdir]))
        for step in spec.steps:
            digest = keys.digest(digest, keys.step_key(step))
            if step.copy is not None:
                layers += (self._keep_copy(step.copy),)
            if step.run or _copied_bytes(self._copies, layers) > INLINE_COPY_BYTES:
                target = f"{self.cache}/layers/{digest}"
                below = replace(image, id=digest, layers=layers, user=step.user)
                if not os.path.isdir(target):
                    await self._build_layer(below, step.run, target, timeout_s)
                layers = tuple(layer for layer in layers if not layer.startswith(COPY)) + (target,)
        image = replace(image, layers=layers)
        if spec.user:
            await self._check_user_of(image)
        return image

    async def _find_base(self, name: str) -> str:
        """The directory that a FROM stands for; "" is the default one."""
        if name == BASE:
            return ""
        known = self.config.bases
        path = known.get(name, known.get(f"{name}:latest"))
        if path is None:
            names = ", ".join(sorted({BASE, *known}))
            raise BuildError(
                f"FROM {name}: no base has that name here ({names}); name it in sandbox.bases, "
                f'as {{"{name}": a directory with an unpacked file system, or "" for the default base}}'
            )
        if not path:
            return ""
        return await asyncio.to_thread(rootfs.prepare_base, path, self.cache, self.privileged, f"sandbox.bases[{name}]")

    def _check_users(self, users: set[str]) -> None:
        others = users - {"", "root", "0"}
        if others and not self.privileged:
            raise SandboxError(
                f"USER {min(others)}: a plain user's sandbox has one id; run as root, or take the docker backend"
            )

    async def _check_user_of(self, image: Image) -> None:
        """Whether the image knows its user."""
        sandbox = await self._create(image, LIMITS, "none")
        try:
            done = await sandbox.exec(["true"])
        finally:
            await sandbox.close()
        if done.exit_code != 0:
            raise BuildError(f"USER {image.user}: {done.stderr.decode(errors='replace').strip()}")

    def _keep_copy(self, files: Mapping[str, bytes]) -> str:
        for path in files:
            if not path.startswith("/") or posixpath.normpath(path) != path or path == "/":
                raise BuildError(f"COPY to {path!r}: give a normalised absolute path of a file")
        packed = tar.pack({path[1:]: content for path, content in files.items()})
        layer = COPY + hashlib.sha256(packed).hexdigest()
        self._copies[layer] = packed
        return layer

    async def _build_layer(self, below: Image, command: str, target: str, timeout_s: float) -> None:
        """Run one step in a sandbox and rename what it wrote to `target`: another process sees all of it or nothing."""
        partial = f"{self.cache}/layers/.{os.path.basename(target)[:16]}-{self.name}-{next(self._numbers)}"
        limits = Limits(cpus=2.0, memory_mb=2048, pids=512, disk_mb=1024, inodes=131072, wall_s=timeout_s + 60)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
        except OSError as error:
            raise host.fault(error, target) from error
        sandbox = await self._create(below, limits, "none")
        try:
            if command:
                result = await sandbox.exec(command, timeout_s=timeout_s, max_output=4000)
                if result.exit_code != 0:
                    tail = (result.stdout + result.stderr).decode(errors="replace").strip()[-2000:]
                    ended = f"took more than {timeout_s:g} s" if result.timed_out else f"ended with {result.exit_code}"
                    raise BuildError(f"RUN {command[:200]}: {ended}\n{tail}")
                await sandbox.kill_all()
            await sandbox.copy_upper(partial)
            os.rename(partial, target)
        except OSError as error:
            if not os.path.isdir(target):  # else another process was faster
                raise host.fault(error, target) from error
        finally:
            await sandbox.close()
            host.remove_tree(partial)

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
        limits = Limits(cpus=0.5, memory_mb=32, pids=24, disk_mb=8, inodes=600, wall_s=60)
        sandbox = await self._create(Image("base", (), (), "/"), limits, "none")
        try:
            went_through = await _try_in(sandbox, limits)
        finally:
            await sandbox.close()
        missing = {
            limit: f"{seen}; {self.driver.why_missing.get(limit, mend)}" for limit, (seen, mend) in went_through.items()
        }
        return Capabilities(frozenset(ENFORCEABLE) - missing.keys(), missing)


async def _try_in(sandbox: NamespaceSandbox, limits: Limits) -> dict[str, tuple[str, str]]:
    """limit -> (what went through although it should not, what to look at), for those that do not hold."""
    held = "is the controller enabled?"
    found = {}
    # The group's limit is memory + disk + shm; tail keeps all that it is asked for in memory.
    if not (await sandbox.exec("head -c 150m /dev/zero | tail -c 150m >/dev/null")).oom:
        found["memory"] = ("150 MiB went through a limit of 56", held)
    if await sandbox.count_forks(limits.pids + 8) > limits.pids:
        found["pids"] = (f"{limits.pids + 8} processes went through a limit of {limits.pids}", held)
    if sandbox.read_cpu_quota().split()[:1] != [str(int(limits.cpus * 100_000))]:
        found["cpu"] = ("the quota that was written does not read back", held)
    if (await sandbox.exec("head -c 16m /dev/zero >/probe; r=$?; rm -f /probe; exit $r")).exit_code == 0:
        found["disk"] = ("16 MiB went on a disk of 8", "tmpfs size= does not hold on this kernel")
    fill = "mkdir /p && for ((i = 0; i < 700; i++)); do : >/p/$i || exit 9; done"
    if (await sandbox.exec(fill)).exit_code == 0:
        found["inodes"] = ("700 files went on 600 inodes", "tmpfs nr_inodes= does not hold on this kernel")
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = await sandbox.exec(f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}")
    if reach.exit_code == 0:
        found["network"] = ("a server of the host answers", "the kernel needs CONFIG_NET_NS")
    return found


def _copied_bytes(copies: Mapping[str, bytes], layers: tuple[str, ...]) -> int:
    return sum(len(copies[layer]) for layer in layers if layer.startswith(COPY))
