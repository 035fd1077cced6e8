"""What a run holds open: the policy, the engine that samples from it, the sandboxes, the verifier."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rsi.chat import Chat
from rsi.config import RunConfig
from rsi.engine import build_engine
from rsi.harbor.grade import Grader
from rsi.sandbox import build_backend
from rsi.solve import Site
from rsi.trainer import Follower, Trainer, build_trainer


@dataclass(frozen=True)
class Lab:
    """site is what episodes need; policy is what learns. The native engine shares the policy's weights."""

    policy: Trainer
    site: Site


def is_follower() -> bool:
    """Whether torchrun started this process to train with another one, which runs the loop."""
    return int(os.environ.get("RANK", "0")) > 0


def follow(config: RunConfig) -> None:
    """What every process but the first does: its share of each update, until the first one closes."""
    policy = build_trainer(config.model, config.trainer, config.loss)
    assert isinstance(policy, Follower), "a trainer of one process refuses more of them when it is built"
    policy.follow()


@asynccontextmanager
async def open_lab(config: RunConfig) -> AsyncIterator[Lab]:
    """Everything is closed at the end of the block, whatever ended it: no sandbox outlives the run."""
    policy = build_trainer(config.model, config.trainer, config.loss)
    chat = Chat(policy.tokenizer, config.model.thinking)
    backend = build_backend(config.sandbox)
    engine = build_engine(config.engine, policy.model)
    try:
        yield Lab(policy, Site(engine, chat, backend, Grader(backend)))
    finally:
        await engine.close()
        await backend.close()
        policy.close()
