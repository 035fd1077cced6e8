"""The start-up gate and skipped updates, on the real trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rsi.loss import LossConfig
from rsi.trainer import ModelConfig, TrainerConfig
from rsi.trainer.guard import Guard, check_mismatch
from rsi.trainer.local import LocalTrainer
from rsi.types import Batch
from tests.trainer.test_documents import make_batch

CONFIG = TrainerConfig(lr=1e-3, threads=1)


@pytest.fixture
def policy(model_dir: Path) -> LocalTrainer:
    return LocalTrainer(ModelConfig(str(model_dir)), CONFIG, LossConfig())


def sampled(policy: LocalTrainer, seed: int = 0) -> Batch:
    """A batch whose stored log-probabilities are the trainer's own."""
    batch = make_batch(seed)
    return replace(batch, logprobs=policy.logprobs(batch))


def poisoned(batch: Batch) -> Batch:
    return replace(batch, advantages=np.where(batch.mask, np.nan, 0).astype(np.float32))


def test_an_engine_that_agrees_passes_the_gate_once(policy: LocalTrainer, tmp_path: Path):
    seconds = iter((10.0, 12.0, 20.0, 21.0))
    guard = Guard(policy, CONFIG, tmp_path, clock=lambda: next(seconds))
    first = guard.update(sampled(policy), 0)
    assert first["train_tokens_per_s"] == len(sampled(policy).tokens) / 2
    assert first["gate_mean"] == first["gate_max"] == 0 and first["skipped"] == 0
    assert "gate_mean" not in guard.update(sampled(policy), 1)


def test_an_engine_that_samples_another_policy_stops_the_run_before_it_learns(policy: LocalTrainer, tmp_path: Path):
    batch = sampled(policy)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    off = batch.logprobs - np.where(batch.mask, 0.1, 0).astype(np.float32)
    worst = int(np.flatnonzero(batch.mask)[-1])
    off[worst] -= 1
    with pytest.raises(RuntimeError, match=r"mean \|ln p - ln q\| is 0\.1.* trainer.gate_mean allows 0.05") as error:
        Guard(policy, CONFIG, tmp_path).update(replace(batch, logprobs=off), 0)
    position = worst - int(batch.cu_seqlens[-2]) + 1
    assert f"token {batch.labels[worst]} of sample 8, position {position}, engine" in str(error.value)
    assert policy.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.model.state_dict().items())


def test_a_few_far_tokens_trip_the_other_bound(policy: LocalTrainer):
    batch = sampled(policy)
    off = batch.logprobs.copy()
    off[np.flatnonzero(batch.mask)[0]] -= 3  # k3 of one token is e^3 - 4, the mean distance stays small
    with pytest.raises(RuntimeError, match="mean k3 .* trainer.gate_k3 allows 0.015"):
        check_mismatch(policy, replace(batch, logprobs=off), CONFIG)
    unbounded = replace(CONFIG, gate_k3=0.0)
    assert check_mismatch(policy, replace(batch, logprobs=off), unbounded)["gate_max"] == pytest.approx(3, abs=1e-4)


def test_samples_of_an_older_version_say_nothing_about_the_engine(policy: LocalTrainer):
    batch = sampled(policy)
    off = replace(batch, logprobs=batch.logprobs - 1, versions=np.full(9, -1))
    assert check_mismatch(policy, off, CONFIG) == {}


def test_an_update_that_is_not_finite_is_skipped_and_its_batch_kept(policy: LocalTrainer, tmp_path: Path):
    guard, batch = Guard(policy, CONFIG, tmp_path / "skipped"), sampled(policy)
    metrics = guard.update(poisoned(batch), 7)
    assert metrics["skipped"] == 1 and "loss" not in metrics and policy.version == 0
    kept = np.load(tmp_path / "skipped" / "step_000007.npz")
    assert kept["tokens"].tolist() == batch.tokens.tolist() and np.isnan(kept["advantages"]).any()
    assert "the loss of step 0 is nan" in str(kept["reason"])
    assert guard.update(batch, 8)["skipped"] == 0 and policy.version == 1


def test_three_in_a_row_stop_the_run_and_a_good_one_between_does_not(policy: LocalTrainer, tmp_path: Path):
    guard, batch = Guard(policy, CONFIG, tmp_path), sampled(policy)
    for update in (poisoned(batch), poisoned(batch), batch, poisoned(batch), poisoned(batch)):
        guard.update(update, 0)
    resumed = Guard(policy, CONFIG, tmp_path, in_a_row=guard.in_a_row)
    with pytest.raises(RuntimeError, match="3 updates in a row were not finite, the last because the loss of step 1"):
        resumed.update(poisoned(batch), 1)
