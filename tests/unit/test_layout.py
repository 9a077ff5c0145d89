"""Shapes, `LayerCache` and the conversions between dtypes."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.config import CacheConfig
from kvblocks.layout import (
    LayerCache,
    convert,
    dtype_name,
    from_float32,
    storage_dtype,
    storage_shape,
    to_float32,
)

DTYPES = ("float32", "float16", "bfloat16")
SMALL = st.integers(1, 6)
CONFIGS = st.builds(
    CacheConfig,
    num_layers=SMALL,
    num_kv_heads=SMALL,
    head_dim=SMALL,
    head_dim_v=st.none() | SMALL,
    dtype=st.sampled_from(DTYPES),
    block_size=SMALL,
    layout=st.sampled_from(["NHD", "HND"]),
)


def make_layer(config: CacheConfig, num_blocks: int) -> LayerCache:
    arrays = [np.zeros(shape, storage_dtype(config.dtype)) for shape in storage_shape(config, num_blocks)]
    return LayerCache(*arrays, config.dtype, config.block_size, config.layout)


@given(CONFIGS, SMALL)
def test_storage_holds_what_the_config_says(config: CacheConfig, num_blocks: int) -> None:
    cache = make_layer(config, num_blocks)
    assert config.num_layers * (cache.k.nbytes + cache.v.nbytes) == num_blocks * config.bytes_per_block
    assert cache.num_blocks == num_blocks
    assert cache.num_slots == num_blocks * config.block_size
    assert cache.num_kv_heads == config.num_kv_heads
    assert (cache.head_dim, cache.head_dim_v) == (config.head_dim, config.head_dim_v)


@given(CONFIGS, SMALL)
def test_nhd_views_show_the_same_memory(config: CacheConfig, num_blocks: int) -> None:
    cache = make_layer(config, num_blocks)
    rows = (num_blocks, config.block_size, config.num_kv_heads)
    for array, view, dim in (
        (cache.k, cache.k_nhd, config.head_dim),
        (cache.v, cache.v_nhd, config.head_dim_v),
    ):
        assert view.shape == (*rows, dim)
        assert np.shares_memory(array, view)
        view[-1, 0, -1, 0] = 1
        assert array[(-1, 0, -1, 0) if config.layout == "NHD" else (-1, -1, 0, 0)] == 1
        assert np.count_nonzero(array) == 1


def test_shapes_by_layout() -> None:
    config = CacheConfig(1, 2, 16, 24, block_size=4)
    assert storage_shape(config, 9) == ((9, 4, 2, 16), (9, 4, 2, 24))
    config = CacheConfig(1, 2, 16, 24, block_size=4, layout="HND")
    assert storage_shape(config, 9) == ((9, 2, 4, 16), (9, 2, 4, 24))


@pytest.mark.parametrize(
    ("k", "v", "dtype", "layout", "error", "message"),
    [
        (
            (3, 4, 2, 8),
            (3, 4, 2, 8),
            "int5",
            "NHD",
            ValueError,
            "k_format is 'int5': expected one of 'float32'",
        ),
        (
            (3, 4, 2, 8),
            (3, 4, 2, 8),
            "int4",
            "NHD",
            TypeError,
            "k: dtype float32, a int4 cache is stored as uint8",
        ),
        ((3, 4, 2, 8), (3, 4, 2, 8), "float32", "DHN", ValueError, "layout is 'DHN': expected one of 'NHD'"),
        ((3, 4, 2, 8), (3, 4, 2, 8), "float16", "NHD", TypeError, "k: dtype float32, a float16 cache"),
        (
            (3, 4, 2),
            (3, 4, 2, 8),
            "float32",
            "NHD",
            ValueError,
            r"k: 3 axes, expected 4 \(num_blocks, block_size",
        ),
        (
            (3, 4, 2, 8),
            (3, 4, 2, 0),
            "float32",
            "NHD",
            ValueError,
            r"v: axis 3 \(head_dim\) is 0, expected 1 or",
        ),
        ((3, 5, 2, 8), (3, 4, 2, 8), "float32", "NHD", ValueError, r"k: axis 1 \(block_size\) is 5, .* 4"),
        ((3, 4, 2, 8), (3, 4, 2, 8), "float32", "HND", ValueError, r"k: axis 2 \(block_size\) is 2, .* 4"),
        ((3, 4, 2, 8), (3, 2, 2, 8), "float32", "NHD", ValueError, r"v: axis 1 \(block_size\) is 2, .* 4"),
        ((3, 4, 2, 8), (2, 4, 2, 8), "float32", "NHD", ValueError, r"v: axis 0 \(num_blocks\) is 2, k has 3"),
        (
            (3, 4, 2, 8),
            (3, 4, 1, 8),
            "float32",
            "NHD",
            ValueError,
            r"v: axis 2 \(num_kv_heads\) is 1, k has 2",
        ),
        (
            (3, 2, 4, 8),
            (3, 1, 4, 8),
            "float32",
            "HND",
            ValueError,
            r"v: axis 1 \(num_kv_heads\) is 1, k has 2",
        ),
    ],
)
def test_arrays_that_disagree(k, v, dtype, layout, error, message) -> None:
    with pytest.raises(error, match=message):
        LayerCache(np.zeros(k, np.float32), np.zeros(v, np.float32), dtype, 4, layout)


def test_subclasses_are_told_apart_by_identity() -> None:
    """Backends remember what they saw of a cache: of two that are equal, the second would be taken for the first."""

    @dataclass(frozen=True)
    class Named(LayerCache):
        name: str = ""

    @dataclass(frozen=True, eq=False)
    class Numbered(LayerCache):
        number: int = 0

    arrays = [np.zeros((3, 4, 2, 8), np.float32) for _ in "kv"]
    with pytest.raises(TypeError, match=r"^Named compares values: .* dataclass\(eq=False\)"):
        Named(*arrays, "float32", 4, "NHD")
    assert len({Numbered(*arrays, "float32", 4, "NHD", number=number) for number in (1, 1)}) == 2


def test_dtype_names() -> None:
    assert [dtype_name(storage_dtype(name)) for name in DTYPES] == list(DTYPES)
    for dtype in (np.float64, np.int16, np.dtype(">f4"), np.bool_):
        with pytest.raises(TypeError, match="expected float32, float16 or uint16"):
            dtype_name(np.dtype(dtype))
    with pytest.raises(TypeError, match=r"bfloat16, expected .*\.view\(numpy\.uint16\)"):
        dtype_name(np.dtype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_value_survives_the_round_trip(dtype: str) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    stored = bits.view(storage_dtype(dtype))
    with np.errstate(invalid="ignore"):
        wide = to_float32(stored)
        oracle = bits.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16).astype(np.float32)
    np.testing.assert_array_equal(wide, oracle)
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(from_float32(wide, dtype).view(np.uint16)[number], bits[number])
    assert np.isnan(to_float32(from_float32(wide, dtype))[~number]).all()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_bfloat16_rounds_like_the_reference(values: list[float]) -> None:
    array = np.array(values, np.float32)
    np.testing.assert_array_equal(
        from_float32(array, "bfloat16"), array.astype(ml_dtypes.bfloat16).view(np.uint16)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_dtype_is_not_copied(dtype: str) -> None:
    array = np.zeros((2, 3), storage_dtype(dtype))
    assert convert(array, dtype) is array
