"""route against the float64 reference: choice, weights, counts, replay, and the router's gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rsi_kernels import route as module
from rsi_kernels.impl import Impl
from rsi_kernels.route import route, route_reference
from tests.kernels.checks import BOTH, DEVICE, leaf, off, plant_in_function, plant_in_module, rel

SCORES = pytest.mark.parametrize("score", ["softmax", "sigmoid"])
RENORM = pytest.mark.parametrize("renorm", [True, False])
IMPLS: list[Impl] = ["torch", "triton", "cuda"] if DEVICE == "cuda" else ["torch", "triton"]
ALL = pytest.mark.parametrize("impl", IMPLS)
"""csrc/route.cu runs on a GPU alone; test_cuda_library.py compiles it anywhere."""


def awkward_logits(tokens: int, experts: int) -> Tensor:
    """Rows 3 to 5: all equal; ten that tie for the first places; ten distinct logits of equal float32 probability."""
    generator = torch.Generator().manual_seed(tokens + experts)
    logits = torch.randn(tokens, experts, generator=generator)
    logits[3] = 0.25
    logits[4, experts // 4 : experts // 4 + 10] = 9.0
    logits[5] = -3.0
    logits[5, -10:] = 1e-3 + torch.arange(10) * 1e-9
    assert logits[5, -10:].unique().numel() == 10 and logits[5, -10:].exp().unique().numel() < 10
    return logits.to(DEVICE)


def check(impl: Impl, tokens: int, experts: int, k: int, forced: Tensor | None = None, **options: Any) -> None:
    """Raises AssertionError if a choice, a number or a gradient is off."""
    logits = leaf(awkward_logits(tokens, experts))
    ours = route(logits, k, forced_ids=forced, impl=impl, **options)
    weights, ids, counts, prob_sum = route_reference(logits, k, forced_ids=forced, **options)
    assert torch.equal(ours[1], ids)
    assert torch.equal(ours[2], counts) and ours[2].sum() == tokens * k
    # weights are at most 1, one exponential and one division from float32 logits
    assert off(ours[0], weights) < 1e-6
    assert rel(ours[3], prob_sum) < 1e-6
    d = torch.linspace(-1, 1, tokens * k, device=DEVICE).view(tokens, k)
    mine, reference = (torch.autograd.grad((w * d).sum(), logits)[0] for w in (ours[0], weights))
    assert rel(mine, reference) < 2e-6


@ALL
@SCORES
@RENORM
@pytest.mark.parametrize(("experts", "k"), [(128, 8), (256, 8), (64, 3)])
def test_choice_weights_counts_and_gradient_match_float64(impl: Impl, score: str, renorm: bool, experts: int, k: int):
    check(impl, 19, experts, k, score=score, renorm=renorm)


@BOTH
def test_any_number_of_experts_will_do(impl: Impl):
    check(impl, 7, 60, 4)
    check(impl, 7, 11, 11)


@ALL
@SCORES
@RENORM
def test_replayed_experts_take_their_weights_from_the_live_scores(impl: Impl, score: str, renorm: bool):
    forced = torch.stack([torch.randperm(128, generator=torch.Generator().manual_seed(t))[:8] for t in range(19)])
    check(impl, 19, 128, 8, forced.to(DEVICE, torch.uint8), score=score, renorm=renorm)
    check(impl, 19, 128, 8, forced.to(DEVICE), score=score, renorm=renorm)


@ALL
def test_replaying_the_own_choice_changes_nothing(impl: Impl):
    logits = awkward_logits(19, 128)
    chosen = route(logits, 8, impl=impl)
    replayed = route(logits, 8, forced_ids=chosen[1], impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(chosen[:3], replayed[:3], strict=True))


@ALL
def test_ties_go_to_the_lower_index(impl: Impl):
    logits = torch.zeros(1, 128, device=DEVICE)
    logits[0, [70, 9, 33]] = 1.0
    weights, ids, _, _ = route(logits, 5, impl=impl)
    assert ids.tolist() == [[9, 33, 70, 0, 1]]
    assert weights[0, 0] == weights[0, 2] > weights[0, 3] == weights[0, 4]


@ALL
def test_bfloat16_logits_are_scored_in_float32(impl: Impl):
    logits = awkward_logits(19, 128).bfloat16()
    weights, ids, _, _ = route(logits, 8, impl=impl)
    expected, expected_ids, _, _ = route_reference(logits, 8)
    assert weights.dtype == torch.float32 and off(weights, expected) < 1e-6
    assert torch.equal(ids, expected_ids)


@ALL
def test_a_row_of_nan_keeps_its_ids_in_range(impl: Impl):
    logits = awkward_logits(7, 128)
    logits[2] = float("nan")
    _, ids, _, _ = route(logits, 8, impl=impl)
    assert ((ids >= 0) & (ids < 128)).all()


@ALL
def test_no_tokens_are_routed_nowhere(impl: Impl):
    weights, ids, counts, prob_sum = route(torch.zeros(0, 128, device=DEVICE), 8, impl=impl)
    assert weights.shape == ids.shape == (0, 8) and not counts.any() and not prob_sum.any()


@RENORM
@SCORES
def test_gradcheck_in_float64(score: Any, renorm: bool):
    logits = leaf(torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    assert torch.autograd.gradcheck(lambda z: route(z, 3, score=score, renorm=renorm)[0], (logits,))


def test_opcheck_finds_schema_fake_and_autograd_in_order():
    logits = leaf(awkward_logits(7, 64))
    weights, ids, _, _ = route(logits, 4)
    for forced in (None, ids):
        torch.library.opcheck(torch.ops.rsi.route.default, (logits, 4, True, True, forced, "auto"))
    args = (torch.randn(7, 4, device=DEVICE), logits.detach(), ids, weights.detach(), True, False, "auto")
    torch.library.opcheck(torch.ops.rsi.route_backward.default, args)


@pytest.mark.parametrize(
    ("logits", "options", "message"),
    [
        (torch.zeros(4), {}, r"logits \[T, E\]"),
        (torch.zeros(4, 8), {"k": 9}, "k <= E"),
        (torch.zeros(4, 8), {"score": "relu"}, "softmax, sigmoid"),
        (torch.zeros(4, 8), {"forced_ids": torch.zeros(4, 3)}, r"forced_ids \[T, K\] = \[4, 2\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(logits: Tensor, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        route(logits, **({"k": 2} | options))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.min(tl.where(left == logit[:, None], e[None, :], EP), 1)", "tl.max((left == logit[:, None]) * e, 1)"),
        ("p = p / total[:, None]", "pass"),
        ("weights = weights / tl.sum(weights, 1)[:, None]", "pass"),
        ("& ok[:, None], 1, 0)", ", 1, 0)"),
        ("tl.where(ok[:, None], p, 0.0)", "p"),
        ("d -= w * total", "d -= total"),
        ("tl.atomic_add(COUNTS", "tl.store(COUNTS"),
        ("tl.store(IDS + out, ids, mask=keep)", "tl.store(IDS + out, ids, mask=keep & (slot[None, :] < K - 1))"),
    ],
)  # fmt: skip
def test_a_fault_planted_in_the_triton_kernel_is_caught(monkeypatch, tmp_path, old: str, new: str):
    plant_in_module(monkeypatch, tmp_path, "route_triton", old, new)
    with pytest.raises(AssertionError):
        check("triton", 19, 128, 8)


@pytest.mark.parametrize(
    ("old", "new", "options"),
    [
        ("grad = -total * ", "grad = 0 * ", {"renorm": False}),
        ("tl.sigmoid(-chosen)", "tl.sigmoid(chosen)", {"score": "sigmoid"}),
        ("tl.exp(logit - top) / total if SOFTMAX else tl.sigmoid(logit)", "tl.exp(logit - top) / total if SOFTMAX else logit", {"score": "sigmoid"}),  # noqa: E501
    ],
)  # fmt: skip
def test_a_fault_of_one_mode_is_caught(monkeypatch, tmp_path, old: str, new: str, options: dict[str, Any]):
    plant_in_module(monkeypatch, tmp_path, "route_triton", old, new)
    with pytest.raises((AssertionError, UnboundLocalError, NameError)):
        check("triton", 19, 128, 8, **options)


def test_a_replay_that_looks_at_the_best_is_caught(monkeypatch, tmp_path):
    plant_in_module(
        monkeypatch, tmp_path, "route_triton", "chosen = _column(ids, slot, k, 0)", "chosen = _column(ids, slot, 0, 0)"
    )
    forced = torch.arange(8).repeat(19, 1).to(DEVICE)
    with pytest.raises(AssertionError):
        check("triton", 19, 128, 8, forced)


def test_a_softmax_of_the_chosen_alone_is_caught(monkeypatch):
    """The gradient of the others is lost (the bug of Megatron's first replay)."""
    function = module._scores
    plant_in_function(monkeypatch, module, function, "logits.softmax(-1) if softmax", "torch.where(logits >= logits.topk(8).values[:, -1:], logits, -torch.inf).softmax(-1) if softmax")  # fmt: skip  # noqa: E501
    with pytest.raises(AssertionError):
        check("torch", 19, 128, 8, renorm=False)
