"""The embedded engine: continuous batching in one thread, on the trainer's own module.

Requests join and leave between steps. A session keeps its keys and values between turns, so that a turn feeds only what
is new; sessions that begin alike (the attempts of a group) compute their common prompt once. Active sequences are kept
in the first rows of the cache, by exchanging rows, so that a step reads the cache in place.

Sampling is by inverse transform in float64 with uniforms of a counter-based generator keyed by the request's seed: what
a request draws does not depend on what else is in the batch, up to the float32 rounding of logits (1e-6), which moves a
draw only if it lands that close to a boundary.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rsi.engine import Completion, EngineConfig, EngineError, Request
from rsi.engine.forward import Chunk, HfForward, LeanForward, Slots

PREFILL_TOKENS = 4096
"""New prompt tokens of one step; more wait for the next, so that decoding goes on in between."""

MIN_SHARED = 8
"""Prompt tokens worth copying from another row rather than computing."""


class NativeEngine:
    """Meets the Engine Protocol. No request may be in flight while the trainer steps the shared module."""

    def __init__(self, config: EngineConfig, model: Any):
        _check(config, model)
        self.num_generated = 0
        self._config, self._module = config, model
        weight = model.get_input_embeddings().weight
        self._num_words = weight.shape[0]
        slots = Slots(model.config, config.max_batch, config.max_len, weight.dtype, weight.device)
        forward = LeanForward(model, slots) if LeanForward.fits(model) else HfForward(model, slots)
        self._worker = _Worker(self, slots, forward)
        self._inbox: queue.SimpleQueue[_Message] = self._worker.inbox
        self._closed = False
        self._thread = threading.Thread(target=self._worker.run, name="rsi-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> Completion:
        self._validate(request)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._send(_Job(request, _Reply(loop, future), self._temperature(request), self._max_new(request)))
        return await future

    def end(self, session: str) -> None:
        if not self._closed:
            self._inbox.put(_End(session))

    async def load(self, weights: Any, version: int) -> None:
        """weights: the shared module (or None), whose new values are taken as they are, or a state dict to copy in.

        Requests in flight are finished under the old version first; later ones wait.
        """
        if weights is not None and weights is not self._module and not isinstance(weights, Mapping):
            raise ValueError(f"load takes the shared module or a state dict, found {type(weights).__name__}")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._send(_Load(weights if isinstance(weights, Mapping) else None, version, _Reply(loop, future)))
        await future

    async def close(self) -> None:
        """Idempotent. Requests that wait get an EngineError."""
        if not self._closed:
            self._closed = True
            self._inbox.put(_Close())
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _send(self, message: _Job | _Load) -> None:
        if self._closed:
            raise EngineError("the engine is closed; build another one")
        self._inbox.put(message)

    def _temperature(self, request: Request) -> float:
        return self._config.temperature if request.temperature is None else request.temperature

    def _max_new(self, request: Request) -> int:
        return min(request.max_new, self._config.max_len - len(request.tokens))

    def _validate(self, request: Request) -> None:
        if not request.tokens or request.max_new < 1:
            raise ValueError(
                f"a request has at least one token and max_new >= 1, found {len(request.tokens)}, {request.max_new}"
            )
        if len(request.tokens) >= self._config.max_len:
            raise ValueError(
                f"the request has {len(request.tokens)} tokens and engine.max_len is {self._config.max_len}, prompt "
                "and samples together; raise engine.max_len or end the episode earlier"
            )
        if not 0 <= min(request.tokens) <= max(request.tokens) < self._num_words:
            raise ValueError(
                f"token ids lie in [0, {self._num_words}), found {min(request.tokens)}..{max(request.tokens)}"
            )
        if not 0 <= self._temperature(request) < math.inf:
            raise ValueError(f"temperature={self._temperature(request)}; use 0 for greedy, or a positive number")


def _check(config: EngineConfig, model: Any) -> None:
    if config.max_batch < 1 or config.max_len < 2:
        raise ValueError(f"engine.max_batch={config.max_batch}, engine.max_len={config.max_len}; use at least 1 and 2")
    longest = model.config.max_position_embeddings
    if config.max_len > longest:
        raise ValueError(f"engine.max_len={config.max_len}, but the model's positions end at {longest}; lower it")
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(model.config, "sliding_window", None):
        raise ValueError(
            f"the native engine serves models with full attention in every layer, found {sorted(kinds)}; "
            "use another engine.backend for this model"
        )


@dataclass(frozen=True)
class _Reply:
    """Where an answer goes: a future of the caller's event loop, settled from our thread."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    def result(self, value: Any) -> None:
        self._call(lambda: self.future.set_result(value))

    def error(self, error: Exception) -> None:
        self._call(lambda: self.future.set_exception(error))

    def _call(self, settle: Any) -> None:
        if self.loop.is_closed():
            return
        try:
            self.loop.call_soon_threadsafe(lambda: None if self.future.done() else settle())
        except RuntimeError:  # closed since: nobody waits any more
            return


@dataclass(eq=False)
class _Job:
    """A request under way."""

    request: Request
    reply: _Reply
    temperature: float
    max_new: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = list(self.request.tokens)
        key = self.request.seed % (1 << 64)
        self.uniforms = np.random.Generator(np.random.Philox(key=key)).random(self.max_new).tolist()


@dataclass(frozen=True)
class _End:
    session: str


@dataclass(frozen=True)
class _Load:
    weights: Mapping[str, Tensor] | None
    version: int
    reply: _Reply


@dataclass(frozen=True)
class _Close:
    pass


_Message = _Job | _End | _Load | _Close


@dataclass(eq=False)
class _Session:
    """A row of the cache and what it holds. `job` is None between turns."""

    name: str
    row: int
    cached: list[int] = field(default_factory=list)
    """Ids whose keys and values are in the row."""
    feed: list[int] = field(default_factory=list)
    """Ids to feed in the next step."""
    job: _Job | None = None
    last_used: int = 0
    ended: bool = False
    """`end` came while a job was under way."""


class _Worker:
    """The thread's side. Only it touches sessions, slots and the module, so nothing here needs a lock."""

    def __init__(self, engine: NativeEngine, slots: Slots, forward: HfForward | LeanForward):
        self.inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._engine, self._slots, self._forward = engine, slots, forward
        self._module: nn.Module = engine._module
        self._parameters = list(self._module.parameters())
        self._rows: list[_Session | None] = [None] * slots.keys.shape[1]
        self._by_name: dict[str, _Session] = {}
        self._waiting: list[_Job] = []
        self._loads: list[_Load] = []
        self._version = 0
        self._stamp = self._weights_stamp()
        self._clock = 0

    def run(self) -> None:
        while self._receive():
            try:
                with torch.inference_mode():
                    self._advance()
                if self._loads and not self._active():
                    self._load(self._loads.pop(0))
            except Exception as error:  # whatever broke, those who wait must hear of it
                self._fail(EngineError(f"the native engine broke: {type(error).__name__}: {error}"), error)
        self._fail(EngineError("the engine was closed while the request was under way"))

    def _receive(self) -> bool:
        """Take in all messages, waiting for one when there is nothing to do; False on close."""
        idle = not (self._waiting or self._loads or self._active())
        while True:
            try:
                message = self.inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            match message:
                case _Job():
                    self._waiting.append(message)
                case _Load():
                    self._loads.append(message)
                case _End():
                    self._end(message.session)
                case _Close():
                    return False

    def _active(self) -> list[_Session]:
        return [session for session in self._rows if session is not None and session.job is not None]

    def _advance(self) -> None:
        """One step: admit who waits, feed every active row, sample one token for each."""
        if self._waiting and not self._loads:
            self._admit()
        active = self._active()
        for session in active:
            assert session.job is not None
            if session.job.reply.future.cancelled():
                self._leave(session)
        active = [session for session in active if session.job is not None]
        if not active:
            return
        self._compact(active)
        active.sort(key=lambda session: session.row)
        logits = self._forward([Chunk(session.row, len(session.cached), session.feed) for session in active])
        jobs = [session.job for session in active if session.job is not None]
        tokens, logprobs = sample(
            logits, [job.temperature for job in jobs], [job.uniforms[len(job.tokens)] for job in jobs]
        )
        if not all(map(math.isfinite, logprobs)):
            raise ArithmeticError("the model's logits are not finite; go back to an earlier checkpoint")
        for session, token, logprob in zip(active, tokens, logprobs, strict=True):
            self._take(session, token, logprob)

    def _take(self, session: _Session, token: int, logprob: float) -> None:
        job = session.job
        assert job is not None
        session.cached += session.feed
        session.feed = [token]
        job.tokens.append(token)
        job.logprobs.append(logprob)
        self._engine.num_generated += 1
        stopped = token in job.request.stop_ids
        if stopped or len(job.tokens) == job.max_new:
            finish: Literal["stop", "length"] = "stop" if stopped else "length"
            job.reply.result(Completion(tuple(job.tokens), tuple(job.logprobs), finish, self._version))
            self._leave(session)

    def _leave(self, session: _Session) -> None:
        """The job is over; the row stays with its session, unless nobody can come back for it."""
        self._clock += 1
        session.job, session.feed, session.last_used = None, [], self._clock
        if session.ended or not session.name:
            self._drop(session)

    def _drop(self, session: _Session) -> None:
        self._rows[session.row] = None
        if self._by_name.get(session.name) is session:
            del self._by_name[session.name]

    def _end(self, name: str) -> None:
        session = self._by_name.get(name)
        if session is None:
            return
        if session.job is None:
            self._drop(session)
        else:
            session.ended = True

    def _admit(self) -> None:
        """Give rows to waiting jobs, first come first served, up to PREFILL_TOKENS new tokens."""
        if self._weights_stamp() != self._stamp:
            raise RuntimeError("the shared weights changed without a load; call `load` after every update")
        budget = PREFILL_TOKENS
        admitted: list[_Session] = []
        still_waiting: list[_Job] = []
        for job in self._waiting:
            session = self._admit_one(job, admitted, budget)
            if session is None:
                still_waiting.append(job)
            else:
                budget -= len(session.feed)
                admitted.append(session)
        self._waiting = still_waiting

    def _admit_one(self, job: _Job, admitted: list[_Session], budget: int) -> _Session | None:
        """A row with the job on it and its new tokens to feed, or None: it has to wait."""
        name, prompt = job.request.session, job.prompt
        session = self._by_name.get(name) if name else None
        if session is not None and session.job is not None:
            return None
        own = common_prefix(session.cached, prompt) if session else 0
        source, shared = self._longest_shared(prompt)
        if shared < own + MIN_SHARED:
            source, shared = None, own
        # if a prompt of this very step begins alike for longer, take its row after the step
        if any(common_prefix(other.cached + other.feed, prompt) >= shared + MIN_SHARED for other in admitted):
            return None
        kept = min(max(own, shared), len(prompt) - 1)
        if admitted and len(prompt) - kept > budget:
            return None
        if session is None:
            row = self._free_row(keep=source)
            if row is None:
                return None
            session = _Session(name, row)
            self._rows[row] = session
            if name:
                self._by_name[name] = session
        if source is not None:
            self._slots.copy(source.row, session.row, kept)
        session.cached, session.feed, session.job = prompt[:kept], prompt[kept:], job
        return session

    def _longest_shared(self, prompt: list[int]) -> tuple[_Session | None, int]:
        best, longest = None, 0
        for session in self._rows:
            if session is not None and len(session.cached) > longest and session.cached[0] == prompt[0]:
                length = common_prefix(session.cached, prompt)
                if length > longest:
                    best, longest = session, length
        return best, longest

    def _free_row(self, keep: _Session | None) -> int | None:
        """An empty row, or that of the session that has been idle longest, those with a waiting job last."""
        for row, session in enumerate(self._rows):
            if session is None:
                return row
        wanted = {job.request.session for job in self._waiting}
        idle = [s for s in self._rows if s is not None and s.job is None and s is not keep]
        if not idle:
            return None
        oldest = min(idle, key=lambda s: (s.name in wanted, s.last_used))
        self._drop(oldest)
        return oldest.row

    def _compact(self, active: Sequence[_Session]) -> None:
        """Bring the active sessions into the first rows; each exchange moves one in and an inactive one out."""
        count = len(active)
        holes = [row for row in range(count) if (held := self._rows[row]) is None or held.job is None]
        for session in active:
            if session.row < count:
                continue
            hole = holes.pop()
            other = self._rows[hole]
            self._slots.swap(session.row, hole, max(len(session.cached), len(other.cached) if other else 0))
            self._rows[session.row], self._rows[hole] = other, session
            if other is not None:
                other.row = session.row
            session.row = hole

    def _load(self, message: _Load) -> None:
        try:
            if message.weights is not None:
                self._module.load_state_dict(message.weights)
        except RuntimeError as error:
            message.reply.error(EngineError(f"the weights do not fit the engine's model: {error}"))
            return
        self._forget_all()
        self._forward.refresh()
        self._version, self._stamp = message.version, self._weights_stamp()
        message.reply.result(None)

    def _forget_all(self) -> None:
        self._rows = [None] * len(self._rows)
        self._by_name.clear()
        self._slots.clear()

    def _fail(self, error: EngineError, cause: Exception | None = None) -> None:
        """Tell everyone who waits, and begin anew with empty caches."""
        error.__cause__ = cause
        replies = [session.job.reply for session in self._active() if session.job is not None]
        replies += [job.reply for job in self._waiting] + [load.reply for load in self._loads]
        self._waiting, self._loads = [], []
        self._forget_all()
        for reply in replies:
            reply.error(error)

    def _weights_stamp(self) -> int:
        """Changes with every in-place change of a parameter: torch counts them."""
        return sum(parameter._version for parameter in self._parameters)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix; by bisection over slices, which compare in C."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def sample(logits: Tensor, temperatures: list[float], uniforms: list[float]) -> tuple[list[int], list[float]]:
    """One token a row by inverse transform: the first whose cumulative probability exceeds the row's uniform.

    logits: float32 [B, V]; temperature 0 takes the most likely token. Returns ids, and their log-probabilities in nats
    under the tempered distribution (the untempered one for temperature 0).
    """
    if any(t not in (0.0, 1.0) for t in temperatures):
        logits = logits / torch.tensor([t or 1.0 for t in temperatures], device=logits.device)[:, None]
    logp_BV = logits.log_softmax(-1)
    cumulative = logp_BV.exp().cumsum(-1, dtype=torch.float64)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=logits.device) * cumulative[:, -1]
    picks = torch.searchsorted(cumulative, targets[:, None], right=True).clamp_(max=logits.shape[1] - 1)
    if 0.0 in temperatures:
        greedy = torch.tensor([t == 0 for t in temperatures], device=logits.device)[:, None]
        picks = torch.where(greedy, logp_BV.argmax(-1, keepdim=True), picks)
    return picks[:, 0].tolist(), logp_BV.gather(1, picks)[:, 0].tolist()
