"""One live container of the `docker` backend: commands, their ends, files in and out.

An engine has no call that ends one exec, that tells when a command ended rather than its streams, or that counts what
it left behind; that is most of this file. PID 1 is a bash of ours that reaps, ignores what is sent from inside, and on
SIGUSR1 from outside kills every other process at once, also where a fork bomb leaves no pid for an exec to do it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import posixpath
import tarfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rsi.sandbox import (
    Entry,
    ExecResult,
    Image,
    Limits,
    SandboxDied,
    SandboxError,
    cgroups,
    docker_wire,
    host,
    streams,
    tar,
)

if TYPE_CHECKING:
    from rsi.sandbox.docker import DockerBackend

GRACE_S = 0.2
"""How long the streams of an ended command may stay open: the engine's copy of them lags behind its exit."""
DEATH_S = 20.0
"""An engine on a loaded host takes seconds for what takes milliseconds; beyond this a sandbox is broken."""
# bash and not sh: dash neither reaps during `read` nor can ignore SIGCHLD. `read` waits on a stdin that nobody writes,
# and without `-t`, which blocks SIGCHLD: zombies would pile up against the limit of pids.
KEEPER = """\
for n in {1..64}; do [ $n = 10 ] || [ $n = 17 ] || trap '' $n; done 2>/dev/null
trap 'kill -9 -1; hit=1' USR1
while hit=; read -r _ || [ "$hit" ]; do :; done
"""
READY = "while read -r k v; do case $k$v in SigCgt:*[2367abef]??) exit 0 ;; esac; done </proc/1/status; exit 1"
"""Whether PID 1 has come to its trap: before, SIGUSR1 would end it."""

# Says the command's pid as the first line of stderr. `env -i`: an engine adds HOSTNAME and HOME of its own.
START = (
    'echo $$ >&2; cd -- "$1" 2>/dev/null || cd /; if [ "$2" ]; then exec 3<"$2"; rm -f -- "$2"; fi; shift 2; exec "$@"'
)

# Kill the command $1 and what it began: its descendants, and orphans younger than it. Older jobs and other commands (an
# exec's parent is 0) stay. Builtins only, in rounds until one finds nothing: a process may fork while we look.
KILL_COMMAND = """\
look() {
    ppid= since= state=
    { read -r stat </proc/$1/stat; } 2>/dev/null || return 1
    set -- ${stat##*) }
    state=$1 ppid=$2 since=${20}
    case $ppid$since in ''|*[!0-9]*) ppid=1 since=99999999999999 ;; esac
}
command=$1
look $command && first=$since || exit 0
round=0
while [ $round -lt 200 ]; do
    round=$((round + 1)) found=
    for folder in /proc/[0-9]*; do
        pid=${folder#/proc/} at=${folder#/proc/}
        [ $pid != 1 ] && look $pid && [ $state != Z ] || continue
        while [ $at != $command ] && [ $ppid -gt 1 ]; do
            at=$ppid
            look $at || continue 2
        done
        if [ $at = $command ] || { [ $ppid = 1 ] && [ $since -ge $first ]; }; then
            kill -9 $pid 2>/dev/null
            found=1
        fi
    done
    [ "$found" ] || exit 0
done
exit 1
"""

# What stands at a file's path is replaced (GNU tar unlinks it first); a parent that is a link leads somewhere inside.
PUT = 'mkdir -p -- "$1" && exec tar -C "$1" --no-same-owner --keep-directory-symlink -xpf -'
# Not tar's --recursive-unlink, which empties every directory that is put, too.
CLEAR = 'cd -- "$1" && while read -r -d "" p; do [ -L "$p" ] || [ ! -d "$p" ] || rm -rf -- "$p"; done'
# `head`: a sparse file of a terabyte must not be read to its end. The archive says by its own end whether it is whole.
GET = """\
if [ -d "$1" ] && [ ! -L "$1" ]; then cd -- "$1" && set -- "$2" . ; elif [ -e "$1" ] || [ -L "$1" ]; then
cd -- "${1%/*}/" && set -- "$2" "./${1##*/}"; else exit 0; fi
tar --format=gnu --numeric-owner --hard-dereference -cf - "$2" | head -c "$1"
case ${PIPESTATUS[0]} in 0|1|141) exit 0 ;; *) exit 3 ;; esac
"""


@dataclass(eq=False)
class Running:
    """An exec that has been started; `pid` is the one inside, 0 until the command has said it."""

    id: str
    out: streams.Kept
    err: streams.Kept
    ended: asyncio.Event
    writer: asyncio.StreamWriter
    pid: int = 0


class DockerSandbox:
    """A live container; made by `DockerBackend.create`."""

    def __init__(self, backend: DockerBackend, image: Image, limits: Limits, name: str) -> None:
        self.image, self.limits, self.name = image, limits, name
        self.container = ""
        self._backend = backend
        self._loop = asyncio.get_running_loop()
        self._environment = host.ENVIRONMENT | dict(image.env)
        self._dead = ""
        self._died = asyncio.Event()
        self._oom = 0
        self._ready = False
        self._num_left = 0
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running: set[Running] = set()
        self._closing: asyncio.Task[None] | None = None
        self._life: asyncio.TimerHandle | None = None

    def begin(self, container: str) -> None:
        self.container = container
        self._life = self._loop.call_later(self.limits.wall_s, self._end_of_life)

    def _end_of_life(self) -> None:
        self.die(f"it lived for its wall_s={self.limits.wall_s:g}; give it more if that was too short")
        self.in_background(self._remove())

    def die(self, reason: str) -> None:
        """The reason of the first death stays."""
        self._dead = self._dead or reason
        self._died.set()

    def on_event(self, action: str) -> None:
        """What the engine says of the container, from outside it."""
        if action == "oom":
            self._oom += 1
        else:
            self.die("its PID 1 ended (killed from outside, out of memory, or the engine ended)")

    def _check_alive(self) -> None:
        if self._dead:
            raise SandboxDied(f"sandbox {self.name} is dead: {self._dead}")

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """What must be done although its caller was cancelled."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """A request about this container; that it is gone is its death."""
        try:
            return await self._backend.call(function, *arguments, **named)
        except docker_wire.EngineError as error:
            if error.status == 404 or (error.status == 409 and "is not running" in str(error)):
                self.die("its container is gone" if error.status == 404 else "its PID 1 ended")
                self._check_alive()
            raise

    # -- commands

    async def _start(self, argv: list[str], stdin: bytes, max_output: tuple[int, int], user: str) -> Running:
        created = await self._call(
            self._backend.api.exec_create,
            self.container,
            argv,
            stdin=bool(stdin),
            user=user,
            workdir="/",
        )
        try:
            reader, writer = await docker_wire.request(
                self._backend.address,
                f"POST /v{self._backend.version}/exec/{created['Id']}/start",
                b'{"Detach": false, "Tty": false}',
                upgrade=True,
            )
        except SandboxError:
            await self._check_container()
            raise
        out, err = streams.Kept(*max_output), streams.Kept(*max_output)
        running = Running(created["Id"], out, err, asyncio.Event(), writer)
        self._running.add(running)
        self.in_background(self._drain(running, reader))
        if stdin:
            self.in_background(_write(writer, stdin))
        return running

    async def _drain(self, running: Running, reader: asyncio.StreamReader) -> None:
        """Read on after the command has ended: a background server must not die of SIGPIPE."""
        said = b""
        try:
            async for kind, block in docker_wire.read_frames(reader):
                if kind == 2 and not running.pid:
                    said += block
                    number, newline, block = said.partition(b"\n")
                    if newline and number.isdigit():
                        running.pid = int(number)
                    else:
                        continue
                (running.err if kind == 2 else running.out).feed(block)
        finally:
            if not running.pid:
                running.err.feed(said)
            running.ended.set()
            running.writer.close()
            self._running.discard(running)

    async def _wait_exit(self, running: Running, timeout_s: float) -> int | None:
        """Its exit code, or None if it runs on after timeout_s. Asked of the engine: the streams may end before the
        command does, and after it."""
        end = self._loop.time() + timeout_s
        pause = 0.02
        while True:
            left = end - self._loop.time()
            if running.ended.is_set():
                await asyncio.sleep(min(pause / 4, max(left, 0)))
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(running.ended.wait(), min(pause, max(left, 0)))
            found = await self._call(self._backend.api.exec_inspect, running.id)
            if not found["Running"] and found["ExitCode"] is not None:
                return int(found["ExitCode"])
            if left <= 0:
                return None
            pause = min(pause * 1.5, 0.5)

    async def _run(
        self, argv: list[str], *, cwd: str, env: Mapping[str, str], script: str, stdin: bytes, timeout_s: float,
        max_output: tuple[int, int], user: str = "",
    ) -> tuple[int | None, Running]:  # fmt: skip
        """(exit code, or None if it was killed at its time; the command), its streams drained as far as they go."""
        variables = [f"{name}={value}" for name, value in env.items()]
        wrapped = ["/bin/sh", "-c", START, "sh", cwd, script, "env", "-i", *variables, *argv]
        starting = self._loop.create_task(self._start(wrapped, stdin, max_output, user))
        try:
            running = await asyncio.shield(starting)
            code = await self._wait_exit(running, timeout_s)
            if code is None:
                await self._kill(running)
        except asyncio.CancelledError:
            self.in_background(self._kill_started(starting))
            raise
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.ended.wait(), GRACE_S if running.pid else DEATH_S)
        if code == 137:
            await self._check_pid_1()
        elif not running.pid:
            await self._check_container()
        if not running.pid and code is not None:
            said = bytes(running.err.head + running.out.head).decode(errors="replace").strip()[-500:]
            raise NotStarted(f"sandbox {self.name} cannot start a command: {said or f'status {code}'}")
        return code, running

    async def _kill_started(self, starting: asyncio.Task[Running]) -> None:
        with contextlib.suppress(SandboxError):
            await self._kill(await starting)

    async def _kill(self, running: Running) -> None:
        """End a command and all that it began; where that fails, everything in the sandbox."""
        if running.pid and not self._dead:
            with contextlib.suppress(SandboxError):
                argv = ["/bin/sh", "-c", KILL_COMMAND, "sh", str(running.pid)]
                killer = await self._start(argv, b"", (1000, 0), "0")
                if await self._wait_exit(killer, DEATH_S) == 0 and await self._wait_exit(running, DEATH_S) is not None:
                    return
        await self.kill_all()

    async def _check_pid_1(self) -> None:
        """Raise SandboxDied where PID 1 is dead: its commands end with 137 then, and that is no result. The engine
        learns of a command's end before it learns of the container's: only another command tells."""
        alive = await self._start(["/bin/sh", "-c", READY], b"", (1000, 0), "0")
        if await self._wait_exit(alive, DEATH_S) != 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._died.wait(), DEATH_S / 4)
            await self._check_container()

    async def _check_container(self) -> None:
        found = await self._call(self._backend.api.inspect_container, self.container)
        if not found["State"]["Running"]:
            self.die(f"its PID 1 ended with {found['State']['ExitCode']}")
        self._check_alive()

    async def _end_bomb(self) -> None:
        """No command leaves a fork bomb to the next. Asked after each, and before the next where anything was left: a
        bomb may have only begun when its command ended."""
        self._num_left = await self._count_processes() - 1 - len(self._running)
        if self._num_left > cgroups.MAX_LEFT:
            await self.kill_all()

    async def _count_processes(self) -> int:
        """All in the container, PID 1 included, by its control group."""
        try:
            found = await self._call(self._backend.api.stats, self.container, stream=False, one_shot=True)
        except SandboxError:  # of a dying container the engine says nothing, not even an error
            await self._check_container()
            raise
        return int(found.get("pids_stats", {}).get("current", 0))

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
        """See the Protocol. Where `cwd` is missing the command starts in `/`. A timeout kills what the command began,
        orphans of concurrent commands that are younger than it included; older jobs live on."""
        self._check_alive()
        started, oom = self._loop.time(), self._oom
        if self._num_left > 0:
            await self._end_bomb()
        argv, script = command, ""
        if isinstance(argv, str):
            encoded = argv.encode("utf-8", "surrogateescape")
            argv = ["bash", "-c", argv]
            if len(encoded) > host.MAX_ARGUMENT:
                script = f"/run/rsi-script-{next(self._numbers)}"
                await self.put("/", {script[1:]: encoded})
                argv = ["bash", "/dev/fd/3"]
        code, running = await self._run_retried(
            argv,
            cwd=cwd if cwd is not None else self.image.workdir,
            env=self._environment | dict(env or {}),
            script=script,
            stdin=stdin,
            timeout_s=timeout_s,
            max_output=(max_output, max_output),
            user=self._backend.user_of(self.image) if user is None else user,
        )
        await self._end_bomb()
        if code == 137 and self._oom == oom:
            await asyncio.sleep(GRACE_S)  # the engine tells of it through another door
        stdout, stderr, dropped = streams.cut(running.out, running.err, max_output)
        return ExecResult(
            exit_code=code,
            stdout=stdout,
            stderr=stderr,
            dropped_bytes=dropped,
            timed_out=code is None,
            oom=self._oom > oom,
            streams_open=not running.ended.is_set(),
            duration_s=self._loop.time() - started,
        )

    async def _run_retried(self, argv: list[str], **how: Any) -> tuple[int | None, Running]:
        """A command that never started (its first line is missing) may be started again: right after a fork bomb the
        engine's own helper inside is sometimes killed with it."""
        for attempt in range(3):
            try:
                return await self._run(argv, **how)
            except NotStarted:
                if attempt == 2 or how["script"]:
                    raise
                await self.kill_all() if attempt else await asyncio.sleep(GRACE_S)
        raise AssertionError("unreachable")

    async def put(self, directory: str, files: Mapping[str, bytes | Entry]) -> None:
        """See the Protocol. A bare bytes value gets mode 0755 where it begins with `#!`, else 0644."""
        # tar reads whole records of 10 KiB, and a pipe that ends early would be an error.
        packed = tar.pack(files)
        packed += bytes(-len(packed) % tarfile.RECORDSIZE)
        where, what = posixpath.join("/", directory), f"put {directory}"
        unpack = ["/bin/sh", "-c", PUT, "sh", where]
        try:
            await self._transfer(unpack, packed, 2000, what)
        except SandboxDied:
            raise
        except SandboxError:  # a directory may stand where a file is to be
            paths = [path for path, entry in files.items() if isinstance(entry, bytes) or entry.kind != "dir"]
            listed = "".join(f"{path}\0" for path in paths).encode("utf-8", "surrogateescape")
            await self._transfer(["bash", "-c", CLEAR, "bash", where], listed, 2000, what)
            await self._transfer(unpack, packed, 2000, what)

    async def get(self, path: str, max_bytes: int = 16 << 20) -> dict[str, Entry]:
        """See the Protocol. A path that is no directory gives one entry under its base name; a missing one gives {}."""
        limit = max_bytes + tar.MAX_ENTRIES * 4 * tarfile.BLOCKSIZE
        target = posixpath.normpath(posixpath.join("/", path))
        argv = ["bash", "-c", GET, "bash", target, str(limit)]
        raw = await self._transfer(argv, b"", limit, f"get {path}")
        if len(raw) >= limit:
            raise SandboxError(f"get {path} in sandbox {self.name}: more than {max_bytes} bytes came from the sandbox")
        entries = tar.parse(raw, max_bytes)
        return {name[2:]: entry for name, entry in entries.items() if name != "."}  # tar says `./a/b`

    async def _transfer(self, argv: list[str], stdin: bytes, max_output: int, what: str) -> bytes:
        self._check_alive()
        code, running = await self._run_retried(
            argv,
            cwd="/",
            env=host.ENVIRONMENT,
            script="",
            stdin=stdin,
            timeout_s=60.0,
            max_output=(max_output, 0),
            user="0",
        )
        if code == 0 and not running.ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.ended.wait(), DEATH_S)
        if code != 0 or not running.ended.is_set() or running.out.total > max_output:
            said = bytes(running.err.head).decode(errors="replace").strip()[-500:]
            reason = "it took more than 60 s" if code is None else said or f"status {code}, {running.out.total} bytes"
            raise SandboxError(f"{what} in sandbox {self.name} failed: {reason}")
        return bytes(running.out.head)

    async def snapshot(self) -> Image:
        """The engine pauses the container for it; the image lives as long as the backend."""
        self._check_alive()
        tag = f"rsi/snapshot:{self.name}-{next(self._numbers)}"
        await self.commit(tag, {"rsi.snapshot": self._backend.name})
        return Image(tag.partition(":")[2], (tag,), self.image.env, self.image.workdir)

    async def commit(self, tag: str, labels: Mapping[str, str]) -> None:
        """Keep what this sandbox wrote as an image of the engine."""
        repository, _, version = tag.partition(":")
        # An image inherits its container's labels: a container that somebody makes from it is not ours to sweep.
        labels = {"rsi.sandbox": "", **labels}
        changes = [f'LABEL {name}="{value}"' for name, value in labels.items()]
        changes.append(f"USER {self._backend.user_of(self.image) or '0'}")
        await self._call(self._backend.api.commit, self.container, repository, version, changes=changes)

    async def kill_all(self) -> None:
        """Kill every process but PID 1, by PID 1, asked from outside; returns when they are gone."""
        self._check_alive()
        await self._wait_ready()
        end = self._loop.time() + DEATH_S
        pause = 0.01
        await self._call(self._backend.api.kill, self.container, "USR1")
        while await self._count_processes() > 1:
            if self._loop.time() > end:
                self.die(f"its processes did not die within {DEATH_S:g} s")
                await self._remove()
                self._check_alive()
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)
            await self._call(self._backend.api.kill, self.container, "USR1")

    async def _wait_ready(self) -> None:
        """Until PID 1 has set its trap; asked once, and true long before unless the host is very busy."""
        end = self._loop.time() + DEATH_S
        while not self._ready:
            running = await self._start(["/bin/sh", "-c", READY], b"", (1000, 0), "0")
            self._ready = await self._wait_exit(running, DEATH_S) == 0
            if not self._ready and self._loop.time() > end:
                self.die("its PID 1 did not start")
                self._check_alive()

    async def close(self) -> None:
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._life:
            self._life.cancel()
        self.die("it was closed")
        await self._remove()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._backend.forget(self)

    async def _remove(self) -> None:
        await self._backend.remove(self.name)


class NotStarted(SandboxError):
    """The command has not run at all."""


async def _write(writer: asyncio.StreamWriter, stdin: bytes) -> None:
    """A command may end without having read it all."""
    with contextlib.suppress(OSError):
        writer.write(stdin)
        await writer.drain()
        writer.write_eof()
