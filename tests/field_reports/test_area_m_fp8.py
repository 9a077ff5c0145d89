"""Area M: FP8 quantisation of K and V, on every backend that takes host arrays."""

import numpy as np
import pytest

import kvblocks as kv
from kvblocks.calibration import Calibration

from .helpers import needs, takes

Q_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def test_p093_no_scale_is_assumed(backend: kv.Backend) -> None:
    needs(backend, "fp8_e4m3:tensor")
    x = np.array([1000, -1000, 0.1], np.float32).reshape(3, 1, 1)
    with pytest.raises(TypeError, match="scale"):
        backend.quantize(x, "fp8_e4m3:tensor")  # type: ignore[call-arg]
    one = backend.quantize(x, "fp8_e4m3:tensor", 1.0)
    assert backend.dequantize(one.codes, "fp8_e4m3:tensor", one.scale).ravel().tolist() == [
        448,
        -448,
        0.1015625,
    ]
    assert one.num_clipped.tolist() == [2]
    fitting = backend.quantize(x, "fp8_e4m3:tensor", 1000 / 448)
    restored = backend.dequantize(fitting.codes, "fp8_e4m3:tensor", fitting.scale)
    np.testing.assert_allclose(restored.ravel()[:2], [1000, -1000], rtol=2**-23)
    assert fitting.num_clipped.tolist() == [0]


def test_p093_a_pool_with_static_scales_takes_no_row_before_they_are_set(backend: kv.Backend) -> None:
    needs(backend, "fp8_e4m3:tensor")
    cache = kv.PagedKVCache(kv.CacheConfig(1, 1, 8, kv_format="fp8_e4m3:tensor"), 4, backend=backend)
    handle = cache.manager.allocate(cache.manager.prepare([1])).handle
    cache.schedule([handle], 1)
    row = np.ones((1, 1, 8), np.float32)
    if not backend.supported().checks_values:
        # Nobody reads a device's scales before a launch: rows written without one are NaN, never of scale 1.
        cache.write(0, row, row)
        table = np.array([cache.manager.block_table(handle)[0]], np.int32)
        assert all(np.isnan(part).all() for part in backend.gather(cache.layers[0], table, 1))
        return
    with pytest.raises(ValueError, match="static scale of fp8_e4m3:tensor is not set"):
        cache.write(0, row, row)


def test_p094_heads_of_eight_sizes(backend: kv.Backend) -> None:
    needs(backend, "fp8_e4m3:head")
    rng = np.random.default_rng(0)
    x = (rng.uniform(-1, 1, (256, 8, 16)) * 2.0 ** np.arange(8)[:, None]).astype(np.float32)
    encoded = backend.quantize(x, "fp8_e4m3:head", "amax")
    restored = backend.dequantize(encoded.codes, "fp8_e4m3:head", encoded.scale)
    normal = np.abs(x) >= 2.0**-6 * encoded.scale[:, None]
    assert (np.abs(restored - x)[normal] <= 0.0625 * np.abs(x)[normal]).all()
    assert backend.quantize(x, "fp8_e4m3:tensor", float(encoded.scale[0])).num_clipped[1:].all()
    with pytest.raises(ValueError, match=r"scale: shape \(4,\), fp8_e4m3:head needs \(8,\)"):
        backend.quantize(x, "fp8_e4m3:head", np.ones(4, np.float32))


def test_p096_groups_of_zeros_and_of_tiny_values(backend: kv.Backend) -> None:
    needs(backend, "fp8_e4m3")
    zeros = backend.quantize(np.zeros((1, 1, 128), np.float32), "fp8_e4m3", "amax")
    assert not zeros.codes.any()
    assert zeros.scale.tolist() == [[1]]
    tiny = np.random.default_rng(0).standard_normal((16, 2, 128)).astype(np.float32)
    errors = []
    for size in (1, 1e-8):
        encoded = backend.quantize(tiny * np.float32(size), "fp8_e4m3", "amax")
        restored = backend.dequantize(encoded.codes, "fp8_e4m3", encoded.scale)
        errors.append(np.linalg.norm(restored / np.float32(size) - tiny) / np.linalg.norm(tiny))
    assert errors[1] == pytest.approx(errors[0], rel=0.01)
    spoilt = tiny.copy()
    spoilt[0, 0, 0] = np.inf
    clean, dirty = (backend.quantize(x, "fp8_e4m3:head", "amax") for x in (tiny, spoilt))
    np.testing.assert_array_equal(clean.codes[:, 1], dirty.codes[:, 1])
    assert dirty.codes[0, 0, 0] == 0x7E
    assert dirty.num_clipped.tolist() == [1, 0]


def test_p098_reading_back_is_what_a_fresh_run_sees(backend: kv.Backend) -> None:
    """Attention right after the write, and attention by another sequence that hits the same blocks."""
    needs(backend, "fp8_e4m3")
    cache = kv.PagedKVCache(kv.CacheConfig(1, 2, 16, kv_format="fp8_e4m3"), 16, backend=backend, seed=0)
    k, v = np.random.default_rng(0).standard_normal((2, 50, 2, 16)).astype(np.float32)
    q = np.random.default_rng(1).standard_normal((50, 4, 16)).astype(np.float32)
    prompt, outs = cache.manager.prepare(range(50)), []
    for num_cached in (0, 48):
        answer = cache.manager.allocate(prompt)
        assert answer.num_cached_tokens == num_cached
        for first, last in ((num_cached, 48), (48, 50)) if num_cached == 0 else ((48, 50),):
            cache.schedule([answer.handle], last - first)
            cache.write(0, k[first:last], v[first:last])
            out = cache.attend(0, q[first:last])
            cache.manager.commit([answer.handle], last - first)
        outs.append(out)
    assert outs[0].tobytes() == outs[1].tobytes()


def test_p098_the_report_flags_a_channel_a_hundred_times_as_large() -> None:
    calibration = Calibration(kv.CacheConfig(1, 2, 64))
    k = np.random.default_rng(0).standard_normal((256, 2, 64)).astype(np.float32)
    k[:, 1, 7] *= 100
    calibration.observe(0, k, k)
    assert calibration.outlier_ratio("k", 0)[0] < 3
    assert calibration.outlier_ratio("k", 0)[1] >= 50


def test_p099_window_layers_stay_in_16_bit() -> None:
    formats = ["fp8_e4m3:tensor" if layer % 6 == 5 else "bfloat16" for layer in range(48)]
    config = kv.CacheConfig(48, 8, 128, dtype="bfloat16", kv_format=formats)
    assert config.bytes_per_token == 8 * 8 * 128 * 2 * 1 + 40 * 8 * 128 * 2 * 2


@pytest.mark.parametrize("q_dtype", Q_DTYPES)
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_e5m2", "int8", "float16", "bfloat16"])
def test_p100_any_query_over_any_pool_or_a_refusal(backend: kv.Backend, q_dtype: str, kv_format: str) -> None:
    config = kv.CacheConfig(1, 1, 8, block_size=4, kv_format=kv_format)
    if not takes(backend, kv_format):
        with pytest.raises(ValueError, match=r"k_format is .*: supported are"):
            backend.allocate(config, 2)
        return
    (cache,) = backend.allocate(config, 2)
    ones = np.ones((4, 1, 8), np.float32)
    backend.write(cache, ones, ones, np.arange(4, 8))
    q = np.zeros((1, 2, 8), Q_DTYPES[q_dtype])
    lens, starts = np.array([4], np.int32), np.array([0, 1], np.int32)
    out = backend.attend(cache, q, np.array([[1]], np.int32), lens, starts)
    assert out.dtype == q.dtype
    expected = 0x3F80 if q_dtype == "bfloat16" else 1
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=1e-6)


def test_p102_the_window_ends_with_the_call_that_fills_it() -> None:
    config = kv.CacheConfig(1, 1, 8)
    calibration = Calibration(config, window_tokens=256)
    for num_tokens, frozen in ((10, False), (300, True)):
        calibration.observe(0, *np.ones((2, num_tokens, 1, 8), np.float32))
        assert calibration.is_frozen == frozen
    assert calibration.num_tokens.tolist() == [310]


def test_p102_scales_do_not_change_under_what_was_written() -> None:
    cache = kv.PagedKVCache(kv.CacheConfig(1, 1, 8, kv_format="fp8_e4m3:tensor"), 4, backend="numpy")
    cache.set_scales(0, k=1.0, v=1.0)
    handle = cache.manager.allocate(cache.manager.prepare([1])).handle
    cache.schedule([handle], 1)
    cache.write(0, *np.ones((2, 1, 1, 8), np.float32))
    with pytest.raises(ValueError, match="layer 0 has been written with the scales that it has"):
        cache.set_scales(0, k=2.0)
