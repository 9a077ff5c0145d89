"""Area B: fork, copy-on-write, parallel sampling, beam search."""

import itertools

import pytest

from .helpers import Engine, state


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("batched", [True, False])
def test_p016_children_are_snapshots_whoever_writes_first(order: tuple[int, ...], batched: bool) -> None:
    engine = Engine(10, 4)
    parent = engine.serve(range(1, 7))
    full, tail = engine.table(parent)
    family = [parent, *engine.manager.fork(parent, 2).tolist()]
    assert [engine.table(member) for member in family] == [[full, tail]] * 3
    writers = [family[i] for i in order]
    copies = []
    for group in [writers] if batched else [[writer] for writer in writers]:
        assert engine.step.schedule(group, 1)
        copies += engine.step.copies.tolist()
        engine.manager.commit(group, 1, [7 + family.index(writer) for writer in group])
    assert [src for src, _ in copies] == [tail, tail]
    tables = [engine.table(member) for member in family]
    assert [table[0] for table in tables] == [full] * 3
    assert {table[1] for table in tables} == {tail, *(dst for _, dst in copies)}
    assert engine.table(writers[-1])[1] == tail  # the last owner writes in place
    assert [engine.manager.tokens(member).tolist() for member in family] == [
        [*range(1, 7), last] for last in (7, 8, 9)
    ]
    stats = engine.manager.stats()
    assert (stats.live_blocks, stats.logical_blocks, stats.used_slots) == (4, 6, 4 + 3 * 3)
    engine.pool()


def test_p017_one_step_has_one_list_of_copies() -> None:
    engine = Engine(10, 4)
    parent = engine.serve(range(6))
    bystander = engine.serve(range(50, 59))
    family = [parent, *engine.manager.fork(parent, 2).tolist()]
    live = {block for handle in (*family, bystander) for block in engine.table(handle)}
    tail = engine.table(parent)[1]
    assert engine.step.schedule([bystander, *family], 1).num_copies == 2
    sources, targets = zip(*engine.step.copies.tolist(), strict=True)
    assert sources == (tail, tail)
    assert len(set(targets)) == 2
    assert live.isdisjoint(targets)
    assert sum(engine.table(member)[1] == tail for member in family) == 1
    engine.pool()


@pytest.mark.parametrize("lookahead", [0, 4])
def test_p019_only_the_shared_tail_is_copied_however_much_is_appended(lookahead: int) -> None:
    engine = Engine(10, 4)
    parent = engine.serve(range(3))
    (child,) = engine.manager.fork(parent).tolist()
    before = engine.table(parent)
    assert engine.step.schedule(child, 6 - lookahead, lookahead=lookahead)
    ((src, dst),) = engine.step.copies.tolist()
    assert src == before[0]
    table = engine.table(child)
    assert (table[0], len(table)) == (dst, 3)
    assert engine.table(parent) == before
    assert engine.manager.tokens(parent).tolist() == [0, 1, 2]
    assert engine.pool() == (6, 4, 0, 0)


def test_p019_a_full_shared_block_is_never_copied() -> None:
    engine = Engine(10, 4)
    parent = engine.serve(range(4))
    (child,) = engine.manager.fork(parent).tolist()
    assert engine.step.schedule([parent, child], 6).num_copies == 0
    assert engine.table(parent)[0] == engine.table(child)[0]


@pytest.mark.parametrize("merge", [False, True])
def test_p020_of_two_equal_blocks_none_is_lost(merge: bool) -> None:
    engine = Engine(5, 16, merge=merge)
    a, b = engine.admit(range(32)), engine.admit(range(32))
    assert engine.step.schedule([a, b], 32)
    engine.manager.commit([a, b], 32)
    assert engine.pool() == ((3, 2, 0, 0) if merge else (1, 4, 0, 0))
    assert (engine.table(a) == engine.table(b)) == merge
    engine.manager.free(a)
    assert engine.hits(range(33)) == 32
    engine.manager.free(b)
    assert engine.hits(range(33)) == 32
    if not merge:
        # One block is free, two are the copy that was used longest ago.
        other = engine.admit(range(100, 148))
        assert engine.manager.stats().evicted_blocks == 2
        assert engine.hits(range(33)) == 32
        engine.manager.free(other)
    engine.pool()


def test_p020_a_merged_block_is_released_when_no_step_reads_it_any_more() -> None:
    engine = Engine(8, 4, merge=True)
    a, b = engine.admit(range(4)), engine.admit(range(4))
    assert engine.step.schedule([a, b], 4)
    assert engine.step.schedule([a, b], 1)  # reads both blocks
    engine.manager.commit([a, b], 4)
    first = engine.table(a)[0]
    assert engine.table(b)[0] == first
    assert engine.pool() == (4, 4, 0, 0)
    engine.manager.commit([a, b], 1, [1, 2])
    assert engine.pool() == (5, 3, 0, 0)
    # The column is shown as changed.
    assert engine.step.schedule([a, b], 1)
    assert engine.step.changes.tolist() == [[1, 0, 2]]
    assert engine.step.block_tables[1, 0] == first


def test_p020_rows_of_one_step_that_hold_the_same_become_one_block_when_committed() -> None:
    engine = Engine(8, 16, merge=True, publish="schedule")
    one, two = (engine.admit(range(40)) for _ in range(2))
    assert engine.step.schedule([one, two], 40)
    assert engine.pool() == (2, 6, 0, 0)
    late = engine.admit(range(40))  # hits the first of the two, before either is computed
    assert engine.table(late)[:2] == engine.table(one)[:2] != engine.table(two)[:2]
    engine.manager.commit([one, two], 40)
    assert engine.table(one)[:2] == engine.table(two)[:2]
    assert engine.pool() == (3, 5, 0, 0)  # two of each, and three tails
    assert engine.step.schedule([one, two], 1)
    assert engine.step.changes.tolist() == [[1, 0, 3]]  # the second row shows the first one's blocks


def test_p020_a_merge_counts_as_a_hit_and_what_it_uses_cannot_be_aborted() -> None:
    engine = Engine(8, 16, merge=True, publish="schedule")
    one, two = (engine.admit(range(40)) for _ in range(2))
    assert engine.step.schedule([one, two], 40)
    engine.manager.commit(two, 40)
    assert engine.table(one)[:2] == engine.table(two)[:2]
    before = state(engine.manager, [one, two])
    with pytest.raises(ValueError, match="nobody has hit"):
        engine.manager.abort_step(one)
    assert state(engine.manager, [one, two]) == before
    engine.manager.preempt(two)
    engine.manager.abort_step(one)
    assert engine.pool() == (5, 3, 0, 0)
