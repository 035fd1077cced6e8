"""rsi.stats: the interval under every pass rate."""

import pytest

from rsi.stats import wilson


def test_wilson_agrees_with_the_textbook() -> None:
    # Wilson 95 % for 8 of 10 and 45 of 50, from the closed form worked by hand.
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=5e-5)
    assert wilson(45, 50) == pytest.approx((0.7864, 0.9565), abs=5e-5)


def test_wilson_keeps_a_width_at_the_ends() -> None:
    low, high = wilson(0, 50)
    assert (low, round(high, 4)) == (0.0, 0.0713)
    assert wilson(50, 50) == pytest.approx((1 - high, 1.0))


def test_no_trials_know_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


def test_more_passes_than_trials_are_our_mistake() -> None:
    with pytest.raises(ValueError, match="passes=3 of n=2"):
        wilson(3, 2)
