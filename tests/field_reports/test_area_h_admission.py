"""Area H: preemption, admission, thrash, deadlock."""

from typing import Any

import pytest

import kvblocks as kv

from .helpers import Engine, state


def test_p069_not_now_and_never_are_different() -> None:
    engine = Engine(10, 16)
    assert isinstance(engine.manager.can_allocate(engine.manager.prepare(range(160))), kv.Ok)
    never = engine.ask(range(161))
    assert isinstance(never, kv.Never)
    assert (never.need_blocks, never.capacity_blocks) == (11, 10)
    engine.admit([7])
    later = engine.ask(range(160))
    assert isinstance(later, kv.Later)
    assert later.num_blocks == 1
    assert not later
    assert not never
    large = Engine(112, 16)
    assert large.manager.can_allocate(large.manager.prepare(range(1792)))
    assert isinstance(large.ask(range(1793)), kv.Never)
    assert isinstance(large.ask(range(16), reserve=1793), kv.Never)
    assert isinstance(large.ask(range(16), max_tokens=1793), kv.Never)


def test_p069_a_step_says_never_too() -> None:
    engine = Engine(4, 16)
    handle = engine.serve(range(16))
    refusal: Any = engine.step.schedule(handle, 49).refusal
    assert isinstance(refusal, kv.Never)
    assert (refusal.need_blocks, refusal.capacity_blocks) == (5, 4)
    assert engine.step.schedule(handle, 48)


def test_p071_blocks_in_a_transfer_are_not_reclaimable() -> None:
    engine = Engine(8, 4)
    a, b = engine.admit(range(16)), engine.admit(range(50, 58))
    transfer = engine.manager.begin_transfer(a)
    assert [engine.manager.reclaimable(handle) for handle in (a, b)] == [0, 2]
    victims = [handle for handle in (a, b) if engine.manager.reclaimable(handle) >= 2]
    assert victims == [b]
    freed = engine.manager.free(a)
    assert (freed.num_blocks, freed.num_deferred) == (0, 4)
    assert engine.pool() == (2, 2, 0, 4)
    assert engine.manager.complete_transfer(transfer) == 4
    assert engine.pool() == (6, 2, 0, 0)


def test_p071_reclaimable_is_what_free_gives_back() -> None:
    engine = Engine(12, 4)
    parent = engine.serve(range(10))
    child, other = *engine.manager.fork(parent).tolist(), engine.serve(range(50, 60))
    groups = [[parent], [child], [parent, child], [parent, other], [parent, child, other]]
    assert [engine.manager.reclaimable(group) for group in groups] == [0, 0, 3, 3, 6]
    assert engine.manager.free([parent, other]).num_blocks == 3
    assert engine.manager.reclaimable(child) == 3


def test_p073_preemption_keeps_the_history_and_nothing_else() -> None:
    engine = Engine(8, 16)
    handle = engine.serve(range(20), ids=range(100, 113))
    history = [*range(20), *range(100, 113)]
    prompts = [engine.manager.preempt(handle)[0] for _ in range(3)]
    assert [prompt.tolist() for prompt in (one.tokens for one in prompts)] == [history] * 3
    cursors = engine.manager.sequence(handle)
    assert (cursors.num_tokens, cursors.num_computed, cursors.num_blocks) == (33, 0, 0)
    assert cursors.is_preempted
    assert engine.manager.stats().preemptions == 1
    assert engine.pool() == (6, 0, 2, 0)
    could: Any = engine.manager.can_allocate(prompts[0])
    assert (could.num_cached_tokens, could.num_new_blocks) == (32, 1)
    answer: Any = engine.manager.allocate(prompts[0])
    assert (answer.handle, answer.num_cached_tokens, answer.num_new_tokens) == (handle, 32, 1)
    assert engine.manager.tokens(handle).tolist() == history
    assert len(engine.table(handle)) == 3
    engine.manager.reset_prefix_cache()
    engine.compute(handle)
    engine.pool()


@pytest.mark.parametrize(("null_block", "capacity"), [(True, 9), (False, 10)])
def test_p074_the_capacity_can_be_used_to_the_last_slot(null_block: bool, capacity: int) -> None:
    manager = kv.BlockManager(10, 16, null_block=null_block)
    assert manager.num_blocks == 10
    assert manager.capacity_blocks == manager.stats().capacity_blocks == capacity
    assert isinstance(manager.allocate(manager.prepare(range(capacity * 16 + 1))), kv.Never)
    answer: Any = manager.allocate(manager.prepare(range(capacity * 16)))
    assert sorted(manager.block_table(answer.handle)) == list(range(10 - capacity, 10))


def test_p075_the_watermark_binds_admissions_only() -> None:
    engine = Engine(100, 1, watermark_blocks=5)
    assert engine.manager.can_allocate(engine.manager.prepare(range(100)))  # the only sequence
    running = engine.admit(range(10))
    before = state(engine.manager, [running])
    later = engine.ask(range(1000, 1086))
    assert isinstance(later, kv.Later)
    assert later.num_blocks == 1
    assert state(engine.manager, [running]) == before
    engine.admit(range(1000, 1085))
    assert engine.pool()[0] == 5
    assert engine.step.schedule(running, 15)
    assert engine.pool()[0] == 0


def test_p075_declared_room_is_kept_from_later_admissions() -> None:
    engine = Engine(10, 4)
    running = engine.serve(range(8))
    engine.manager.set_max_tokens(running, 24)
    assert engine.manager.stats().promised_blocks == 4
    later = engine.ask(range(100, 120))
    assert isinstance(later, kv.Later)
    assert later.num_blocks == 1
    other = engine.serve(range(100, 116))
    assert engine.step.schedule(running, 16)
    assert engine.manager.stats().promised_blocks == 0
    # What a newcomer declares counts as well.
    engine.manager.free(other)
    assert isinstance(engine.ask(range(100, 104), max_tokens=20), kv.Later)
    assert engine.ask(range(100, 104), max_tokens=16)
    assert engine.manager.stats().promised_blocks == 3
