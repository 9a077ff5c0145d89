"""Area E: block boundaries."""

from typing import Any

import numpy as np
import pytest

import kvblocks as kv

from .helpers import Engine, state


@pytest.mark.parametrize(
    ("full_hit", "usable"),
    [
        ("block", {1: 0, 16: 0, 17: 16, 31: 16, 32: 16, 33: 32, 48: 32}),
        ("token", {1: 0, 16: 15, 17: 16, 31: 16, 32: 31, 33: 32, 48: 47}),
    ],
)
def test_p049_a_full_hit_leaves_something_to_compute(full_hit: str, usable: dict[int, int]) -> None:
    for length, expected in usable.items():
        engine = Engine(16, 16, full_hit=full_hit)
        engine.cache(range(64))
        prompt = engine.manager.prepare(range(length))
        assert engine.manager.match_prefix(prompt) == expected
        answer = engine.manager.allocate(prompt)
        assert isinstance(answer, kv.Allocated)
        assert (answer.num_cached_tokens, answer.num_new_tokens) == (expected, length - expected)
        assert engine.step.schedule(answer.handle, length - expected)
        assert len(engine.step.copies) == int(expected % 16 > 0)
        engine.manager.commit(answer.handle, length - expected)
        # The prompt's blocks are all published, under the same hashes.
        engine.manager.free(answer.handle)
        assert engine.hits([*range(length), 9]) == length // 16 * 16
        assert engine.manager.prepare(range(length)).block_hashes.tolist() == prompt.block_hashes.tolist()
        engine.pool()


def test_p051_the_length_of_the_last_block() -> None:
    engine = Engine(16, 4)
    lengths = [0, 1, 4, 5, 8]
    handles = [engine.serve(range(100 * n, 100 * n + n)) for n in lengths]
    assert engine.step.schedule(handles, 0)
    indptr, indices, last = engine.step.csr()
    assert last.tolist() == [0, 1, 4, 1, 4]
    assert indptr.tolist() == [0, 0, 1, 2, 4, 6]
    assert indices.tolist() == [block for handle in handles for block in engine.table(handle)]


@pytest.mark.parametrize(("length", "new_blocks"), [(4, 1), (3, 0)])
def test_p051_one_more_token(length: int, new_blocks: int) -> None:
    engine = Engine(4, 4)
    handle = engine.serve(range(length))
    before = engine.pool()[0]
    assert engine.step.schedule(handle, 1)
    assert engine.pool()[0] == before - new_blocks


def test_p052_several_boundaries_in_one_append() -> None:
    for length in range(41):
        for num_new in range(21):
            deficit = -(-(length + num_new) // 4) - -(-length // 4)
            for room in {max(0, deficit - 1), deficit}:
                engine = Engine(40, 4, max_tokens=64, enable_prefix_cache=False)
                handle = engine.serve(range(length))
                occupied = -(-length // 4)
                filler = engine.admit(range((40 - occupied - room) * 4))
                before = state(engine.manager, [handle, filler])
                scheduled = engine.step.schedule(handle, num_new)
                if room == deficit:
                    assert scheduled
                    assert len(engine.table(handle)) == occupied + deficit
                else:
                    assert isinstance(scheduled.refusal, kv.Later)
                    assert scheduled.refusal.num_blocks == 1
                    assert state(engine.manager, [handle, filler]) == before


def test_p052_as_reported() -> None:
    for room, fits in [(1, False), (2, True)]:
        engine = Engine(8, 4)
        handle = engine.serve(range(5))
        engine.admit(range(100, 100 + 4 * (6 - room)))
        assert bool(engine.step.schedule(handle, 8)) == fits
        assert len(engine.table(handle)) == (4 if fits else 2)


@pytest.mark.parametrize("full_hit", ["block", "token"])
def test_p054_nothing_is_something_too(full_hit: str) -> None:
    engine = Engine(4, 4, full_hit=full_hit)
    answer = engine.ask([])
    assert (answer.num_cached_tokens, answer.num_new_tokens) == (0, 0)
    assert engine.table(answer.handle) == []
    assert engine.step.schedule(answer.handle, 0).num_copies == 0
    engine.manager.commit(answer.handle, 0)
    assert engine.pool() == (4, 0, 0, 0)
    engine.decode(answer.handle, [1, 2])
    engine.manager.truncate(answer.handle, 2)
    for length in (3, 100):
        with pytest.raises(ValueError, match=f"lengths\\[0\\] is {length}, expected at most its 2 tokens"):
            engine.manager.truncate(answer.handle, length)
    assert engine.manager.truncate(answer.handle, 0) == 1
    assert engine.pool() == (4, 0, 0, 0)
    assert engine.step.schedule([], []).num_seqs == 0
    assert engine.manager.fork([]).tolist() == []
    assert engine.manager.free([]).num_blocks == 0


@pytest.mark.parametrize("block_size", [1, 3, 16, 24, 448, 1600])
def test_p055_any_block_size(block_size: int) -> None:
    engine = Engine(12, block_size, max_tokens=10 * block_size)
    prompt = np.arange(3 * block_size + 1)
    first: Any = engine.serve(prompt.tolist())
    assert len(engine.table(first)) == 4
    answer = engine.ask(prompt.tolist())
    assert answer.num_cached_tokens == 3 * block_size
    engine.compute(answer.handle)
    (child,) = engine.manager.fork(first).tolist()
    assert engine.step.schedule([first, child], 1).num_copies == int(block_size > 1)
    engine.manager.commit([first, child], 1, [1, 2])
    position = 3 * block_size + 1
    slots = [
        engine.table(handle)[position // block_size] * block_size + position % block_size
        for handle in (first, child)
    ]
    assert engine.step.slot_mapping.tolist() == slots
    assert engine.manager.drop_range(first, 0, 2 * block_size).end == 2 * block_size
    assert engine.manager.tokens(child).tolist() == [*prompt.tolist(), 2]
    engine.manager.free([first, child, answer.handle])
    assert engine.pool()[1] == 0
    assert engine.hits([*prompt.tolist(), 0]) == (len(prompt) // block_size) * block_size
