"""`Calibration`: what it has seen, the scales that follow, and its files."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvblocks as kv
from kvblocks.calibration import Calibration

CONFIG = kv.CacheConfig(2, 3, 16, 8)


def make(num_tokens: int = 50, seed: int = 0, **options: Any) -> tuple[Calibration, np.ndarray, np.ndarray]:
    """A calibration that has seen K and V [2, num_tokens, ..] of two layers; head h is 4^h times as large."""
    rng = np.random.default_rng(seed)
    sizes = 4.0 ** np.arange(3)[:, None]
    k = (rng.standard_normal((2, num_tokens, 3, 16)) * sizes).astype(np.float32)
    v = (rng.standard_normal((2, num_tokens, 3, 8)) * sizes).astype(np.float32)
    calibration = Calibration(CONFIG, **options)
    for layer in range(2):
        calibration.observe(layer, k[layer], v[layer])
    return calibration, k, v


def part_of(text: str) -> kv.Format:
    return kv.KVFormat.parse(f"{text},float32").k


def test_amax_and_scales() -> None:
    calibration, k, _ = make()
    assert calibration.num_tokens.tolist() == [50, 50]
    amax = np.abs(k[1]).max(axis=0)
    np.testing.assert_array_equal(calibration.k_amax[1], amax)
    np.testing.assert_array_equal(calibration.scale("k", 1, part_of("int8:channel")), amax / np.float32(127))
    np.testing.assert_array_equal(
        calibration.scale("k", 1, part_of("fp8_e4m3:head")), amax.max(axis=1) / np.float32(448)
    )
    assert calibration.scale("k", 1, part_of("fp8_e5m2:tensor")) == amax.max() / np.float32(57344)


def test_percentiles_are_close_and_never_too_small() -> None:
    calibration, k, _ = make(2000)
    magnitude = np.abs(k[0]).transpose(1, 0, 2).reshape(3, -1)
    for percent in (50, 99, 99.9):
        exact = np.percentile(magnitude, percent, axis=1, method="inverted_cdf")
        found = calibration.percentile("k", 0, percent)
        assert (found >= exact).all()
        assert (found <= exact * 1.045).all()
    np.testing.assert_array_equal(calibration.percentile("k", 0, 100), magnitude.max(axis=1))


def test_the_report_of_what_a_scale_clips() -> None:
    calibration, k, _ = make(2000)
    part = part_of("int8:head")
    assert not calibration.clipped("k", 0, part, calibration.scale("k", 0, part)).any()
    clipped = calibration.clipped("k", 0, part, calibration.scale("k", 0, part, 99))
    assert (clipped <= 0.01).all()
    assert (clipped > 0.005).all()
    first_head_for_all = np.float32(np.abs(k[0, :, 0]).max() / 127)
    report = calibration.clipped(
        "k", 0, part_of("fp8_e4m3:tensor"), np.array([first_head_for_all * 127 / 448], np.float32)
    )
    assert report[0] == 0
    assert report[2] > 0.5


def test_an_outlier_channel_is_seen() -> None:
    calibration = Calibration(CONFIG)
    k = np.random.default_rng(0).standard_normal((100, 3, 16)).astype(np.float32)
    k[:, 1, 5] *= 100
    calibration.observe(0, k, np.ones((100, 3, 8), np.float32))
    ratio = calibration.outlier_ratio("k", 0)
    assert ratio[1] >= 50
    assert (ratio[[0, 2]] < 3).all()


def test_what_is_not_finite_is_left_out() -> None:
    calibration = Calibration(CONFIG)
    k, v = np.ones((4, 3, 16), np.float32), np.ones((4, 3, 8), np.float32)
    k[0, 0, 0], k[1, 1, 1], v[2] = np.inf, np.nan, -np.inf
    calibration.observe(0, k, v)
    assert calibration.k_amax.max() == 1
    assert calibration.percentile("k", 0, 100).tolist() == [1, 1, 1]
    np.testing.assert_array_equal(calibration.scale("v", 0, part_of("int8:head")), np.float32(1 / 127))


def test_the_window_freezes_in_one_place() -> None:
    calibration = Calibration(CONFIG, window_tokens=256)
    for num_tokens in (10, 300, 50):
        for layer in range(2):
            calibration.observe(
                layer,
                np.full((num_tokens, 3, 16), num_tokens, np.float32),
                np.ones((num_tokens, 3, 8), np.float32),
            )
        assert calibration.is_frozen == (num_tokens != 10)
    assert calibration.num_tokens.tolist() == [310, 310]
    assert calibration.k_amax.max() == 300
    loose = Calibration(CONFIG)
    loose.freeze()
    loose.observe(0, np.ones((1, 3, 16), np.float32), np.ones((1, 3, 8), np.float32))
    assert loose.num_tokens.tolist() == [0, 0]


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_files(tmp_path: Path, suffix: str) -> None:
    calibration, _, _ = make()
    path = tmp_path / f"scales.{suffix}"
    calibration.save(path)
    again = Calibration.load(path, CONFIG)
    for name in ("k_amax", "v_amax", "k_histogram", "v_histogram", "num_tokens"):
        np.testing.assert_array_equal(getattr(again, name), getattr(calibration, name))
    assert again.is_frozen
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    with pytest.raises(
        ValueError, match=rf"{path.name}: k_amax has shape \(2, 3, 16\), this model needs \(2, 3, 32\)"
    ):
        Calibration.load(path, kv.CacheConfig(2, 3, 32, 8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"line 1: Expecting value"),
        ("[1]", "list, expected a JSON object"),
        ('{"kind": "scales"}', "kind 'scales', version None: expected 'kvblocks-calibration', '1'"),
        ('{"kind": "kvblocks-calibration", "version": "1"}', "k_amax: missing or no array of numbers"),
        (
            '{"kind": "kvblocks-calibration", "version": "1", "k_amax": "many"}',
            "k_amax: missing or no array of numbers",
        ),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"bad.json: {message}"):
        Calibration.load(path, CONFIG)


def test_files_with_numbers_that_are_none(tmp_path: Path) -> None:
    calibration, _, _ = make()
    path = tmp_path / "bad.json"
    calibration.save(path)
    text = path.read_text()
    for value in (-1, 1e300, math.nan):
        fields = json.loads(text)
        fields["v_amax"][0][0][0] = value
        path.write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=r"bad\.json: v_amax: expected finite numbers from 0 on"):
            Calibration.load(path, CONFIG)
    for value in (0.5, math.inf, 10**30):
        path.write_text(json.dumps(json.loads(text) | {"num_tokens": [value, 1]}))
        with pytest.raises(ValueError, match=r"bad\.json: num_tokens: missing or no array of numbers"):
            Calibration.load(path, CONFIG)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"bad\.json: not a calibration"):
        Calibration.load(path, CONFIG)
    with pytest.raises(ValueError, match=r"absent\.json: No such file"):
        Calibration.load(tmp_path / "absent.json", CONFIG)
    (tmp_path / "bad.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(ValueError, match=r"bad\.safetensors: "):
        Calibration.load(tmp_path / "bad.safetensors", CONFIG)


def test_a_rank_takes_its_heads() -> None:
    calibration, _, _ = make()
    part = calibration.of_heads(1, 3)
    for scaling in ("fp8_e4m3:head", "int8:channel"):
        whole = calibration.scale("k", 1, part_of(scaling))
        np.testing.assert_array_equal(part.scale("k", 1, part_of(scaling)), whole[1:3])
    assert part.is_frozen
    assert not calibration.is_frozen
    for first, last in ((-1, 2), (2, 2), (0, 4)):
        with pytest.raises(ValueError, match=rf"heads {first}\.\.{last}, expected a range within 0\.\.3"):
            calibration.of_heads(first, last)


def test_refusals() -> None:
    calibration, k, v = make()
    with pytest.raises(ValueError, match="window_tokens is 0"):
        Calibration(CONFIG, window_tokens=0)
    with pytest.raises(ValueError, match="percent is 0, expected a number above 0"):
        calibration.percentile("k", 0, 0)
    with pytest.raises(ValueError, match="int8 has no static scale"):
        calibration.scale("k", 0, part_of("int8"))
    with pytest.raises(ValueError, match="percent is 99: a channel's scale"):
        calibration.scale("k", 0, part_of("int8:channel"), 99)
    with pytest.raises(ValueError, match="layer 0 has seen no tokens"):
        Calibration(CONFIG).scale("k", 0, part_of("int8:head"))
    for layer, some_k, some_v, message in (
        (2, k[0], v[0], r"layer is 2, expected 0\.\.1"),
        (-1, k[0], v[0], r"layer is -1"),
        (0, v[0], v[0], r"k of layer 0 has shape \(50, 3, 8\), expected \(50, 3, 16\)"),
        (0, 2 * k[0], k[0], r"v of layer 0 has shape \(50, 3, 16\), expected \(50, 3, 8\)"),
        (0, 2 * k[0], v[0, :9], r"v of layer 0 has shape \(9, 3, 8\), expected \(50, 3, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            calibration.observe(layer, some_k, some_v)
    assert calibration.k_amax.max() == np.abs(k).max()
    assert calibration.k_histogram.sum() == k.size


def test_a_cache_calibrates_and_another_one_takes_its_scales() -> None:
    """While a model runs: padding is not seen; the scales of a run keep all of its values."""
    plain = kv.CacheConfig(2, 3, 16, 8)
    calibration = Calibration(plain)
    cache = kv.PagedKVCache(plain, 8, backend="numpy", calibration=calibration, max_tokens=64)
    handle = cache.manager.allocate(cache.manager.prepare(range(40))).handle
    assert cache.schedule([handle], 40, pad_tokens=48)
    rng = np.random.default_rng(0)
    k, v = (
        rng.standard_normal((48, 3, 16)).astype(np.float32),
        rng.standard_normal((48, 3, 8)).astype(np.float32),
    )
    k[40:], v[40:] = 1e6, 1e6
    for layer in range(2):
        cache.write(layer, k, v)
    assert calibration.num_tokens.tolist() == [40, 40]
    assert calibration.k_amax.max() < 10
    config = kv.CacheConfig(2, 3, 16, 8, kv_format=["int8:channel,int8", "fp8_e4m3:tensor,int8:head"])
    static = kv.PagedKVCache(config, 8, backend="numpy", max_tokens=64)
    static.apply_scales(calibration)
    np.testing.assert_array_equal(static.layers[0].k_scale, calibration.scale("k", 0, config.formats[0].k))
    handle = static.manager.allocate(static.manager.prepare(range(40))).handle
    assert static.schedule([handle], 40)
    for layer in range(2):
        static.write(layer, k[:40], v[:40])
    static.manager.commit([handle], 40)
    for layer in range(2):
        np.testing.assert_allclose(static.gather(handle, layer)[0], k[:40], rtol=0.07, atol=0.02)
    with pytest.raises(ValueError, match="layer 0 has been written"):
        static.apply_scales(calibration)
