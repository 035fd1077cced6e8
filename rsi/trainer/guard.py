"""Updates that may go wrong: an engine that samples another policy than the one trained, a loss that is not finite.

The gate is the step before the first step, at learning rate 0: the trainer scores what the engine has sampled, and a
run whose two sides disagree stops before it has learned anything from that. An update that is not finite is skipped and
its batch kept for the autopsy; several in a row stop the run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from rsi.trainer import Trainer, TrainerConfig
from rsi.types import Batch

IN_A_ROW = 3
"""Skipped updates that stop the run."""


class Guard:
    """Between a loop and its trainer. directory: where batches of skipped updates go."""

    def __init__(
        self,
        policy: Trainer,
        config: TrainerConfig,
        directory: Path,
        in_a_row: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.in_a_row = in_a_row
        """Updates skipped since the last one that went well; a checkpoint holds it."""
        self._policy, self._config, self._directory = policy, config, directory
        self._gated, self._clock = False, clock

    def update(self, batch: Batch, step: int) -> Mapping[str, float]:
        """`Trainer.update`, with `skipped` and `train_tokens_per_s` among its metrics.

        Raises RuntimeError where the gate, or the third update in a row that is not finite, stops the run.
        """
        gate: Mapping[str, float] = {}
        if not self._gated:
            gate = check_mismatch(self._policy, batch, self._config)
            self._gated = True
        began = self._clock()
        try:
            metrics = self._policy.update(batch)
        except FloatingPointError as error:
            self.in_a_row += 1
            kept = dump(batch, self._directory / f"step_{step:06d}.npz", str(error))
            if self.in_a_row >= IN_A_ROW:
                raise RuntimeError(
                    f"{self.in_a_row} updates in a row were not finite, the last because {error}; their batches are in "
                    f"{kept.parent}"
                ) from error
            return {**gate, "skipped": 1.0}
        self.in_a_row = 0
        rate = len(batch.tokens) / max(self._clock() - began, 1e-9)
        return {**gate, **metrics, "train_tokens_per_s": rate, "skipped": 0.0}


def check_mismatch(policy: Trainer, batch: Batch, config: TrainerConfig) -> dict[str, float]:
    """Mean and largest |ln p_trainer - ln p_engine|, nats, and mean k3, over the samples of the current version; empty
    where there are none. Raises RuntimeError, naming the worst token, above the bounds of `config`."""
    fresh = np.repeat(batch.versions == policy.version, np.diff(batch.cu_seqlens)) & batch.mask
    if not fresh.any() or not (config.gate_mean or config.gate_k3):
        return {}
    ours = policy.logprobs(batch)
    log_w = (ours - batch.logprobs).astype(np.float64)
    distance = np.where(fresh, np.abs(log_w), 0.0)
    with np.errstate(over="ignore"):
        k3 = float((np.expm1(log_w[fresh]) - log_w[fresh]).mean())
    mean, worst = float(distance[fresh].mean()), int(distance.argmax())
    for found, bound, name in ((mean, config.gate_mean, "gate_mean"), (k3, config.gate_k3, "gate_k3")):
        if bound and not found <= bound:
            sample = int(np.searchsorted(batch.cu_seqlens, worst, side="right")) - 1
            raise RuntimeError(
                f"the engine samples another policy than the trainer trains: "
                f"{'mean |ln p - ln q|' if name == 'gate_mean' else 'mean k3'} is {found:.3g} over {int(fresh.sum())} "
                f"tokens, trainer.{name} allows {bound:g}. Worst: token {int(batch.labels[worst])} of sample {sample}, "
                f"position {worst - int(batch.cu_seqlens[sample]) + 1}, engine {float(batch.logprobs[worst]):.4g}, "
                f"trainer {float(ours[worst]):.4g}. Compare dtype, temperature and weights of both sides"
            )
    return {"gate_mean": mean, "gate_max": float(distance[worst]), "gate_k3": k3}


def dump(batch: Batch, path: Path, reason: str) -> Path:
    """The batch as numpy arrays, with why it was skipped; `numpy.load(path)` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    arrays = {name: value for name, value in fields.items() if value is not None}
    np.savez(path, reason=np.asarray(reason), **arrays)
    return path
