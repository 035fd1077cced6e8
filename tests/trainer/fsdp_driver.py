"""Ranks of the sharded trainer, for test_fsdp.py: every scenario in one launch, because a launch costs seconds.

python -m torch.distributed.run ... fsdp_driver.py OUT.json MODEL_DIR WORK_DIR
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rsi.loss import LossConfig
from rsi.trainer import ModelConfig, TrainerConfig
from rsi.trainer.fsdp import FsdpTrainer
from tests.trainer.test_documents import make_batch

STEPS = 3


def config(**overrides: Any) -> TrainerConfig:
    fields = dict(backend="fsdp", layout="packed", lr=1e-3, microbatch_tokens=80, threads=1) | overrides
    return TrainerConfig(**fields)  # pyright: ignore[reportArgumentType]


def batches(step: int) -> Any:
    batch = make_batch(step)
    noise = np.random.default_rng(step).normal(size=len(batch.tokens)) * 0.1
    return replace(batch, logprobs=np.where(batch.mask, -5.5 + noise, 0).astype(np.float32))


def digest(trainer: FsdpTrainer) -> dict[str, list[float]]:
    """Of every tensor: its sum and its sum of squares, in float64."""
    return {
        name: [float(t.double().sum()), float(t.double().square().sum())]
        for name, t in trainer.model.state_dict().items()
    }


def lead(trainer: FsdpTrainer, work: Path) -> dict[str, Any]:
    told: dict[str, Any] = {"world": trainer.world, "read": trainer.num_bytes_read}
    told["held"] = sum(p.to_local().numel() * 4 for p in trainer._parameters)
    told["logprobs"] = trainer.logprobs(batches(0)).tolist()
    told["steps"] = [dict(trainer.update(batches(step))) for step in range(STEPS)]
    told["weights"] = digest(trainer)
    trainer.save(work / f"after-{trainer.world}")
    poisoned = replace(batches(3), advantages=np.full(len(batches(3).tokens), np.nan, np.float32))
    try:
        trainer.update(poisoned)
    except FloatingPointError as error:
        told["refused"] = str(error)
    told["version"] = trainer.version
    told["after_refusal"] = digest(trainer) == told["weights"]
    told["next"] = dict(trainer.update(batches(STEPS)))
    told["next_weights"] = digest(trainer)
    for saved in sorted(work.glob("after-*")):
        trainer.load(saved)
        told[f"resumed {saved.name}"] = {
            "version": trainer.version,
            "weights": digest(trainer) == told["weights"],
            "next": dict(trainer.update(batches(STEPS))),
            "next_weights": digest(trainer) == told["next_weights"],
        }
    trainer.export(work / f"export-{trainer.world}")
    (work / "file").write_text("in the way")  # a directory cannot be made below it
    try:
        trainer.save(work / "file" / "below")
    except OSError as error:
        told["unwritable"] = str(error)
    told["alive"] = trainer.version
    return told


def main() -> None:
    out, model_dir, work = map(Path, sys.argv[1:4])
    work.mkdir(exist_ok=True)
    alone = os.environ["WORLD_SIZE"] == "1"  # one rank offloads, two recompute activations: neither changes a number
    settings = config(offload=alone, checkpoint_activations=not alone)
    trainer = FsdpTrainer(ModelConfig(str(model_dir)), settings, LossConfig())
    if trainer.rank:
        trainer.follow()
        return
    told = lead(trainer, work)
    trainer.close()
    out.write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
