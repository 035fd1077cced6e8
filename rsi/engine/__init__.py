"""Rollout engines: tokens in, tokens out. The Protocol, its records, and `build_engine`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class EngineConfig:
    """The `engine:` block of a recipe."""

    backend: Literal["native"] = "native"
    max_batch: int = 64
    """Sequences that keep a key-value cache at once; further ones wait, or give up their cache between turns."""
    max_len: int = 1024
    """Tokens of one sequence, prompt and samples together."""
    temperature: float = 1.0
    """1 is the policy itself; anything else makes the stored logprobs those of the tempered policy."""


@dataclass(frozen=True)
class Request:
    """One sample to draw. Equal requests to equal weights give equal tokens, whatever else is in the batch."""

    tokens: tuple[int, ...]
    """The whole context, not only what is new."""
    max_new: int
    stop_ids: frozenset[int]
    seed: int
    session: str = ""
    """Requests of one episode share it: the engine keeps its key-value cache until `end(session)`."""
    temperature: float | None = None
    """None: the engine's; 0: greedy."""


@dataclass(frozen=True)
class Completion:
    """tokens ends with the stop id when finish is "stop". logprobs: nats, fp32, one a token."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    version: int


class EngineError(RuntimeError):
    """Our side broke; callers count it as a fault."""


class Engine(Protocol):
    num_generated: int
    """Tokens sampled since the start."""

    async def generate(self, request: Request) -> Completion:
        """Raises ValueError for a request longer than max_len, EngineError when the engine broke."""
        ...

    def end(self, session: str) -> None:
        """Forget a session's cache; unknown sessions are fine."""
        ...

    async def load(self, weights: Any, version: int) -> None:
        """Take new weights under a version number; caches of the old ones are dropped."""
        ...

    async def close(self) -> None: ...


def build_engine(config: EngineConfig, model: Any) -> Engine:
    """model: the trainer's module, whose weights the native engine shares rather than copies."""
    match config.backend:
        case "native":
            from rsi.engine.native import NativeEngine

            return NativeEngine(config, model)
