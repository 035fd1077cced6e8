"""combine and experts against a float64 loop over experts: values and gradients, with experts that get nothing."""
# pyright: reportCallIssue=false
# (lists of operands are unpacked before others)

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rsi_kernels import experts as module
from rsi_kernels.combine import combine, combine_reference
from rsi_kernels.experts import experts, experts_reference
from rsi_kernels.impl import Impl
from rsi_kernels.permute import permute
from tests.kernels.checks import BF16, BOTH, DEVICE, FP32, leaf, plant_in_function, plant_in_module, rel


def some_ids(tokens: int, num_experts: int, k: int) -> Tensor:
    """Distinct experts for each token, odd ones only: half of the experts stay empty."""
    generator = torch.Generator().manual_seed(tokens)
    rows = [torch.randperm(num_experts // 2, generator=generator)[:k] * 2 + 1 for _ in range(tokens)]
    return torch.stack(rows).int().to(DEVICE)


def operands(tokens: int, hidden: int, inner: int, num_experts: int, k: int, dtype=torch.float32) -> Any:
    generator = torch.Generator().manual_seed(tokens + inner)
    rand = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE, dtype)  # noqa: E731
    x, w_gate_up = rand(tokens, hidden), rand(num_experts, 2 * inner, hidden) / hidden**0.5
    weights = torch.rand(tokens, k, generator=generator).to(DEVICE)
    return [leaf(t) for t in (x, w_gate_up, rand(num_experts, hidden, inner) / inner**0.5, weights)]


def grads(y: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    ramp = torch.linspace(-1, 2, y.numel(), dtype=torch.float64, device=y.device).view_as(y)
    return torch.autograd.grad((y.double() * ramp).sum(), inputs)


def check_experts(impl: Impl, ids: Tensor, num_experts: int, dtype=torch.float32, inner: int = 24) -> None:
    """Raises AssertionError if the result or a gradient is off. inner=24 is no power of two."""
    args = operands(ids.shape[0], 16, inner, num_experts, ids.shape[1], dtype)
    y = experts(*args, *permute(ids, num_experts, impl=impl), impl=impl)
    wide: Any = [leaf(t.double()) for t in args]
    reference = experts_reference(*wide, ids)
    bound = FP32 if dtype == torch.float32 else 2 * BF16  # through three tensors that are stored in bfloat16
    assert y.dtype == dtype and rel(y, reference) < bound
    for ours, expected, arg in zip(grads(y, args), grads(reference, wide), args, strict=True):
        assert ours.dtype == arg.dtype
        assert rel(ours, expected) < bound


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "num_experts", "k"), [(1, 4, 1), (37, 16, 4)])
def test_values_and_gradients_match_a_float64_loop(impl: Impl, dtype, tokens: int, num_experts: int, k: int):
    check_experts(impl, some_ids(tokens, num_experts, k), num_experts, dtype)


@BOTH
def test_one_expert_may_take_all(impl: Impl):
    check_experts(impl, torch.full((21, 1), 3, dtype=torch.int32, device=DEVICE), 4)


@BOTH
def test_slots_of_other_ranks_add_nothing_and_get_no_gradient(impl: Impl):
    ids = some_ids(37, 16, 4)
    ids[ids < 6] = 16
    check_experts(impl, ids, 16)
    weights = leaf(torch.rand(37, 4, device=DEVICE))
    args = operands(37, 16, 24, 16, 4)[:3]
    y = experts(*args, weights, *permute(ids, 16, impl=impl), impl=impl)
    assert not torch.autograd.grad(y.sum(), weights)[0][ids == 16].any()


@BOTH
def test_no_tokens_give_no_rows(impl: Impl):
    args = operands(0, 16, 24, 4, 2)
    sorted_ids = permute(torch.zeros(0, 2, dtype=torch.int32, device=DEVICE), 4, impl=impl)
    y = experts(*args, *sorted_ids, impl=impl)
    y.sum().backward()
    assert y.shape == (0, 16) and args[1].grad is not None and not args[1].grad.any()


def check_combine(impl: Impl, weighted: bool) -> None:
    """Raises AssertionError if a sum or a gradient is off, or if a row of nobody is looked at. H is over one block."""
    ids = some_ids(9, 16, 4)
    ids[ids < 4] = 16
    _, inv, offs = permute(ids, 16)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(36, 1100, generator=generator).to(DEVICE)
    rows[int(offs[-1]) :] = float("nan")
    rows = leaf(rows)
    weights = leaf(torch.rand(9, 4, generator=generator).to(DEVICE)) if weighted else None
    y, reference = combine(rows, weights, inv, 4, impl=impl), combine_reference(rows, weights, inv, 4)
    assert rel(y, reference) < FP32
    inputs = [rows] if weights is None else [rows, weights]
    ours = grads(y, inputs)
    for gradient, expected in zip(ours, grads(reference, inputs), strict=True):
        assert rel(gradient, expected) < FP32
    assert not ours[0][int(offs[-1]) :].any()


@BOTH
@pytest.mark.parametrize("weighted", [True, False])
def test_combine_matches_float64_and_skips_rows_of_nobody(impl: Impl, weighted: bool):
    check_combine(impl, weighted)


def test_gradcheck_in_float64():
    args: Any = [leaf(t.double()) for t in operands(5, 3, 4, 4, 2)]
    ids = some_ids(5, 4, 2)
    ids[0, 0] = 4
    sorted_ids = permute(ids, 4)
    assert torch.autograd.gradcheck(lambda *a: experts(*a, *sorted_ids), args)
    rows = leaf(torch.randn(10, 3, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda r, w: combine(r, w, sorted_ids[1], 2), (rows, args[3]))


def test_opcheck_finds_schema_fake_and_autograd_in_order():
    args, ids = operands(5, 8, 8, 4, 2), some_ids(5, 4, 2)
    perm, inv, offs = permute(ids, 4)
    torch.library.opcheck(torch.ops.rsi.experts.default, (*args, perm, inv, offs, "auto"))
    rows = leaf(torch.randn(10, 8, device=DEVICE))
    for weights in (args[3], None):
        torch.library.opcheck(torch.ops.rsi.combine.default, (rows, weights, inv, 2, "auto"))


def test_frozen_weights_cost_no_gradient_of_them(monkeypatch: pytest.MonkeyPatch):
    x, w_gate_up, w_down, weights = operands(5, 8, 8, 4, 2)
    calls = []
    plain = module.grouped_mm
    monkeypatch.setattr(module, "grouped_mm", lambda *args: calls.append(args[1].dim()) or plain(*args))
    y = experts(x, w_gate_up.detach(), w_down.detach(), weights, *permute(some_ids(5, 4, 2), 4))
    y.sum().backward()
    assert calls == [3, 3, 3, 3] and x.grad is not None  # two forward, two backward; none by two-dimensional operands


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: [a[0][:, :-1], *a[1:]], r"expected x \[T, H\]"),
        (lambda a: [a[0].bfloat16(), *a[1:]], "use one dtype"),
        (lambda a: [*a[:3], a[3][:3]], r"weights \[T, K\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, message: str):
    sorted_ids = permute(some_ids(5, 4, 2), 4)
    with pytest.raises(ValueError, match=message):
        experts(*change(operands(5, 8, 8, 4, 2)), *sorted_ids)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("swiglu_triton", "(g * tl.sigmoid(g) * u)", "(g * tl.sigmoid(u) * u)"),
        ("swiglu_triton", "tl.load(PRE + row * 2 * INNER + INNER + c", "tl.load(PRE + row * 2 * INNER + c"),
        ("swiglu_triton", "(s + silu * (1.0 - s))", "(s + g * (1.0 - s))"),
        ("swiglu_triton", "d = d * w", "pass"),
        ("swiglu_triton", "(a * w).to", "a.to"),
        ("swiglu_triton", "ok = c < INNER", "ok = c < INNER - 1"),
        ("swiglu_triton", "tl.store(D_WEIGHT + row, tl.sum(a * d, 0))", "pass"),
    ],
)
def test_a_fault_planted_in_the_swiglu_is_caught(monkeypatch, tmp_path, name: str, old: str, new: str):
    plant_in_module(monkeypatch, tmp_path, name, old, new)
    with pytest.raises(AssertionError):
        check_experts("triton", some_ids(13, 8, 2), 8)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("& (row >= 0), other=0.0).to(tl.float32)\n        if", ", other=0.0).to(tl.float32)\n        if"),
        ("value = value * tl.load(WEIGHTS + t * K + k)", "pass"),
        ("tl.program_id(1) * BLOCK", "0"),
        ("tl.store(D_WEIGHTS + t * K + k, tl.sum(dot, 0))", "pass"),
        ("d = d * tl.load(WEIGHTS + t * K + k)", "pass"),
        ("for start in range(0, H, BLOCK):", "for start in range(0, BLOCK, BLOCK):"),
    ],
)
def test_a_fault_planted_in_the_combine_is_caught(monkeypatch, tmp_path, old: str, new: str):
    plant_in_module(monkeypatch, tmp_path, "combine_triton", old, new)
    with pytest.raises((AssertionError, IndexError)):
        check_combine("triton", True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(s + silu * (1 - s))", "(s + gate * (1 - s))"),
        ("a.mul_(w)", "a"),
        ("da = da * w", "da = da"),
    ],
)
def test_a_fault_planted_in_the_torch_path_is_caught(monkeypatch, old: str, new: str):
    plant_in_function(monkeypatch, module, module._swiglu_backward, old, new)
    with pytest.raises(AssertionError):
        check_experts("torch", some_ids(13, 8, 2), 8)
