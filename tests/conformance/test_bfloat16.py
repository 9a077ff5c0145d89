"""Queries and results of bfloat16 over rows long enough for pairs of bfloat16: what may be rounded, and by how much.

A backend may round the weights of V to bfloat16 where the result is rounded to it anyway. So an element of the result
may be off by its own rounding, and by that of every weight: both are at most 2^-8 of what is rounded. Where neighbours
share a scale, what is rounded may be weights times scales: an element is off by as much as the largest of its group.
"""

import numpy as np
import pytest

from conformance import reference, scene, test_formats
from conformance.harness import Harness
from conformance.scene import LSE_TOLERANCE, NAN_BYTES, element, load, store
from conformance.test_formats import LAYOUTS, supports
from every_format import EVERY_FORMAT

UNIT = 2.0**-8
# Odd lengths, so that the last key has no other to go with; a tile and more; none.
SEQ_LENS = (1, 2, 33, 0, 63, 150)
OPTIONS = [
    {},
    {"window": 21},
    {"soft_cap": 3.0, "alibi_slopes": np.geomspace(1, 0.01, 8, dtype=np.float32)},
    {"sinks": np.linspace(-2, 3, 8, dtype=np.float32), "scale": 0.3},
]


def largest_of_groups(values: np.ndarray, size: int) -> np.ndarray:
    """The largest of each group of neighbours, in the place of all of them."""
    *rows, dim = values.shape
    size = min(size, dim)  # a short row is one group
    return values.reshape(*rows, dim // size, size).max(axis=-1).repeat(size, axis=-1)


def within_rounding(made: scene.Scene, tail: object = None, **options: object) -> None:
    """Compare each element with the reference, and the log-sum-exp with that of weights that are not rounded."""
    out, lse = made.attend(**(options if tail is None else options | {"tail": tail}))
    expected, expected_lse = made.expected(**options)
    # The same weights on magnitudes.
    group = made.cache.format.v.group if made.cache.format.v.scaling == "group" else 1
    magnitudes = [(k, largest_of_groups(np.abs(v), group)) for k, v in made.sequences]
    queries = [load(made.q[row : row + 1]) for row in range(len(made.q))]
    of_weights, _ = reference.attend(queries, magnitudes, **options)
    limit = 1.02 * UNIT * (np.abs(expected) + of_weights) + 1e-5 * of_weights
    bad = ~(np.abs(load(out) - expected) <= limit)
    assert not bad.any(), f"{bad.sum()} of {bad.size}: the first is {np.argwhere(bad)[0]}"
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=LSE_TOLERANCE)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_format", ["bfloat16", "fp8_e4m3", "fp8_e4m3:head", "fp8_e5m2", "int8"])
def test_every_option(harness: Harness, kv_format: str, layout: str, options: dict) -> None:
    supports(harness, kv_format)
    how = {"seq_lens": SEQ_LENS, "q_dtype": "bfloat16", "layout": layout, "heads": (8, 2), "dims": (128, 128)}
    within_rounding(*test_formats.make_scene(harness, kv_format, **how), **options)


@pytest.mark.parametrize("dims", [(64, 128), (192, 64), (96, 32)])
@pytest.mark.parametrize("kv_format", EVERY_FORMAT)
def test_every_format(harness: Harness, kv_format: str, dims: tuple[int, int]) -> None:
    supports(harness, kv_format)
    how = {"seq_lens": (0, 35, 64), "q_dtype": "bfloat16", "heads": (7, 1), "dims": dims}
    within_rounding(*test_formats.make_scene(harness, kv_format, **how))


@pytest.mark.parametrize("kv_format", ["bfloat16", "fp8_e4m3:head", "int8"])
def test_one_key_alone_gives_its_value(harness: Harness, kv_format: str) -> None:
    """Where one key has all the weight, the result is its value, rounded once."""
    supports(harness, kv_format)
    made, _ = test_formats.make_scene(
        harness, kv_format, seq_lens=(1,), q_dtype="bfloat16", heads=(4, 1), dims=(64, 128)
    )
    out, _ = made.attend()
    value = made.sequences[0][1][0, 0]
    # The bfloat16 next to it; what is nearly between two of them may become either.
    half_step = 2.0 ** (np.floor(np.log2(np.abs(value))) - 8)
    assert (np.abs(load(out)[0] - value) <= half_step * (1 + 1e-4)).all()


@pytest.mark.parametrize("num_keys", [1, 3, 32, 33])
def test_an_infinite_last_value_stays_alone(harness: Harness, num_keys: int) -> None:
    """The last of an odd number of keys goes with no other: infinities of V stay where they are."""
    made = scene.make_scene(
        harness, dtype="bfloat16", seq_lens=(num_keys,), heads=(4, 1), dims=(64, 64), fill_byte=NAN_BYTES
    )
    last = num_keys - 1
    block = made.block_tables[0, last // made.cache.block_size]
    slot = int(block) * made.cache.block_size + last % made.cache.block_size
    values = harness.to_host(made.cache.v).copy()
    values[element(made.cache, slot)][..., 3] = store(np.array([np.inf]), "bfloat16")[0]
    made.cache.v[...] = harness.to_device(values)
    out, _ = made.attend()
    got = load(out)[0]
    assert np.isposinf(got[:, 3]).all()
    assert np.isfinite(np.delete(got, 3, axis=1)).all()
