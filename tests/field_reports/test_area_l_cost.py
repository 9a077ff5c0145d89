"""Area L: what the allocator costs the interpreter. Its times are benchmarks."""

import gc
from typing import Any

import numpy as np

import kvblocks as kv
from kvblocks._core import StepBuffers

from .helpers import Engine


def test_p090_python_objects_do_not_grow_with_the_pool() -> None:
    def tracked(num_blocks: int) -> int:
        gc.collect()
        before = len(gc.get_objects())
        manager = kv.BlockManager(num_blocks, 16)
        step = kv.Step(manager, max_seqs=4, max_tokens=num_blocks * 16, max_blocks_per_seq=num_blocks)
        answer: Any = manager.allocate(manager.prepare(np.arange(num_blocks * 8)))
        step.schedule(answer.handle, num_blocks * 8)
        manager.commit(answer.handle, num_blocks * 8)
        table = manager.block_table(answer.handle)
        gc.collect()
        grown = len(gc.get_objects()) - before
        assert len(table) == num_blocks // 2
        return grown

    tracked(1_000)
    assert abs(tracked(1_000_000) - tracked(1_000)) < 100


def test_p091_a_step_touches_only_the_rows_that_changed() -> None:
    manager = kv.BlockManager(1 + 8192, 16, enable_prefix_cache=False)
    places = StepBuffers.layout(1024, 65536, 2048)
    memory = np.zeros(places["num_words"], np.int64)
    buffers = StepBuffers(manager, [memory], 1024, 65536, 2048)
    tables, changes = (
        memory.view(np.uint8)[slice(*places[name])].view(np.int32).reshape(-1, width)
        for name, width in (("block_tables", 2048), ("changes", 3))
    )
    lengths = np.array([1 + 7 * i % 64 for i in range(1024)], np.int32)
    admitted: list[Any] = [manager.allocate(manager.prepare(np.arange(length))) for length in lengths]
    handles = np.array([answer.handle for answer in admitted])
    assert buffers.schedule(handles, lengths).num_changes == 1024
    manager.commit(handles, lengths)
    for number in range(20):
        # Whatever the step does not have to write keeps its mark.
        shown = tables.copy()
        tables[:, 40:] = -9
        scheduled = buffers.schedule(handles, 1)
        assert scheduled.num_seqs == scheduled.num_tokens == 1024
        grown = np.flatnonzero((lengths + number) % 16 == 0)
        columns = (lengths[grown] + number) // 16
        expected = np.stack([grown, columns, np.ones_like(grown)], axis=1)
        np.testing.assert_array_equal(changes[: scheduled.num_changes], expected)
        assert (tables[:, 40:] == -9).all()
        shown[grown, columns] = tables[grown, columns]
        np.testing.assert_array_equal(tables[:, :40], shown[:, :40])
        manager.commit(handles, 1, np.arange(1024))
    for row in (0, 7, 1023):
        table = manager.block_table(handles[row])
        np.testing.assert_array_equal(tables[row, : len(table)], table)


def test_p092_one_entry_a_block_and_one_hash_a_block() -> None:
    engine = Engine(80, 16)
    prompt = engine.manager.prepare(range(64 * 16))
    assert prompt.block_hashes.shape == (64, 16)
    assert len(np.unique(prompt.block_hashes, axis=0)) == 64
    answer: Any = engine.manager.allocate(prompt)
    engine.compute(answer.handle)
    engine.manager.free(answer.handle)
    assert engine.pool() == (16, 0, 64, 0)
    for _ in range(3):  # the prompt carries its hashes: look-ups add nothing
        assert engine.manager.match_prefix(prompt) == 63 * 16
        assert engine.pool() == (16, 0, 64, 0)
    # A preempted sequence that has grown keeps the digests of its prompt.
    handle = engine.serve(range(64 * 16), ids=range(20))
    (history,) = engine.manager.preempt(handle)
    assert history.block_hashes[:64].tolist() == prompt.block_hashes.tolist()
    assert history.block_hashes.shape == (65, 16)
