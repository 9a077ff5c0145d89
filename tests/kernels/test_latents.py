"""MLA: one latent of 576 elements a token, of which the first 512 are V; every head reads it."""

import numpy as np
import pytest

from conformance import test_formats
from conformance.harness import Harness
from conformance.scene import Scene, load, make_scene, rows_close
from kernels.emulator import SCHEDULES, emulated_backend
from kvblocks.config import CacheConfig
from kvblocks.layout import LayerCache

pytestmark = pytest.mark.cuda

TOLERANCE = {"float16": 1e-3, "bfloat16": 1e-2}


def make_latents(
    harness: Harness, kv_format: str, *, num_heads: int, q_dtype: str | None = None, **lens
) -> Scene:
    """A scene over latents, of a 16-bit dtype or an FP8 format, whose scale K and V share."""
    sizes = {"dims": (576, 512), "heads": (num_heads, 1)}
    if kv_format in TOLERANCE:
        scene = make_scene(harness, dtype=kv_format, q_dtype=q_dtype, **sizes, **lens)
    else:
        scene, _ = test_formats.make_scene(
            harness, kv_format, q_dtype=q_dtype or "float16", block_size=16, **sizes, **lens
        )
    latents, scale = scene.cache.k, scene.cache.k_scale
    scene.cache = LayerCache(latents, latents[..., :512], kv_format, 16, "NHD", k_scale=scale, v_scale=scale)
    scene.sequences = [(k, k[..., :512]) for k, _ in scene.sequences]
    return scene


def check(
    kv_format: str, q_dtype: str, num_heads: int, schedule: str = "forward", **lens: tuple[int, ...]
) -> np.ndarray:
    """Against float64, on the kernel for latents; the result without options."""
    given = Harness("emulated", make=lambda: emulated_backend("emulated", schedule))
    scene = make_latents(given, kv_format, num_heads=num_heads, q_dtype=q_dtype, **lens)
    launcher = scene.harness.backend.launcher
    launched: list[str] = []
    launch = launcher.launch
    launcher.launch = lambda function, *rest: (launched.append(function.__name__), launch(function, *rest))
    try:
        for options in ({}, {"window": 50, "sinks": np.linspace(-2, 2, num_heads).astype(np.float32)}):
            out, lse = scene.attend(scale=0.02, **options)
            expected, expected_lse = scene.expected(scale=0.02, **options)
            tolerance = max(TOLERANCE[q_dtype], TOLERANCE.get(kv_format, 0))
            rows_close(load(out), expected, tolerance)
            np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-4)
    finally:
        del launcher.launch
    assert "kvb_mla_decode" in launched
    assert not {name for name in launched if name.startswith("kvb_paged_attention")}
    return scene.attend(scale=0.02)[0]


@pytest.mark.parametrize(
    ("kv_format", "q_dtype"),
    [
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float16", "bfloat16"),
        ("fp8_e4m3:tensor", "bfloat16"),
        ("fp8_e4m3:head", "float16"),
        ("fp8_e4m3", "float16"),
    ],
)
@pytest.mark.parametrize("num_heads", [16, 128])
def test_decode(kv_format: str, q_dtype: str, num_heads: int) -> None:
    check(kv_format, q_dtype, num_heads, seq_lens=(0, 1, 15, 64, 65, 130))


@pytest.mark.parametrize("kv_format", ["bfloat16", "float16", "fp8_e4m3:tensor", "fp8_e4m3"])
def test_chunks_and_splits(kv_format: str) -> None:
    q_dtype = "bfloat16" if kv_format == "bfloat16" else "float16"
    check(kv_format, q_dtype, 16, seq_lens=(33, 130, 5), query_lens=(9, 3, 1))
    check(kv_format, q_dtype, 16, seq_lens=(700, 0, 20))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_latents_are_written_as_two_parts_of_a_row(layout: str) -> None:
    """A cache of the two parts, side by side in the memory of the latents, takes the place of K and V."""
    backend, rng = emulated_backend(), np.random.default_rng(0)
    config = CacheConfig(1, 1, 576, 512, dtype="float16", layout=layout)
    (whole,) = backend.allocate(config, 4)
    latents = whole.k
    parts = LayerCache(latents[..., :512], latents[..., 512:], "float16", 16, layout)
    rows = rng.standard_normal((20, 1, 576)).astype(np.float16)
    backend.write(parts, rows[..., :512], rows[..., 512:], np.arange(16, 36))
    cache = LayerCache(latents, latents[..., :512], "float16", 16, layout)
    k, v = backend.gather(cache, np.array([1, 2], np.int32), 20)
    np.testing.assert_array_equal(k, rows)
    np.testing.assert_array_equal(v, rows[..., :512])


@pytest.mark.parametrize("kv_format", ["float16", "fp8_e4m3"])
def test_schedules_give_the_same_bits(kv_format: str) -> None:
    results = [
        check(kv_format, "float16", 20, schedule, seq_lens=(130, 70)).tobytes() for schedule in SCHEDULES
    ]
    assert all(result == results[0] for result in results)
