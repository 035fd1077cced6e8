"""The requests to a Docker engine whose answers go on and on (exec, build, events), on the event loop.

The SDK reads them with a blocking generator that no other thread can stop: an exec, a build or a backend that ends
would leave its thread behind. Every other request goes through the SDK.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

from rsi.sandbox import SandboxError, streams

MAX_LINE = 16 << 20
"""Of a build's or an event's JSON line."""


class EngineError(SandboxError):
    """The engine answered with an error status; `status` is the HTTP one."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the Docker engine answered {status}: {message}")
        self.status = status


@dataclass(frozen=True)
class Address:
    """Where an engine listens: a socket's path, or host and port without TLS."""

    path: str = ""
    host: str = ""
    port: int = 0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            if self.path:
                return await asyncio.open_unix_connection(self.path, limit=MAX_LINE)
            return await asyncio.open_connection(self.host, self.port, limit=MAX_LINE)
        except OSError as error:
            raise SandboxError(
                f"no Docker engine answers at {self.path or f'{self.host}:{self.port}'}: {error}"
            ) from error


def parse_address(url: str) -> Address:
    """Of `unix:///path` or `tcp://host:port`; raises SandboxError for what needs TLS or ssh."""
    scheme, _, rest = url.partition("://")
    if scheme in ("unix", "http+unix"):
        return Address(path="/" + rest.lstrip("/"))
    host, _, port = rest.rstrip("/").rpartition(":")
    if scheme in ("tcp", "http") and host and port.isdigit():
        return Address(host=host, port=int(port))
    raise SandboxError(
        f"DOCKER_HOST={url!r} is neither unix:///path nor tcp://host:port; for an engine behind ssh or TLS forward its "
        "socket (ssh -L /path/docker.sock:/var/run/docker.sock HOST) and set DOCKER_HOST=unix:///path/docker.sock"
    )


async def request(
    address: Address, line: str, body: bytes = b"", content_type: str = "application/json", upgrade: bool = False
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send one request; the reader stands at the answer's body, which ends with the connection.

    line: `POST /v1.41/...`. HTTP/1.0, so that the body comes without chunks; `upgrade`: the connection becomes the raw
    stream, both ways. Raises EngineError for an error status.
    """
    reader, writer = await address.connect()
    headers = [f"{line} HTTP/1.{int(upgrade)}", "Host: docker", f"Content-Type: {content_type}"]
    headers += [f"Content-Length: {len(body)}", *(["Connection: Upgrade", "Upgrade: tcp"] if upgrade else [])]
    try:
        writer.write("\r\n".join([*headers, "", ""]).encode() + body)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(None, 2)[1])
        if status >= 400:
            answer = await asyncio.wait_for(reader.read(1 << 16), 5.0)
            raise EngineError(status, _message(answer))
    except BaseException as error:
        writer.close()
        if isinstance(error, OSError | EOFError | TimeoutError):
            raise SandboxError(f"the Docker engine hung up: {error}") from error
        raise
    return reader, writer


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace").strip()[:500]


async def json_lines(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, object]]:
    """The objects of an answer, as they come."""
    while line := await reader.readline():
        if line.strip():
            yield json.loads(line)


async def read_frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    """(1 for stdout or 2 for stderr, bytes) of an exec without a terminal, until the connection ends."""
    try:
        while True:
            kind, length = struct.unpack(">BxxxL", await reader.readexactly(8))
            while length:
                block = await reader.read(min(length, streams.READ_BYTES))
                if not block:
                    return
                length -= len(block)
                yield kind, block
    except (OSError, asyncio.IncompleteReadError):
        return
