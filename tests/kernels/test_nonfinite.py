"""Infinities and NaN in V: they reach the rows that see their keys, and no others, also within one tile of rows."""

import numpy as np
import pytest

from conformance import test_formats
from conformance.harness import Harness
from conformance.scene import TOLERANCE, Scene, element, load, make_scene, rows_close
from kernels.emulator import SCHEDULES, emulated_backend
from kernels.test_latents import make_latents

pytestmark = pytest.mark.cuda

# Bits of +infinity, -infinity and NaN where a format has them.
BITS = {
    "float16": (0x7C00, 0xFC00, 0x7E01),
    "bfloat16": (0x7F80, 0xFF80, 0xFFC0),
    "float32": (0x7F800000, 0xFF800000, 0x7FC00000),
    "fp8_e4m3": (0x7F, 0xFF, 0x7F),
    "fp8_e5m2": (0x7C, 0xFC, 0x7F),
}
VALUES = (np.inf, -np.inf, np.nan)
# Chunks whose last rows see keys that the first do not, decode with drafts, and a row alone.
LENS = {"seq_lens": (150, 70, 5, 40), "query_lens": (40, 6, 5, 1)}


def harness(schedule: str = "forward", split_size: int | None = None) -> Harness:
    return Harness("emulated", make=lambda: emulated_backend("emulated", schedule, split_size))


def poison(scene: Scene, kv_format: str) -> None:
    """Values that are not finite at some keys and dims, near the end of each sequence and before."""
    name = kv_format.split(":")[0]
    v = scene.cache.v.view(f"u{scene.cache.v.itemsize}")
    for row, (_, values) in enumerate(scene.sequences):
        num_keys, num_heads, dim = values.shape
        for at, key in enumerate({num_keys - 1, num_keys - 3, num_keys // 2, 0}):
            slot = int(scene.block_tables[row, key // 16]) * 16 + key % 16
            for kind, head in ((at % 3, at % num_heads), ((at + 1) % 3, 0)):
                place = (7 * at + 3 * kind) % dim
                v[element(scene.cache, slot)][head, place] = BITS[name][kind]
                values[key, head, place] = VALUES[kind] if name != "fp8_e4m3" else np.nan


def check(scene: Scene, **options) -> np.ndarray:
    """The same elements are not finite, and the same infinities; the others are as close as ever."""
    out, lse = scene.attend(**options)
    out = load(out)
    with np.errstate(invalid="ignore"):
        expected, expected_lse = scene.expected(**options)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    infinite = np.isinf(expected)
    np.testing.assert_array_equal(out[infinite], expected[infinite])
    finite = np.isfinite(expected)
    assert finite.any()
    assert not finite.all()
    rows_close(np.where(finite, out, 0), np.where(finite, expected, 0), TOLERANCE[scene.q_dtype])
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-4)
    return out


def make(kv_format: str, schedule: str = "forward", split_size: int | None = None, **options) -> Scene:
    given = harness(schedule, split_size)
    options = (
        {"dims": (64, 64), "q_dtype": "float16" if kv_format != "bfloat16" else kv_format} | LENS | options
    )
    if kv_format.startswith("fp8"):
        scene, _ = test_formats.make_scene(given, kv_format, block_size=16, **options)
    else:
        scene = make_scene(given, dtype=kv_format, **options)
    poison(scene, kv_format)
    return scene


@pytest.mark.parametrize("heads", [(6, 2), (16, 1), (2, 2)], ids=["tiles-of-64", "tiles-of-16-too", "no-mma"])
@pytest.mark.parametrize("kv_format", ["float16", "bfloat16", "fp8_e4m3", "fp8_e4m3:head", "fp8_e5m2"])
def test_only_rows_that_see_a_key_see_what_is_not_finite(kv_format: str, heads: tuple[int, int]) -> None:
    scene = make(kv_format, heads=heads)
    check(scene)
    check(scene, window=9)


def test_drafts_of_few_tokens() -> None:
    """Tiles of 16 rows whose warps share the keys."""
    for kv_format in ("float16", "fp8_e5m2:tensor"):
        scene = make(kv_format, seq_lens=(150, 70, 33), query_lens=(4, 2, 3))
        check(scene)
        check(scene, window=40)


@pytest.mark.parametrize("heads", [(8, 1), (2, 2)], ids=["tensor-cores", "without"])
def test_a_weight_that_vanishes_hides_nothing(heads: tuple[int, int]) -> None:
    """A key that float32 gives no weight is one that its row sees, as in the NumPy backend."""
    scene = make_scene(
        harness(), dtype="float16", heads=heads, dims=(64, 64), seq_lens=(300,), query_lens=(2,)
    )
    slot = int(scene.block_tables[0, 9]) * 16
    place = element(scene.cache, slot + 5)
    scene.cache.k[place], scene.cache.v[place] = -60.0, np.nan
    scene.q[...] = 60.0
    out, lse = scene.attend()
    assert np.isnan(out).all()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("kv_format", ["float16", "fp8_e4m3:tensor"])
def test_rows_over_latents(kv_format: str) -> None:
    """A latent is K as well: who sees it has no finite logit, and who does not has the bits that he has without it."""
    scene = make_latents(harness(), kv_format, num_heads=16, seq_lens=(90,), query_lens=(4,))
    clean, clean_lse = scene.attend(scale=0.02)
    slot = int(scene.block_tables[0, 88 // 16]) * 16 + 88 % 16  # the key of the third query
    scene.cache.k.view(f"u{scene.cache.k.itemsize}")[element(scene.cache, slot)][0, 300] = BITS[
        kv_format.split(":")[0]
    ][2]
    out, lse = scene.attend(scale=0.02)
    assert out[:2].tobytes() == clean[:2].tobytes()
    assert lse[:2].tobytes() == clean_lse[:2].tobytes()
    assert np.isnan(out[2:]).all()


def test_every_schedule_gives_the_same_bits() -> None:
    for kv_format in ("float16", "fp8_e5m2:head"):
        outs = [check(make(kv_format, schedule)).tobytes() for schedule in SCHEDULES]
        assert all(out == outs[0] for out in outs)


def test_splits() -> None:
    check(make("bfloat16", split_size=64))
