"""Queries and results of bfloat16 over rows long enough for pairs of bfloat16: what may be rounded, and by how much.

A backend may round the weights of V to bfloat16 where the result is rounded to it anyway. Then an element of the result
may be off by its own rounding and by that of the weights, each at most 2^-8 of what is rounded. If it divides by the
sum of what it rounded, a weight of its share moves an element by as much of the distance between its value and the
result; if it divides by the sum of the weights as they were, by as much of the value. Where neighbours share a scale,
what is rounded may be weights times scales, which move it by as much of the distance from the middle of the codes.
"""

import math

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


def half_ranges(values: np.ndarray, size: int) -> np.ndarray:
    """The most that values of groups of neighbours, which reach both ends of the codes, may be off their middle.

    Of 16 codes the eighth may be taken for it: 8/15 of the range.
    """
    *rows, dim = values.shape
    size = min(size, dim)  # a short row is one group
    groups = values.reshape(*rows, dim // size, size)
    return np.ptp(groups, axis=-1).repeat(size, axis=-1) * (8 / 15)


def within_rounding(made: scene.Scene, tail: object = None, **options: object) -> None:
    """Compare each element with the reference, and the log-sum-exp with that of weights that are not rounded."""
    out, lse = made.attend(**(options if tail is None else options | {"tail": tail}))
    expected, expected_lse = made.expected(**options)
    moved, mean_magnitude = np.zeros_like(expected), np.zeros_like(expected)
    for row, (k, v) in enumerate(made.sequences):
        if len(k):
            # With one element for each key, 1 for this one, attention is the weights.
            units = np.repeat(np.eye(len(k))[:, None], k.shape[1], axis=1)
            weights, _ = reference.attend_query(load(made.q[row]), k, units, len(k), **options)
            of_heads = v.repeat(len(weights) // v.shape[1], axis=1)
            mean_magnitude[row] = np.einsum("hn,nhd->hd", weights, np.abs(of_heads))
            if made.cache.format.v.scaling == "group":
                distances = half_ranges(of_heads, made.cache.format.v.group)
                moved[row] = np.einsum("hn,nhd->hd", weights, distances)
            else:
                mean_distance = np.einsum("hn,nhd->hd", weights, np.abs(of_heads - expected[row]))
                moved[row] = np.maximum(mean_distance, mean_magnitude[row])
    limit = 1.01 * UNIT * (np.abs(expected) + moved) + 1e-5 * mean_magnitude
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


def test_weights_that_round_apart(harness: Harness) -> None:
    """The most that rounding does: many weights just below the middle of two bfloat16, few just above it.

    The few have all the values, so that the result is off by twice the rounding of a weight, and by its own.
    """
    middle, many, few = 0.5 + 2.0**-9, 500, 8
    weights = [1.0] + [middle - 2e-6] * many + [middle + 2e-6] * few
    made = scene.make_scene(harness, dtype="bfloat16", seq_lens=(len(weights),), heads=(4, 1), dims=(64, 64))
    # A logit is the sum of the elements of its key: of four bfloat16.
    made.q[...] = store(np.ones(made.q.shape), "bfloat16")
    k, v = (np.zeros((len(weights), 1, 64)) for _ in "kv")
    left = np.array([math.log(weight) for weight in weights])
    for part in range(4):
        k[:, 0, part] = load(store(left, "bfloat16"))
        left -= k[:, 0, part]
    v[-few:] = load(store(np.linspace(1, 2, 64), "bfloat16"))
    arrays = [harness.to_host(array).copy() for array in (made.cache.k, made.cache.v)]
    size = made.cache.block_size
    for token in range(len(weights)):
        index = element(made.cache, int(made.block_tables[0, token // size]) * size + token % size)
        for array, values in zip(arrays, (k, v), strict=True):
            array[index] = store(values[token], "bfloat16")
    made.cache.k[...], made.cache.v[...] = map(harness.to_device, arrays)
    made.sequences[0] = k, v
    within_rounding(made, scale=1.0)


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
