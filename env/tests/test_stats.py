"""Intervals with known values."""

from __future__ import annotations

import pytest

from hsql_env.analysis.stats import paired_bootstrap, significance_text, wilson_interval


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (0, 10, 0.0, 0.27753),  # 1 - 1/(1 + z^2/n)
        (10, 10, 0.72247, 1.0),
        (5, 10, 0.23659, 0.76341),
        (81, 263, 0.25529, 0.36621),  # Newcombe 1998, table I: 0.2553, 0.3662
        (300, 512, 0.54279, 0.62781),
    ],
)
def test_wilson_interval(successes: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(successes, total) == pytest.approx((low, high), abs=1e-5)


def test_wilson_interval_narrows_with_a_lower_level_and_knows_nothing_of_no_tasks() -> None:
    low, high = wilson_interval(5, 10, level=0.5)
    assert (low, high) == pytest.approx((0.39570, 0.60430), abs=1e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="got 3 of 2"):
        wilson_interval(3, 2)


def test_paired_bootstrap_is_deterministic_and_close_to_the_normal_interval() -> None:
    before = [0] * 60 + [1] * 20 + [0] * 20
    after = [0] * 60 + [0] * 20 + [1] * 20
    # Differences: 60 zeros, 20 losses, 20 gains: mean 0, standard error sqrt(.4/100) = .0632.
    change = paired_bootstrap(before, after, seed=3)
    assert change == paired_bootstrap(before, after, seed=3)
    assert change != paired_bootstrap(before, after, seed=4)
    assert change.mean == 0
    assert change.low == pytest.approx(-0.124, abs=0.012)
    assert change.high == pytest.approx(0.124, abs=0.012)


def test_paired_bootstrap_of_a_constant_gain_has_no_width() -> None:
    assert paired_bootstrap([0, 0.25, 0.5], [0.5, 0.75, 1], resamples=50) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(("before", "after"), [([], []), ([1], [1, 0])])
def test_paired_bootstrap_refuses_scores_without_partners(
    before: list[int], after: list[int]
) -> None:
    with pytest.raises(ValueError, match=f"got {len(before)} and {len(after)}"):
        paired_bootstrap(before, after)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((0.02, -0.01, 0.05), "no significant change"),
        ((0.02, 0.0, 0.05), "no significant change"),
        ((0.04, 0.01, 0.07), "significant gain"),
        ((-0.04, -0.07, -0.01), "significant loss"),
    ],
)
def test_significance_text(change: tuple[float, float, float], words: str) -> None:
    assert significance_text(*change) == words
