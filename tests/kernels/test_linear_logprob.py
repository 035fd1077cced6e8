"""linear_logprob against the float64 reference, values and gradients, at odd shapes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rsi_kernels import head
from rsi_kernels import linear_logprob as module
from rsi_kernels.impl import Impl
from rsi_kernels.linear_logprob import linear_logprob, linear_logprob_reference
from tests.kernels.checks import BF16, BOTH, DEVICE, FP32, leaf, off, plant_in_function, plant_in_module, rel

SHAPES = [(1, 8, 3, 0), (7, 8, 997, 3), (21, 16, 4500, 8), (33, 24, 100, 1024)]
"""T, H, V, chunk. 4,500 is three steps of the Triton kernels' 2,048 logits, and two programs of 4,096."""


def operands(t: int, h: int, v: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t + h + v)
    hidden = torch.randn(t, h, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(v, h, generator=generator).to(DEVICE, dtype)
    target = torch.randint(0, v, (t,), generator=generator).to(DEVICE)
    target[:1], target[1:2] = v - 1, 0
    return leaf(hidden), leaf(weight), target


def gradients(logp: Tensor, entropy: Tensor, inputs: list[Tensor], of_entropy: float = 1.0) -> tuple[Tensor, ...]:
    """Of a loss that weighs every row of both outputs differently, so that no error cancels."""
    ramp = torch.linspace(-1, 2, logp.shape[0], dtype=logp.dtype, device=logp.device)
    loss = (logp * ramp).sum()
    if of_entropy:
        loss = loss + of_entropy * (entropy * ramp.flip(0)).sum()
    return torch.autograd.grad(loss, inputs)


def check_float32(impl: Impl, shape: tuple[int, int, int, int], temperature: float, of_entropy: float = 1.0) -> None:
    """Raises AssertionError if a value or a gradient is off."""
    *_, chunk = shape
    hidden, weight, target = operands(*shape[:3])
    ours = linear_logprob(hidden, weight, target, temperature=temperature, chunk=chunk, impl=impl)
    reference = linear_logprob_reference(hidden, weight, target, temperature)
    # logits reach ~30 here, where float32 is 2e-6 apart; their sum over H terms adds a few of those
    assert max(off(a, b) for a, b in zip(ours, reference, strict=True)) < 3e-5
    assert ours[0].dtype == ours[1].dtype == torch.float32
    assert (ours[0] <= 1e-6).all() and (ours[1] >= -1e-5).all() and (ours[1] <= math.log(weight.shape[0]) + 1e-5).all()
    grads = gradients(*ours, [hidden, weight], of_entropy)
    for a, b in zip(grads, gradients(*reference, [hidden, weight], of_entropy), strict=True):
        assert rel(a, b) < FP32
    # every row of dlogits sums to 0, hence so do the columns of its product with the hidden states
    assert grads[1].sum(0).abs().max() < 1e-4


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_match_float64(impl: Impl, shape: tuple[int, int, int, int]):
    check_float32(impl, shape, 1.0)


@BOTH
def test_temperature_divides_the_logits(impl: Impl):
    check_float32(impl, SHAPES[1], 0.7)


@BOTH
def test_gradient_of_logp_alone_matches_float64(impl: Impl):
    check_float32(impl, SHAPES[1], 1.3, of_entropy=0.0)


@BOTH
def test_bfloat16_operands_give_float32_logprobs(impl: Impl):
    hidden, weight, target = operands(9, 16, 2500, torch.bfloat16)
    ours = linear_logprob(hidden, weight, target, temperature=1.0, chunk=4, impl=impl)
    reference = linear_logprob_reference(hidden, weight, target)
    assert max(off(a, b) for a, b in zip(ours, reference, strict=True)) < 3e-5
    for a, b in zip(
        gradients(*ours, [hidden, weight]),
        gradients(*linear_logprob_reference(hidden.double(), weight.double(), target), [hidden, weight]),
        strict=True,
    ):
        assert a.dtype == torch.bfloat16
        assert rel(a, b) < BF16


@BOTH
def test_head_is_float32_for_bfloat16_operands(impl: Impl):
    # the two logits are 20.0625 and 20.0; a bfloat16 product would round the first to 20.0 and give -ln 2
    hidden = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16, device=DEVICE)
    weight = torch.tensor([[20.0, 0.0625], [20.0, 0.0]], dtype=torch.bfloat16, device=DEVICE)
    target = torch.tensor([0], device=DEVICE)
    logp, _ = linear_logprob(hidden, weight, target, temperature=1.0, impl=impl)
    assert logp.item() == pytest.approx(-0.66238, abs=1e-5)  # -ln(1 + e^-0.0625)
    rounded, _ = linear_logprob(hidden, weight, target, temperature=1.0, fp32_logits=False, impl=impl)
    assert rounded.item() == pytest.approx(-math.log(2), abs=1e-5)


@BOTH
def test_extreme_logits_stay_finite(impl: Impl):
    hidden = torch.tensor([[1e4]], device=DEVICE)
    weight = torch.tensor([[1.0], [-1.0]], device=DEVICE)
    logp, entropy = linear_logprob(hidden, weight, torch.tensor([1], device=DEVICE), temperature=1.0, impl=impl)
    assert logp.item() == pytest.approx(-2e4, rel=1e-6)
    assert entropy.item() == pytest.approx(0, abs=2e-3)  # the difference of two numbers of 1e4


@BOTH
def test_no_tokens_give_no_rows_and_zero_gradients(impl: Impl):
    hidden, weight, target = operands(0, 8, 50)
    logp, entropy = linear_logprob(hidden, weight, target, temperature=1.0, impl=impl)
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,)
    assert hidden.grad is not None and hidden.grad.shape == (0, 8)
    assert weight.grad is not None and not weight.grad.any()


@BOTH
def test_two_runs_are_bit_equal(impl: Impl):
    hidden, weight, target = operands(7, 8, 997)
    runs = []
    for _ in range(2):
        out = linear_logprob(hidden, weight, target, temperature=1.0, chunk=3, impl=impl)
        runs.append((*out, *gradients(*out, [hidden, weight])))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_chunks_do_not_change_the_result():
    hidden, weight, target = operands(50, 8, 40)
    whole, chunked = (linear_logprob(hidden, weight, target, temperature=1.0, chunk=c)[0] for c in (50, 7))
    # the same rows through matrix products of other heights: the order of summation may differ
    assert off(whole, chunked) < 1e-5


def test_a_frozen_head_costs_no_gradient_of_it(monkeypatch: pytest.MonkeyPatch):
    hidden, weight, target = operands(9, 8, 40)
    monkeypatch.setattr(head.Head, "add_weight_grad", lambda *_: pytest.fail("the head is frozen"))
    logp, _ = linear_logprob(hidden, weight.detach(), target, temperature=1.0)
    logp.sum().backward()
    assert hidden.grad is not None


def test_logits_are_not_kept_for_backward():
    hidden, weight, target = operands(64, 4, 1000)
    logp, _ = linear_logprob(hidden, weight, target, temperature=1.0, chunk=8)
    kept = sum(t.numel() for t in logp.grad_fn.saved_tensors)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    assert kept < 64 * 1000 / 8  # hidden 256, weight 4000, three rows of 64


def test_scoring_without_gradient_keeps_nothing():
    hidden, weight, target = operands(9, 8, 40)
    with torch.no_grad():
        logp, _ = linear_logprob(hidden, weight, target, temperature=1.0)
    assert logp.grad_fn is None
    assert linear_logprob(hidden.detach(), weight.detach(), target, temperature=1.0)[0].grad_fn is None


def test_a_target_that_is_no_token_never_passes_for_one():
    hidden, weight, _ = operands(2, 8, 40)
    target = torch.tensor([3, -100], device=DEVICE)
    logp, _ = linear_logprob(hidden, weight, target, temperature=1.0, impl="triton")
    assert logp.isnan().tolist() == [False, True]
    if DEVICE == "cpu":  # a gather out of range on a GPU ends the process
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            linear_logprob(hidden, weight, target, temperature=1.0, impl="torch")


def test_gradcheck_in_float64():
    hidden, weight, target = (t.double() if t.is_floating_point() else t for t in operands(5, 3, 11))
    inputs = (leaf(hidden), leaf(weight))
    assert torch.autograd.gradcheck(lambda x, w: linear_logprob(x, w, target, temperature=0.8, chunk=2), inputs)


def test_opcheck_finds_schema_fake_and_autograd_in_order():
    hidden, weight, target = operands(6, 8, 11)
    torch.library.opcheck(torch.ops.rsi.linear_logprob.default, (hidden, weight, target, 1.0, 4, True, "auto"))
    rows = [torch.randn(6, device=DEVICE) for _ in range(4)]
    args = (rows[0], rows[1], hidden.detach(), weight.detach(), target, rows[2], rows[3], 1.0, 4, True, "auto")
    for needs in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(torch.ops.rsi.linear_logprob_backward.default, (*args, *needs))


def test_a_compiled_graph_equals_eager():
    hidden, weight, target = operands(6, 8, 11)

    def step(x: Tensor, w: Tensor) -> Tensor:
        logp, entropy = linear_logprob(x * 2, w, target, temperature=1.0, chunk=4)
        return logp.sum() + 0.1 * entropy.sum()

    eager = torch.autograd.grad(step(hidden, weight), [hidden, weight])
    compiled = torch.autograd.grad(
        torch.compile(step, fullgraph=True, backend="aot_eager")(hidden, weight), [hidden, weight]
    )
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


@pytest.mark.parametrize(
    ("hidden", "weight", "target", "options", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64), {}, "expected hidden"),
        (torch.zeros(2, 3), torch.zeros(5, 3).bfloat16(), torch.zeros(2, dtype=torch.int64), {}, "cast one of them"),
        (torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, dtype=torch.int32), {}, "use int64"),
        (torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, dtype=torch.int64), {"temperature": 0.0}, "positive"),
        (torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, dtype=torch.int64), {"chunk": -1}, "at least 1"),
    ],
)
def test_operands_that_do_not_fit_are_refused(hidden: Tensor, weight: Tensor, target: Tensor, options, message: str):
    with pytest.raises(ValueError, match=message):
        linear_logprob(hidden, weight, target, **({"temperature": 1.0} | options))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ok = c < V", "ok = c < V - 1"),
        ("s = s * rescale", "s = s"),
        ("w = w * rescale", "w = w"),
        ("tl.store(ENTROPY + row, (lse2 - w / s) * LN2)", "tl.store(ENTROPY + row, lse2 - w / s)"),
        ("tl.where(c == t, 1.0, 0.0) - p", "tl.where(c == t + 1, 1.0, 0.0) - p"),
        ("(log_p2 * LN2 + tl.load(ENTROPY + row))", "(log_p2 * LN2 - tl.load(ENTROPY + row))"),
        ("(d * inv_t).to", "d.to"),
        ("tl.program_id(1) * BLOCK + tl.arange", "tl.arange"),
        ("tl.store(LSE + row, lse2 * LN2)", "pass"),
    ],
)
def test_a_fault_planted_in_the_triton_kernel_is_caught(monkeypatch, tmp_path, old: str, new: str):
    plant_in_module(monkeypatch, tmp_path, "head_triton", old, new)
    with pytest.raises(AssertionError):
        check_float32("triton", (5, 8, 4500, 3), 0.7)


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        (module._statistics, "rowwise_dot(e, z) / total", "rowwise_dot(e, z)"),
        (module._statistics, "mul_(inv_temperature)", "clone()"),
        (module._dlogits, "add_(entropy[:, None])", "sub_(entropy[:, None])"),
        (module._dlogits, "(g * inv_t)[:, None])\n    if", "g[:, None])\n    if"),
        (module._dlogits, "mul_(-inv_t)", "mul_(-1)"),
    ],
)
def test_a_fault_planted_in_the_torch_path_is_caught(monkeypatch, function, old: str, new: str):
    plant_in_function(monkeypatch, module, function, old, new)
    with pytest.raises(AssertionError):
        check_float32("torch", (5, 8, 450, 3), 0.7)
