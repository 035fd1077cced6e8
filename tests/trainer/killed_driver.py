"""A run of real updates, for test_killed.py: every step saved, the weights' digest written at the end.

python killed_driver.py RUN_DIR MODEL_DIR STEPS
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

from rsi.loss import LossConfig
from rsi.run import RunDir
from rsi.trainer import ModelConfig, TrainerConfig
from rsi.trainer.local import LocalTrainer
from tests.trainer.test_documents import make_batch


@dataclass(frozen=True)
class Config:
    steps: int


def digest(trainer: LocalTrainer) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(trainer.model.state_dict().items()):
        total.update(name.encode() + tensor.numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    path, model_dir, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    trainer = LocalTrainer(ModelConfig(model_dir), TrainerConfig(lr=1e-3, warmup_steps=3, threads=1), LossConfig())
    with RunDir(path, Config(steps), min_free_mb=1, tensorboard=False) as run:
        found = run.latest()
        if found:
            trainer.load(found[1] / "policy")
        print("open", flush=True)
        for step in range(found[0] if found else 0, steps):
            run.log(step, trainer.update(make_batch(step)))
            run.save(step + 1, lambda directory: trainer.save(directory / "policy"), {})
        run.write_summary({"weights": digest(trainer), "version": trainer.version})


if __name__ == "__main__":
    main()
