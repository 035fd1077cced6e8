"""Files on their way into and out of a sandbox, as tar; what comes out is believed in nothing."""

from __future__ import annotations

import io
import stat
import tarfile
from collections.abc import Mapping

from rsi.sandbox import Entry, SandboxError

MAX_ENTRIES = 20_000
"""Of one archive that comes out."""


def pack(files: Mapping[str, bytes | Entry]) -> bytes:
    """An uncompressed tar of files by relative path; bytes get mode 0755 where they begin with `#!`, else 0644."""
    buffer = io.BytesIO()
    for path, entry in files.items():
        parts = path.split("/")
        if path.startswith("/") or ".." in parts or path in ("", "."):
            raise ValueError(f"{path!r} is not a path below the directory; give a relative one without '..'")
        if isinstance(entry, bytes):
            entry = Entry("file", default_mode(entry), entry)
        header = tarfile.TarInfo(path)
        header.mode = entry.mode
        match entry.kind:
            case "file":
                header.size = len(entry.content)
            case "dir":
                header.type = tarfile.DIRTYPE
            case "link":
                header.type, header.linkname = tarfile.SYMTYPE, entry.target
            case "other":
                raise ValueError(f"{path!r} is neither a file, a directory nor a link; leave it out")
        buffer.write(header.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
        if entry.kind == "file":
            buffer.write(entry.content)
            buffer.write(bytes(-len(entry.content) % tarfile.BLOCKSIZE))
    buffer.write(bytes(2 * tarfile.BLOCKSIZE))
    return buffer.getvalue()


def default_mode(content: bytes) -> int:
    return 0o755 if content.startswith(b"#!") else 0o644


def parse(raw: bytes, max_bytes: int) -> dict[str, Entry]:
    """What a sandbox packed, believed in nothing: bounded, no name twice, only plain regular files give content.

    Raises SandboxError where the archive is cut or breaks a bound.
    """
    entries: dict[str, Entry] = {}
    num_bytes = 0
    if not raw:
        return entries
    if not raw.endswith(bytes(2 * tarfile.BLOCKSIZE)):
        raise SandboxError(f"the archive from the sandbox is cut after {len(raw)} bytes")
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            for member in archive:
                parts = member.name.split("/")
                if member.name in entries or member.name.startswith("/") or ".." in parts:
                    raise SandboxError(f"the archive from the sandbox holds a bad name: {member.name!r}")
                num_bytes += member.size if member.isreg() else 0
                if num_bytes > max_bytes or len(entries) >= MAX_ENTRIES or member.issparse():
                    raise SandboxError(f"more than {max_bytes} bytes or {MAX_ENTRIES} entries came from the sandbox")
                entries[member.name] = _parse_member(archive, member)
    except (tarfile.TarError, ValueError, OSError, OverflowError) as error:
        raise SandboxError(f"the archive from the sandbox cannot be read: {error}") from error
    return entries


def _parse_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Entry:
    mode = stat.S_IMODE(member.mode)
    if member.isdir():
        return Entry("dir", mode)
    if member.issym():
        return Entry("link", mode, target=member.linkname)
    content = archive.extractfile(member) if member.isreg() else None
    return Entry("file", mode, content.read()) if content else Entry("other", mode)


def join(tars: list[bytes]) -> bytes:
    """One tar of several from `pack`: each ends with two zero blocks, which would end the archive."""
    return b"".join(tar[: -2 * tarfile.BLOCKSIZE] for tar in tars) + bytes(2 * tarfile.BLOCKSIZE)
