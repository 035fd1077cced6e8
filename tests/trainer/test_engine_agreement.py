"""Sampler and trainer on one module: what the engine reports is what the trainer computes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rsi.advantages import flatten
from rsi.engine import EngineConfig, Request
from rsi.engine.native import NativeEngine
from rsi.loss import LossConfig
from rsi.pack import pack
from rsi.trainer import ModelConfig, TrainerConfig
from rsi.trainer.local import LocalTrainer
from rsi.types import Batch, Stop, Trajectory, Turn


async def rollouts(engine: NativeEngine, num: int) -> Batch:
    """Episodes of three turns, concurrently, as the episode loop runs them."""

    async def episode(seed: int) -> Trajectory:
        rng = np.random.default_rng(seed)
        context: tuple[int, ...] = ()
        turns = []
        for turn in range(3):
            observed = tuple(rng.integers(0, 256, 4 + seed % 5).tolist())
            context += observed
            completion = await engine.generate(Request(context, 10, frozenset({256}), 10 * seed + turn, str(seed)))
            context += completion.tokens
            version = completion.version
            turns.append(Turn(observed, completion.tokens, completion.logprobs, version, version))
        engine.end(str(seed))
        return Trajectory(str(seed), "task", "solver", tuple(turns), Stop.DONE)

    episodes = await asyncio.gather(*[episode(seed) for seed in range(num)])
    return pack([flatten(trajectory, (-1.0) ** i) for i, trajectory in enumerate(episodes)])


def test_the_trainer_scores_what_the_engine_sampled_alike_step_after_step(model_dir: Path):
    trainer = LocalTrainer(ModelConfig(str(model_dir)), TrainerConfig(lr=1e-2, threads=1), LossConfig())

    async def main() -> None:
        engine = NativeEngine(EngineConfig(max_batch=5, max_len=100), trainer.model)
        for version in range(3):
            batch = await rollouts(engine, 8)
            # float32: cached steps and one padded forward sum in another order; 2e-6 measured, and a stale cache or
            # weight after a step of 1e-2 gives > 0.1
            np.testing.assert_allclose(trainer.logprobs(batch), batch.logprobs, atol=1e-4)
            metrics = trainer.update(batch)
            assert metrics["max_mismatch"] < 1e-4
            assert metrics["max_ratio"] == pytest.approx(1, abs=1e-4)
            await engine.load(trainer.model, trainer.version)
            assert trainer.version == version + 1
        await engine.close()

    asyncio.run(main())
