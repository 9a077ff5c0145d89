"""Lengths of contexts."""

import math
from fractions import Fraction
from statistics import NormalDist, fmean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvblocks.planner.lengths import fixed, log_normal, observed


@given(p50=st.integers(1, 5000), ratio=st.floats(1, 20), longest=st.integers(1, 50_000))
@example(p50=1204, ratio=1.9375, longest=53)
def test_the_mean_of_a_cut_log_normal_is_that_of_its_quantiles(p50: int, ratio: float, longest: int) -> None:
    p95 = math.ceil(p50 * ratio)
    sigma = math.log(p95 / p50) / NormalDist().inv_cdf(0.95)
    quantiles = [NormalDist().inv_cdf((i + 0.5) / 2000) for i in range(2000)]
    mean = fmean(min(p50 * math.exp(sigma * z), longest) for z in quantiles)
    lengths = log_normal(p50, p95, longest)
    # The midpoints miss a little of the tail; the mean is rounded up.
    assert 0.99 * mean <= lengths.mean_tokens <= 1.03 * mean + 1
    assert 1 <= lengths.mean_tokens <= lengths.max_tokens == longest
    assert lengths.p95_tokens == min(p95, longest)


def test_observed_lengths_are_cut_and_ranked() -> None:
    lengths = observed(range(1, 101), None, "a trace")
    assert (lengths.max_tokens, lengths.p95_tokens, lengths.mean_tokens) == (100, 95, 51)
    assert observed([5, 50], 10, "a trace").mean_tokens == 8
    with pytest.raises(ValueError, match="no requests"):
        observed([], 10, "a trace")


def test_rows_are_named_and_equal_ones_merged() -> None:
    assert fixed(10).rows() == [("full", 10)]
    assert [name for name, _ in log_normal(5, 10, 20).rows()] == ["full", "p95", "mean"]
    assert log_normal(5, 10, 20).scaled(Fraction(11, 10)).p95_tokens == 11
