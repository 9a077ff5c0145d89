"""What is refused changes nothing, and what says that it can be done is done: over random states and options."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvblocks as kv
from field_reports.helpers import OPTIONS, VERBS, Engine, Operation, Walk

numbers = st.integers(0, 63)
operations = st.lists(st.tuples(st.sampled_from(VERBS), numbers, numbers), max_size=40)
pools = st.fixed_dictionaries(
    {
        "capacity": st.integers(3, 14),
        "block_size": st.sampled_from([1, 2, 3, 4]),
        "watermark_blocks": st.integers(0, 2),
        "seed": st.just(1),
        **{name: st.sampled_from(values) for name, values in OPTIONS.items()},
    }
)


def walk(pool: dict[str, Any], operations: list[Operation]) -> Walk:
    """A manager in a state that the operations lead to; the same one for the same arguments."""
    walker = Walk(Engine(**pool, max_tokens=256))
    for operation in operations:
        walker.take(operation)
        assert walker.manager.check_integrity() == []
    return walker


@given(pools, operations, st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4))
def test_allocate_succeeds_if_and_only_if_can_allocate_says_so(
    pool: dict[str, Any], operations: list[Operation], requests: list[tuple[int, int]]
) -> None:
    walker = walk(pool, operations)
    for a, b in requests:
        prompt, options = walker.prompt(a, b), walker.options(a, b)
        before = walker.state()
        could = walker.manager.can_allocate(prompt, **options)
        walker.manager.match_prefix(prompt)
        assert walker.state() == before
        free = walker.manager.stats().free_blocks + walker.manager.stats().cached_blocks
        answer = walker.manager.allocate(prompt, **options)
        if isinstance(answer, kv.Allocated):
            assert isinstance(could, kv.Ok)
            assert answer.num_cached_tokens == could.num_cached_tokens
            walker.handles.append(answer.handle)
            stats = walker.manager.stats()
            assert free - stats.free_blocks - stats.cached_blocks >= could.num_new_blocks
        else:
            assert could == answer
            assert walker.state() == before
            if isinstance(answer, kv.Later):
                assert answer.num_blocks >= 1
    walker.finish()


@given(pools, operations, st.data())
def test_a_whole_batch_fits_if_and_only_if_its_longest_prefix_is_all_of_it(
    pool: dict[str, Any], operations: list[Operation], data: st.DataObject
) -> None:
    whole, fit, again = (walk(pool, operations) for _ in range(3))
    few = [handle for handle in whole.resident() if len(whole.steps.get(handle, [])) < 8]
    handles = [handle for handle in few if whole.manager.sequence(handle).num_scheduled <= 39]
    handles = data.draw(st.permutations(handles))
    counts = data.draw(st.lists(st.integers(0, 20), min_size=len(handles), max_size=len(handles)))
    lookahead = data.draw(st.lists(st.integers(0, 5), min_size=len(handles), max_size=len(handles)))

    before, arrays = whole.state(), whole.engine.step.packed.copy()
    could = whole.engine.step.schedule(handles, counts, lookahead=lookahead)
    fitted = fit.engine.step.schedule(handles, counts, lookahead=lookahead, policy="fit")
    num_rows = fitted.num_seqs
    assert bool(could) == bool(fitted) == (num_rows == len(handles))
    if could:
        assert whole.state() == fit.state()
        return
    assert could.num_seqs == 0
    assert whole.state() == before
    np.testing.assert_array_equal(whole.engine.step.packed, arrays)
    # The prefix that fitted does fit, and one row more does not.
    longer = whole.engine.step.schedule(
        handles[: num_rows + 1], counts[: num_rows + 1], lookahead=lookahead[: num_rows + 1]
    )
    assert not longer
    assert longer.refusal == fitted.refusal
    assert whole.state() == before
    assert whole.engine.step.schedule(handles[:num_rows], counts[:num_rows], lookahead=lookahead[:num_rows])
    assert whole.state() == fit.state()
    # What was refused on the way has left no trace in what comes next either.
    assert again.engine.step.schedule(handles[:num_rows], counts[:num_rows], lookahead=lookahead[:num_rows])
    for walker in (whole, again):
        walker.engine.ask([1] * 3)
    assert whole.state() == again.state()


@given(pools, operations, st.data())
def test_a_full_step_takes_the_longest_prefix_and_the_rest_comes_later(
    pool: dict[str, Any], operations: list[Operation], data: st.DataObject
) -> None:
    wide, narrow = (walk(pool, operations) for _ in range(2))
    few = [handle for handle in wide.resident() if len(wide.steps.get(handle, [])) < 8]
    handles = [handle for handle in few if wide.manager.sequence(handle).num_scheduled <= 39]
    handles = data.draw(st.permutations(handles))
    counts = data.draw(st.lists(st.integers(0, 9), min_size=len(handles), max_size=len(handles)))
    max_seqs, max_tokens = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 24))
    step = kv.Step(narrow.manager, max_seqs=max_seqs, max_tokens=max_tokens, max_blocks_per_seq=64)

    before = narrow.state()
    if max(counts, default=0) > max_tokens:
        with pytest.raises(ValueError, match=r"num_new\[\d+\] is"):
            step.schedule(handles, counts, policy="fit")
        assert narrow.state() == before
        return
    room = [n for n in range(len(handles) + 1) if n <= max_seqs and sum(counts[:n]) <= max_tokens]
    expected = wide.engine.step.schedule(handles[: room[-1]], counts[: room[-1]], policy="fit")
    fitted = step.schedule(handles, counts, policy="fit")
    assert (fitted.num_seqs, fitted.num_tokens) == (expected.num_seqs, expected.num_tokens)
    assert narrow.state() == wide.state()
    if expected and room[-1] < len(handles):
        assert isinstance(fitted.refusal, kv.Later)
        assert fitted.refusal.num_blocks == 0
    else:
        assert fitted.refusal == expected.refusal


FOREIGN = kv.BlockManager(4, 2).prepare([1])


# These take nothing that could be wrong.
ALWAYS_RIGHT = {
    "check_integrity", "fragmentation", "pending_transfers", "reset_peaks", "reset_prefix_cache", "series", "stats",
}  # fmt: skip


def test_the_wrong_calls_cover_every_verb() -> None:
    verbs = {name for name, verb in vars(kv.BlockManager).items() if callable(verb) and name[0] != "_"}
    source = inspect.getsource(wrong_calls)
    assert len(verbs) >= 32
    assert {verb for verb in verbs if f"manager.{verb}(" not in source} == ALWAYS_RIGHT
    assert "step.schedule(" in source


def wrong_calls(walker: Walk) -> list[Callable[[], object]]:
    """Misuse of every verb, in the middle of a batch where there is one."""
    manager, step, handles = walker.manager, walker.engine.step, walker.handles
    return [
        lambda: manager.allocate(FOREIGN),
        lambda: manager.free([*handles, 0]),
        lambda: manager.preempt([*handles, 0]),
        lambda: manager.fork([*handles, 0], 2),
        lambda: manager.truncate([*handles, 0], 0),
        lambda: manager.commit([*handles, 0], 0),
        lambda: manager.abort_step([*handles, 0]),
        lambda: manager.reorder([*handles, 0], [0] * (len(handles) + 1)),
        lambda: manager.set_max_tokens([*handles, 0], 3),
        lambda: manager.set_max_tokens(handles, [-1] * max(1, len(handles))),
        lambda: manager.move_slots([*handles, 0], 0, []),
        lambda: manager.reclaimable([*handles, 0]),
        lambda: manager.sequence_usage([*handles, 0]),
        lambda: manager.sequence(0),
        lambda: manager.block_table(0),
        lambda: manager.tokens(0),
        lambda: manager.drop_range(0, 0, 1),
        lambda: manager.begin_transfer(0),
        lambda: manager.complete_transfer(0),
        lambda: manager.fail_transfer(0),
        lambda: manager.cancel_transfer(0),
        lambda: manager.match_prefix(FOREIGN),
        lambda: manager.can_allocate(FOREIGN),
        lambda: manager.prepare([-1]),
        lambda: manager.namespace_usage(salt=""),
        lambda: manager.drop_namespace(),
        lambda: manager.drop_namespace(salt=""),
        lambda: step.schedule([*handles, 0], 1),
        lambda: step.schedule(handles, 10_000, pad_seqs=17),
    ]


@given(pools, operations, st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6))
def test_refused_and_wrong_calls_leave_no_trace_in_later_ids(
    pool: dict[str, Any], operations: list[Operation], requests: list[tuple[int, int]]
) -> None:
    plain, disturbed = walk(pool, []), walk(pool, [])
    for number, operation in enumerate(operations):
        a, b = requests[number % len(requests)]
        before = disturbed.state()
        prompt, options = disturbed.prompt(a, b), disturbed.options(a, b)
        disturbed.manager.can_allocate(prompt, **options)
        assert not disturbed.manager.allocate(prompt, 1000)
        for call in wrong_calls(disturbed):
            with pytest.raises((ValueError, kv.KVBlocksError)):
                call()
        assert disturbed.state() == before
        for walker in (plain, disturbed):
            walker.take(operation)
        assert plain.state() == disturbed.state()
