"""linear_grpo against the float64 reference: loss, metrics and gradients, on both sides of every clip and mask."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rsi_kernels import head
from rsi_kernels import linear_grpo as module
from rsi_kernels.impl import Impl
from rsi_kernels.linear_grpo import CUT, ENTROPY, K3, LOGP, linear_grpo, linear_grpo_reference
from rsi_kernels.linear_logprob import linear_logprob_reference
from tests.kernels.checks import BF16, BOTH, DEVICE, FP32, leaf, off, plant_in_function, plant_in_module, rel

CLIP: dict[str, Any] = {"loss": "clip", "lo": 0.2, "hi": 0.28}
DPPO: dict[str, Any] = {"loss": "dppo", "lo": 0.02, "hi": 0.01}
LOSSES = pytest.mark.parametrize("loss", [CLIP, DPPO], ids=["clip", "dppo"])


def operands(t: int, h: int, v: int, dtype: torch.dtype = torch.float32, old: bool = True) -> list[Any]:
    """Likely tokens, or DPPO's mask would never bite; rows 3 to 6 lie far on either side of the old policy, row 7
    further than the ratio's bound, row 8 between DPPO's two bounds; row 2 is masked."""
    generator = torch.Generator().manual_seed(t + h + v)
    rand = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    hidden, weight = rand(t, h).to(dtype), (rand(v, h) * 3 / h**0.5).to(dtype)
    target = (hidden.float() @ weight.float().T).argmax(-1)
    target[0], target[1] = v - 1, 0
    logp = linear_logprob_reference(hidden, weight, target, 0.7)[0].float()
    old_logp, ref_logp, advantage = logp + rand(t) * 0.3, logp + rand(t) * 0.2, rand(t)
    token_weight = torch.rand(t, generator=generator) + 0.1
    token_weight[2] = 0
    for row, (moved, sign) in zip(range(3, 7), ((0.5, 1), (0.5, -1), (-0.5, 1), (-0.5, -1)), strict=True):
        old_logp[row], advantage[row] = logp[row] - moved, sign * advantage[row].abs()
    old_logp[7], advantage[7], ref_logp[7] = logp[7] + 25, 1.0, logp[7] - 25
    old_logp[8:9], advantage[8:9] = (logp[8:9].exp() + 0.015).log(), -1.0  # between hi and lo of DPPO
    rows = [target, old_logp if old else None, ref_logp, advantage, token_weight]
    return [leaf(hidden.to(DEVICE)), leaf(weight.to(DEVICE)), *(r if r is None else r.to(DEVICE) for r in rows)]


def check_float32(
    impl: Impl, options: dict[str, Any], sizes: tuple[int, int, int] = (11, 8, 4500), old: bool = True
) -> Tensor:
    """Raises AssertionError if something is off; returns the metrics."""
    args = operands(*sizes, old=old)
    options = {"temperature": 0.7, "beta": 0.05, "log_ratio_sq": 1e-3} | options
    ours, metrics = linear_grpo(*args, **options, chunk=4, impl=impl)
    reference, expected = linear_grpo_reference(*args, **options)
    assert abs(ours.item() - reference.item()) < 1e-5 * max(1.0, abs(reference.item()))
    # logits reach ~15: logp and entropy as in linear_logprob; k3 is e^d of such a difference
    assert off(metrics[:CUT], expected[:CUT]) < 5e-5 and torch.equal(metrics[CUT].double(), expected[CUT])
    for a, b in zip(
        torch.autograd.grad(0.3 * ours, args[:2]), torch.autograd.grad(0.3 * reference, args[:2]), strict=True
    ):
        assert rel(a, b) < FP32
        if a.shape == args[0].shape:
            assert not a[2].any(), "a masked row has a gradient"
    assert not metrics[:, 2].any() and not metrics.requires_grad
    return metrics


def check_bound(impl: Impl, loss: dict[str, Any]) -> None:
    """Raises AssertionError unless a ratio of e^25 counts as e^20 and gives no gradient, though nothing clips it."""
    hidden, weight, target, old, ref, advantage, token_weight = operands(11, 8, 300)
    old = linear_logprob_reference(hidden, weight, target)[0].detach().float() - 25
    advantage = -advantage.abs()
    value, metrics = linear_grpo(
        hidden, weight, target, old, ref, advantage, token_weight, temperature=1.0, **loss, impl=impl
    )
    expected = -(advantage * token_weight).sum().item() * math.exp(20)
    assert value.item() == pytest.approx(expected, rel=1e-5) and not metrics[CUT].any()
    assert not any(g.any() for g in torch.autograd.grad(value, [hidden, weight]))


@BOTH
@LOSSES
def test_the_exponent_of_a_ratio_is_bounded(impl: Impl, loss: dict[str, Any]):
    check_bound(impl, loss)


@BOTH
@LOSSES
def test_loss_metrics_and_gradients_match_float64(impl: Impl, loss: dict[str, Any]):
    cut = check_float32(impl, loss)[CUT]
    # pushed further the way they already moved: up with A > 0, down with A < 0
    assert cut[3:7].tolist() == [1, 0, 0, 1]


@BOTH
@LOSSES
def test_without_an_old_policy_the_ratio_is_one(impl: Impl, loss: dict[str, Any]):
    assert not check_float32(impl, loss, old=False)[CUT].any()


@BOTH
def test_without_a_reference_k3_is_zero(impl: Impl):
    args = operands(11, 8, 300)
    _, metrics = linear_grpo(*args, **CLIP, temperature=0.7, impl=impl)
    assert not metrics[K3].any()
    args[4] = None
    loss, without = linear_grpo(*args, **CLIP, temperature=0.7, impl=impl)
    assert torch.equal(metrics, without)
    assert loss.item() == pytest.approx(linear_grpo_reference(*args, **CLIP, temperature=0.7)[0].item(), abs=1e-5)


@BOTH
@LOSSES
def test_bfloat16_operands_give_a_float32_loss(impl: Impl, loss: dict[str, Any]):
    args = operands(9, 16, 2500, torch.bfloat16)
    ours, _ = linear_grpo(*args, **loss, temperature=0.7, chunk=4, impl=impl)
    wide = [leaf(args[0].double()), leaf(args[1].double()), *args[2:]]
    reference, _ = linear_grpo_reference(*wide, **loss, temperature=0.7)
    assert ours.dtype == torch.float32 and abs(ours.item() - reference.item()) < 1e-5 * max(1.0, abs(reference.item()))
    for a, b in zip(torch.autograd.grad(ours, args[:2]), torch.autograd.grad(reference, wide[:2]), strict=True):
        assert a.dtype == torch.bfloat16 and rel(a, b) < BF16


@BOTH
def test_rows_may_be_strided(impl: Impl):
    args = operands(11, 8, 300)
    strided = [torch.stack([row, row], 1)[:, 0] for row in args[2:]]
    assert not any(row.is_contiguous() for row in strided)
    dense, _ = linear_grpo(*args, **CLIP, beta=0.1, temperature=1.0, chunk=4, impl=impl)
    loss, _ = linear_grpo(*args[:2], *strided, **CLIP, beta=0.1, temperature=1.0, chunk=4, impl=impl)
    assert torch.equal(dense, loss)


@BOTH
def test_a_masked_chunk_gives_nothing(impl: Impl):
    args = operands(11, 8, 300)
    args[6] = torch.zeros_like(args[6])
    loss, metrics = linear_grpo(*args, **CLIP, temperature=1.0, chunk=4, impl=impl)
    grads = torch.autograd.grad(loss, args[:2])
    assert loss.item() == 0 and not metrics.any() and not any(g.any() for g in grads)


@BOTH
def test_extreme_logits_stay_finite(impl: Impl):
    args = operands(11, 8, 300)
    with torch.no_grad():
        args[0] *= 80
    loss, metrics = linear_grpo(*args, **CLIP, beta=0.1, temperature=1.0, impl=impl)
    assert loss.isfinite() and metrics.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, args[:2]))


def test_the_loss_of_one_token_by_hand():
    """Logits ln 1 and ln 3, target the second: p = 3/4. Old p 1/2: ratio 1.5, clipped to 1.28, cut, l = -1.28 A.
    dppo with hi = 0.3 keeps it (moved 0.25): l = -1.5 A, d l / d z = -1.5 A (1 - p) = -0.375 A at the target."""
    hidden, weight = leaf(torch.ones(1, 1)), leaf(torch.tensor([[0.0], [3.0]])).detach()
    weight[1] = torch.tensor(3.0).log()
    rows = [torch.tensor([1]), torch.tensor([0.5]).log(), None, torch.tensor([2.0]), torch.tensor([1.0])]
    loss, metrics = linear_grpo(hidden, weight, *rows, temperature=1.0, loss="clip", lo=0.2, hi=0.28)  # pyright: ignore[reportArgumentType]
    assert loss.item() == pytest.approx(-2.56, abs=1e-6)
    assert metrics[CUT].item() == 1 and torch.autograd.grad(loss, hidden)[0].item() == 0
    loss, metrics = linear_grpo(hidden, weight, *rows, temperature=1.0, loss="dppo", lo=0.3, hi=0.3)  # pyright: ignore[reportArgumentType]
    assert loss.item() == pytest.approx(-3.0, abs=1e-6)
    assert metrics[LOGP].item() == pytest.approx(-0.28768, abs=1e-5)
    assert metrics[ENTROPY].item() == pytest.approx(0.56234, abs=1e-5)
    # d z_1 = ln 3 d x at the target, d z_0 = 0
    assert torch.autograd.grad(loss, hidden)[0].item() == pytest.approx(-0.75 * 1.098612, abs=1e-5)


@LOSSES
def test_scoring_without_gradient_gives_the_same_numbers(loss: dict[str, Any]):
    args = operands(11, 8, 300)
    with_grad, metrics = linear_grpo(*args, **loss, temperature=0.7, beta=0.05)
    with torch.no_grad():
        without, scored = linear_grpo(*args, **loss, temperature=0.7, beta=0.05)
    assert without.item() == pytest.approx(with_grad.item(), abs=1e-6)
    assert off(metrics, scored) < 1e-5


def test_a_frozen_head_takes_two_products(monkeypatch: pytest.MonkeyPatch):
    args = operands(11, 8, 300)
    args[1] = args[1].detach()
    monkeypatch.setattr(head.Head, "add_weight_grad", lambda *_: pytest.fail("the head is frozen"))
    loss, _ = linear_grpo(*args, **CLIP, temperature=1.0)
    loss.backward()
    assert args[0].grad is not None


def test_parts_add_up_to_the_whole():
    args = operands(11, 8, 300)
    whole, _ = linear_grpo(*args, **CLIP, temperature=1.0)
    parts = [
        linear_grpo(args[0][s], args[1], *(r[s] for r in args[2:]), **CLIP, temperature=1.0)[0]
        for s in (slice(4), slice(4, 11))
    ]
    assert sum(p.item() for p in parts) == pytest.approx(whole.item(), abs=1e-6)


@LOSSES
def test_gradcheck_in_float64(loss: dict[str, Any]):
    hidden, weight, *rows = (t.double() if t.is_floating_point() else t for t in operands(8, 3, 11))

    def of(x: Tensor, w: Tensor) -> Tensor:
        return linear_grpo(x, w, *rows, **loss, temperature=0.7, beta=0.05, log_ratio_sq=0.01, chunk=3)[0]

    assert torch.autograd.gradcheck(of, (leaf(hidden), leaf(weight)))


def test_opcheck_finds_schema_fake_and_autograd_in_order():
    hidden, weight, target, old, ref, advantage, token_weight = operands(8, 8, 11)
    for before, reference in ((old, ref), (None, None)):
        args = (hidden, weight, target, before, reference, advantage, token_weight, 1.0)
        torch.library.opcheck(
            torch.ops.rsi.linear_grpo.default, (*args, "clip", 0.2, 0.2, 0.1, 0.0, 4, True, "auto", True, True)
        )


def test_a_compiled_graph_equals_eager():
    hidden, weight, *rows = operands(11, 8, 300)

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        loss, metrics = linear_grpo(x * 2, w, *rows, **DPPO, temperature=1.0, chunk=4)
        return loss * 0.5, metrics

    loss, metrics = step(hidden, weight)
    compiled_loss, compiled_metrics = torch.compile(step, fullgraph=True, backend="aot_eager")(hidden, weight)
    assert torch.equal(loss, compiled_loss) and torch.equal(metrics, compiled_metrics)
    pairs = zip(
        torch.autograd.grad(loss, [hidden, weight]), torch.autograd.grad(compiled_loss, [hidden, weight]), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "gspo"}, "on top of linear_logprob"),
        ({"lo": -0.1}, "values >= 0"),
        ({"beta": 0.1}, "give ref_logp"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str):
    args = operands(8, 8, 11)
    args[4] = None
    with pytest.raises(ValueError, match=message):
        linear_grpo(*args, **(CLIP | options), temperature=1.0)


def test_rows_of_another_length_are_refused():
    args = operands(8, 8, 11)
    args[5] = args[5][:3]
    with pytest.raises(ValueError, match=r"are \[T\] = \[8\]; found \[3\]"):
        linear_grpo(*args, **CLIP, temperature=1.0)


FAULTS = [
    ("cut = ratio * adv > clipped * adv", "cut = ratio > clipped", CLIP),
    ("tl.maximum(ratio, 1.0 - lo), 1.0 + hi", "tl.maximum(ratio, 1.0 - hi), 1.0 + lo", CLIP),
    ("(adv < 0.0) & (moved < -lo)", "(adv < 0.0) & (moved < -hi)", DPPO),
    ("moved = tl.exp(logp) - tl.exp(before)", "moved = logp - before", DPPO),
    ("cut | (tl.abs(log_ratio) > 20.0)", "cut", CLIP),
    ("beta * (1.0 - e)", "-beta * (1.0 - e)", CLIP),
    ("2.0 * log_ratio_sq * log_ratio", "log_ratio_sq * log_ratio", DPPO),
    ("tl.store(VALUE + row, loss * weight)", "tl.store(VALUE + row, loss)", CLIP),
    ("g = dlogp * weight * inv_t", "g = dlogp * weight", CLIP),
    ("tl.store(dz_row + c, tl.zeros((LANES, VEC), DZ.dtype.element_ty), mask=c < V)", "pass", CLIP),
    ("tl.store(METRICS + 2 * metrics_stride + row, k3)", "pass", CLIP),
]


@pytest.mark.parametrize(("old", "new", "loss"), FAULTS, ids=[new for _, new, _ in FAULTS])
def test_a_fault_planted_in_the_triton_kernel_is_caught(monkeypatch, tmp_path, old: str, new: str, loss):
    plant_in_module(monkeypatch, tmp_path, "head_triton", old, new)
    with pytest.raises(AssertionError):
        check_float32("triton", loss, (11, 8, 300))
        check_bound("triton", loss)


@pytest.mark.parametrize(
    ("old", "new", "loss"),
    [
        ("ratio * advantage > clipped * advantage", "ratio > clipped", CLIP),
        ("(moved < -lo)", "(moved < -hi)", DPPO),
        ("cut | ~inside", "cut", CLIP),
        ("beta * (1 - e)", "beta * (e - 1)", CLIP),
        ("2 * log_ratio_sq", "log_ratio_sq", DPPO),
    ],
)
def test_a_fault_planted_in_the_torch_path_is_caught(monkeypatch, old: str, new: str, loss):
    plant_in_function(monkeypatch, module, module.loss_terms, old, new)
    with pytest.raises(AssertionError):
        check_float32("torch", loss, (11, 8, 300))
        check_bound("torch", loss)
