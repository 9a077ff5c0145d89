"""Distributions over time, against all values kept."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.replay.account import WeightedQuantiles

# A value, and the whole seconds that it lasted.
Stretch = tuple[int, int]


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 5)), min_size=1, max_size=30),
    st.sampled_from([0.01, 0.5, 0.99, 1.0]),
    st.booleans(),
)
def test_a_quantile_is_at_most_half_a_percent_too_high(
    stretches: list[Stretch], share: float, at_once: bool
) -> None:
    quantiles = WeightedQuantiles()
    values, weights = (np.array(column) for column in zip(*stretches, strict=True))
    if at_once:
        quantiles.add(values, weights.astype(np.float64))
    else:
        for value, weight in stretches:
            quantiles.add_one(value, float(weight))
    exact = float(np.quantile(np.repeat(values, weights), share, method="inverted_cdf"))
    found = quantiles.quantile(share)
    if exact < 200:
        assert found == exact
    else:
        assert exact * (1 - 1e-9) <= found <= min(exact * 1.005 * (1 + 1e-9), values.max())


def test_no_time_has_no_quantile() -> None:
    assert WeightedQuantiles().quantile(0.99) == 0.0
