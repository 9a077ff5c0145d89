"""Area O: paged attention and writes, on every backend; rows of float16 that CUDA kernels take to tensor cores."""

import numpy as np
import pytest

import kvblocks as kv
from conformance.harness import PARAMS, Harness
from conformance.scene import fill, lse_close, make_scene, rows_close, snapshot
from conformance.test_formats import supports

LENS = (1, 15, 16, 17, 33)
TENSOR_CORES = {"dims": (64, 64), "dtype": "float16"}
SIMT = {"dims": (40, 24), "dtype": "float32"}


# One of the CPU's instruction sets: the contract suite has them all.
BACKENDS = [each for each in PARAMS if not str(each.id).startswith("cpu-")]


@pytest.fixture(params=[pytest.param(Harness("cpu"), id="cpu"), *BACKENDS])
def harness(request: pytest.FixtureRequest) -> Harness:
    return request.param


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_format", ["float16", "bfloat16", "float32", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_p111_a_pool_full_of_nan(harness: Harness, kv_format: str, layout: str) -> None:
    """Bit for bit what a pool of zeros gives."""
    supports(harness, kv_format)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, sum(LENS), 2, 64)).astype(np.float32)
    q = rng.standard_normal((len(LENS), 4, 64)).astype(np.float16)
    blocks = np.arange(12, 0, -1, dtype=np.int32)
    tables = np.full((len(LENS), 3), -1, np.int32)
    slots = []
    for row, length in enumerate(LENS):
        need = -(-length // 16)
        tables[row, :need], blocks = blocks[:need], blocks[need:]
        position = np.arange(length)
        slots.append(tables[row, position // 16].astype(np.int64) * 16 + position % 16)
    results = []
    for byte in (0xFF, 0):
        config = kv.CacheConfig(1, 2, 64, kv_format=kv_format, layout=layout)
        (cache,) = harness.backend.allocate(config, 13)
        fill(harness, cache, byte)
        device = harness.to_device
        harness.backend.write(cache, device(k), device(v), device(np.concatenate(slots)))
        lse = device(np.full((len(LENS), 4), np.nan, np.float32))
        lens, starts = np.array(LENS, np.int32), np.arange(len(LENS) + 1, dtype=np.int32)
        out = harness.backend.attend(cache, device(q), device(tables), device(lens), device(starts), lse=lse)
        results.append((harness.to_host(out).tobytes(), harness.to_host(lse).tobytes()))
        assert np.isfinite(harness.to_host(out)).all()
    assert results[0] == results[1]


@pytest.mark.parametrize("config", [TENSOR_CORES, SIMT], ids=["16-bit", "32-bit"])
def test_p112_empty_sequences_beside_others(harness: Harness, config: dict) -> None:
    scene = make_scene(harness, seq_lens=(5, 0, 0, 37), **config)
    out, lse = scene.attend()
    assert not out[1:3].any()
    assert np.isneginf(lse[1:3]).all()
    step = scene.q, scene.block_tables, scene.seq_lens
    for row in (0, 3):
        scene.q, scene.block_tables, scene.seq_lens = (each[row : row + 1].copy() for each in step)
        scene.query_start_loc = np.array([0, 1], np.int32)
        alone, lse_alone = scene.attend()
        # How keys are split among blocks of threads depends on the batch, and is no more than rounding.
        rows_close(alone[0].astype(float), out[row].astype(float), 1e-3 if config is TENSOR_CORES else 1e-5)
        lse_close(lse_alone[0], lse[row])
    none = make_scene(harness, seq_lens=(), query_lens=(), **config)
    assert none.attend()[0].shape[0] == 0


@pytest.mark.parametrize("kv_format", ["float16", "fp8_e4m3", "int8"])
def test_p113_padded_rows_are_not_written(harness: Harness, kv_format: str) -> None:
    supports(harness, kv_format)
    (cache,) = harness.backend.allocate(kv.CacheConfig(1, 2, 64, block_size=4, kv_format=kv_format), 4)
    fill(harness, cache, 0)
    before = [harness.to_host(array).copy() for array in cache.block_arrays]
    k = np.ones((4, 2, 64), np.float32)
    k[1:3] = np.nan
    device = harness.to_device
    harness.backend.write(cache, device(k), device(k), device(np.array([3, -1, -1, 7])))
    for array, old in zip(cache.block_arrays, before, strict=True):
        changed = (harness.to_host(array) != old).reshape(4, 4, -1).any(-1)
        assert np.flatnonzero(changed).tolist() == [3, 7]
    assert harness.checks_values or harness.backend.first_error() is None
    wrong = np.array([16, -2, 8, -1])
    if harness.checks_values:
        with pytest.raises(ValueError, match="slot_mapping: row 0 is slot 16, "):
            harness.backend.write(cache, device(k), device(k), wrong)
        return
    states = snapshot(harness, cache)
    harness.backend.write(cache, device(k[:2] * 0 + 5), device(k[:2] * 0 + 5), device(wrong[:2]))
    assert snapshot(harness, cache) == states
    assert "slot_mapping" in (harness.backend.first_error() or "")


def test_p114_rows_beyond_the_mapping_and_rows_apart(harness: Harness) -> None:
    config = kv.CacheConfig(1, 3, 64, dtype="float16", block_size=4)
    wide = np.random.default_rng(1).standard_normal((8, 5, 3, 80)).astype(np.float16)
    k = harness.to_device(wide)[:, 1, :, 8:72]
    states = []
    for given in (k, harness.to_device(np.ascontiguousarray(wide[:, 1, :, 8:72]))):
        (cache,) = harness.backend.allocate(config, 4)
        fill(harness, cache, 0)
        harness.backend.write(cache, given, given, harness.to_device(np.arange(5, 10)))
        states.append(snapshot(harness, cache))
        written = harness.to_host(cache.k).reshape(16, 3, 64)
        np.testing.assert_array_equal(written[5:10], wide[:5, 1, :, 8:72])
        assert not written[10:].any()
    assert states[0] == states[1]


DIMS = (8, 16, 32, 40, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256, 512, 576)


@pytest.mark.parametrize("head_dim", DIMS)
def test_p115_head_dims(harness: Harness, head_dim: int) -> None:
    scene = make_scene(harness, dims=(head_dim, head_dim), dtype="float16", heads=(4, 1), seq_lens=(17, 70))
    scene.check()


@pytest.mark.parametrize("dims", [(192, 128), (576, 512), (64, 128)], ids=str)
def test_p116_values_shorter_or_longer_than_keys(harness: Harness, dims: tuple[int, int]) -> None:
    make_scene(harness, dims=dims, dtype="float16", heads=(4, 1), seq_lens=(17, 70)).check()


@pytest.mark.parametrize(
    "heads",
    [(1, 1), (2, 1), (6, 1), (7, 1), (12, 2), (14, 2), (32, 8), (40, 8), (71, 1), (64, 4), (128, 1)],
    ids=str,
)
def test_p117_groups_of_heads(harness: Harness, heads: tuple[int, int]) -> None:
    make_scene(harness, heads=heads, seq_lens=(33, 0, 5), **TENSOR_CORES).check()


def test_p117_heads_that_do_not_divide(harness: Harness) -> None:
    scene = make_scene(harness, heads=(8, 4), **TENSOR_CORES)
    scene.q = np.zeros((len(scene.q), 10, 64), np.float16)
    with pytest.raises(ValueError, match=r"q: axis 1 \(num_q_heads\) is 10, not a multiple of the cache's 4"):
        scene.attend()


def test_p118_block_sizes(harness: Harness) -> None:
    results = [
        make_scene(harness, block_size=size, seq_lens=(33, 100), **TENSOR_CORES).attend()
        for size in (16, 1, 3, 8, 24, 32, 64, 128, 256, 448)
    ]
    for out, lse in results[1:]:
        rows_close(out.astype(float), results[0][0].astype(float), 1e-3)
        lse_close(lse, results[0][1])


@pytest.mark.parametrize("config", [TENSOR_CORES, SIMT], ids=["16-bit", "32-bit"])
def test_p119_a_window_begins_at_its_edge(harness: Harness, config: dict) -> None:
    scene = make_scene(harness, seq_lens=(10, 70), block_size=4, **config)
    scene.check(window=4)
    # What lies before the edge is never looked up.
    windowed = scene.attend(window=4)
    for row, length in enumerate((10, 70)):
        scene.block_tables[row, : (length - 4) // 4] = -1
    for one, other in zip(windowed, scene.attend(window=4), strict=True):
        assert one.tobytes() == other.tobytes()
    fresh = make_scene(harness, seq_lens=(10, 70), heads=(2, 2), block_size=4, **config)
    for one, other in zip(fresh.attend(), fresh.attend(window=70), strict=True):
        rows_close(one.astype(float)[None], other.astype(float)[None], 1e-6)
    last = [v[-1] for _, v in fresh.sequences]
    np.testing.assert_array_equal(fresh.attend(window=1)[0].astype(float), np.stack(last))
    with pytest.raises(ValueError, match="window is 0"):
        fresh.attend(window=0)


@pytest.mark.parametrize("config", [TENSOR_CORES, SIMT], ids=["16-bit", "32-bit"])
@pytest.mark.parametrize("value", [99, -5, 2**31 - 1])
def test_p122_blocks_that_do_not_exist(harness: Harness, config: dict, value: int) -> None:
    scene = make_scene(harness, seq_lens=(33, 20, 5), **config)
    good, _ = scene.attend()
    scene.block_tables[1, 1] = value
    if harness.checks_values:
        with pytest.raises(ValueError, match=rf"block_tables: row 1, column 1 is block {value}"):
            scene.attend()
        return
    out, _ = scene.attend()
    message = harness.backend.first_error() or ""
    assert "row 1" in message
    assert str(value) in message
    for row in (0, 2):
        assert out[row].tobytes() == good[row].tobytes()


@pytest.mark.parametrize("config", [TENSOR_CORES, SIMT], ids=["16-bit", "32-bit"])
def test_p122_lengths_beyond_the_table(harness: Harness, config: dict) -> None:
    scene = make_scene(harness, seq_lens=(33, 20, 5), **config)
    scene.seq_lens[2] = 16 * scene.block_tables.shape[1] + 1
    if harness.checks_values:
        with pytest.raises(ValueError, match="seq_lens: row 2"):
            scene.attend()
        return
    scene.attend()
    assert "row 2" in (harness.backend.first_error() or "")


@pytest.mark.parametrize("config", [TENSOR_CORES, SIMT], ids=["16-bit", "32-bit"])
def test_p123_huge_keys_behind_the_last_one(harness: Harness, config: dict) -> None:
    scene = make_scene(harness, seq_lens=LENS, **config)
    before = scene.attend()
    k = harness.to_host(scene.cache.k).copy()
    k[np.isnan(k)] = 6e4
    scene.cache.k[...] = harness.to_device(k)
    for one, other in zip(before, scene.attend(), strict=True):
        assert one.tobytes() == other.tobytes()
