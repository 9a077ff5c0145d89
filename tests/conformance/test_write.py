"""`write`: every token at its slot, rounded to the cache's dtype, and nothing else touched."""

import ml_dtypes
import numpy as np
import pytest

from conformance.harness import Harness
from conformance.scene import element, fill, load, misaligned, snapshot, store
from kvblocks.config import CacheConfig
from kvblocks.layout import LayerCache

DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("NHD", "HND")


def make_cache(harness: Harness, *, num_blocks: int = 6, **fields) -> LayerCache:
    """A poisoned cache of 2 heads, K rows of 8 and V rows of 5 elements, blocks of 4 tokens."""
    config = CacheConfig(
        **{"num_layers": 1, "num_kv_heads": 2, "head_dim": 8, "head_dim_v": 5, "block_size": 4} | fields
    )
    (cache,) = harness.backend.allocate(config, num_blocks)
    fill(harness, cache)
    return cache


def make_rows(num_tokens: int, dtype: str = "float32", seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((num_tokens, 2, 8)), rng.standard_normal((num_tokens, 2, 5))
    return store(k, dtype), store(v, dtype)


def write(
    harness: Harness, cache: LayerCache, k: np.ndarray, v: np.ndarray, slots: list[int] | np.ndarray
) -> None:
    device = harness.to_device
    harness.backend.write(cache, device(k), device(v), device(np.asarray(slots, np.int64)))


def check_write(harness: Harness, cache: LayerCache, k: np.ndarray, v: np.ndarray, slots: list[int]) -> None:
    """Write, then compare the whole pool with one changed token by token."""
    expected = []
    for array, rows in ((cache.k, k), (cache.v, v)):
        host = harness.to_host(array).copy()
        for slot, row in zip(slots, rows, strict=False):
            if slot != -1:
                host[element(cache, slot)] = store(load(row), cache.format.k.name)
        expected.append(host.tobytes())
    write(harness, cache, k, v, slots)
    assert snapshot(harness, cache) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 24, 64, 256])
def test_scattered_slots(harness: Harness, layout: str, dtype: str, block_size: int) -> None:
    cache = make_cache(
        harness, num_blocks=40 // block_size + 3, block_size=block_size, layout=layout, dtype=dtype
    )
    slots = np.random.default_rng(block_size).permutation(cache.num_slots)[:23].tolist()
    check_write(harness, cache, *make_rows(23, dtype), slots)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_skipped_rows_write_nothing(harness: Harness, layout: str) -> None:
    cache = make_cache(harness, layout=layout)
    k, v = make_rows(4)
    k[1:3] = v[1:3] = np.nan
    check_write(harness, cache, k, v, [3, -1, -1, 7])
    check_write(harness, cache, k, v, [-1, -1, -1, -1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_null_block_is_left_alone(harness: Harness, layout: str) -> None:
    """Slots that pad a step are -1, so the bytes of block 0 stay as they were."""
    cache = make_cache(harness, layout=layout, block_size=16)
    before = harness.to_host(cache.k[0]).tobytes(), harness.to_host(cache.v[0]).tobytes()
    write(harness, cache, *make_rows(80), [*range(16, 80), *([-1] * 16)])
    assert (harness.to_host(cache.k[0]).tobytes(), harness.to_host(cache.v[0]).tobytes()) == before


def test_no_slots(harness: Harness) -> None:
    cache = make_cache(harness)
    check_write(harness, cache, *make_rows(0), [])
    check_write(harness, cache, *make_rows(3), [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_beyond_the_mapping_are_ignored(harness: Harness, layout: str) -> None:
    cache = make_cache(harness, layout=layout)
    k, v = make_rows(8)
    k[5:] = v[5:] = np.inf
    check_write(harness, cache, k, v, [9, 2, 17, 4, 5])
    check_write(harness, cache, k, v[:6], [9, 2, 17, 4, 5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_rows_equal_their_copy(harness: Harness, dtype: str, layout: str) -> None:
    k, v = make_rows(5, "float32")
    slots = [9, 2, 17, 4, 5]
    reference_cache = make_cache(harness, dtype=dtype, layout=layout)
    write(harness, reference_cache, k, v, slots)
    packed = np.full((5, 4, 8), np.nan, np.float32)
    packed[:, 1:3] = k
    views = (
        packed[:, 1:3],
        np.ascontiguousarray(k.transpose(1, 0, 2)).transpose(1, 0, 2),
        np.ascontiguousarray(k.transpose(2, 1, 0)).transpose(2, 1, 0),
        k[::-1].copy()[::-1],
    )
    for view in views:
        assert not view.flags.c_contiguous
        cache = make_cache(harness, dtype=dtype, layout=layout)
        write(harness, cache, view, np.repeat(v, 2, axis=0)[::2], np.repeat(slots, 2)[::2])
        assert snapshot(harness, cache) == snapshot(harness, reference_cache)


@pytest.mark.usefixtures("host_arrays")
@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_rows_equal_their_copy(harness: Harness, dtype: str) -> None:
    k, v = make_rows(5)
    slots = np.array([9, 2, 17, 4, 5])
    expected, cache = make_cache(harness, dtype=dtype), make_cache(harness, dtype=dtype)
    write(harness, expected, k, v, slots)
    write(harness, cache, misaligned(k), misaligned(v), misaligned(slots))
    assert snapshot(harness, cache) == snapshot(harness, expected)


@pytest.mark.usefixtures("host_arrays")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "split",
    [
        lambda pool: (pool[0], pool[1]),
        lambda pool: pool.reshape(6, 2, *pool.shape[2:]).transpose(1, 0, 2, 3, 4),
        lambda pool: pool.reshape(*pool.shape[1:4], 2, pool.shape[4]).transpose(3, 0, 1, 2, 4),
        lambda pool: pool.reshape(*pool.shape[1:3], 2, *pool.shape[3:]).transpose(2, 0, 1, 3, 4),
        lambda pool: pool.transpose(0, 3, 2, 1, 4).reshape(2, *(pool.shape[axis] for axis in (1, 2, 3, 4))),
    ],
    ids=["apart", "by block", "by row", "by the middle", "axes in another order"],
)
def test_engines_pools_of_k_and_v(harness: Harness, layout: str, split) -> None:
    """However K and V lie in one pool, as long as they do not overlap."""
    middle = (4, 2) if layout == "NHD" else (2, 4)
    k_array, v_array = split(harness.to_device(np.full((2, 6, *middle, 8), np.nan, np.float32)))
    cache = LayerCache(k_array, v_array, "float32", 4, layout)
    k, _ = make_rows(3)
    check_write(harness, cache, k, k + 1, [0, 9, 23])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_rounding_is_to_nearest_even(harness: Harness, dtype: str, source: str) -> None:
    """Ties, carries into the exponent, subnormals, overflow to infinity, signed zeros and infinities."""
    exponents = np.ldexp(np.float32(1), np.arange(-149, 128))
    mantissas = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2 - 2**-23], np.float32)
    with np.errstate(over="ignore"):
        edges = np.outer(exponents, mantissas).astype(np.float32).ravel()
    bits = np.random.default_rng(0).integers(0, 2**32, 10_000, np.uint64).astype(np.uint32).view(np.float32)
    values = np.concatenate([edges, -edges, [0.0, -0.0, np.inf, -np.inf], bits[~np.isnan(bits)]])
    values = store(values[: values.size // 16 * 16].reshape(-1, 2, 8), source)
    cache = make_cache(harness, num_blocks=len(values) // 4 + 1, dtype=dtype, head_dim_v=8)
    write(harness, cache, values, values, np.arange(len(values)))

    if source == dtype:
        expected = values
    else:
        wide = values.view(ml_dtypes.bfloat16) if source == "bfloat16" else values
        with np.errstate(over="ignore"):
            target = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
            expected = wide.astype(np.float32).astype(target).view(cache.k.dtype)
    for array in (cache.k, cache.v):
        stored = harness.to_host(array).reshape(-1, 2, 8)[: len(values)]
        np.testing.assert_array_equal(stored.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan(harness: Harness, dtype: str) -> None:
    """Whatever its payload, of which a narrower dtype may keep no bit."""
    bits = np.array(
        [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F80FFFF, 0x7FBFFFFF]
    )
    k = np.broadcast_to(bits.astype(np.uint32).view(np.float32), (1, 2, 8))
    cache = make_cache(harness, dtype=dtype, head_dim_v=8)
    cache.k[...] = cache.v[...] = 0
    write(harness, cache, k, k, [0])
    for array in (cache.k, cache.v):
        assert np.isnan(load(harness.to_host(array)[0, 0])).all()


def test_slot_is_split_by_the_block_size_of_the_cache(harness: Harness) -> None:
    cache = make_cache(harness, num_blocks=4741, block_size=16)
    k, v = make_rows(1)
    write(harness, cache, k, v, [75_849])
    np.testing.assert_array_equal(harness.to_host(cache.k[4_740, 9]), k[0])
    np.testing.assert_array_equal(harness.to_host(cache.v[4_740, 9]), v[0])


def test_cache_that_is_a_view_of_a_larger_pool(harness: Harness) -> None:
    pool = harness.to_device(np.full((6, 2, 4, 2, 8), np.nan, np.float32))
    cache = LayerCache(pool[:, 0], pool[:, 1], "float32", 4, "NHD")
    k, _ = make_rows(3)
    check_write(harness, cache, k, k + 1, [0, 9, 23])
    assert np.isfinite(harness.to_host(pool)).sum() == 2 * k.size
