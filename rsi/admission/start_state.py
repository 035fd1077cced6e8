"""What an agent finds: every file that an image adds to its base, seen from inside a fresh instance.

Told by ctime, which no command can set back: what is newer than the newest file of the bare base was added. Contents
come out as tar, for files small enough to be read by a person; of the others the hash, above 64 MiB the size alone.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rsi.sandbox import Backend, Image, ImageSpec, Limits, Sandbox, SandboxError
from rsi.sandbox.tar import parse

MAX_LISTING_BYTES = 32 << 20
MAX_CONTENT_BYTES = 32 << 20
MAX_FILE_KB = 256
"""A larger file is known by its hash alone."""
LOOK_S = 60.0
OURS = "! -path /.dockerenv ! -path /etc/hosts ! -path /etc/hostname ! -path /etc/resolv.conf"
"""What a container runtime writes at every start."""
NEWEST = f"find / -xdev ! -type d {OURS} -printf '%C@\\n' | sort -n | tail -n 1"
"""Directories of the root are made anew at every start; files of a base are as they were."""
LIST = f"find / -xdev {OURS} -newerct @{{since}} -printf '%y %m %U %G %s\\0%p\\0%l\\0'"
HASH = f"find / -xdev {OURS} -newerct @{{since}} -type f -size -65537k -print0 | xargs -0 -r sha256sum -z --"
PACK = (
    f"find / -xdev {OURS} -newerct @{{since}} -type f -size -{{kb}}k -print0 | "
    "tar -c --null --no-recursion -T - -f - 2>/dev/null | head -c {max}"
)
LIMITS = Limits(cpus=2.0, memory_mb=512, disk_mb=64, wall_s=4 * LOOK_S)


@dataclass(frozen=True)
class Seen:
    """One path. kind: as find(1) has it, f d l and others; owner: uid and gid; num_bytes: of a file."""

    kind: str
    mode: str
    owner: str
    num_bytes: int = 0
    sha256: str = ""
    target: str = ""


@dataclass(frozen=True)
class StartState:
    """Paths are absolute. files: the contents of those that are small."""

    tree: Mapping[str, Seen]
    files: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        lines = (f"{path!r} {seen}\n" for path, seen in sorted(self.tree.items()))
        return hashlib.sha256("".join(lines).encode(errors="surrogatepass")).hexdigest()

    @property
    def size_mb(self) -> float:
        return sum(seen.num_bytes for seen in self.tree.values()) / (1 << 20)

    def differences(self, other: StartState) -> list[str]:
        paths = {*self.tree, *other.tree}
        return sorted(path for path in paths if self.tree.get(path) != other.tree.get(path))


class Eyes:
    """Looks at images of one backend; what a base's newest file is, is found out once."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._newest: dict[str, asyncio.Task[str]] = {}

    async def look(self, image: Image, base: str) -> StartState:
        """base: the image's FROM. Raises SandboxError where it cannot be looked at."""
        if base not in self._newest:
            self._newest[base] = asyncio.ensure_future(self._newest_of(base))
        try:
            since = await asyncio.shield(self._newest[base])
        except SandboxError:
            self._newest.pop(base, None)  # the next look tries again
            raise
        sandbox = await self._backend.create(replace(image, user=""), LIMITS)
        try:
            return await _look(sandbox, since)
        finally:
            await sandbox.close()

    async def _newest_of(self, base: str) -> str:
        """Seconds since the epoch, with a fraction, of the newest ctime in an image without any step."""
        sandbox = await self._backend.create(await self._backend.build(ImageSpec(base=base)), LIMITS)
        try:
            newest = (await _output(sandbox, NEWEST)).decode().strip()
        finally:
            await sandbox.close()
        if not newest.replace(".", "").isdigit():
            raise SandboxError(f"find in {base} has no -printf; take an image with GNU findutils")
        return newest


async def _look(sandbox: Sandbox, since: str) -> StartState:
    fields = (await _output(sandbox, LIST.format(since=since))).split(b"\0")[:-1]
    hashes = {}
    for row in (await _output(sandbox, HASH.format(since=since))).split(b"\0")[:-1]:
        sha256, _, path = row.partition(b"  ")
        hashes[path] = sha256.decode()
    tree = {}
    for row, path, target in zip(fields[0::3], fields[1::3], fields[2::3], strict=True):
        kind, mode, uid, gid, size = row.decode().split()
        num_bytes = int(size) if kind == "f" else 0
        seen = Seen(kind, mode, f"{uid}:{gid}", num_bytes, hashes.get(path, ""), target.decode(errors="replace"))
        tree[path.decode(errors="replace")] = seen
    packed = await _output(sandbox, PACK.format(since=since, kb=MAX_FILE_KB, max=MAX_CONTENT_BYTES))
    entries = parse(_whole(packed), MAX_CONTENT_BYTES)
    files = {f"/{path.lstrip('/')}": entry.content for path, entry in entries.items() if entry.kind == "file"}
    return StartState(tree, files)


def _whole(packed: bytes) -> bytes:
    """An archive that `head` cut, without its last member; the rest is looked at by hash."""
    return packed if len(packed) < MAX_CONTENT_BYTES else b""


async def _output(sandbox: Sandbox, command: str) -> bytes:
    done = await sandbox.exec(command, timeout_s=LOOK_S, cwd="/", max_output=2 * MAX_LISTING_BYTES)
    if done.timed_out or done.dropped_bytes:
        raise SandboxError(f"{command.split()[0]} over the image took more than {LOOK_S:g} s or {MAX_LISTING_BYTES} B")
    return done.stdout
