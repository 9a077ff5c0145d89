"""`attend` against the brute-force reference: shapes, features, poisoned memory, padding."""

import numpy as np
import pytest

from conformance.harness import Harness
from conformance.scene import (
    TOLERANCE,
    Scene,
    element,
    fill,
    load,
    lse_close,
    make_scene,
    misaligned,
    rows_close,
    store,
)
from kvblocks.config import CacheConfig
from kvblocks.layout import LayerCache

DTYPES = ("float32", "float16", "bfloat16")
BLOCK_SIZES = (1, 3, 8, 16, 24, 64, 256)
CHUNKS = {"seq_lens": (33, 16, 0, 17, 5, 1), "query_lens": (9, 16, 2, 3, 1, 1)}
SLOPES = np.geomspace(1, 0.01, 6, dtype=np.float32)
SINKS = np.array([-3, -1, 0, 0.5, 4, -np.inf], np.float32)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
class TestStorage:
    def test_decode(self, harness: Harness, layout: str, dtype: str, block_size: int) -> None:
        make_scene(harness, dtype=dtype, layout=layout, block_size=block_size, dims=(16, 24)).check()

    def test_chunks(self, harness: Harness, layout: str, dtype: str, block_size: int) -> None:
        make_scene(harness, dtype=dtype, layout=layout, block_size=block_size, **CHUNKS).check()


@pytest.mark.parametrize("q_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_cache_of_different_dtypes(harness: Harness, q_dtype: str, dtype: str) -> None:
    make_scene(harness, dtype=dtype, q_dtype=q_dtype, **CHUNKS).check()


@pytest.mark.parametrize(
    "heads",
    [
        (1, 1),
        (2, 1),
        (6, 1),
        (7, 1),
        (12, 2),
        (14, 2),
        (9, 3),
        (32, 8),
        (40, 8),
        (71, 1),
        (64, 4),
        (128, 1),
        (5, 5),
    ],
    ids=lambda heads: f"{heads[0]}q{heads[1]}kv",
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_any_ratio_of_heads_that_divides(harness: Harness, heads: tuple[int, int], layout: str) -> None:
    make_scene(
        harness, heads=heads, layout=layout, dims=(8, 8), seq_lens=(17, 5, 0), query_lens=(1, 3, 1)
    ).check()


@pytest.mark.parametrize(
    "dims",
    [(d, d) for d in (8, 16, 20, 32, 40, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256, 512, 576)]
    + [(192, 128), (576, 512), (64, 128)],
    ids=lambda dims: f"{dims[0]}x{dims[1]}",
)
def test_head_dims_are_right_or_refused(harness: Harness, dims: tuple[int, int]) -> None:
    supported = harness.backend.supported().head_dims
    if supported is not None and not all(dim in supported for dim in dims):
        with pytest.raises(ValueError, match=r"head_dim(_v)? is \d+: supported are "):
            harness.backend.allocate(CacheConfig(1, 1, *dims), 2)
        return
    for dtype in DTYPES:
        make_scene(
            harness, dims=dims, dtype=dtype, heads=(4, 2), seq_lens=(17, 33), query_lens=(1, 2)
        ).check()


def test_block_sizes_agree(harness: Harness) -> None:
    results = [
        make_scene(harness, block_size=block_size, layout=layout, **CHUNKS).attend()
        for block_size in (16, 1, 3, 8, 24, 32, 64, 128, 256, 448)
        for layout in ("NHD", "HND")
    ]
    for out, lse in results[1:]:
        rows_close(load(out), load(results[0][0]), TOLERANCE["float32"])
        lse_close(lse, results[0][1])


OPTIONS = {
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.1},
    "scale 0": {"scale": 0},
    "widest soft cap": {"soft_cap": 3e38},
    "narrowest soft cap": {"soft_cap": 1.2e-38},
    "window 1": {"window": 1},
    "window 2": {"window": 2},
    "window 7": {"window": 7},
    "window 16": {"window": 16},
    "window 17": {"window": 17},
    "wide window": {"window": 1000},
    "soft cap": {"soft_cap": 1.5},
    "soft cap and scale": {"soft_cap": 5.0, "scale": 2.0},
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi_slopes": SLOPES},
    "everything": {
        "scale": 0.5,
        "window": 11,
        "soft_cap": 3.0,
        "sinks": SINKS,
        "alibi_slopes": SLOPES,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
class TestFeatures:
    def test_decode(self, harness: Harness, options: dict) -> None:
        make_scene(harness).check(**options)

    def test_chunks_in_small_blocks(self, harness: Harness, options: dict) -> None:
        make_scene(harness, block_size=3, layout="HND", **CHUNKS).check(**options)

    def test_half_precision(self, harness: Harness, options: dict) -> None:
        make_scene(harness, dtype="bfloat16", **CHUNKS).check(**options)


class TestWindow:
    def test_sees_the_last_keys_only(self, harness: Harness) -> None:
        scene = make_scene(harness, seq_lens=(10,))
        windowed, _ = scene.attend(window=4)
        k, v = scene.sequences[0]
        scene.sequences = [(k[6:], v[6:])]
        rows_close(load(windowed), scene.expected()[0], TOLERANCE["float32"])

    def test_of_one_gives_the_last_value(self, harness: Harness) -> None:
        scene = make_scene(harness, seq_lens=(10,), heads=(2, 2))
        out, _ = scene.attend(window=1)
        np.testing.assert_array_equal(load(out)[0], scene.sequences[0][1][-1])

    def test_beyond_the_sequence_is_no_window(self, harness: Harness) -> None:
        scene = make_scene(harness, **CHUNKS)
        for window in (33, 34, 2**31, 2**100):
            out, lse = scene.attend(window=window)
            rows_close(load(out), load(scene.attend()[0]), TOLERANCE["float32"])
            lse_close(lse, scene.attend()[1])

    @pytest.mark.parametrize("query_len", [1, 5])
    def test_never_follows_the_blocks_before_its_edge(self, harness: Harness, query_len: int) -> None:
        scene = make_scene(harness, seq_lens=(33, 40), query_lens=(query_len, 1), block_size=4)
        clean_out, clean_lse = scene.attend(window=6)
        for row, first_query in enumerate((33 - query_len, 39)):
            dropped = (first_query + 1 - 6) // 4
            assert dropped > 0
            for block in scene.block_tables[row, :dropped]:
                scene.cache.k[int(block)] = np.nan
                scene.cache.v[int(block)] = np.nan
            scene.block_tables[row, :dropped] = (-1, 2**31 - 1)[row]
        out, lse = scene.attend(window=6)
        np.testing.assert_array_equal(out, clean_out)
        np.testing.assert_array_equal(lse, clean_lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("junk", ["NaN", "huge", "infinite"])
def test_slots_beyond_the_length_never_matter(harness: Harness, dtype: str, layout: str, junk: str) -> None:
    batch = {"seq_lens": (1, 15, 16, 17, 33), "query_lens": (1, 4, 1, 2, 1), "dtype": dtype, "layout": layout}
    clean = make_scene(harness, fill_byte=0, **batch)
    dirty = make_scene(harness, fill_byte=0xFF, **batch)
    if junk != "NaN":
        value = store(np.array({"huge": 6e4, "infinite": np.inf}[junk]), dtype)
        for array in (dirty.cache.k, dirty.cache.v):
            host = harness.to_host(array).copy()
            host[np.isnan(load(host))] = value
            array[...] = harness.to_device(host)
    for options in ({}, {"window": 7, "soft_cap": 2.0, "alibi_slopes": SLOPES}):
        for actual, expected in zip(dirty.attend(**options), clean.attend(**options), strict=True):
            assert np.isfinite(load(expected)).all()
            assert actual.tobytes() == expected.tobytes()


class TestEmpty:
    @pytest.mark.parametrize(
        "options", [{}, {"window": 3, "sinks": SINKS}], ids=["plain", "window and sinks"]
    )
    def test_rows_between_others(self, harness: Harness, options: dict) -> None:
        batch = make_scene(harness, seq_lens=(5, 0, 0, 37))
        out, lse = batch.attend(**options)
        assert not out[1:3].any()
        assert np.isneginf(lse[1:3]).all()
        for row in (0, 3):
            alone = make_scene(harness, seq_lens=(5, 0, 0, 37))
            alone.q = alone.q[row : row + 1]
            alone.block_tables = alone.block_tables[row : row + 1]
            alone.seq_lens = alone.seq_lens[row : row + 1]
            alone.query_start_loc = np.array([0, 1], np.int32)
            out_alone, lse_alone = alone.attend(**options)
            assert out[row].tobytes() == out_alone[0].tobytes()
            assert lse[row].tobytes() == lse_alone[0].tobytes()

    @pytest.mark.parametrize("num_tokens", [0, 3])
    def test_batch(self, harness: Harness, num_tokens: int) -> None:
        scene = make_scene(harness, seq_lens=(), query_lens=(), pad_tokens=num_tokens)
        out, lse = scene.attend()
        assert out.shape == (num_tokens, 6, 16)
        assert not out.any()
        assert np.isneginf(lse).all()

    def test_table_without_columns(self, harness: Harness) -> None:
        scene = make_scene(harness, seq_lens=(0, 0))
        scene.block_tables = scene.block_tables[:, :0]
        scene.check()

    def test_padded_step(self, harness: Harness) -> None:
        """Rows and tokens beyond the batch: length 0, a null table, a flat query_start_loc."""
        scene = make_scene(harness, seq_lens=(17, 5, 0, 0), query_lens=(2, 1, 0, 0), pad_tokens=4)
        scene.block_tables[2:] = 0
        out, lse = scene.attend()
        assert not out[3:].any()
        assert np.isneginf(lse[3:]).all()
        scene.check()

    def test_rows_without_queries_are_not_read(self, harness: Harness) -> None:
        scene = make_scene(harness, seq_lens=(17, 33, 5), query_lens=(1, 0, 2))
        scene.block_tables[1] = -1
        scene.check()


class TestArrays:
    def test_strided_queries_equal_their_copy(self, harness: Harness) -> None:
        scene = make_scene(harness, **CHUNKS)
        expected, _ = scene.attend()
        num_tokens, num_q_heads, head_dim = scene.q.shape
        packed = np.full((num_tokens, num_q_heads + 4, head_dim), np.nan, np.float32)
        packed[:, :num_q_heads] = scene.q
        views = (
            packed[:, :num_q_heads],
            np.ascontiguousarray(scene.q.transpose(1, 0, 2)).transpose(1, 0, 2),
            scene.q.repeat(2, axis=2)[:, :, ::2],
            scene.q[::-1].copy()[::-1],
        )
        for scene.q in views:
            assert not scene.q.flags.c_contiguous
            assert scene.attend()[0].tobytes() == expected.tobytes()

    @pytest.mark.usefixtures("host_arrays")
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_misaligned_arguments_equal_their_copy(self, harness: Harness, dtype: str) -> None:
        scene = make_scene(harness, dtype=dtype, **CHUNKS)
        options = {"sinks": SINKS, "alibi_slopes": SLOPES}
        expected = scene.attend(**options)
        for name in ("q", "block_tables", "seq_lens", "query_start_loc"):
            setattr(scene, name, misaligned(getattr(scene, name)))
        for actual in (
            scene.attend(**options),
            scene.attend(**{name: misaligned(array) for name, array in options.items()}),
        ):
            assert [array.tobytes() for array in actual] == [array.tobytes() for array in expected]

    @pytest.mark.usefixtures("host_arrays")
    def test_misaligned_arrays_without_elements(self, harness: Harness) -> None:
        scene = make_scene(harness, seq_lens=(), query_lens=())
        scene.q, scene.seq_lens = misaligned(scene.q), misaligned(scene.seq_lens)
        assert scene.attend()[0].shape == (0, 6, 16)

    def test_strided_outputs_are_filled_in_place(self, harness: Harness) -> None:
        scene = make_scene(harness, **CHUNKS)
        expected, expected_lse = scene.attend()
        device = harness.to_device
        out = device(np.full((2, 6, len(scene.q), 16), np.nan, np.float32))
        lse = device(np.full((6, len(scene.q) * 2), np.nan, np.float32))
        harness.backend.attend(
            scene.cache,
            device(scene.q),
            device(scene.block_tables),
            device(scene.seq_lens),
            device(scene.query_start_loc),
            out=out[1].transpose(1, 0, 2),
            lse=lse[:, ::2].T,
        )
        out, lse = harness.to_host(out), harness.to_host(lse)
        np.testing.assert_array_equal(out[1].transpose(1, 0, 2), expected)
        np.testing.assert_array_equal(lse[:, ::2].T, expected_lse)
        assert np.isnan(out[0]).all()
        assert np.isnan(lse[:, 1::2]).all()

    def test_strided_index_arrays(self, harness: Harness) -> None:
        scene = make_scene(harness, **CHUNKS)
        expected, _ = scene.attend()
        wide = np.full((len(scene.seq_lens), 64), -1, np.int32)
        wide[:, : scene.block_tables.shape[1]] = scene.block_tables
        scene.block_tables = wide[:, : scene.block_tables.shape[1]]
        scene.seq_lens = scene.seq_lens.repeat(2)[::2]
        scene.query_start_loc = scene.query_start_loc.repeat(3)[::3]
        assert scene.attend()[0].tobytes() == expected.tobytes()

    def test_out_is_made_when_not_given(self, harness: Harness) -> None:
        for dtype in DTYPES:
            scene = make_scene(harness, dtype=dtype, dims=(16, 24))
            device = harness.to_device
            out = harness.backend.attend(
                scene.cache,
                device(scene.q),
                device(scene.block_tables),
                device(scene.seq_lens),
                device(scene.query_start_loc),
            )
            assert out.shape == (6, 6, 24)
            assert out.dtype == scene.q.dtype
            assert harness.to_host(out).tobytes() == scene.attend()[0].tobytes()

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_cache_that_is_a_view_of_a_larger_pool(self, harness: Harness, layout: str) -> None:
        """K and V of a block side by side, as engines that own the storage keep them."""
        scene = make_scene(harness, layout=layout, **CHUNKS)
        expected, _ = scene.attend()
        k, v = harness.to_host(scene.cache.k), harness.to_host(scene.cache.v)
        pool = harness.to_device(np.stack([k, v], axis=1))
        scene.cache = LayerCache(pool[:, 0], pool[:, 1], "float32", 16, layout)
        assert scene.attend()[0].tobytes() == expected.tobytes()


def test_rows_may_share_blocks(harness: Harness) -> None:
    scene = make_scene(harness, seq_lens=(33, 20), block_size=16)
    scene.block_tables[1, 0] = scene.block_tables[0, 0]
    for mine, shared in zip(scene.sequences[1], scene.sequences[0], strict=True):
        mine[:16] = shared[:16]
    scene.check()


def test_large_logits_do_not_overflow(harness: Harness) -> None:
    """Logits of several hundred, where exp overflows float32; their own rounding costs about 1e-4."""
    scene = make_scene(harness, **CHUNKS)
    scene.check(tolerance=1e-3, scale=30.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [-6.0, 1.0, 5.4, 5.6, 40.0])
def test_logits_that_climb_or_fall(harness: Harness, step: float, dtype: str) -> None:
    """By a step every 32 keys: softmaxes that go over keys in tiles rescale what they have, or let weights grow."""
    scene = make_scene(harness, seq_lens=(1100, 33), heads=(4, 2), dtype=dtype)
    scene.check(alibi_slopes=np.full(4, step / 32, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_queries", [1, 20])
def test_sums_of_large_values_do_not_overflow(harness: Harness, num_queries: int, dtype: str) -> None:
    """Of n keys, while n times the largest value is below 2^120; most weights are e^5.4 of those of the first tile."""
    num_keys, block_size = 1024, 16
    scene = make_scene(
        harness,
        seq_lens=(num_keys,),
        query_lens=(num_queries,),
        heads=(1, 1),
        dtype=dtype,
        block_size=block_size,
    )
    k, v = scene.sequences[0]
    k[...], v[...] = 0, 1.875 * 2.0**109
    k[32:, :, 0] = 5.375
    scene.q = store(np.ones(scene.q.shape), dtype)
    slots = (
        scene.block_tables[0, : num_keys // block_size, None] * block_size + np.arange(block_size)
    ).ravel()
    rows = (store(k, dtype), store(v, dtype), slots.astype(np.int64))
    harness.backend.write(scene.cache, *map(harness.to_device, rows))
    scene.check(scale=1.0)


class TestLogitsOfMinusInfinity:
    """200 keys of which some leading ones have the logit -inf: part of a tile of 64 keys, whole ones, or all."""

    def scene(
        self, harness: Harness, num_infinite: int, dtype: str = "float32", key: float = -np.inf
    ) -> Scene:
        scene = make_scene(harness, seq_lens=(200,), query_lens=(3,), block_size=8, heads=(4, 2), dtype=dtype)
        scene.q = store(np.abs(load(scene.q)), dtype)
        k = scene.sequences[0][0]
        k[:num_infinite] = load(store(np.array(key), dtype))
        host = harness.to_host(scene.cache.k).copy()
        for token in range(num_infinite):
            host[element(scene.cache, scene.block_tables[0, token // 8] * 8 + token % 8)] = store(
                k[token], dtype
            )
        scene.cache.k[...] = harness.to_device(host)
        return scene

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("num_infinite", [1, 63, 64, 65, 127, 128, 129, 197])
    def test_have_no_weight(self, harness: Harness, num_infinite: int, dtype: str) -> None:
        scene = self.scene(harness, num_infinite, dtype)
        scene.check()
        scene.check(sinks=SINKS[:4], alibi_slopes=SLOPES[:4])
        scene.check(window=200 - num_infinite)

    def test_made_by_rounding(self, harness: Harness) -> None:
        """Finite keys that float16 does not hold."""
        self.scene(harness, 64, "float16", -1e5).check()

    def test_made_by_slopes(self, harness: Harness) -> None:
        """A slope that takes the far keys beyond float32, and leaves the last key alone."""
        scene = make_scene(harness, seq_lens=(100,), heads=(1, 1))
        scene.check(alibi_slopes=np.array([1e37], np.float32))

    @pytest.mark.parametrize(
        "options", [{}, {"sinks": np.full(4, -np.inf, np.float32)}], ids=["plain", "sinks"]
    )
    def test_of_all_keys_give_what_no_keys_give(self, harness: Harness, options: dict) -> None:
        scene = self.scene(harness, 200)
        out, lse = scene.attend(**options)
        assert not out.any()
        assert np.isneginf(lse).all()
        scene.cache.v[...] = np.nan
        assert not scene.attend(**options)[0].any()

    def test_of_all_keys_leave_the_sink(self, harness: Harness) -> None:
        out, lse = self.scene(harness, 200).attend(sinks=SINKS[:4])
        assert not out.any()
        np.testing.assert_allclose(lse, np.broadcast_to(SINKS[:4], lse.shape), atol=1e-6)

    def test_take_no_part_in_a_merge(self, harness: Harness) -> None:
        scene = self.scene(harness, 200)
        nothing = scene.attend()
        other = make_scene(harness, seq_lens=(200,), query_lens=(3,), heads=(4, 2)).attend()
        device = harness.to_device
        merged = harness.backend.merge_states(*map(device, (*nothing, *other)))
        for actual, expected in zip(merged, other, strict=True):
            np.testing.assert_allclose(harness.to_host(actual), expected, rtol=1e-6)


def test_pool_beyond_two_to_the_31_elements(harness: Harness) -> None:
    """Offsets are 64-bit; only the touched pages of the pool become real memory."""
    config = CacheConfig(1, 8, 256, 1, "float16", 16)
    (cache,) = harness.backend.allocate(config, 70_000)
    assert cache.k.size > 2**31
    rng = np.random.default_rng(1)
    k = store(rng.standard_normal((17, 8, 256)), "float16")
    v = store(rng.standard_normal((17, 8, 1)), "float16")
    blocks = np.array([[69_999, 66_000]], np.int32)
    slots = (blocks[0].astype(np.int64)[:, None] * 16 + np.arange(16)).ravel()[:17]
    device = harness.to_device
    harness.backend.write(cache, device(k), device(v), device(slots))
    np.testing.assert_array_equal(harness.to_host(cache.k[69_999]), k[:16])

    gathered, _ = harness.backend.gather(cache, device(blocks[0]), 17)
    np.testing.assert_array_equal(harness.to_host(gathered), k)
    scene = make_scene(harness, seq_lens=(17,), heads=(8, 8), dims=(256, 1), dtype="float16")
    scene.cache, scene.block_tables, scene.sequences = cache, blocks, [(load(k), load(v))]
    scene.check()
    harness.backend.copy_blocks([cache], device(np.array([[69_999, 1]], np.int32)))
    np.testing.assert_array_equal(harness.to_host(cache.k[1]), k[:16])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("layer", [0, 1, 15, 29])
def test_values_of_a_real_model(harness: Harness, real_kv, layer: int, layout: str) -> None:
    data = np.load(real_kv / "smollm2_qkv_512.npz")
    q, k, v = (data[f"{name}{layer}"].transpose(1, 0, 2) for name in "qkv")
    (cache,) = harness.backend.allocate(CacheConfig(1, 3, 64, dtype="float16", layout=layout), 40)
    fill(harness, cache)
    table = np.random.default_rng(layer).permutation(np.arange(1, 40, dtype=np.int32))[None, :32]
    slots = (table[0].astype(np.int64)[:, None] * 16 + np.arange(16)).ravel()
    device = harness.to_device
    harness.backend.write(cache, device(k), device(v), device(slots))
    out = harness.backend.attend(
        cache,
        device(q[-64:].astype(np.float32)),
        device(table),
        device(np.array([512], np.int32)),
        device(np.array([0, 64], np.int32)),
        scale=float(data[f"scale{layer}"]),
    )
    rows_close(load(harness.to_host(out)), load(data[f"out{layer}"]), TOLERANCE["float16"])
