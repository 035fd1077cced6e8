"""The losses on batch X: five one-token samples whose every term can be computed by hand."""

import math

import pytest
import torch

from rsi.loss import LossConfig, dppo_loss, grpo_loss, merge_metrics, policy_loss, sft_loss

SAMPLER = torch.tensor([0.50, 0.50, 0.50, 0.50, 0.01]).log()
POLICY = torch.tensor([0.65, 0.58, 0.65, 0.35, 0.05]).log()
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
ALL = torch.ones(5, dtype=torch.bool)


def test_dppo_drops_what_moved_too_far_the_way_it_is_pushed():
    logp = POLICY.clone().requires_grad_()
    loss, metrics = dppo_loss(logp, SAMPLER, ADVANTAGES, ALL, 5, delta=0.1)
    assert loss.item() == pytest.approx(-0.972, abs=1e-6)  # (0 - 1.16 + 1.3 + 0 - 5) / 5
    loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0, -1.16 / 5, 1.3 / 5, 0, -1.0], abs=1e-6)
    assert metrics["masked_pos_frac"] == pytest.approx(1 / 5)
    assert metrics["masked_neg_frac"] == pytest.approx(1 / 5)
    assert metrics["max_ratio"] == pytest.approx(5, abs=1e-5)
    assert metrics["max_mismatch"] == pytest.approx(math.log(5), abs=1e-5)


def test_dppo_with_a_wide_threshold_keeps_all():
    loss, metrics = dppo_loss(POLICY, SAMPLER, ADVANTAGES, ALL, 5, delta=0.2)
    assert loss.item() == pytest.approx(-1.092, abs=1e-6)
    assert metrics["masked_pos_frac"] == metrics["masked_neg_frac"] == 0


def test_grpo_clips_the_ratio():
    logp = POLICY.clone().requires_grad_()
    loss, _ = grpo_loss(logp, SAMPLER, ADVANTAGES, ALL, 5)
    assert loss.item() == pytest.approx(-0.292, abs=1e-6)  # (-1.2 - 1.16 + 1.3 + .8 - 1.2) / 5
    loss.backward()
    assert logp.grad is not None
    assert [g != 0 for g in logp.grad.tolist()] == [False, True, True, False, False]


def test_grpo_takes_dapos_asymmetric_clip():
    loss, metrics = grpo_loss(POLICY, SAMPLER, ADVANTAGES, ALL, 5, clip_low=0.2, clip_high=0.28)
    assert loss.item() == pytest.approx(-0.324, abs=1e-6)
    assert metrics["masked_pos_frac"] == pytest.approx(2 / 5)
    assert metrics["masked_neg_frac"] == pytest.approx(1 / 5)


def test_tokens_outside_the_mask_have_neither_loss_nor_gradient():
    mask = torch.tensor([True, True, True, True, False])
    logp = POLICY.clone()
    logp[4] = -math.inf  # a masked row may hold anything
    logp.requires_grad_()
    loss, metrics = dppo_loss(logp, SAMPLER, ADVANTAGES, mask, 4)
    assert loss.item() == pytest.approx((-1.16 + 1.3) / 4, abs=1e-6)
    loss.backward()
    assert logp.grad is not None and logp.grad[4].item() == 0
    assert metrics["max_ratio"] == pytest.approx(1.3, abs=1e-5)


def test_mismatch_is_k3_of_policy_over_sampler():
    logp = torch.tensor([0.5, 1.0, 3.0]).log()
    _, metrics = dppo_loss(logp, torch.zeros(3), torch.ones(3), torch.ones(3, dtype=torch.bool), 3)
    assert metrics["mismatch_k3"] == pytest.approx(0.36484, abs=1e-5)


def test_microbatches_add_up_to_one_batch():
    whole, metrics = dppo_loss(POLICY, SAMPLER, ADVANTAGES, ALL, 5)
    parts = [dppo_loss(POLICY[s], SAMPLER[s], ADVANTAGES[s], ALL[s], 5) for s in (slice(0, 2), slice(2, 5))]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), abs=1e-6)
    assert merge_metrics([part for _, part in parts]) == pytest.approx(metrics, abs=1e-6)


def test_the_token_count_is_global():
    # rank 0 has 8 tokens, rank 1 has 2, each with a loss sum of 8: 16 / 10, not the mean of rank means 2.5
    rank0, _ = dppo_loss(torch.zeros(8), torch.zeros(8), -torch.ones(8), torch.ones(8, dtype=torch.bool), 10)
    rank1, _ = dppo_loss(torch.zeros(2), torch.zeros(2), -4 * torch.ones(2), torch.ones(2, dtype=torch.bool), 10)
    assert (rank0 + rank1).item() == pytest.approx(1.6)


def test_sft_is_weighted_negative_log_likelihood():
    logp = torch.tensor([0.5, 0.25, 0.1]).log().requires_grad_()
    weights, mask = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([True, True, False])
    loss, metrics = sft_loss(logp, weights, mask, 2)
    assert loss.item() == pytest.approx((math.log(2) + 2 * math.log(4)) / 2, abs=1e-6)
    loss.backward()
    assert logp.grad is not None and logp.grad.tolist() == [-0.5, -1.0, 0.0]
    assert metrics["max_ratio"] == 1 and metrics["masked_pos_frac"] == metrics["mismatch_k3"] == 0


def test_config_chooses_the_loss():
    arguments = (POLICY, SAMPLER, ADVANTAGES, ALL, 5)
    assert policy_loss(LossConfig(), *arguments)[0].item() == pytest.approx(-0.972, abs=1e-6)
    assert policy_loss(LossConfig(loss="grpo"), *arguments)[0].item() == pytest.approx(-0.292, abs=1e-6)
    expected = -(POLICY * ADVANTAGES).sum().item() / 5
    assert policy_loss(LossConfig(loss="sft"), *arguments)[0].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("bad", [{"delta": 0.0}, {"delta": 1.5}, {"clip_low": 1.0}, {"clip_high": -0.1}])
def test_config_refuses_thresholds_that_mean_nothing(bad: dict[str, float]):
    with pytest.raises(ValueError, match="use"):
        LossConfig(**bad)  # pyright: ignore[reportArgumentType]
