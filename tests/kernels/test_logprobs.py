"""token_logprobs against the float64 reference, values and gradients, at odd shapes."""

import pytest
import torch

from rsi_kernels.logprobs import token_logprobs, token_logprobs_reference

SHAPES = [(1, 3, 2, 1), (7, 5, 11, 3), (64, 32, 257, 64), (33, 16, 100, 1024)]


def operands(n: int, h: int, v: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n + h + v)
    hidden = torch.randn(n, h, generator=generator).requires_grad_()
    weight = torch.randn(v, h, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, v, (n,), generator=generator)


def grads(outputs: tuple[torch.Tensor, torch.Tensor], inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Of a loss that weighs every row of both outputs differently, so that no error cancels."""
    logp, entropy = outputs
    ramp = torch.linspace(-1, 2, logp.shape[0], dtype=logp.dtype)
    return torch.autograd.grad((logp * ramp).sum() + (entropy * ramp.flip(0)).sum(), inputs)


@pytest.mark.parametrize(("n", "h", "v", "chunk"), SHAPES)
def test_values_and_gradients_match_float64(n: int, h: int, v: int, chunk: int):
    hidden, weight, labels = operands(n, h, v)
    ours, reference = token_logprobs(hidden, weight, labels, chunk), token_logprobs_reference(hidden, weight, labels)
    # logits reach ~20 in float32, whose spacing there is 2e-6; a dot product of 32 terms adds a few of those
    for a, b in zip(ours, reference, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=1e-5)
    for a, b in zip(grads(ours, [hidden, weight]), grads(reference, [hidden, weight]), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_gradient_of_logp_alone_matches_float64():
    hidden, weight, labels = operands(9, 4, 13)
    a = torch.autograd.grad(token_logprobs(hidden, weight, labels, 4)[0].sum(), [hidden, weight])
    b = torch.autograd.grad(token_logprobs_reference(hidden, weight, labels)[0].sum(), [hidden, weight])
    for ours, reference in zip(a, b, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)


def test_chunks_do_not_change_the_result():
    hidden, weight, labels = operands(50, 8, 40)
    whole, chunked = token_logprobs(hidden, weight, labels, 50), token_logprobs(hidden, weight, labels, 7)
    # the same rows through matrix products of other heights: the order of summation may differ
    torch.testing.assert_close(whole[0], chunked[0], atol=1e-5, rtol=0)


def test_head_is_float32_for_bfloat16_operands():
    # the two logits are 20.0625 and 20.0; a bfloat16 product would round the first to 20.0 and give -ln 2
    hidden = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    weight = torch.tensor([[20.0, 0.0625], [20.0, 0.0]], dtype=torch.bfloat16)
    logp, _ = token_logprobs(hidden, weight, torch.tensor([0]))
    assert logp.item() == pytest.approx(-0.66238, abs=1e-5)  # -ln(1 + e^-0.0625)


def test_logits_are_not_kept_for_backward():
    hidden, weight, labels = operands(64, 4, 1000)
    logp, _ = token_logprobs(hidden, weight, labels, 8)
    kept = sum(t.numel() for t in logp.grad_fn.saved_tensors)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    assert kept < 64 * 1000 / 8  # hidden 256, weight 4000, three rows of 64


def test_extreme_logits_stay_finite():
    logp, entropy = token_logprobs(torch.tensor([[1e4]]), torch.tensor([[1.0], [-1.0]]), torch.tensor([1]))
    assert logp.item() == -2e4
    assert entropy.item() == 0


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="expected hidden"):
        token_logprobs(torch.zeros(2, 3), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64))
