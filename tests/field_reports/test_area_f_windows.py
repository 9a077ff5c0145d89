"""Area F: sliding windows. Of its cases P062, dropping a range of a live sequence."""

import pytest

import kvblocks as kv

from .helpers import Engine


def test_p062_drop_range_frees_the_whole_blocks_inside() -> None:
    engine = Engine(12, 16)
    handle = engine.serve(range(160))
    before = engine.table(handle)
    dropped = engine.manager.drop_range(handle, 16, 100)
    assert (dropped.start, dropped.end, dropped.num_blocks) == (16, 96, 5)
    assert engine.table(handle) == [before[0], *[engine.manager.null_block_id] * 5, *before[6:]]
    cursors = engine.manager.sequence(handle)
    assert (cursors.num_tokens, cursors.num_computed, cursors.num_blocks) == (160, 160, 10)
    assert engine.manager.tokens(handle).tolist() == list(range(160))
    assert engine.pool() == (2, 5, 5, 0)
    assert engine.hits([*range(160), 0]) == 160  # still cached
    engine.decode(handle, [7])
    assert engine.step.positions.tolist() == [160]
    assert engine.step.block_tables[0, 1:6].tolist() == [engine.manager.null_block_id] * 5
    assert engine.manager.stats().logical_blocks == 6


def test_p062_what_is_dropped_can_be_made_unfindable() -> None:
    engine = Engine(12, 16)
    handle = engine.serve(range(160))
    assert engine.manager.drop_range(handle, 16, 100, unpublish=True).num_blocks == 5
    assert engine.pool() == (7, 5, 0, 0)
    assert engine.hits([*range(160), 0]) == 16


def test_p062_a_block_shared_with_a_fork_is_dropped_and_not_counted_as_freed() -> None:
    engine = Engine(12, 16)
    handle = engine.serve(range(160))
    (child,) = engine.manager.fork(handle).tolist()
    before = engine.table(child)
    dropped = engine.manager.drop_range(handle, 16, 100, unpublish=True)
    assert (dropped.start, dropped.end, dropped.num_blocks) == (16, 96, 0)
    assert engine.table(child) == before
    assert engine.pool() == (2, 10, 0, 0)
    assert engine.hits([*range(160), 0]) == 160
    assert engine.manager.drop_range(child, 16, 100).num_blocks == 5


def test_p062_what_lies_within_no_whole_block_is_left() -> None:
    engine = Engine(12, 16)
    handle = engine.serve(range(40))
    before = engine.table(handle)
    for start, end in [(0, 0), (1, 31), (17, 40), (32, 40), (40, 40)]:
        dropped = engine.manager.drop_range(handle, start, end)
        assert (dropped.start, dropped.end, dropped.num_blocks) == (0, 0, 0)
    assert engine.table(handle) == before
    for start, end in [(0, 41), (30, 20)]:
        with pytest.raises(ValueError, match="expected start <= end <= 40"):
            engine.manager.drop_range(handle, start, end)


def test_p062_blocks_that_are_not_computed_are_not_dropped() -> None:
    engine = Engine(12, 16)
    handle = engine.admit(range(64))
    engine.compute(handle, 24)
    assert engine.manager.drop_range(handle, 0, 64).end == 16
    engine.compute(handle)
    assert engine.manager.tokens(handle).tolist() == list(range(64))
    assert engine.pool() == (8, 3, 1, 0)


def test_p062_a_window_of_a_long_generation_needs_few_blocks() -> None:
    engine = Engine(6, 4)
    engine.step = kv.Step(engine.manager, max_blocks_per_seq=30)
    handle = engine.serve(range(8))
    for n in range(8, 120):
        engine.decode(handle, [n])
        engine.manager.drop_range(handle, 0, max(0, n + 1 - 10), unpublish=True)
        assert engine.manager.stats().live_blocks <= 4
    assert engine.manager.tokens(handle).tolist() == list(range(120))
    with pytest.raises(ValueError, match="inside a dropped block"):
        engine.manager.truncate(handle, 6)
    engine.pool()


def test_p062_a_windowed_sequence_longer_than_the_pool_comes_back_from_a_preemption() -> None:
    """Of 120 tokens, 30 blocks, a window of 8 and chunks of 4 hold 11 at a time: ceil((8 - 1 + 4 - 1) / 4) + 1 = 4."""
    engine = Engine(6, 4, watermark_blocks=1)
    manager, most = engine.manager, 4

    def compute(handle: int, end: int) -> None:
        """Compute up to `end` tokens by chunks, and let the window follow."""
        while (start := manager.sequence(handle).num_computed) < end:
            manager.drop_range(handle, 0, max(0, start - 7), unpublish=True)
            chunk = min(4, end - start)
            assert engine.step.schedule(handle, chunk)
            manager.commit(handle, chunk, [*range(start, start + chunk)])
            assert manager.sequence_usage(handle).live_blocks <= most

    # Admitted as a window, too: a prompt of 60 tokens takes 15 blocks as a whole.
    prompt = manager.prepare(range(60))
    for options, need in [({}, 15), ({"max_resident_blocks": 7}, 7)]:
        never = manager.allocate(prompt, 4, **options)
        assert isinstance(never, kv.Never)
        assert (never.need_blocks, never.capacity_blocks) == (need, 6)
    answer = manager.allocate(prompt, 4, max_tokens=160, max_resident_blocks=most)
    assert isinstance(answer, kv.Allocated)
    assert manager.stats().promised_blocks == most - 1
    compute(answer.handle, 120)
    assert manager.stats().promised_blocks == most - manager.stats().live_blocks
    manager.set_max_tokens(answer.handle, 200)  # more than the pool holds

    for _ in range(2):
        (history,) = manager.preempt(answer.handle)
        assert history.num_tokens == 120
        assert isinstance(manager.allocate(history), kv.Never)  # the whole of it at once
        assert not manager.can_allocate(history, 4 * 7)
        # What was declared before still holds; other requests are kept from what it may need.
        assert manager.allocate(history, 4)
        assert manager.stats().promised_blocks == most - 1
        assert manager.can_allocate(manager.prepare(range(100, 104)))
        later = engine.ask(range(100, 108))  # 2 blocks, 3 promised, 1 watermark, of 5
        assert isinstance(later, kv.Later)
        assert later.num_blocks == 1
        compute(answer.handle, 120)
        assert manager.tokens(answer.handle).tolist() == list(range(120))
        engine.pool()
    manager.free(answer.handle)
    assert engine.pool()[1] == 0
