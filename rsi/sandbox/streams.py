"""What a command writes, read by the event loop: head and tail are kept, the middle is counted and dropped."""

from __future__ import annotations

import asyncio
import os

READ_BYTES = 1 << 16


class Kept:
    """What is kept of one output: its head and tail; all of it is counted."""

    def __init__(self, head: int, tail: int) -> None:
        self.max_head, self.max_tail = head, tail
        self.head, self.tail, self.total = bytearray(), bytearray(), 0

    def feed(self, block: bytes) -> None:
        self.total += len(block)
        room = self.max_head - len(self.head)
        if room > 0:
            self.head += block[:room]
            block = block[room:]
        if block and self.max_tail:
            self.tail += block[-self.max_tail :]
            if len(self.tail) > 2 * self.max_tail:
                del self.tail[: -self.max_tail]

    def kept(self, budget: int) -> bytes:
        """At most `budget` bytes, head and tail, with a line that says what was cut where it was."""
        both = self.head + self.tail[-self.max_tail :] if self.max_tail else self.head
        if self.total <= budget:
            return bytes(both)
        front = budget // 2
        back = budget - front
        marker = b"\n[%d bytes cut]\n" % (self.total - budget)
        return bytes(both[:front]) + marker + bytes(both[len(both) - back :])


class Capture(Kept):
    """The read end of one output pipe: drains on after the command has ended (a background server must not die of
    SIGPIPE)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, head: int, tail: int) -> None:
        super().__init__(head, tail)
        self.loop = loop
        self.fd, self.write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self.ended = loop.create_future()
        loop.add_reader(self.fd, self._read)

    @property
    def is_open(self) -> bool:
        return self.fd >= 0

    def _read(self) -> bool:
        """Take what one read gives; False when there was nothing."""
        try:
            block = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not block:
            self.close()
            return False
        self.feed(block)
        return True

    def drain(self) -> None:
        """Take what lies in the pipe now; bounded, for a background process may write without end."""
        for _ in range(32):
            if not self.is_open or not self._read():
                return

    def close(self) -> None:
        if self.fd < 0:
            return
        self.loop.remove_reader(self.fd)
        os.close(self.fd)
        self.fd = -1
        if not self.ended.done():
            self.ended.set_result(None)


def cut(out: Kept, err: Kept, max_output: int) -> tuple[bytes, bytes, int]:
    """(stdout, stderr, bytes dropped): each may use half of `max_output`, and what the other leaves of its half."""
    half = max_output // 2
    out_budget = max(half, max_output - err.total)
    err_budget = max(max_output - half, max_output - out.total)
    dropped = max(0, out.total - out_budget) + max(0, err.total - err_budget)
    return out.kept(out_budget), err.kept(err_budget), dropped


def memfd(content: bytes, name: str) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
