"""Attention kernels: every path against float64, the same bits in every schedule, and the cases that users reported.

The contract suite runs over these kernels too; here is what decides between them: tensor cores or not, 16 or 64 rows,
one or many splits of the keys, and the formats with scales.
"""

import numpy as np
import pytest

from conformance.harness import Harness
from conformance.scene import Scene, load, lse_close, make_scene, rows_close, store
from kernels.emulator import SCHEDULES, emulated_backend
from kvblocks.backends.attention import plan_attention
from kvblocks.backends.numpy import NumpyBackend
from kvblocks.config import CacheConfig
from kvblocks.kernels import params
from kvblocks.kernels.specs import DTYPES
from kvblocks.layout import LayerCache

pytestmark = pytest.mark.cuda

NUMPY = NumpyBackend()
FORMATS = (
    "fp8_e4m3",
    "fp8_e4m3:head",
    "fp8_e4m3:tensor",
    "fp8_e5m2",
    "fp8_e5m2:tensor",
    "int8",
    "int8:head",
    "int8:channel,int8",
)
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
CHUNKS = {"seq_lens": (33, 130, 0, 17, 5, 1), "query_lens": (9, 70, 2, 3, 1, 1)}
SINKS = np.array([-3, -1, 0, 0.5, 4, -np.inf], np.float32)
SLOPES = np.geomspace(1, 0.01, 6, dtype=np.float32)
OPTIONS = {
    "plain": {},
    "window": {"window": 7},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi_slopes": SLOPES},
    "everything": {"scale": 0.4, "window": 11, "soft_cap": 3.0, "sinks": SINKS, "alibi_slopes": SLOPES},
}


def harness(schedule: str = "forward", split_size: int | None = None) -> Harness:
    return Harness("emulated", make=lambda: emulated_backend("emulated", schedule, split_size))


class TestTensorCores:
    """16-bit caches with head dims that the tensor-core kernel takes; `Scene` poisons what must not be read."""

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("block_size", [1, 3, 8, 16, 24, 64, 256])
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_any_block_size(self, dtype: str, block_size: int, layout: str) -> None:
        storage = {"dtype": dtype, "block_size": block_size, "layout": layout, "dims": (64, 64)}
        make_scene(harness(), **storage).check()
        make_scene(harness(), **storage, **CHUNKS).check()

    @pytest.mark.parametrize("heads", [(6, 1), (7, 1), (14, 2), (32, 8), (71, 1), (128, 1), (1, 1), (2, 1)])
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_any_group(self, heads: tuple[int, int], dtype: str) -> None:
        make_scene(harness(), heads=heads, dtype=dtype, dims=(64, 64), seq_lens=(17, 70, 0)).check()
        chunks = {"seq_lens": (17, 70, 0), "query_lens": (3, 40, 1)}
        make_scene(harness(), heads=heads, dtype=dtype, dims=(64, 64), **chunks).check()

    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_options(self, options: dict, dtype: str) -> None:
        make_scene(harness(), dims=(64, 64), dtype=dtype).check(**options)
        make_scene(harness(), dims=(80, 80), dtype=dtype, block_size=3, **CHUNKS).check(**options)

    @pytest.mark.parametrize(
        "dims", [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (192, 192), (256, 256)]
    )
    def test_every_pair_of_head_dims(self, dims: tuple[int, int]) -> None:
        for dtype in ("float16", "bfloat16"):
            make_scene(harness(), dims=dims, dtype=dtype, seq_lens=(130,)).check()
            make_scene(harness(), dims=dims, dtype=dtype, seq_lens=(130,), query_lens=(70,)).check()

    @pytest.mark.parametrize("query_len", [1, 20])
    def test_infinite_and_unread_keys(self, query_len: int) -> None:
        """-infinity in some logits, all of them, and NaN in the blocks that a window has left behind."""
        scene = make_scene(
            harness(), seq_lens=(200,), query_lens=(query_len,), dims=(64, 64), dtype="float16", block_size=8
        )
        clean = scene.attend(window=50)
        for block in scene.block_tables[0, : (200 - query_len - 50) // 8]:
            scene.cache.k[int(block)] = scene.cache.v[int(block)] = np.nan
        scene.block_tables[0, : (200 - query_len - 50) // 8] = -1
        for actual, expected in zip(scene.attend(window=50), clean, strict=True):
            assert actual.tobytes() == expected.tobytes()

    def test_bfloat16_queries_beyond_the_range_of_float16(self) -> None:
        scene = make_scene(harness(), dims=(64, 64), dtype="float16", q_dtype="bfloat16")
        scene.q = store(load(scene.q) * 1e6, "bfloat16")
        scene.check(scale=1e-6 / 8)


class Quantised:
    """A cache of any format with random sequences, written by the emulated kernels; NumPy gives the expectation."""

    def __init__(
        self,
        kv_format: str,
        *,
        q_dtype: str = "float16",
        dims: tuple[int, int] = (64, 64),
        heads: tuple[int, int] = (6, 2),
        seq_lens: tuple[int, ...] = (0, 1, 15, 70, 33),
        query_lens: tuple[int, ...] | None = None,
        block_size: int = 16,
        layout: str = "NHD",
        spread: float = 1.0,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        query_lens = query_lens or (1,) * len(seq_lens)
        needs = [-(-length // block_size) for length in seq_lens]
        num_blocks = sum(needs) + 3
        config = CacheConfig(1, heads[1], *dims, block_size=block_size, layout=layout, kv_format=kv_format)
        backend = emulated_backend()
        (self.cache,) = backend.allocate(config, num_blocks)
        (self.other,) = NUMPY.allocate(config, num_blocks)
        for cache in (self.cache, self.other):
            for name, array in cache.named_arrays:
                part = cache.format.k if name.startswith("k") else cache.format.v
                if name.endswith("_scale") and part.is_static:
                    array[...] = np.linspace(0.02, 0.05, array.size).reshape(array.shape)
                else:
                    array.view(np.uint8).fill(0xFF)
        ids = rng.permutation(num_blocks).astype(np.int32)
        self.tables = np.full((len(seq_lens), max(needs) + 1), -7, np.int32)
        slots = []
        for row, need in enumerate(needs):
            blocks, ids = ids[:need], ids[need:]
            self.tables[row, :need] = blocks
            position = np.arange(seq_lens[row])
            slots.append(blocks[position // block_size].astype(np.int64) * block_size + position % block_size)
        self.slots = np.concatenate(slots)
        num_tokens = len(self.slots)
        scale = np.exp(spread * rng.standard_normal((num_tokens, heads[1], 1)))
        self.k = store(rng.standard_normal((num_tokens, heads[1], dims[0])) * scale, q_dtype)
        self.v = store(rng.standard_normal((num_tokens, heads[1], dims[1])) * scale[::-1], q_dtype)
        self.q = store(rng.standard_normal((sum(query_lens), heads[0], dims[0])), q_dtype)
        self.q_dtype = q_dtype
        self.seq_lens = np.array(seq_lens, np.int32)
        self.starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        backend.write(self.cache, self.k, self.v, self.slots)
        NUMPY.write(self.other, self.k, self.v, self.slots)

    def attend(self, backend, cache: LayerCache, **options) -> tuple[np.ndarray, np.ndarray]:
        lse = np.full(self.q.shape[:2], np.nan, np.float32)
        out = backend.attend(cache, self.q, self.tables, self.seq_lens, self.starts, lse=lse, **options)
        return out, lse

    def check(self, tolerance: float | None = None, **options) -> None:
        out, lse = self.attend(emulated_backend(), self.cache, **options)
        wide = store(load(self.q), "float32"), self.q
        self.q = wide[0]
        expected_out, expected_lse = self.attend(NUMPY, self.other, **options)
        self.q = wide[1]
        rows_close(load(out), load(expected_out), tolerance or TOLERANCE[self.q_dtype])
        lse_close(lse, expected_lse)


class TestFormats:
    @pytest.mark.parametrize("q_dtype", TOLERANCE)
    @pytest.mark.parametrize("kv_format", FORMATS)
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_codes_and_scales_are_those_of_the_specification(
        self, kv_format: str, q_dtype: str, layout: str
    ) -> None:
        for dims in ((64, 64), (40, 24), (20, 7)):
            scene = Quantised(kv_format, q_dtype=q_dtype, dims=dims, layout=layout)
            for (name, actual), (_, expected) in zip(
                scene.cache.named_arrays, scene.other.named_arrays, strict=True
            ):
                assert actual.tobytes() == expected.tobytes(), f"{name} at {dims}"

    @pytest.mark.parametrize("q_dtype", TOLERANCE)
    @pytest.mark.parametrize("kv_format", FORMATS)
    def test_decode_and_chunks(self, kv_format: str, q_dtype: str) -> None:
        for dims in ((64, 64), (112, 112), (40, 24)):
            Quantised(kv_format, q_dtype=q_dtype, dims=dims).check()
            Quantised(kv_format, q_dtype=q_dtype, dims=dims, **CHUNKS).check()

    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
    @pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_e4m3:head", "int8"])
    def test_options(self, kv_format: str, options: dict) -> None:
        Quantised(kv_format).check(**options)
        Quantised(kv_format, block_size=3, **CHUNKS).check(**options)

    @pytest.mark.parametrize("kv_format", ["fp8_e4m3", "int8"])
    def test_scales_of_very_different_sizes(self, kv_format: str) -> None:
        """Rows that differ by factors of e^6: weights enter the products over the largest scale of their tile."""
        for seed in range(3):
            Quantised(kv_format, spread=3.0, seq_lens=(200, 190), seed=seed).check(tolerance=2e-3, scale=0.01)

    @pytest.mark.parametrize("kv_format", ["float16", "fp8_e4m3", "fp8_e5m2", "int8"])
    def test_gather_is_exact(self, kv_format: str) -> None:
        scene = Quantised(kv_format)
        for row, length in enumerate(scene.seq_lens.tolist()):
            actual = emulated_backend().gather(scene.cache, scene.tables[row], length)
            expected = NUMPY.gather(scene.other, scene.tables[row], length)
            for one, other in zip(actual, expected, strict=True):
                np.testing.assert_array_equal(one, other)


CONFIGS = {
    "tensor cores, 16 rows": {"dtype": "float16", "dims": (64, 64), "heads": (6, 2)},
    "tensor cores, 64 rows": {"dtype": "bfloat16", "dims": (64, 64), **CHUNKS},
    "no tensor cores": {"dtype": "float32", "dims": (16, 24), **CHUNKS},
    "split keys": {"dtype": "float16", "dims": (64, 64), "seq_lens": (700, 300)},
}


class TestSchedules:
    @pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
    def test_give_the_same_bits(self, config: dict) -> None:
        results = [
            [array.tobytes() for array in make_scene(harness(name), **config).attend(sinks=SINKS)]
            for name in SCHEDULES
        ]
        assert all(result == results[0] for result in results)

    @pytest.mark.parametrize("kv_format", ["fp8_e4m3", "int8"])
    def test_give_the_same_bits_for_8_bit_caches(self, kv_format: str) -> None:
        scene = Quantised(kv_format, seq_lens=(200, 70))
        results = [scene.attend(emulated_backend("emulated", name), scene.cache) for name in SCHEDULES]
        for out, lse in results[1:]:
            assert out.tobytes() == results[0][0].tobytes()
            assert lse.tobytes() == results[0][1].tobytes()

    def test_of_a_write(self) -> None:
        stored = []
        scene = Quantised("fp8_e4m3")
        for name in SCHEDULES:
            for _, array in scene.cache.named_arrays:
                array.view(np.uint8).fill(0xFF)
            emulated_backend("emulated", name).write(scene.cache, scene.k, scene.v, scene.slots)
            stored.append([array.tobytes() for _, array in scene.cache.named_arrays])
        assert all(one == stored[0] for one in stored)


class TestSplits:
    @pytest.mark.parametrize("dims", [(64, 64), (16, 24)])
    @pytest.mark.parametrize("options", [{}, {"sinks": SINKS}, {"window": 400}])
    def test_parts_make_the_whole(self, dims: tuple[int, int], options: dict) -> None:
        """Rows of many splits beside rows of one, of none, and of keys that a window leaves out."""
        for dtype in ("float16", "float32"):
            scene = make_scene(harness(), dims=dims, dtype=dtype, seq_lens=(1500, 3, 0, 300))
            backend = scene.harness.backend
            before = backend.launcher.num_launches
            scene.check(**options)
            assert backend.launcher.num_launches == before + 2, "no split"

    def test_a_fixed_size_makes_a_row_independent_of_its_batch(self) -> None:
        lens = (700, 64, 65, 0, 300)
        scene = make_scene(harness(split_size=128), dims=(64, 64), dtype="bfloat16", seq_lens=lens)
        out, lse = scene.attend(sinks=SINKS)
        for row in range(len(lens)):
            alone = Scene(
                scene.harness,
                scene.cache,
                scene.q[row : row + 1],
                scene.q_dtype,
                scene.block_tables[row : row + 1],
                scene.seq_lens[row : row + 1],
                np.array([0, 1], np.int32),
                [],
            )
            out_alone, lse_alone = alone.attend(sinks=SINKS)
            assert out_alone[0].tobytes() == out[row].tobytes()
            assert lse_alone[0].tobytes() == lse[row].tobytes()

    def test_a_size_that_is_no_multiple_of_a_tile_is_refused(self) -> None:
        for size in (0, 63, 100):
            with pytest.raises(ValueError, match=f"split_size is {size}: expected a multiple of 64"):
                emulated_backend("emulated", "forward", size)

    def test_more_splits_than_a_grid_has_are_refused(self) -> None:
        scene = make_scene(harness(split_size=64), dims=(64, 64), dtype="float16", seq_lens=(1,))
        table = np.broadcast_to(scene.block_tables[:, :1], (1, 65_536 * 64))
        with pytest.raises(ValueError, match=r"^split_size is 64: \d+ splits of \d+ keys, at most 65535$"):
            scene.harness.backend.attend(scene.cache, scene.q, table, scene.seq_lens, scene.query_start_loc)


class TestPlans:
    @pytest.mark.parametrize(("shared_kib", "row_warps"), [(227, "4"), (99, "1"), (64, None)])
    def test_less_shared_memory_means_smaller_tiles(self, shared_kib: int, row_warps: str | None) -> None:
        """Chunked prefill of rows of 192 on devices of 227 and of 99 KiB a block."""
        (cache,) = NUMPY.allocate(CacheConfig(1, 1, 192, head_dim_v=128, dtype="bfloat16"), 2)
        record = np.zeros((), params.ATTEND)
        record["num_tokens"], record["num_seqs"], record["max_blocks"] = 128, 1, 2
        record["num_q_heads"] = record["num_kv_heads"] = 1
        record["q_dtype"] = DTYPES["bfloat16"]
        record["k_is_vector"] = record["v_is_vector"] = 1
        plan = plan_attention(record, cache, 132, shared_kib * 1024, None)
        assert dict(plan.instance.defines).get("KVB_ROW_WARPS") == row_warps
        assert plan.shared_bytes <= shared_kib * 1024

    @pytest.mark.parametrize(
        ("kv_format", "num_tokens", "num_seqs", "seq_len", "row_warps", "num_splits"),
        [
            ("bfloat16", 64, 64, 8192, "1", 1),  # 512 blocks on 132 SMs of 2: two waves, nearly full
            ("bfloat16", 1, 1, 8192, "1", 32),  # one wave
            ("fp8_e4m3", 64, 64, 8192, "1", 3),  # 3 of an SM: 1.3 waves of one split, 3.9 of three
            ("bfloat16", 8192, 1, 8192, "4", 1),  # more than the device holds
            ("bfloat16", 64, 1, 8192, "4", 8),  # a short chunk over a long context
        ],
    )
    def test_splits_fill_waves(
        self, kv_format: str, num_tokens: int, num_seqs: int, seq_len: int, row_warps: str, num_splits: int
    ) -> None:
        """Heads of Llama-3-8B on an H200, of which two blocks with a 16-bit cache, or three with FP8, fit an SM."""
        (cache,) = NUMPY.allocate(CacheConfig(1, 8, 128, kv_format=kv_format, dtype="bfloat16"), 2)
        record = np.zeros((), params.ATTEND)
        record["num_tokens"], record["num_seqs"], record["max_blocks"] = num_tokens, num_seqs, seq_len // 16
        record["num_q_heads"], record["num_kv_heads"] = 32, 8
        record["q_dtype"] = DTYPES["bfloat16"]
        record["k_is_vector"] = record["v_is_vector"] = 1
        plan = plan_attention(record, cache, 132, 227 * 1024, None)
        assert dict(plan.instance.defines)["KVB_ROW_WARPS"] == row_warps
        assert plan.num_splits == num_splits


class TestPrepared:
    """Fixed arrays, launched again: what a captured graph does."""

    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_sees_what_the_arrays_hold_at_its_launch(self, dtype: str) -> None:
        scene = make_scene(harness(), dims=(64, 64), dtype=dtype, seq_lens=(700, 33, 5))
        lse = np.empty(scene.q.shape[:2], np.float32)
        step = [scene.block_tables.copy(), scene.seq_lens.copy(), scene.query_start_loc.copy()]
        prepared = scene.harness.backend.prepare_attend(scene.cache, scene.q, *step, lse=lse)
        for order in ([0, 1, 2], [2, 0, 1], [1, 1, 1]):
            step[0][:], step[1][:] = scene.block_tables[order], scene.seq_lens[order]
            out = prepared()
            assert out is prepared.out
            expected = scene.harness.backend.attend(scene.cache, scene.q, *(each.copy() for each in step))
            assert out.tobytes() == expected.tobytes()
        # Rows that fall away, as a graph is padded.
        step[1][1:], step[0][1:] = 0, 0
        assert not prepared()[1:].any()
        assert np.isneginf(lse[1:]).all()

    def test_refuses_what_it_would_have_to_copy(self) -> None:
        scene = make_scene(harness(), dims=(64, 64), dtype="float16")
        lens = scene.seq_lens.repeat(2)[::2]
        with pytest.raises(ValueError, match="prepare_attend: expected arrays with contiguous rows"):
            scene.harness.backend.prepare_attend(
                scene.cache, scene.q, scene.block_tables, lens, scene.query_start_loc
            )


class TestLongContexts:
    """Field reports P097 and P098: small weights must neither vanish nor add up to a bias."""

    def uniform(self, kv_format: str, num_keys: int, v_value: float) -> tuple[LayerCache, np.ndarray]:
        config = CacheConfig(1, 1, 64, block_size=256, kv_format=kv_format)
        num_blocks = num_keys // 256
        (cache,) = NUMPY.allocate(config, num_blocks)
        for name, array in cache.named_arrays:
            array[...] = 1 if name.endswith("_scale") else 0
        NUMPY.write(
            cache,
            np.zeros((num_keys, 1, 64), np.float32),
            np.full((num_keys, 1, 64), v_value, np.float32),
            np.arange(num_keys),
        )
        return cache, np.arange(num_blocks, dtype=np.int32)[None]

    def attend(self, cache: LayerCache, table: np.ndarray, q: np.ndarray) -> np.ndarray:
        num_keys = table.size * 256
        return emulated_backend().attend(
            cache, q, table, np.array([num_keys], np.int32), np.array([0, 1], np.int32), scale=1.0
        )

    @pytest.mark.parametrize("kv_format", ["fp8_e4m3:tensor", "float16"])
    def test_equal_weights_of_131072_keys(self, kv_format: str) -> None:
        cache, table = self.uniform(kv_format, 131_072, 1.0)
        out = self.attend(cache, table, np.zeros((1, 4, 64), np.float16))
        np.testing.assert_allclose(out.astype(float), 1.0, atol=1e-3)

    def test_one_key_among_131072_that_counts(self) -> None:
        cache, table = self.uniform("float16", 131_072, 0.0)
        one = np.zeros((1, 1, 64), np.float32)
        one[..., 0] = 20
        NUMPY.write(cache, one, np.ones((1, 1, 64), np.float32), np.array([77_777]))
        q = np.zeros((1, 4, 64), np.float16)
        q[..., 0] = 1
        np.testing.assert_allclose(self.attend(cache, table, q).astype(float), 0.99973, atol=3e-4)

    @pytest.mark.parametrize("kv_format", ["fp8_e4m3:tensor", "fp8_e4m3", "int8", "float16"])
    def test_one_key_with_95_percent_of_the_weight(self, kv_format: str) -> None:
        """The other 32,767 keys share 5 %: 1.5e-6 each, which float16 alone would hold as subnormals."""
        num_keys = 32_768
        cache, table = self.uniform(kv_format, num_keys, 1.0)
        one = np.zeros((1, 1, 64), np.float32)
        one[..., 0] = np.log(0.95 / 0.05 * (num_keys - 1))
        NUMPY.write(cache, one, np.zeros((1, 1, 64), np.float32), np.array([5_000]))
        q = np.zeros((1, 4, 64), np.float16)
        q[..., 0] = 1
        lens, starts = np.array([num_keys], np.int32), np.array([0, 1], np.int32)
        expected = NUMPY.attend(cache, q.astype(np.float32), table, lens, starts, scale=1.0)
        np.testing.assert_allclose(self.attend(cache, table, q).astype(float), expected, rtol=1e-3)


def test_slots_beyond_2_to_the_31_elements() -> None:
    """Blocks 2^30 elements apart: only what is touched of the pool becomes real memory."""
    apart = 2**30
    pool = np.empty(3 * apart, np.float16)
    arrays = [
        np.lib.stride_tricks.as_strided(pool[offset:], (3, 16, 1, 64), (2 * apart, 128, 128, 2))
        for offset in (0, 4096)
    ]
    cache = LayerCache(*arrays, "float16", 16, "NHD")
    backend = emulated_backend()
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 20, 1, 64)).astype(np.float16)
    table = np.array([[2, 1]], np.int32)
    slots = np.concatenate([np.arange(32, 48), np.arange(16, 20)])
    backend.write(cache, k, v, slots)
    np.testing.assert_array_equal(cache.k[2, :, 0], k[:16, 0])
    q = rng.standard_normal((1, 4, 64)).astype(np.float16)
    lens, starts = np.array([20], np.int32), np.array([0, 1], np.int32)
    expected = NUMPY.attend(cache, q.astype(np.float32), table, lens, starts)
    rows_close(load(backend.attend(cache, q, table, lens, starts)), load(expected), 1e-3)
    backend.copy_blocks([cache], np.array([[2, 0]], np.int32))
    np.testing.assert_array_equal(cache.v[0, :, 0], v[:16, 0])


class TestWrongValues:
    """Field reports P113 and P122: skipped, and reported with the row and the number; never followed."""

    def test_slots(self) -> None:
        backend = emulated_backend()
        (cache,) = backend.allocate(CacheConfig(1, 2, 64, dtype="float16"), 3)
        for array in (cache.k, cache.v):
            array[...] = 7
        k = np.ones((5, 2, 64), np.float16)
        backend.write(cache, k, k, np.array([3, 48, -1, -9, 2**40]))
        assert set(np.flatnonzero((cache.k == 1).all(axis=(2, 3)).ravel())) == {3}
        assert "slot_mapping that the cache does not have: row 1, column 0, value 48" in backend.first_error()
        assert backend.first_error() is None

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    @pytest.mark.parametrize(
        ("name", "where", "value", "message"),
        [
            (
                "block_tables",
                (1, 1),
                10_000,
                "block_tables that the cache does not have: row 1, column 1, value 10000",
            ),
            ("block_tables", (1, 0), -5, "row 1, column 0, value -5"),
            ("block_tables", (1, 1), 2**31 - 1, "row 1, column 1, value 2147483647"),
            ("seq_lens", 1, 1000, "seq_lens beyond the row's table: row 1, column 0, value 1000"),
            ("seq_lens", 1, -1, "seq_lens beyond the row's table: row 1, column 0, value -1"),
            ("query_start_loc", 2, 40, "does not ascend: row"),
        ],
    )
    def test_steps(self, dtype: str, name: str, where, value: int, message: str) -> None:
        scene = make_scene(harness(), seq_lens=(33, 20, 18), dtype=dtype, dims=(64, 64))
        clean, _ = scene.attend()
        getattr(scene, name)[where] = value
        out, _ = scene.attend()
        assert message in scene.harness.backend.first_error()
        assert out[0].tobytes() == clean[0].tobytes(), "another row was harmed"

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_starts_that_do_not_ascend_write_nowhere_else(self, dtype: str) -> None:
        """A block must not take a sequence whose tiles begin beyond it: its rows would be before the batch."""
        scene = make_scene(harness(), seq_lens=(33,) * 8, query_lens=(8,) * 8, dtype=dtype, dims=(64, 64))
        scene.query_start_loc[:] = [0, 10, 20, 30, 40, 50, -1000, -1000, -1000]
        whole = np.full((3, *scene.q.shape), 7, scene.q.dtype)
        scene.harness.backend.attend(
            scene.cache, scene.q, scene.block_tables, scene.seq_lens, scene.query_start_loc, out=whole[1]
        )
        assert "does not ascend" in scene.harness.backend.first_error()
        assert (whole[0] == 7).all()
        assert (whole[2] == 7).all()

    def test_copies_and_moves(self) -> None:
        backend = emulated_backend()
        (cache,) = backend.allocate(CacheConfig(1, 2, 64, dtype="float16"), 3)
        cache.k[...] = np.arange(3)[:, None, None, None]
        backend.copy_blocks([cache], np.array([[2, 3], [-1, 0], [2, 1]], np.int32))
        assert cache.k[:, 0, 0, 0].tolist() == [0, 2, 2]
        assert "copies that the cache does not have" in backend.first_error()
        backend.move_slots([cache], np.array([[48, 0], [17, 1]]), np.array([0, 2], np.int32))
        assert "moves that the cache does not have: row 0, column 0, value 48" in backend.first_error()
        assert cache.k[0, 1, 0, 0] == 2


class TestMovingBytes:
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize("kv_format", ["float16", "fp8_e4m3", "int8:channel,int8"])
    def test_moves_are_done_in_their_order(self, kv_format: str, layout: str) -> None:
        """The destination of one move is the source of the next; two sequences; a skipped move."""
        scene = Quantised(kv_format, layout=layout, dims=(20, 64), seq_lens=(40, 40))
        chain = [(5, 3), (6, 4), (9, 5), (-1, 7), (12, -1), (13, 6)]
        moves = np.array([[source, to] for source, to in chain] + [[20, 18], [21, 19]], np.int64)
        expected = [array.copy() for array in scene.cache.block_arrays]
        for source, to in moves.tolist():
            if min(source, to) < 0:
                continue
            for array in expected:
                nhd = array if array.ndim == 3 or layout == "NHD" else array.transpose(0, 2, 1, 3)
                nhd[to // 16, to % 16] = nhd[source // 16, source % 16]
        emulated_backend().move_slots([scene.cache], moves, np.array([0, len(chain), len(moves)], np.int32))
        for actual, wanted in zip(scene.cache.block_arrays, expected, strict=True):
            assert actual.tobytes() == wanted.tobytes()

    @pytest.mark.parametrize("kv_format", ["fp8_e4m3", "int8:channel,int8"])
    def test_copies_take_the_scales_along(self, kv_format: str) -> None:
        scene = Quantised(kv_format)
        emulated_backend().copy_blocks([scene.cache], np.array([[0, 1], [2, 3]], np.int32))
        for array in scene.cache.block_arrays:
            assert array[1].tobytes() == array[0].tobytes()
            assert array[3].tobytes() == array[2].tobytes()
