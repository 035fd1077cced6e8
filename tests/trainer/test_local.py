"""The one-process trainer on a random tiny Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rsi.loss import LossConfig
from rsi.pack import pack
from rsi.trainer import ModelConfig, TrainerConfig, build_trainer
from rsi.trainer.layout import Microbatch, idle, padded
from rsi.trainer.local import LocalTrainer
from rsi.trainer.scoring import accumulate, expert_metrics
from rsi.types import Batch, Sample


def make_trainer(model_dir: Path, dtype: str = "float32", **overrides: float) -> LocalTrainer:
    config = TrainerConfig(**({"lr": 1e-2, "threads": 1} | overrides))  # pyright: ignore[reportArgumentType]
    return LocalTrainer(ModelConfig(str(model_dir), dtype), config, LossConfig())  # pyright: ignore[reportArgumentType]


def make_batch(trainer: LocalTrainer | None = None, seed: int = 0, advantage: float | None = None) -> Batch:
    """Eight samples of 6 to 40 tokens, about half of them sampled; on-policy where a trainer is given."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(8):
        length = int(rng.integers(6, 41))
        mask = rng.random(length) < 0.5
        mask[0], mask[1] = False, True
        samples.append(
            Sample(
                tuple(rng.integers(0, 270, length).tolist()),
                tuple(mask.tolist()),
                tuple(np.where(mask, -5.0, 0.0).tolist()),
                float(rng.normal()) if advantage is None else advantage,
                "solver",
                0,
            )
        )
    batch = pack(samples)
    return replace(batch, logprobs=trainer.logprobs(batch)) if trainer else batch


def accumulate_into(trainer: LocalTrainer, batch: Batch, microbatch: Microbatch) -> None:
    accumulate(trainer._scorer, LossConfig(), batch, microbatch, trainer._device)


def weights(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_logprobs_are_those_of_the_unpadded_module(model_dir: Path):
    trainer, batch = make_trainer(model_dir, microbatch_tokens=90), make_batch()
    ours = torch.from_numpy(trainer.logprobs(batch))
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        row = slice(int(start), int(end))
        with torch.no_grad():
            logp = trainer.model(torch.from_numpy(batch.tokens[row])[None]).logits[0].log_softmax(-1)
        expected = logp.gather(-1, torch.from_numpy(batch.labels[row])[:, None])[:, 0]
        expected[~torch.from_numpy(batch.mask[row])] = 0
        # float32, logits of ~5: padding changes the heights of the products and so their order of summation
        torch.testing.assert_close(ours[row], expected, atol=2e-5, rtol=0)


def test_many_microbatches_equal_one(model_dir: Path):
    one, many = (make_trainer(model_dir, microbatch_tokens=n, lr=1e-3) for n in (10_000, 50))
    batch = make_batch(one)
    a, b = one.update(batch), many.update(batch)
    assert (a["num_microbatches"], b["num_microbatches"]) == (1, 7)
    for name in a.keys() - {"num_microbatches", "memory_peak_mb", "expert_load_max", "expert_unused_frac"}:
        # sums of ~80 float32 terms in another order; max_mismatch and its kin are differences of equal numbers
        assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name
    for name, tensor in one.model.state_dict().items():
        # Adam's first step is lr * sign(gradient) where the gradient exceeds eps 1e-8, so rounding of a gradient near
        # zero shows up to twice lr = 2e-3; nearly all elements agree to rounding
        difference = (tensor - many.model.state_dict()[name]).abs()
        assert difference.max() <= 2.1e-3 and difference.median() < 1e-6, name


def test_gradients_of_many_microbatches_equal_those_of_one(model_dir: Path):
    trainer, grads = make_trainer(model_dir), []
    batch = make_batch(trainer)
    for tokens in (10_000, 50):
        for microbatch in padded(batch, tokens):
            accumulate_into(trainer, batch, microbatch)
        grads.append({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
        trainer._clear_grads()
    for name, gradient in grads[0].items():
        torch.testing.assert_close(gradient, grads[1][name], atol=1e-6, rtol=1e-3)  # order of summation


def test_gradient_is_that_of_reinforce_on_policy(model_dir: Path):
    """At ratio 1 the loss's gradient is -sum(A * grad logp) / N, computed here by plain autograd, sample by sample."""
    trainer = make_trainer(model_dir)
    batch = make_batch(trainer)
    for microbatch in padded(batch, 100):
        accumulate_into(trainer, batch, microbatch)
    ours = trainer.model.model.embed_tokens.weight.grad.clone()
    trainer._clear_grads()
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        row = slice(int(start), int(end))
        logp = trainer.model(torch.from_numpy(batch.tokens[row])[None]).logits[0].log_softmax(-1)
        chosen = logp.gather(-1, torch.from_numpy(batch.labels[row])[:, None])[:, 0]
        (-(chosen * torch.from_numpy(batch.advantages[row])).sum() / batch.num_loss_tokens).backward()
    torch.testing.assert_close(ours, trainer.model.model.embed_tokens.weight.grad, atol=1e-6, rtol=1e-3)


def test_updates_raise_what_is_rewarded(model_dir: Path):
    trainer = make_trainer(model_dir, lr=1e-3)
    batch = make_batch(trainer, advantage=1.0)
    before = trainer.logprobs(batch).sum()
    metrics = trainer.update(batch)
    assert trainer.logprobs(batch).sum() > before
    assert trainer.version == 1
    assert metrics["loss"] == pytest.approx(-1.0, abs=1e-5)  # on-policy: ratio 1, advantage 1
    assert metrics["max_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch_k3"] == pytest.approx(0.0, abs=1e-6)
    assert 0 < metrics["entropy"] <= np.log(270)
    assert metrics["num_loss_tokens"] == batch.num_loss_tokens
    assert metrics["num_tokens"] == len(batch.tokens)


def test_far_tokens_are_masked_by_sign(model_dir: Path):
    trainer = make_trainer(model_dir)
    batch = make_batch(trainer, advantage=-1.0)
    certain = replace(batch, logprobs=np.where(batch.mask, -0.01, 0).astype(np.float32))  # the sampler gave p = 0.99
    metrics = trainer.update(certain)
    assert metrics["masked_neg_frac"] == 1.0
    assert metrics["masked_pos_frac"] == 0.0
    assert metrics["grad_norm"] == 0.0


def test_a_step_tells_what_it_saw(model_dir: Path):
    trainer = make_trainer(model_dir, lr=1e-3)
    batch = replace(make_batch(trainer), versions=np.array([0, 0, 0, 0, 0, 0, 0, -2]))
    metrics = trainer.update(batch)
    lengths = np.diff(batch.cu_seqlens)
    assert metrics["length_mean"] == pytest.approx(lengths.mean()) and metrics["length_max"] == lengths.max()
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (0.25, 2)
    assert metrics["ess"] == pytest.approx(1.0) and metrics["chi2"] == pytest.approx(0.0, abs=1e-5)  # on-policy
    assert metrics["ratio_pos_mean"] == pytest.approx(1.0) == metrics["ratio_neg_mean"]
    assert metrics["pos_frac"] + metrics["neg_frac"] == pytest.approx(1.0)
    assert 1 <= metrics["expert_load_max"] <= 8 and 0 <= metrics["expert_unused_frac"] < 1
    assert metrics["memory_peak_mb"] > 100


def test_expert_load_counts_tokens_by_layer_and_expert(model_dir: Path):
    trainer = make_trainer(model_dir)
    tokens = torch.arange(10)[None]
    trainer.model(tokens)  # not while it is watched: an engine shares the module
    with trainer._experts.watching(padded(make_batch(), 1000)[0]):
        trainer.model(tokens)
    with trainer._experts.watching(idle()):
        trainer.model(tokens)
    counts = trainer._experts.counts
    assert counts.shape == (2, 8) and counts.sum(-1).tolist() == [20, 20]  # top-2
    assert expert_metrics(torch.tensor([[4, 0, 0, 0], [1, 1, 1, 1]])) == {
        "expert_load_max": 4.0,
        "expert_unused_frac": 0.375,
    }


@pytest.mark.parametrize("overrides", [{"layout": "packed"}, {"checkpoint_activations": True}])
def test_packing_and_recomputation_change_the_cost_and_not_the_step(model_dir: Path, overrides: dict):
    plain, other = make_trainer(model_dir, lr=1e-3), make_trainer(model_dir, lr=1e-3, **overrides)
    batch = make_batch(plain)
    a, b = plain.update(batch), other.update(batch)
    assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    np.testing.assert_allclose(plain.logprobs(batch), other.logprobs(batch), atol=2e-3)
    assert not other.model.training


def test_warm_up_is_linear(model_dir: Path):
    trainer = make_trainer(model_dir, lr=1e-4, warmup_steps=4)
    batch = make_batch(trainer)
    assert [trainer.update(batch)["lr"] for _ in range(5)] == pytest.approx([2.5e-5, 5e-5, 7.5e-5, 1e-4, 1e-4])


def test_decay_is_linear_down_to_a_twentieth(model_dir: Path):
    trainer = make_trainer(model_dir, lr=1e-4, decay_steps=4)
    batch = make_batch(trainer)
    assert [trainer.update(batch)["lr"] for _ in range(6)] == pytest.approx([1e-4, 7.5e-5, 5e-5, 2.5e-5, 5e-6, 5e-6])


def test_gradients_are_clipped(model_dir: Path):
    trainer = make_trainer(model_dir)
    batch = make_batch(trainer, advantage=1000.0)
    microbatch = padded(batch, 10_000)[0]
    accumulate_into(trainer, batch, microbatch)
    assert trainer._grad_norm() > 1
    norm = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm()
    assert norm.item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("field", "value"), [("logprobs", -np.inf), ("advantages", np.nan)])
def test_a_loss_that_is_not_finite_leaves_the_weights(model_dir: Path, field: str, value: float):
    trainer = make_trainer(model_dir)
    batch = make_batch(trainer)
    before = weights(trainer)
    poisoned = getattr(batch, field).copy()
    poisoned[np.flatnonzero(batch.mask)[-1]] = value
    with pytest.raises(FloatingPointError, match="the loss of step 0"):
        trainer.update(replace(batch, **{field: poisoned}))
    assert equal(before, weights(trainer)) and trainer.version == 0
    assert all(p.grad is None for p in trainer.model.parameters())
    trainer.update(batch)
    assert trainer.version == 1


def test_a_gradient_that_is_not_finite_leaves_the_weights(model_dir: Path):
    trainer = make_trainer(model_dir)
    batch = make_batch(trainer)
    before = weights(trainer)
    hook = trainer.model.model.norm.weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(FloatingPointError, match="gradient norm of step 0"):
        trainer.update(batch)
    hook.remove()
    assert equal(before, weights(trainer)) and trainer.version == 0


def test_bfloat16_weights_step_through_float32_masters(model_dir: Path):
    """Steps of 1e-5 are below bfloat16's spacing at most weights; in sum they still arrive."""
    trainer = make_trainer(model_dir, "bfloat16", lr=1e-5)
    batch = make_batch(trainer, advantage=1.0)
    before, master = weights(trainer), trainer._masters[0].clone()
    for _ in range(30):
        trainer.update(batch)
    moved = (trainer._masters[0] - master).abs().max().item()
    assert moved > 1e-4
    assert trainer._masters[0].dtype == torch.float32
    name, parameter = next(iter(trainer.model.named_parameters()))
    assert torch.equal(parameter, trainer._masters[0].bfloat16())
    assert not torch.equal(parameter, before[name])


def test_microbatches_keep_their_bound_and_lose_no_token():
    batch = make_batch()
    cut = padded(batch, 60)
    assert all(m.tokens.numel() <= 60 for m in cut)
    assert sorted(torch.cat([m.source for m in cut]).tolist()) == np.flatnonzero(batch.mask).tolist()
    for m in cut:
        assert m.tokens.flatten()[m.where].tolist() == batch.tokens[m.source.numpy()].tolist()


def test_a_row_longer_than_the_bound_runs_alone():
    cut = padded(make_batch(), 10)
    assert len(cut) == 8 and all(len(m.tokens) == 1 for m in cut)


def test_several_processes_are_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="found WORLD_SIZE=2"):
        make_trainer(model_dir)


def test_build_trainer_builds_it(model_dir: Path):
    trainer = build_trainer(ModelConfig(str(model_dir)), TrainerConfig(threads=1), LossConfig())
    assert isinstance(trainer, LocalTrainer) and trainer.version == 0
