"""`allocate`, `copy_blocks`, `gather` and `merge_states`."""

import numpy as np
import pytest

from conformance.harness import Harness
from conformance.scene import (
    TOLERANCE,
    fill,
    load,
    lse_close,
    make_scene,
    misaligned,
    rows_close,
    snapshot,
    store,
)
from kvblocks.config import CacheConfig

DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("NHD", "HND")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_allocate_gives_separate_arrays_of_the_stated_size(harness: Harness, dtype: str, layout: str) -> None:
    config = CacheConfig(3, 2, 16, 24, dtype, 8, layout)
    caches = harness.backend.allocate(config, 5)
    middle = (8, 2) if layout == "NHD" else (2, 8)
    assert [cache.k.shape for cache in caches] == [(5, *middle, 16)] * 3
    assert [cache.v.shape for cache in caches] == [(5, *middle, 24)] * 3
    assert sum(cache.k.nbytes + cache.v.nbytes for cache in caches) == 5 * config.bytes_per_block
    for index, cache in enumerate(caches):
        fill(harness, cache, index)
    assert [set(data) for data in snapshot(harness, *caches)] == [{0}, {0}, {1}, {1}, {2}, {2}]


@pytest.mark.usefixtures("host_arrays")
def test_misaligned_arguments_equal_their_copy(harness: Harness) -> None:
    scene = make_scene(harness, seq_lens=(33,))
    backend, table = harness.backend, scene.block_tables[0, :3]
    for actual, expected in zip(
        backend.gather(scene.cache, misaligned(table), 33),
        backend.gather(scene.cache, table, 33),
        strict=True,
    ):
        assert actual.tobytes() == expected.tobytes()
    state = scene.attend()
    merged = backend.merge_states(*map(misaligned, (*state, *state)))
    for actual, expected in zip(merged, backend.merge_states(*state, *state), strict=True):
        assert actual.tobytes() == expected.tobytes()
    backend.copy_blocks([scene.cache], misaligned(np.array([[table[0], 0]], np.int32)))
    assert scene.cache.k[0].tobytes() == scene.cache.k[table[0]].tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
class TestCopyBlocks:
    def make(self, harness: Harness, dtype: str, layout: str):
        """Two layers of random bytes, every kind of NaN among them."""
        rng = np.random.default_rng(3)
        caches = harness.backend.allocate(CacheConfig(2, 3, 8, 5, dtype, 4, layout), 9)
        for cache in caches:
            for array in (cache.k, cache.v):
                junk = rng.integers(0, 256, (*array.shape, array.dtype.itemsize), np.uint8)
                array[...] = harness.to_device(junk.view(array.dtype)[..., 0])
        return caches

    def test_moves_every_byte_from_src_to_dst_in_all_layers(
        self, harness: Harness, dtype: str, layout: str
    ) -> None:
        caches = self.make(harness, dtype, layout)
        before = [harness.to_host(array).copy() for cache in caches for array in (cache.k, cache.v)]
        copies = [(2, 7), (5, 1), (2, 3)]
        harness.backend.copy_blocks(caches, harness.to_device(np.array(copies, np.int32)))
        for array in before:
            for src, dst in copies:
                array[dst] = array[src]
        assert snapshot(harness, *caches) == [array.tobytes() for array in before]

    def test_none(self, harness: Harness, dtype: str, layout: str) -> None:
        caches = self.make(harness, dtype, layout)
        before = snapshot(harness, *caches)
        harness.backend.copy_blocks(caches, harness.to_device(np.empty((0, 2), np.int32)))
        assert snapshot(harness, *caches) == before
        harness.backend.copy_blocks([], harness.to_device(np.array([[1, 2]], np.int32)))


def test_copy_then_write_leaves_the_source(harness: Harness) -> None:
    """Copy-on-write as a step does it: the copy goes on with a new token, the source stays as it was."""
    scene = make_scene(harness, seq_lens=(19,), block_size=16)
    tail, copy = int(scene.block_tables[0, 1]), 0
    source = harness.to_host(scene.cache.k[tail]).tobytes()
    harness.backend.copy_blocks([scene.cache], harness.to_device(np.array([[tail, copy]], np.int32)))
    k, v = store(np.ones((1, 2, 16)), "float32"), store(np.full((1, 2, 16), 2), "float32")
    device = harness.to_device
    harness.backend.write(scene.cache, device(k), device(v), device(np.array([copy * 16 + 3])))
    assert harness.to_host(scene.cache.k[tail]).tobytes() == source
    scene.check()
    scene.block_tables[0, 1] = copy
    scene.seq_lens[0] = 20
    old_k, old_v = scene.sequences[0]
    scene.sequences = [(np.concatenate([old_k, k]), np.concatenate([old_v, v]))]
    scene.check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_gather_is_exact_and_owns_its_memory(
    harness: Harness, dtype: str, layout: str, block_size: int
) -> None:
    scene = make_scene(harness, dtype=dtype, layout=layout, block_size=block_size, dims=(16, 24))
    for row, (k, v) in enumerate(scene.sequences):
        table = harness.to_device(scene.block_tables[row])
        gathered = harness.backend.gather(scene.cache, table, int(scene.seq_lens[row]))
        fill_before = snapshot(harness, scene.cache)
        for actual, expected in zip(gathered, (k, v), strict=True):
            assert actual.dtype == np.float32
            assert actual.flags.c_contiguous
            np.testing.assert_array_equal(harness.to_host(actual), expected)
            actual[...] = 0
        assert snapshot(harness, scene.cache) == fill_before


class TestMergeStates:
    def state(self, scene, table, seq_len: int, **options):
        """Attention of a decode row over the first seq_len tokens of another table."""
        tables, lens = scene.block_tables, scene.seq_lens
        scene.block_tables, scene.seq_lens = table[None], np.array([seq_len], np.int32)
        try:
            return scene.attend(**options)
        finally:
            scene.block_tables, scene.seq_lens = tables, lens

    def merge(self, harness: Harness, a, b):
        arrays = (harness.to_device(array) for array in (*a, *b))
        out, lse = harness.backend.merge_states(*arrays)
        return harness.to_host(out), harness.to_host(lse)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("cut", [0, 16, 32, 48])
    def test_parts_make_the_whole(self, harness: Harness, dtype: str, cut: int) -> None:
        scene = make_scene(harness, seq_lens=(50,), dtype=dtype, dims=(16, 24))
        first = self.state(scene, scene.block_tables[0], cut)
        second = self.state(scene, scene.block_tables[0, cut // 16 :], 50 - cut)
        expected_out, expected_lse = scene.expected()
        for parts in ((first, second), (second, first)):
            out, lse = self.merge(harness, *parts)
            assert out.dtype == scene.q.dtype
            rows_close(load(out), expected_out, 2 * TOLERANCE[dtype])
            lse_close(lse, expected_lse)

    def test_a_sink_belongs_to_one_part(self, harness: Harness) -> None:
        scene = make_scene(harness, seq_lens=(50,))
        sinks = {"sinks": np.linspace(-2, 3, 6, dtype=np.float32)}
        first = self.state(scene, scene.block_tables[0], 32)
        second = self.state(scene, scene.block_tables[0, 2:], 18, **sinks)
        out, lse = self.merge(harness, first, second)
        expected_out, expected_lse = scene.expected(**sinks)
        rows_close(load(out), expected_out, TOLERANCE["float32"])
        lse_close(lse, expected_lse)

    def test_an_empty_state_takes_no_part(self, harness: Harness) -> None:
        rng = np.random.default_rng(0)
        out = rng.standard_normal((3, 2, 8)).astype(np.float32)
        lse = rng.standard_normal((3, 2)).astype(np.float32)
        empty = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
        for parts in (((out, lse), empty), (empty, (out, lse))):
            merged, merged_lse = self.merge(harness, *parts)
            np.testing.assert_array_equal(merged, out)
            np.testing.assert_array_equal(merged_lse, lse)
        merged, merged_lse = self.merge(harness, empty, empty)
        assert not merged.any()
        assert np.isneginf(merged_lse).all()

    def test_far_apart_states(self, harness: Harness) -> None:
        ones = np.ones((1, 1, 4), np.float32)
        low, high = np.full((1, 1), -3000, np.float32), np.full((1, 1), 3000, np.float32)
        merged, lse = self.merge(harness, (ones, low), (2 * ones, high))
        np.testing.assert_array_equal(merged, 2 * ones)
        np.testing.assert_array_equal(lse, high)

    def test_no_tokens(self, harness: Harness) -> None:
        empty = np.empty((0, 2, 8), np.float32), np.empty((0, 2), np.float32)
        merged, lse = self.merge(harness, empty, empty)
        assert merged.shape == (0, 2, 8)
        assert lse.shape == (0, 2)

    def test_strided_states_equal_their_copies(self, harness: Harness) -> None:
        rng = np.random.default_rng(0)
        out = rng.standard_normal((2, 3, 8)).astype(np.float32).transpose(1, 0, 2)
        lse = rng.standard_normal((2, 3)).astype(np.float32).T
        copies = np.ascontiguousarray(out), np.ascontiguousarray(lse)
        for actual, expected in zip(
            self.merge(harness, (out, lse), (-out, 2 * lse)),
            self.merge(harness, copies, (-copies[0], 2 * copies[1])),
            strict=True,
        ):
            np.testing.assert_array_equal(actual, expected)
