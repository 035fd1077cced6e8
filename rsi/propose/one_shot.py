"""The prompt-only arm: one completion holds the whole task, no terminal, no feedback. The baseline of the agent arm.

It is asked the same question and passes the same gates; what the agent reads in its workspace is put into the prompt.
"""

from __future__ import annotations

import re

from rsi.chat import ONE_SHOT, Chat, proposer_message
from rsi.engine import Engine, EngineError, Request
from rsi.episode import EpisodeLimits, request_seed, turn_of
from rsi.harbor.task import TaskError, check_files, new_task_files
from rsi.types import Assignment, Stop, Task, Trajectory

MAX_INLINE_BYTES = 4096
"""A larger input file of the parent is left out of the prompt."""


def question(assignment: Assignment) -> str:
    """The user's message: the assignment's line, then the parent's files that a proposer may change."""
    blocks = [] if assignment.parent is None else _blocks(assignment.parent)
    return "\n".join([proposer_message(assignment), *blocks])


def _blocks(parent: Task) -> list[str]:
    inputs = sorted(path for path in parent.files if path.startswith("environment/files/"))
    blocks = []
    for path in ("instruction.md", "solution/solve.sh", *inputs):
        content = parent.files.get(path)
        if content is None or len(content) > MAX_INLINE_BYTES:
            continue
        try:
            blocks.append(f"=== {path}\n{content.decode().rstrip()}")
        except UnicodeDecodeError:
            continue
    return blocks


def parse_blocks(text: str, domain: str) -> dict[str, bytes]:
    """The files of one answer, over the skeleton of a new task. Raises TaskError when there is none or too much."""
    parts = re.split(r"^=== (\S+)[ \t]*$", text, flags=re.MULTILINE)
    blocks = {path: (body.strip("\n") + "\n").encode() for path, body in zip(parts[1::2], parts[2::2], strict=True)}
    if not blocks:
        raise TaskError("the answer has no `=== path` line")
    files = {**new_task_files(domain), **blocks}
    check_files(files)
    return files


async def complete(
    engine: Engine, chat: Chat, assignment: Assignment, *, id: str, limits: EpisodeLimits, seed: int
) -> tuple[Trajectory, str]:
    """Draw the one answer: its trajectory, and its text. An answer cut by max_tokens stops as MAX_TOKENS."""
    prompt = chat.prompt(ONE_SHOT, question(assignment))
    room = limits.max_tokens - len(prompt)
    if room < 1:
        return Trajectory(id, assignment.id, "proposer", (), Stop.MAX_TOKENS), ""
    request = Request(prompt, room, chat.stop_ids, request_seed(seed, id, 0), id)
    try:
        completion = await engine.generate(request)
    except EngineError:
        return Trajectory(id, assignment.id, "proposer", (), Stop.FAULT), ""
    finally:
        engine.end(id)
    stop = Stop.DONE if completion.finish == "stop" else Stop.MAX_TOKENS
    trajectory = Trajectory(id, assignment.id, "proposer", (turn_of(prompt, completion),), stop)
    return trajectory, chat.decode([i for i in completion.tokens if i not in chat.stop_ids])
