"""`PagedKVCache`: what its constructor takes and refuses, and its layers by number."""

from typing import Any

import numpy as np
import pytest

import kvblocks as kv
from kvblocks.backends.numpy import NumpyBackend

CONFIG = kv.CacheConfig(num_layers=2, num_kv_heads=1, head_dim=4)


def make_cache(**options: Any) -> kv.PagedKVCache:
    return kv.PagedKVCache(CONFIG, **({"num_blocks": 8, "backend": "numpy", "max_tokens": 64} | options))


@pytest.mark.parametrize("layer", [-1, 2, 2**100, True, None, 0.0, "0"])
def test_layers_that_do_not_exist(layer: Any) -> None:
    cache = make_cache()
    handle = cache.manager.allocate(cache.manager.prepare([1, 2])).handle
    assert cache.schedule([handle], 2)
    rows = np.ones((2, 1, 4), np.float32)
    for call in (
        lambda: cache.write(layer, rows, rows),
        lambda: cache.attend(layer, rows),
        lambda: cache.gather(handle, layer),
    ):
        with pytest.raises(
            ValueError, match=rf"^layer is {layer!r}: expected an integer in 0..1, .* 2 layers$"
        ):
            call()


def test_layers_by_number() -> None:
    cache = make_cache()
    handle = cache.manager.allocate(cache.manager.prepare([1, 2])).handle
    assert cache.schedule([handle], 2)
    rows = np.ones((2, 1, 4), np.float32)
    for layer in (0, np.int64(1)):
        cache.write(layer, rows * np.float32(layer + 1), rows)
        np.testing.assert_array_equal(cache.attend(layer, rows), rows)
    cache.manager.commit([handle], 2)
    np.testing.assert_array_equal(cache.gather(handle, 1)[0], rows * 2)


@pytest.mark.parametrize("backend", [3, b"cpu", ["cpu"], NumpyBackend, object()])
def test_things_that_are_no_backend(backend: Any) -> None:
    message = rf"^backend: {type(backend).__name__}, expected a name, a Backend or None$"
    with pytest.raises(TypeError, match=message):
        make_cache(backend=backend)


def test_a_backend_is_taken_as_it_is() -> None:
    backend = NumpyBackend()
    assert make_cache(backend=backend).backend is backend


@pytest.mark.parametrize("config", [None, {"num_layers": 2}, kv.CacheConfig])
def test_things_that_are_no_config(config: Any) -> None:
    with pytest.raises(TypeError, match=rf"^config: {type(config).__name__}, expected a CacheConfig$"):
        kv.PagedKVCache(config, 8)


def test_memory() -> None:
    assert make_cache(num_blocks=None, memory=3 * CONFIG.bytes_per_block + 1).num_blocks == 3
    with pytest.raises(
        ValueError, match=r"^memory is 1024 bytes, expected at least two blocks of 1024 bytes$"
    ):
        make_cache(num_blocks=None, memory="1KiB")


@pytest.mark.parametrize("memory", ["", 0, -1, "8 G"])
def test_memory_that_is_no_size(memory: Any) -> None:
    with pytest.raises(ValueError, match=f"^memory size {memory!r}: expected bytes >= 1 as an int"):
        make_cache(num_blocks=None, memory=memory)


@pytest.mark.parametrize("sizes", [{"num_blocks": None}, {"num_blocks": 8, "memory": "1GiB"}])
def test_one_of_num_blocks_and_memory(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^give num_blocks or memory, one of the two$"):
        make_cache(**sizes)


class TestTables:
    def test_hold_the_whole_pool_where_it_is_small(self) -> None:
        cache = make_cache()
        handle = cache.manager.allocate(cache.manager.prepare(range(7 * 16))).handle
        assert cache.schedule([handle], 64)
        assert cache.step.block_tables.shape == (1, 7)

    @pytest.mark.parametrize(("block_size", "columns"), [(16, 8192), (24, 5462), (2**20, 1)])
    def test_of_a_huge_pool_hold_131072_tokens_a_sequence(self, block_size: int, columns: int) -> None:
        """Nobody asked for a row of three million columns, 2.9 GB of tables."""
        config = kv.CacheConfig(1, 1, 1, block_size=block_size)
        num_blocks = 3_000_000 if block_size < 2**10 else 2
        cache = kv.PagedKVCache(config, num_blocks, backend="numpy")
        assert cache.step.block_table_buffer.shape == (256, columns)
        assert kv.Step(cache.manager).block_table_buffer.shape == (256, columns)

    def test_that_are_too_narrow_name_the_argument_to_raise(self) -> None:
        cache = make_cache(max_blocks_per_seq=2)
        handle = cache.manager.allocate(cache.manager.prepare(range(48))).handle
        with pytest.raises(
            ValueError, match=r"at most the 2 columns of block_tables; raise max_blocks_per_seq$"
        ):
            cache.schedule([handle], 48)


def test_rows_appended_to_a_step_read_what_its_earlier_rows_write() -> None:
    rng = np.random.default_rng(5)
    values = rng.random((3, 100, 1, 4), np.float32)  # q, k and v of each token id
    prompts = [list(range(40)), [*range(32), 98, 99]]

    def attend(cache: kv.PagedKVCache, ids: list[int]) -> np.ndarray:
        q, k, v = values[:, ids]
        cache.write(0, k, v)
        return cache.attend(0, q)

    alone = make_cache()
    seq = alone.manager.allocate(alone.manager.prepare(prompts[1]))
    assert alone.schedule(seq.handle, 34)
    expected = attend(alone, prompts[1])[32:]

    cache = make_cache()
    cache.manager = kv.BlockManager(8, 16, publish="schedule")
    cache.step = kv.Step(cache.manager, max_seqs=2, max_tokens=64)
    first = cache.manager.allocate(cache.manager.prepare(prompts[0]))
    assert cache.schedule(first.handle, 40)
    second = cache.manager.allocate(cache.manager.prepare(prompts[1]))
    assert second.num_cached_tokens == 32
    assert cache.schedule(second.handle, 2, append=True).num_tokens == 42
    out = attend(cache, [*prompts[0], 98, 99])
    np.testing.assert_allclose(out[40:], expected, rtol=1e-6)


def test_a_sequence_stands_in_a_step_once() -> None:
    manager = kv.BlockManager(8, 4)
    a = manager.allocate(manager.prepare(range(6))).handle
    step = kv.Step(manager, max_seqs=4, max_tokens=16)
    assert step.schedule(a, 3)
    before = manager.stats(), manager.sequence(a)
    with pytest.raises(ValueError, match="more than once"):
        step.schedule(a, 3, append=True)
    assert (manager.stats(), manager.sequence(a)) == before
    assert step.seq_lens.tolist() == [3]


@pytest.mark.parametrize("how", ["free", "preempt", "abort_step", "commit", "truncate", "drop_range"])
def test_a_step_whose_rows_gave_blocks_back_takes_no_more_rows(how: str) -> None:
    # What the first row would write is free: a row beside it would be given the same blocks.
    manager = kv.BlockManager(4, 4)
    a = manager.allocate(manager.prepare(range(4))).handle
    step = kv.Step(manager, max_seqs=4, max_tokens=16)
    step.schedule(a, 4)
    manager.commit(a, 4)
    assert step.schedule(a, 4)
    b = manager.allocate(manager.prepare(range(9, 13))).handle
    c = manager.fork(b).tolist()[0]
    if how == "commit":
        manager.commit(a, 1, [0])
    elif how == "truncate":
        manager.commit(a, 4, [0] * 4)
        manager.truncate(a, 2)
    elif how == "drop_range":
        manager.drop_range(a, 0, 4)
    else:
        getattr(manager, how)(a)
    before = manager.stats(), step.block_tables.tolist()
    with pytest.raises(ValueError, match=r"^append finds row 0 of the step, sequence 0x1\d+, freed"):
        step.schedule(b, 4, append=True)
    assert (manager.stats(), step.block_tables.tolist()) == before
    assert step.schedule([b, c], [4, 0])
    assert step.schedule([], [], append=True).num_seqs == 2
