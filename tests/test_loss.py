"""The losses on batch X: five one-token samples whose every term can be computed by hand.

Gradients are compared with those of the formula, written out token by token in float64 and differentiated by autograd.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rsi.corrections import CorrectionConfig
from rsi.loss import (
    Counts,
    LossConfig,
    LossTokens,
    cispo,
    divergence_of,
    dppo,
    dual_clip,
    grpo,
    gspo,
    normalised,
    policy_loss,
    sft,
)
from rsi.loss_metrics import derive, merge_metrics

SAMPLER = torch.tensor([0.50, 0.50, 0.50, 0.50, 0.01]).log()
POLICY = torch.tensor([0.65, 0.58, 0.65, 0.35, 0.05]).log()
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])


def tokens_of(logp: Tensor, sampler: Tensor, advantages: Tensor, sequence: list[int] | None = None) -> LossTokens:
    """One token a sequence unless said otherwise; the trainer's old log-probabilities are its present ones."""
    ids = torch.tensor(sequence if sequence is not None else range(len(logp)), dtype=torch.int64)
    return LossTokens(logp, logp.detach(), sampler, advantages, ids, int(ids.max()) + 1 if len(ids) else 0)


X = tokens_of(POLICY, SAMPLER, ADVANTAGES)
FIVE = Counts(tokens=5, sequences=5)


def gradient(loss: Callable[[Tensor], Tensor], logp: Tensor) -> list[float]:
    logp = logp.clone().requires_grad_()
    (result,) = torch.autograd.grad(loss(logp), logp)
    return result.tolist()


def test_dppo_drops_what_moved_too_far_the_way_it_is_pushed():
    logp = POLICY.clone().requires_grad_()
    loss, metrics = policy_loss(LossConfig(), tokens_of(logp, SAMPLER, ADVANTAGES), FIVE)
    assert loss.item() == pytest.approx(-0.972, abs=1e-6)  # (0 - 1.16 + 1.3 + 0 - 5) / 5
    loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0, -1.16 / 5, 1.3 / 5, 0, -1.0], abs=1e-6)
    assert metrics["masked_pos_frac"] == pytest.approx(1 / 5)
    assert metrics["masked_neg_frac"] == pytest.approx(1 / 5)
    assert metrics["max_ratio"] == pytest.approx(5, abs=1e-5)
    assert metrics["max_mismatch"] == pytest.approx(math.log(5), abs=1e-5)


def test_dppo_with_a_wide_threshold_keeps_all():
    loss, metrics = policy_loss(LossConfig(delta=0.2), X, FIVE)
    assert loss.item() == pytest.approx(-1.092, abs=1e-6)
    assert metrics["masked_pos_frac"] == metrics["masked_neg_frac"] == 0


def test_dppo_takes_binary_kl_as_its_divergence():
    assert divergence_of(POLICY, SAMPLER, "kl")[0].item() == pytest.approx(0.04716, abs=1e-5)
    # a, b, d and e moved the way they are pushed: by 0.04716, 0.01297, 0.04716 and 0.02474
    assert dppo(POLICY, SAMPLER, ADVANTAGES, 0.046, "kl")[1].tolist() == [True, False, False, True, False]
    assert dppo(POLICY, SAMPLER, ADVANTAGES, 0.02, "kl")[1].tolist() == [True, False, False, True, True]
    assert not dppo(POLICY, SAMPLER, ADVANTAGES, 0.05, "kl")[1].any()
    certain = divergence_of(torch.tensor([0.0]), torch.tensor([0.5]).log(), "kl")
    assert torch.isfinite(certain).all()


def test_grpo_clips_the_ratio():
    losses, dropped = grpo(POLICY, SAMPLER, ADVANTAGES)
    assert losses.tolist() == pytest.approx([-1.2, -1.16, 1.3, 0.8, -1.2], abs=1e-6)
    assert dropped.tolist() == [True, False, False, True, True]
    assert losses.mean().item() == pytest.approx(-0.292, abs=1e-6)
    slope = gradient(lambda logp: grpo(logp, SAMPLER, ADVANTAGES)[0].mean(), POLICY)
    assert [g != 0 for g in slope] == [False, True, True, False, False]


def test_dapo_is_grpo_with_a_wider_upper_clip():
    loss, metrics = policy_loss(LossConfig(loss="dapo"), X, FIVE)
    assert loss.item() == pytest.approx(-0.324, abs=1e-6)  # a and e become -1.28
    assert metrics["masked_pos_frac"] == pytest.approx(2 / 5)
    assert metrics["masked_neg_frac"] == pytest.approx(1 / 5)
    same, _ = policy_loss(LossConfig(loss="grpo", clip_high=0.28), X, FIVE)
    assert same.item() == loss.item()


@pytest.mark.parametrize(("bound", "loss", "capped"), [(3.0, 3.0, True), (10.0, 5.0, False)])
def test_dual_clip_bounds_what_a_negative_advantage_costs(bound: float, loss: float, capped: bool):
    logp, old, advantage = torch.tensor([math.log(0.05)]), torch.tensor([math.log(0.01)]), torch.tensor([-1.0])
    losses, hit = dual_clip(grpo(logp, old, advantage)[0], advantage, bound)
    assert losses.tolist() == pytest.approx([loss], abs=1e-5) and hit.tolist() == [capped]
    slope = gradient(lambda x: dual_clip(grpo(x, old, advantage)[0], advantage, bound)[0].sum(), logp)
    assert (slope == [0.0]) is capped


def test_gspo_clips_one_ratio_a_sequence():
    log_ratio, old, one = torch.tensor([0.3, -0.1, 0.1]), torch.zeros(3), torch.ones(3)
    together = torch.zeros(3, dtype=torch.int64)
    losses, dropped = gspo(log_ratio, old, one, together, 1)
    assert losses.tolist() == pytest.approx([-1.0004] * 3, abs=1e-6) and dropped.all()
    assert gradient(lambda x: gspo(x, old, one, together, 1)[0].sum(), log_ratio) == [0, 0, 0]
    losses, dropped = gspo(log_ratio, old, -one, together, 1)
    assert losses.tolist() == pytest.approx([1.10517] * 3, abs=1e-5) and not dropped.any()  # e^0.1


@pytest.mark.parametrize(("cap", "loss", "slope"), [(1.272, 3.81057, -1.272), (5.0, 14.97866, -5.0)])
def test_cispo_weighs_and_keeps_every_token(cap: float, loss: float, slope: float):
    losses, dropped = cispo(POLICY, SAMPLER, ADVANTAGES, cap)
    assert losses[4].item() == pytest.approx(loss, abs=1e-4) and not dropped.any()
    assert gradient(lambda x: cispo(x, SAMPLER, ADVANTAGES, cap)[0].sum(), POLICY)[4] == pytest.approx(slope, abs=1e-5)


def test_normalisers_divide_by_tokens_sequences_or_a_constant():
    """Rewards 1, 0, 0, 0 on lengths 4, 2, 2, 2 at ratio 1."""
    sequence = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3, 3])
    losses = -torch.tensor([0.75] * 4 + [-0.25] * 6)
    values = [normalised(losses, sequence, 4, Counts(10, 4), n, 10).item() for n in ("token", "sequence", "constant")]
    assert values == pytest.approx([-0.15, 0, -0.0375], abs=1e-7)
    dr_grpo, _ = policy_loss(
        LossConfig(loss="dr_grpo", max_len=10),
        LossTokens(losses * 0, losses * 0, losses * 0, -losses, sequence, 4),
        Counts(10, 4),
    )
    assert dr_grpo.item() == pytest.approx(-0.0375, abs=1e-7)


def test_mismatch_is_k3_of_policy_over_sampler():
    ratios = torch.tensor([0.5, 1.0, 3.0])
    _, metrics = policy_loss(LossConfig(), tokens_of(ratios.log(), torch.zeros(3), torch.ones(3)), Counts(3, 3))
    assert metrics["mismatch_k3"] == pytest.approx(0.36484, abs=1e-5)
    assert metrics["max_k3"] == pytest.approx(2 - math.log(3), abs=1e-5)
    assert (metrics["min_ratio"], metrics["max_ratio"]) == pytest.approx((0.5, 3.0))
    assert metrics["far_frac"] == pytest.approx(1 / 3)  # ln 0.5 is on the border, ln 3 beyond it


def test_effective_sample_size_and_ratio_by_sign_are_derived_from_the_whole_step():
    ratios = torch.tensor([0.5, 1.0, 3.0])
    tokens = tokens_of(ratios.log(), torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]))
    metrics = derive(policy_loss(LossConfig(), tokens, Counts(3, 3))[1])
    assert metrics["ess"] == pytest.approx(4.5**2 / (3 * 10.25))
    assert metrics["chi2"] == pytest.approx(10.25 / 3 - 1)
    assert metrics["ratio_pos_mean"] == pytest.approx(1.75) and metrics["ratio_neg_mean"] == pytest.approx(1.0)


def part_of(tokens: LossTokens, chosen: list[int]) -> LossTokens:
    at = torch.tensor(chosen)
    _, ids = tokens.sequence[at].unique(return_inverse=True)
    logp, old, sampler = tokens.logp[at], tokens.logp_old[at], tokens.logp_sampler[at]
    return LossTokens(logp, old, sampler, tokens.advantages[at], ids, int(ids.max()) + 1)


EVERY = [
    LossConfig(),
    LossConfig(delta=0.05, divergence="kl"),
    LossConfig(loss="grpo"),
    LossConfig(loss="grpo", dual_clip=2.0, correct=CorrectionConfig(opsm=1e-4, geometric=(0.5, 2.0))),
    LossConfig(loss="dapo"),
    LossConfig(loss="dr_grpo", max_len=9),
    LossConfig(loss="gspo", clip_low=0.2, clip_high=0.3),
    LossConfig(loss="cispo", cap=1.2),
    LossConfig(loss="sft"),
    LossConfig(loss="grpo", old="trainer", correct=CorrectionConfig(token_tis=1.2)),
    LossConfig(loss="grpo", old="trainer", correct=CorrectionConfig(sequence_mis=(0.5, 2.0))),
    LossConfig(loss="cispo", old="trainer", correct=CorrectionConfig(icepop=(0.8, 1.3), sequence_veto=0.5)),
]


def batch(dtype: torch.dtype = torch.float64) -> LossTokens:
    """Twelve tokens of four sequences, ratios from 0.6 to 1.6, old log-probabilities between sampler and policy."""
    generator = torch.Generator().manual_seed(3)
    sampler = -torch.rand(12, generator=generator, dtype=dtype) * 2 - 0.2
    old = sampler + torch.randn(12, generator=generator, dtype=dtype) * 0.2
    logp = (old + torch.randn(12, generator=generator, dtype=dtype) * 0.2).clamp(max=-1e-3)
    sequence = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3])
    return LossTokens(logp, old, sampler, torch.tensor([1.0, -0.5, -1.5, 0.75], dtype=dtype)[sequence], sequence, 4)


@pytest.mark.parametrize("config", EVERY, ids=lambda config: f"{config.loss}-{config.old}")
def test_microbatches_in_any_order_add_up_to_one_batch(config: LossConfig):
    tokens, counts = batch(), Counts(12, 4)
    whole, metrics = policy_loss(config, tokens, counts)
    for split in (([7, 8], [0, 1, 2, 3, 4, 5, 6], [9, 10, 11]), ([9, 10, 11, 0, 1, 2], [3, 4, 5, 6, 7, 8])):
        parts = [policy_loss(config, part_of(tokens, chosen), counts) for chosen in split]
        assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), abs=1e-12)
        assert merge_metrics(part for _, part in parts) == pytest.approx(metrics, abs=1e-12)


def formula(config: LossConfig, tokens: LossTokens, logp: Tensor, counts: Counts) -> Tensor:
    """The step's loss as the papers write it: one token after another, every weight a plain number."""
    total = logp.new_zeros(())
    for s in range(tokens.num_sequences):
        at = [i for i in range(len(logp)) if tokens.sequence[i] == s]
        advantage = float(tokens.advantages[at[0]])
        base = tokens.logp_sampler if config.old == "sampler" else tokens.logp_old
        w = [math.exp(float(tokens.logp_old[i] - tokens.logp_sampler[i])) for i in at]
        c, kept = config.correct, 1.0
        if c.sequence_mis:
            kept *= math.prod(w) if c.sequence_mis[0] <= math.prod(w) <= c.sequence_mis[1] else 0.0
        if c.sequence_veto and min(w) < c.sequence_veto:
            kept = 0.0
        if c.geometric and not c.geometric[0] <= math.prod(w) ** (1 / len(w)) <= c.geometric[1]:
            kept = 0.0
        if c.opsm is not None and advantage < 0:
            fallen = sum(float(tokens.logp_old[i] - logp[i].detach()) for i in at) / len(at)
            kept = 0.0 if fallen > c.opsm else kept
        s_ratio = torch.stack([logp[i] - base[i] for i in at]).mean().exp()
        for i, w_i in zip(at, w, strict=True):
            r = (logp[i] - base[i]).exp()
            low, high = 1 - config.clip[0], 1 + config.clip[1]
            match config.loss:
                case "dppo":
                    p, q = float(logp[i].detach().exp()), float(tokens.logp_sampler[i].exp())
                    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
                    far = (abs(p - q) if config.divergence == "tv" else kl) > config.delta
                    gone = far and ((advantage > 0 and p > q) or (advantage < 0 and p < q))
                    loss = -r * advantage * (0.0 if gone else 1.0)
                case "cispo":
                    loss = -min(float(r.detach()), config.cap) * advantage * logp[i]
                case "sft":
                    loss = -advantage * logp[i]
                case "gspo":
                    loss = -torch.min(s_ratio * advantage, s_ratio.clamp(low, high) * advantage)
                case _:
                    loss = -torch.min(r * advantage, r.clamp(low, high) * advantage)
            if config.dual_clip and advantage < 0:
                loss = torch.min(loss, loss.new_tensor(config.dual_clip * -advantage))
            weight = kept
            if c.token_tis:
                weight *= min(w_i, c.token_tis)
            if c.icepop:
                weight *= w_i if c.icepop[0] <= w_i <= c.icepop[1] else 0.0
            per = {"token": counts.tokens, "sequence": len(at) * counts.sequences, "constant": counts.sequences * 9}
            total = total + loss * weight / per[config.normaliser]
    return total


@pytest.mark.parametrize("config", EVERY, ids=lambda config: f"{config.loss}-{config.old}")
def test_value_and_gradient_are_those_of_the_formula_in_float64(config: LossConfig):
    tokens, counts = batch(), Counts(12, 4)
    logp = tokens.logp.clone().requires_grad_()
    ours = policy_loss(
        config,
        LossTokens(logp, tokens.logp_old, tokens.logp_sampler, tokens.advantages, tokens.sequence, 4),
        counts,
    )[0]
    theirs = formula(config, tokens, logp, counts)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    (a,) = torch.autograd.grad(ours, logp)
    (b,) = torch.autograd.grad(theirs, logp)
    assert b.abs().sum() > 0
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_the_token_count_is_global():
    # rank 0 has 8 tokens, rank 1 has 2, each with a loss sum of 8: 16 / 10, not the mean of rank means 2.5
    def rank(tokens: int, advantage: float) -> Tensor:
        zeros = torch.zeros(tokens)
        return policy_loss(LossConfig(), tokens_of(zeros, zeros, zeros + advantage), Counts(10, 10))[0]

    assert (rank(8, -1.0) + rank(2, -4.0)).item() == pytest.approx(1.6)


def test_sft_is_weighted_negative_log_likelihood():
    logp = torch.tensor([0.5, 0.25]).log().requires_grad_()
    weights = torch.tensor([1.0, 2.0])
    loss, metrics = policy_loss(LossConfig(loss="sft"), tokens_of(logp, torch.zeros(2), weights), Counts(2, 2))
    assert loss.item() == pytest.approx((math.log(2) + 2 * math.log(4)) / 2, abs=1e-6)
    loss.backward()
    assert logp.grad is not None and logp.grad.tolist() == [-0.5, -1.0]
    assert metrics["max_ratio"] == 1 and metrics["masked_pos_frac"] == metrics["mismatch_k3"] == 0
    assert not sft(logp, weights)[1].any()


def test_a_microbatch_without_loss_tokens_adds_nothing():
    none = torch.zeros(0)
    for config in EVERY:
        loss, metrics = policy_loss(config, tokens_of(none, none, none), Counts(3, 2))
        assert loss.item() == 0 and metrics == {}


def test_config_chooses_the_loss():
    assert policy_loss(LossConfig(), X, FIVE)[0].item() == pytest.approx(-0.972, abs=1e-6)
    assert policy_loss(LossConfig(loss="grpo"), X, FIVE)[0].item() == pytest.approx(-0.292, abs=1e-6)
    expected = -(POLICY * ADVANTAGES).sum().item() / 5
    assert policy_loss(LossConfig(loss="sft"), X, FIVE)[0].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "bad",
    [
        {"delta": 0.0},
        {"delta": 1.5},
        {"clip_low": 1.0},
        {"clip_high": -0.1},
        {"cap": 0.0},
        {"dual_clip": 1.0},
        {"dual_clip": 3.0},
        {"loss": "dr_grpo"},
    ],
)
def test_config_refuses_settings_that_mean_nothing(bad: dict[str, float]):
    with pytest.raises(ValueError, match="use|set"):
        LossConfig(**bad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("correct", [{"token_tis": 2.0}, {"sequence_mis": (0.5, 2.0)}, {"icepop": (0.5, 5.0)}])
def test_a_correction_that_counts_the_mismatch_twice_is_refused(correct: dict):
    for loss, old in (("dppo", "sampler"), ("dppo", "trainer"), ("grpo", "sampler")):
        with pytest.raises(ValueError, match="count the mismatch twice"):
            LossConfig(loss=loss, old=old, correct=CorrectionConfig(**correct))  # pyright: ignore[reportArgumentType]
    LossConfig(loss="grpo", old="trainer", correct=CorrectionConfig(**correct))
    LossConfig(correct=CorrectionConfig(geometric=(0.99, 1.01), opsm=1e-4))
    with pytest.raises(ValueError, match="no sampler"):
        LossConfig(loss="sft", correct=CorrectionConfig(opsm=1e-4))
