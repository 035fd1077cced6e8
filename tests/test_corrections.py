"""Every off-policy correction on numbers that can be computed by hand."""

import math

import pytest
import torch

from rsi.corrections import (
    CorrectionConfig,
    correction,
    geometric_rejection,
    icepop,
    opsm,
    sequence_mis,
    sequence_veto,
    token_tis,
)

ONE = torch.zeros(3, dtype=torch.int64)


def logs(*w: float) -> torch.Tensor:
    return torch.tensor(w, dtype=torch.float64).log()


def test_token_tis_caps_the_weight():
    assert token_tis(logs(0.5, 1, 3), 2.0).tolist() == pytest.approx([0.5, 1, 2])


def test_sequence_mis_weighs_by_the_product_or_not_at_all():
    assert sequence_mis(logs(0.5, 1, 3), ONE, 1, 0.5, 2.0).tolist() == pytest.approx([1.5] * 3)
    assert sequence_mis(logs(2, 2, 1), ONE, 1, 0.0, 3.0).tolist() == [0, 0, 0]  # product 4
    two = torch.tensor([0, 1, 1])
    assert sequence_mis(logs(0.9, 2, 2), two, 2, 0.5, 2.0).tolist() == pytest.approx([0.9, 0, 0])


def test_a_veto_takes_the_whole_sequence():
    two = torch.tensor([0, 0, 1])
    assert sequence_veto(logs(1, 1e-5, 1), two, 2, 1e-4).tolist() == [0, 0, 1]


def test_geometric_rejection_looks_at_the_mean_log_weight():
    near, far = logs(1.01, 0.99, 1.002), logs(1.02, 1.01, 1)
    assert far.mean().exp().item() == pytest.approx(1.00997, abs=1e-5)
    assert geometric_rejection(near, ONE, 1, 0.999, 1.001).tolist() == [1, 1, 1]  # 1.00063
    assert geometric_rejection(far, ONE, 1, 0.99, 1.01).tolist() == [1, 1, 1]
    assert geometric_rejection(far, ONE, 1, 0.999, 1.001).tolist() == [0, 0, 0]


def test_icepop_zeroes_tokens_outside_the_band():
    assert icepop(logs(0.4, 0.8, 6), 0.5, 5.0).tolist() == pytest.approx([0, 0.8, 0])


def test_opsm_drops_a_sequence_that_the_policy_left_and_that_is_punished():
    fallen = logs(0.5, 0.4, 0.2) - logs(0.45, 0.4, 0.2)
    assert fallen.mean().item() == pytest.approx(0.03512, abs=1e-5)
    assert opsm(fallen, -torch.ones(3), ONE, 1, 1e-4).tolist() == [0, 0, 0]
    assert opsm(fallen, torch.ones(3), ONE, 1, 1e-4).tolist() == [1, 1, 1]
    assert opsm(-fallen, -torch.ones(3), ONE, 1, 1e-4).tolist() == [1, 1, 1]


def test_corrections_multiply_and_carry_no_gradient():
    sampler, old = logs(0.5, 0.5, 0.5), logs(0.6, 0.25, 0.5)
    logp = old.clone().requires_grad_()
    config = CorrectionConfig(token_tis=1.1, geometric=(0.5, 2.0))
    factor = correction(config, logp, old, sampler, torch.ones(3), ONE, 1)
    assert factor is not None and not factor.requires_grad
    assert factor.tolist() == pytest.approx([1.1, 0.5, 1.0])
    assert correction(CorrectionConfig(), logp, old, sampler, torch.ones(3), ONE, 1) is None


def test_weights_beyond_float_range_stay_finite():
    wild = torch.tensor([500.0, -500.0, 500.0])
    for factor in (token_tis(wild, 2.0), icepop(wild, 0.5, 5.0), sequence_mis(wild, ONE, 1, 0.5, 2.0)):
        assert math.isfinite(factor.sum().item())


@pytest.mark.parametrize("bad", [{"icepop": (2.0, 0.5)}, {"geometric": (-1.0, 1.0)}, {"token_tis": 0.0}])
def test_bounds_that_mean_nothing_are_refused(bad: dict):
    with pytest.raises(ValueError, match="use"):
        CorrectionConfig(**bad)
