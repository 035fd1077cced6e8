"""One agent loop for both roles: tokens in, tokens out, commands in a sandbox; what comes back is a Trajectory.

The context is one list of ids that only grows: what the policy sampled is kept as it was sampled, and each observation
is encoded once and appended. So the trainer sees exactly the ids that the engine saw, and every turn's context begins
with the context of the turn before it and what was sampled there. Our side breaking (engine or sandbox) ends the
episode as FAULT, which says nothing about the policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rsi.chat import Call, Chat, Final, Malformed
from rsi.engine import Completion, Engine, EngineError, Request
from rsi.sandbox import ExecResult, Sandbox, SandboxError
from rsi.sandbox.shell import shell
from rsi.types import Role, Stop, Trajectory, Turn

OnFinal = Callable[[], Awaitable[str | None]]
"""Called when the policy answers without a call; its text goes on with the episode as a user message, None ends it."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Where an episode stops. What it left behind is graded as it stands, whichever limit it met."""

    max_turns: int = 12
    """Samples drawn, malformed ones included."""
    max_tokens: int = 1024
    """Ids of the whole context, shown and sampled together; at most the engine's max_len."""
    max_new: int = 192
    """Ids sampled in one turn."""
    command_timeout_s: float = 10.0
    """Of one command; on a time-out all that it started is killed and the episode goes on."""
    wall_s: float = 120.0
    """Seconds that the commands of one episode may take together. Time spent waiting for the engine is ours and does
    not count: a slow machine says nothing about the policy."""
    max_output: int = 2000
    """Bytes of output that one observation shows, stdout and stderr together; head and tail are kept."""


def observation_text(result: ExecResult) -> str:
    """What the policy reads after a command: stdout, then stderr, then how it ended if not well. Where output was cut,
    the sandbox has put a line that says so."""
    lines = []
    for stream in (result.stdout, result.stderr):
        text = stream.decode("utf-8", errors="replace")
        if text:
            lines.append(text.removesuffix("\n"))
    if result.timed_out:
        lines.append("[timeout]")
    elif result.exit_code != 0:
        lines.append(f"[exit {result.exit_code}]")
    return "\n".join(lines) or "(no output)"


def request_seed(seed: int, episode: str, turn: int) -> int:
    """A 63-bit seed of one request, the same on every machine."""
    digest = hashlib.sha256(f"{seed}\0{episode}\0{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


async def run_episode(
    engine: Engine,
    chat: Chat,
    sandbox: Sandbox,
    *,
    id: str,
    task_id: str,
    role: Role,
    system: str,
    user: str,
    limits: EpisodeLimits,
    cwd: str,
    seed: int,
    temperature: float | None = None,
    on_final: OnFinal | None = None,
) -> Trajectory:
    """Let the policy act in `sandbox` until it is done or meets a limit; the sandbox stays open, for its output.

    id names the episode and its engine session, and with `seed` decides every sample; it must be unique among live
    episodes. on_final may answer a final answer with a further message (see OnFinal), within the same limits. A prompt
    that leaves no room for a sample gives MAX_TOKENS and no turns. EngineError and SandboxError do not come out.
    """
    loop = _Loop(engine, chat, sandbox, id, limits, cwd, seed, temperature, on_final)
    try:
        stop = await loop.run(chat.prompt(system, user))
    except (EngineError, SandboxError):
        stop = Stop.FAULT
    finally:
        engine.end(id)
    return Trajectory(id, task_id, role, tuple(loop.turns), stop)


class _Loop:
    """The growing state of one episode; `turns` holds what is finished even when a later turn faults."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        sandbox: Sandbox,
        id: str,
        limits: EpisodeLimits,
        cwd: str,
        seed: int,
        temperature: float | None,
        on_final: OnFinal | None,
    ):
        self.turns: list[Turn] = []
        self._engine = engine
        self._chat = chat
        self._sandbox = sandbox
        self._id = id
        self._limits = limits
        self._cwd = cwd
        self._seed = seed
        self._temperature = temperature
        self._on_final = on_final
        self._context: list[int] = []
        self._command_s = 0.0

    async def run(self, observed: tuple[int, ...]) -> Stop:
        while len(self.turns) < self._limits.max_turns:
            self._context += observed
            room = self._limits.max_tokens - len(self._context)
            if room < 1:
                return Stop.MAX_TOKENS
            completion = await self._sample(min(room, self._limits.max_new))
            self.turns.append(turn_of(observed, completion))
            self._context += completion.tokens
            if completion.finish == "length" and len(completion.tokens) >= room:
                return Stop.MAX_TOKENS
            answer = await self._answer(completion)
            if isinstance(answer, Stop):
                return answer
            observed = answer
        return Stop.MAX_TURNS

    async def _sample(self, max_new: int) -> Completion:
        return await self._engine.generate(
            Request(
                tokens=tuple(self._context),
                max_new=max_new,
                stop_ids=self._chat.stop_ids,
                seed=request_seed(self._seed, self._id, len(self.turns)),
                session=self._id,
                temperature=self._temperature,
            )
        )

    async def _answer(self, completion: Completion) -> tuple[int, ...] | Stop:
        """Do what was sampled; the ids to show next, or why the episode ends."""
        match self._chat.parse(completion.tokens):
            case Final() if completion.finish == "length":
                # cut before its stop id: not an answer, and a call may have been on its way
                complaint = f"the answer was cut at {len(completion.tokens)} tokens"
                return self._chat.observation(complaint, completion.tokens)
            case Final():
                more = None if self._on_final is None else await self._on_final()
                return Stop.DONE if more is None else self._chat.user_message(more, completion.tokens)
            case Malformed(complaint):
                return self._chat.observation(complaint, completion.tokens)
            case Call(command):
                result = await self._run(command)
                if self._command_s >= self._limits.wall_s:
                    return Stop.TIMEOUT
                return self._chat.observation(observation_text(result), completion.tokens)

    async def _run(self, command: str) -> ExecResult:
        left_s = self._limits.wall_s - self._command_s
        result = await shell(
            self._sandbox,
            command,
            timeout_s=min(self._limits.command_timeout_s, left_s),
            cwd=self._cwd,
            max_output=self._limits.max_output,
        )
        # a command that was killed at the last of its time has used it up, whatever the clock's rounding says
        used_up = result.timed_out and left_s <= self._limits.command_timeout_s
        self._command_s += left_s if used_up else result.duration_s
        return result


def turn_of(observed: tuple[int, ...], completion: Completion) -> Turn:
    return Turn(observed, completion.tokens, completion.logprobs, completion.version, completion.version)
