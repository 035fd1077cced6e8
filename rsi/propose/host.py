"""The host's end of the proposer's tools.

A tool in the workspace writes one word to a fifo and reads the answer from another; the host reads and writes them with
plain `exec` calls, which run beside the command that waits, so the tools work on every sandbox backend and need no
network. What arrives is untrusted: only known words do anything, and calls are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

from rsi.propose.workspace import HOST
from rsi.sandbox import Sandbox, SandboxError

Answer = tuple[int, str]
"""Exit status of the tool and what it prints."""
Answerer = Callable[[str], Awaitable[Answer]]

POLL_S = 60.0
"""One read of the request fifo; a read that times out is begun again."""
REPLY_S = 5.0
"""A tool that was killed while the host worked no longer reads; its answer is dropped after this."""


@asynccontextmanager
async def serving(sandbox: Sandbox, answer: Answerer, max_calls: int):
    """Answer the tools of `sandbox` within the block; an exception of `answer` comes out at its end."""
    task = asyncio.create_task(_serve(sandbox, answer, max_calls))
    try:
        yield
    finally:
        task.cancel()
        [result] = await asyncio.gather(task, return_exceptions=True)
    if isinstance(result, Exception):
        raise result


async def _serve(sandbox: Sandbox, answer: Answerer, max_calls: int) -> None:
    """Ends by itself when the sandbox dies, or after so many requests that they can only be noise."""
    calls = 0
    try:
        while calls < 2 * max_calls + 8:
            word = await _next_request(sandbox)
            if word is None:
                continue
            calls += 1
            if calls > max_calls:
                status, text = 2, f"no calls left; {max_calls} were granted"
            else:
                status, text = await answer(word)
            await _reply(sandbox, status, text)
    except SandboxError:
        return  # the episode meets the same dead sandbox and ends as a fault


async def _next_request(sandbox: Sandbox) -> str | None:
    """One word; "" for what is none (an agent can replace the fifo); None when nobody asked."""
    result = await sandbox.exec(["head", "-n", "1", f"{HOST}/request"], timeout_s=POLL_S, max_output=256)
    if result.timed_out:
        return None
    if result.exit_code != 0:
        await asyncio.sleep(0.1)  # the fifo is gone, or a time-out elsewhere killed the reader: never a busy loop
    return result.stdout.decode(errors="replace").strip()


async def _reply(sandbox: Sandbox, status: int, text: str) -> None:
    answer = f"{status}\n{text}\n".encode()
    await sandbox.exec(["dd", "status=none", f"of={HOST}/reply"], stdin=answer, timeout_s=REPLY_S)
