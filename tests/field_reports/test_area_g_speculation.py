"""Area G: look-ahead slots and roll-back of drafts."""

from typing import Any

import numpy as np
import pytest

from .helpers import Engine, state


@pytest.mark.parametrize(("length", "num_blocks"), [(14, 2), (11, 1)])
@pytest.mark.parametrize(("num_new", "lookahead"), [(5, 0), (1, 4), (0, 5)])
def test_p065_the_table_covers_the_look_ahead(
    length: int, num_blocks: int, num_new: int, lookahead: int
) -> None:
    engine = Engine(4, 16)
    handle = engine.serve(range(length))
    assert engine.step.schedule(handle, num_new, lookahead=lookahead)
    table = engine.table(handle)
    assert len(table) == num_blocks
    assert engine.step.block_tables.tolist() == [table]
    slots = [table[position // 16] * 16 + position % 16 for position in range(length, length + num_new)]
    assert engine.step.slot_mapping.tolist() == slots
    assert engine.manager.sequence(handle).num_reserved == length + 5
    assert engine.manager.stats().reserved_slots == lookahead


def visible(engine: Engine, handle: int) -> Any:
    """The sequence, and the pool without its counters of events."""
    stats = engine.manager.stats()
    names = [name for name in dir(stats) if name.endswith(("_blocks", "_slots")) and "peak" not in name]
    return state(engine.manager, [handle], salts=())[1:], [(name, getattr(stats, name)) for name in names]


@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_p066_rejected_drafts_are_rolled_back(accepted: int) -> None:
    engine = Engine(4, 16)
    handle = engine.serve(range(14))
    before = visible(engine, handle)
    assert engine.step.schedule(handle, 5)
    assert engine.pool() == (2, 2, 0, 0)
    engine.manager.commit(handle, accepted, list(range(14, 14 + accepted)))
    cursors = engine.manager.sequence(handle)
    assert (cursors.num_computed, cursors.num_scheduled, cursors.num_tokens) == (14 + accepted,) * 3
    assert engine.manager.tokens(handle).tolist() == list(range(14 + accepted))
    assert len(engine.table(handle)) == (2 if accepted == 5 else 1)
    assert engine.manager.stats().used_slots == 14 + accepted
    if accepted == 0:
        assert visible(engine, handle) == before


@pytest.mark.parametrize(("spare", "num_blocks"), [("free", 1), ("keep", 2)])
def test_p066_truncate_is_told_what_to_do_with_spare_blocks(spare: Any, num_blocks: int) -> None:
    engine = Engine(4, 16)
    handle = engine.serve(range(14))
    assert engine.step.schedule(handle, 5)
    engine.manager.commit(handle, 5, range(14, 19))
    assert engine.manager.truncate(handle, 16, spare=spare) == 2 - num_blocks
    assert len(engine.table(handle)) == num_blocks
    assert engine.pool() == (4 - num_blocks, num_blocks, 0, 0)
    assert engine.manager.tokens(handle).tolist() == list(range(16))


def test_p066_truncate_takes_a_reservation_back() -> None:
    engine = Engine(4, 16)
    handle = engine.serve(range(14))
    before = visible(engine, handle)
    assert engine.step.schedule(handle, 0, lookahead=5)
    engine.manager.commit(handle, 0)
    assert len(engine.table(handle)) == 2
    assert engine.manager.truncate(handle, 14) == 1
    assert visible(engine, handle) == before
    assert engine.step.schedule(handle, 0, lookahead=5)
    with pytest.raises(ValueError, match="expected at most the 0 tokens"):
        engine.manager.commit(handle, 1, [1])
    engine.manager.abort_step(handle)
    assert visible(engine, handle) == before


def test_p066_an_aborted_step_leaves_no_trace() -> None:
    engine = Engine(8, 4)
    handle = engine.serve(range(6))
    assert engine.step.schedule(handle, 1)
    before = visible(engine, handle)
    assert engine.step.schedule(handle, 7, lookahead=3)
    engine.manager.abort_step(handle)
    assert visible(engine, handle) == before
    engine.manager.commit(handle, 1, [6])
    with pytest.raises(ValueError, match="expected a sequence with a step in flight"):
        engine.manager.abort_step(handle)


def test_p066_the_accepted_branch_of_a_draft_tree_moves_into_a_row() -> None:
    engine = Engine(8, 4)
    a, b = engine.serve(range(3)), engine.serve(range(100, 106))
    assert engine.step.schedule([a, b], 6)
    slots = engine.step.slot_mapping.reshape(2, 6).copy()
    before = state(engine.manager, [a, b])
    moves = engine.manager.move_slots([a, b], [3, 1], np.array([0, 2, 5, 4], np.int32))
    assert state(engine.manager, [a, b]) == before
    assert moves.tolist() == [
        [slots[0, 2], slots[0, 1]],
        [slots[0, 5], slots[0, 2]],
        [slots[1, 4], slots[1, 0]],
    ]
    assert engine.manager.move_slots([a, b], 2, [0, 1, 0, 1]).shape == (0, 2)
    for wrong in ([1, 1], [2, 1], [0, 6], [-1, 0]):
        with pytest.raises(ValueError, match="accepted"):
            engine.manager.move_slots(a, 2, wrong)
    engine.manager.commit([a, b], [3, 1], [3, 4, 5, 106])
    assert engine.manager.tokens(a).tolist() == list(range(6))


@pytest.mark.parametrize(("num_cached", "normal", "with_option"), [(64, 64, 48), (16, 16, 0), (0, 0, 0)])
def test_p068_the_last_hit_can_be_left_to_be_computed_again(
    num_cached: int, normal: int, with_option: int
) -> None:
    engine = Engine(12, 16)
    engine.cache(range(num_cached))
    prompt = engine.manager.prepare([*range(num_cached), 99])
    assert engine.manager.match_prefix(prompt) == normal
    assert engine.manager.match_prefix(prompt, recompute_last_hit=True) == with_option
    before = engine.manager.stats()
    could: Any = engine.manager.can_allocate(prompt, recompute_last_hit=True)
    answer: Any = engine.manager.allocate(prompt, recompute_last_hit=True)
    assert could.num_cached_tokens == answer.num_cached_tokens == with_option
    after = engine.manager.stats()
    assert after.hit_tokens - before.hit_tokens == with_option
    assert after.hit_requests - before.hit_requests == int(with_option > 0)
