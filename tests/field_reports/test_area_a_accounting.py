"""Area A: leaks, double frees, reference counts."""

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvblocks as kv

from .helpers import OPTIONS, VERBS, Engine, Operation, Walk, state


@pytest.mark.parametrize("caching", [True, False])
def test_p001_every_block_comes_home_after_every_request(caching: bool) -> None:
    engine = Engine(64, 16, enable_prefix_cache=caching)
    source = random.Random(1)
    streams = [[source.randrange(50_000) for _ in range(200)] for _ in range(8)]
    for _ in range(5_000):
        prompt = source.choice(streams)[: source.randint(1, 200)]
        handle = engine.serve(prompt)
        num_new = source.randint(0, 40)
        assert engine.step.schedule(handle, num_new)
        engine.manager.commit(handle, num_new, [source.randrange(50_000) for _ in range(num_new)])
        engine.manager.free(handle)
        stats = engine.manager.stats()
        assert (stats.live_blocks, stats.used_slots, stats.logical_blocks) == (0, 0, 0)
        assert stats.free_blocks + stats.cached_blocks == 64
    assert (engine.manager.stats().hit_tokens > 0) == caching
    assert engine.pool()[1] == 0


def test_p002_a_shared_block_is_counted_once() -> None:
    engine = Engine(20, 32)
    first = engine.serve([*range(96), *[1] * 40])
    second = engine.serve([*range(96), *[2] * 40])
    assert engine.pool() == (20 - 7, 7, 0, 0)
    assert engine.manager.stats().logical_blocks == 10
    engine.manager.free(first)
    engine.manager.free(second)
    assert engine.pool() == (15, 0, 5, 0)


def test_p002_a_walk_of_100_000_steps_stays_sound() -> None:
    source = random.Random(2)
    for merge, reuse in itertools.product(OPTIONS["merge"], OPTIONS["reuse"]):
        walk = Walk(Engine(14, 4, merge=merge, reuse=reuse, max_tokens=256))
        for _ in range(25_000):
            walk.take((source.choice(VERBS), source.randrange(64), source.randrange(64)))
            assert walk.manager.check_integrity() == []
        walk.finish()


def test_p003_a_prompt_shorter_than_a_block_finds_nothing_and_touches_nothing() -> None:
    engine = Engine(8, 16)
    engine.cache(range(16))
    before = state(engine.manager)
    assert [engine.hits(range(n)) for n in (0, 1, 15)] == [0, 0, 0]
    assert [engine.hits(range(n)) for n in (16, 17)] == [0, 16]
    assert state(engine.manager) == before
    assert engine.pool() == (7, 0, 1, 0)


@pytest.mark.parametrize("order", list(itertools.permutations(["a", "b", "a", "b"])))
def test_p004_locking_and_unlocking_in_any_order_keeps_the_sums(order: tuple[str, ...]) -> None:
    engine = Engine(10, 4)
    prompts = {"a": [*range(12), 0], "b": [*range(8), 9, 9, 9, 9, 0]}
    for prompt in prompts.values():
        engine.cache(prompt)
    live: dict[str, int] = {}
    for name in order:
        if name in live:
            engine.manager.free(live.pop(name))
        else:
            live[name] = engine.admit(prompts[name])
        # Of the 4 published blocks, those in use; and a block for the last token of each.
        pinned = 4 if len(live) == 2 else 3 if live else 0
        assert engine.pool() == (6 - len(live), pinned + len(live), 4 - pinned, 0)


def test_p004_asking_for_more_than_can_be_evicted_ends() -> None:
    engine = Engine(10, 4)
    engine.cache(range(16))
    engine.admit(range(100, 124))
    assert engine.pool() == (0, 6, 4, 0)
    later = engine.ask(range(200, 240))
    assert isinstance(later, kv.Later)
    assert later.num_blocks == 6


def test_p005_a_block_is_owned_once_and_freed_once() -> None:
    engine = Engine(4, 4)
    handle = engine.admit(range(3))
    assert (engine.manager.stats().live_blocks, engine.manager.stats().logical_blocks) == (1, 1)
    freed = engine.manager.free(handle)
    assert (freed.num_blocks, freed.num_deferred) == (1, 0)
    before = state(engine.manager)
    with pytest.raises(kv.StaleHandleError):
        engine.manager.free(handle)
    assert state(engine.manager) == before
    assert engine.pool() == (4, 0, 0, 0)
    assert sorted(engine.table(engine.admit(range(16)))) == [1, 2, 3, 4]


def test_p008_a_hit_that_is_free_does_not_count_as_room() -> None:
    engine = Engine(6, 4)
    hits = engine.cache(range(8))
    other = engine.admit([50])
    assert engine.pool() == (3, 1, 2, 0)
    before = state(engine.manager, [other])
    later = engine.ask([*range(8), *[9] * 16])  # 2 hits and 4 new blocks
    assert isinstance(later, kv.Later)
    assert later.num_blocks == 1
    assert state(engine.manager, [other]) == before
    handle = engine.admit([*range(8), *[9] * 12])  # 2 hits and 3 new ones
    assert engine.table(handle)[:2] == hits
    assert engine.pool() == (0, 6, 0, 0)


def test_p008_as_reported_in_a_pool_of_five() -> None:
    engine = Engine(5, 4)
    hits = engine.cache(range(8))
    before = state(engine.manager)
    never = engine.ask([*range(8), *[9] * 16])
    assert isinstance(never, kv.Never)
    assert (never.need_blocks, never.capacity_blocks) == (6, 5)
    assert state(engine.manager) == before
    assert engine.table(engine.admit([*range(8), *[9] * 12]))[:2] == hits


def test_p009_a_revived_block_keeps_its_id_and_stays_findable() -> None:
    engine = Engine(8, 4)
    blocks = engine.cache(range(8))
    second = engine.admit(range(9))
    third = engine.admit(range(9))
    assert engine.table(second)[:2] == engine.table(third)[:2] == blocks
    engine.manager.free([second, third])
    assert engine.hits(range(9)) == 8


operations = st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 63), st.integers(0, 63)), max_size=30)


@given(operations, st.integers(0, 63), st.integers(0, 63), st.sampled_from(["block", "token"]))
def test_p009_can_allocate_is_true_if_and_only_if_allocate_succeeds(
    operations: list[Operation], a: int, b: int, full_hit: str
) -> None:
    walk = Walk(Engine(9, 3, full_hit=full_hit, max_tokens=256))
    for operation in operations:
        walk.take(operation)
    prompt, options = walk.prompt(a, b), walk.options(a, b)
    before = walk.state()
    could = walk.manager.can_allocate(prompt, **options)
    assert walk.state() == before
    answer = walk.manager.allocate(prompt, **options)
    if isinstance(answer, kv.Allocated):
        assert isinstance(could, kv.Ok)
        assert could.num_cached_tokens == answer.num_cached_tokens
    else:
        assert could == answer
        assert walk.state() == before


def test_p010_a_sequence_may_be_freed_at_any_stage() -> None:
    engine = Engine(8, 4)
    for num_computed in (0, 3, 4, 7, 16):
        handle = engine.admit(range(16))
        engine.compute(handle, num_computed)
        engine.manager.free(handle)
        cached = num_computed // 4
        assert engine.pool() == (8 - cached, 0, cached, 0)
        assert engine.manager.reset_prefix_cache() == cached
    handle = engine.admit(range(16))
    assert engine.step.schedule(handle, 9)  # in flight
    engine.manager.free(handle)
    assert engine.pool() == (8, 0, 0, 0)


def test_p010_a_parent_is_not_evicted_before_its_children() -> None:
    engine = Engine(3, 4)
    engine.cache(range(12))
    for num_taken, left in [(1, 8), (2, 4), (3, 0)]:
        taken = engine.admit(range(100, 100 + 4 * num_taken))
        assert engine.hits(range(13)) == left
        engine.manager.free(taken)


@pytest.mark.parametrize("end", ["complete_transfer", "fail_transfer", "cancel_transfer"])
def test_p011_a_transfer_outlives_its_sequence_and_ends_once(end: str) -> None:
    engine = Engine(8, 4)
    handle = engine.admit(range(16))
    transfer = engine.manager.begin_transfer(handle)
    freed = engine.manager.free(handle)
    assert (freed.num_blocks, freed.num_deferred) == (0, 4)
    assert engine.pool() == (4, 0, 0, 4)
    assert engine.manager.pending_transfers().tolist() == [[transfer, 4, 0]]
    # The blocks are not given away meanwhile.
    later = engine.ask(range(20))
    assert isinstance(later, kv.Later)
    assert later.num_blocks == 1
    finish: Callable[[int], int] = getattr(engine.manager, end)
    assert finish(transfer) == 4
    assert engine.pool() == (8, 0, 0, 0)
    before = state(engine.manager)
    for again in (engine.manager.complete_transfer, engine.manager.cancel_transfer):
        with pytest.raises(kv.StaleHandleError, match="names no transfer"):
            again(transfer)
    assert state(engine.manager) == before
    stats = engine.manager.stats()
    ended = (stats.completed_transfers, stats.failed_transfers, stats.cancelled_transfers)
    assert ended == tuple(int(end.startswith(word)) for word in ("complete", "fail", "cancel"))


def test_p011_a_transfer_that_ends_first_leaves_the_blocks_to_the_sequence() -> None:
    engine = Engine(8, 4)
    handle = engine.admit(range(16))
    transfer = engine.manager.begin_transfer(handle, 1, 3)
    assert engine.pool() == (4, 4, 0, 0)
    engine.step.schedule(handle, 1)
    assert engine.manager.pending_transfers().tolist() == [[transfer, 2, 1]]  # one step old
    assert engine.manager.complete_transfer(transfer) == 0
    assert engine.manager.free(handle).num_blocks == 4
    assert engine.pool() == (8, 0, 0, 0)


def test_p012_a_group_may_hold_members_that_are_gone() -> None:
    engine = Engine(8, 4)
    parent = engine.serve(range(9))
    (child,) = engine.manager.fork(parent).tolist()
    assert engine.manager.free(child).num_blocks == 0
    freed = engine.manager.free([parent, child], missing_ok=True)
    assert (freed.num_blocks, freed.num_deferred) == (3, 0)
    assert engine.pool() == (6, 0, 2, 0)


def test_p015_the_block_table_grows_with_the_tokens_and_an_export_is_a_snapshot() -> None:
    engine = Engine(8, 16)
    handle = engine.serve(range(16))
    exported = engine.manager.block_table(handle)
    first = exported.copy()
    for n in range(17, 50):
        engine.decode(handle, [n])
        assert len(engine.table(handle)) == -(-n // 16)
        assert engine.step.block_tables.tolist() == [engine.table(handle)]
        assert engine.step.seq_lens.tolist() == [n]
    np.testing.assert_array_equal(exported, first)
    exported[:] = -7
    assert engine.table(handle)[0] == first[0]
