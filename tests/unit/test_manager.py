"""The verbs of `BlockManager` and `Step` as Python sees them: answers, arguments, errors, processes, threads."""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvblocks as kv


def run(step: kv.Step, manager: kv.BlockManager, handle: int, ids: list[int] | None = None) -> None:
    """Compute what is known of a sequence, then one step a token of `ids`."""
    cursors = manager.sequence(handle)
    num_new = cursors.num_tokens - cursors.num_scheduled
    assert step.schedule(handle, num_new)
    manager.commit(handle, num_new)
    for token in ids or []:
        assert step.schedule(handle, 1)
        manager.commit(handle, 1, [token])


def admit(manager: kv.BlockManager, tokens: Any, reserve: int | None = None) -> kv.Allocated:
    answer = manager.allocate(manager.prepare(tokens), reserve)
    assert isinstance(answer, kv.Allocated)
    return answer


@pytest.fixture
def manager() -> kv.BlockManager:
    return kv.BlockManager(11, 4)


@pytest.fixture
def step(manager: kv.BlockManager) -> kv.Step:
    return kv.Step(manager, max_seqs=8, max_tokens=64)


def test_a_full_hit_leaves_a_token_to_compute(manager: kv.BlockManager, step: kv.Step) -> None:
    run(step, manager, admit(manager, range(12)).handle)
    for length, cached in [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)]:
        prompt = manager.prepare(range(length))
        assert manager.match_prefix(prompt) == cached
        answer = manager.allocate(prompt)
        assert isinstance(answer, kv.Allocated)
        assert (answer.num_cached_tokens, answer.num_new_tokens) == (cached, length - cached)
        manager.free(answer.handle)


def test_ok_later_never_at_the_boundaries() -> None:
    manager = kv.BlockManager(11, 16)
    assert manager.capacity_blocks == 10
    assert manager.can_allocate(manager.prepare(range(160)))
    never = manager.can_allocate(manager.prepare(range(161)))
    assert isinstance(never, kv.Never)
    assert (never.need_blocks, never.capacity_blocks) == (11, 10)
    first = admit(manager, [1])
    later = manager.allocate(manager.prepare(range(160)))
    assert isinstance(later, kv.Later)
    assert later.num_blocks == 1
    assert not later
    assert not never
    # A reservation of a chunk needs less now, and is judged on the whole prompt all the same.
    assert admit(manager, range(160), 16)
    assert isinstance(manager.can_allocate(manager.prepare(range(161)), 16), kv.Never)
    assert manager.free(first.handle) == 1


def test_the_watermark_binds_admissions_only() -> None:
    manager = kv.BlockManager(101, 1, watermark_blocks=5)
    step = kv.Step(manager, max_seqs=4, max_tokens=128)
    assert manager.can_allocate(manager.prepare(range(100)))
    running = admit(manager, range(10)).handle
    assert manager.can_allocate(manager.prepare(range(1000, 1085)))
    assert manager.can_allocate(manager.prepare(range(1000, 1086))) == manager.allocate(
        manager.prepare(range(1000, 1086))
    )
    later = manager.can_allocate(manager.prepare(range(1000, 1086)))
    assert isinstance(later, kv.Later)
    assert later.num_blocks == 1
    assert step.schedule(running, 100)


def test_three_writers_of_a_half_full_tail_make_two_copies(manager: kv.BlockManager, step: kv.Step) -> None:
    parent = admit(manager, range(1, 7)).handle
    run(step, manager, parent)
    children = manager.fork(parent, 2).tolist()
    first, tail = manager.block_table(parent).tolist()
    assert step.schedule([parent, *children], 1).num_copies == 2
    assert {src for src, _ in step.copies.tolist()} == {tail}
    tails = [table[1] for table in step.block_tables.tolist()]
    assert len(set(tails)) == 3
    assert tails[2] == tail  # the last owner writes in place
    assert [table[0] for table in step.block_tables.tolist()] == [first] * 3
    manager.commit([parent, *children], 1, [7, 8, 9])
    assert [manager.tokens(handle).tolist()[5:] for handle in (parent, *children)] == [[6, 7], [6, 8], [6, 9]]
    stats = manager.stats()
    assert (stats.live_blocks, stats.logical_blocks, stats.copied_blocks) == (4, 6, 2)
    assert stats.used_slots == 4 + 3 * 3


def test_a_rejected_draft_leaves_no_trace() -> None:
    manager = kv.BlockManager(9, 16)
    step = kv.Step(manager, max_seqs=2, max_tokens=64)
    handle = admit(manager, range(14)).handle
    run(step, manager, handle)
    before = manager.stats()
    table = manager.block_table(handle).tolist()
    assert step.schedule(handle, 5)
    assert len(manager.block_table(handle)) == 2
    manager.commit(handle, 0)
    assert manager.block_table(handle).tolist() == table
    after = manager.stats()
    assert (after.free_blocks, after.used_slots) == (before.free_blocks, before.used_slots)
    assert step.schedule(handle, 5)
    manager.commit(handle, 2, [1, 2])
    assert manager.sequence(handle).num_computed == 16
    assert len(manager.block_table(handle)) == 1


def test_steps_may_be_committed_late(manager: kv.BlockManager, step: kv.Step) -> None:
    handle = admit(manager, range(6)).handle
    assert step.schedule(handle, 6)
    assert step.schedule(handle, 1)
    assert step.schedule(handle, 1)
    manager.commit(handle, 6)
    with pytest.raises(ValueError, match=r"counts\[0\] is 0, expected all 1 tokens, since a later step"):
        manager.commit(handle, 0)
    manager.commit(handle, 1, [6])
    manager.commit(handle, 1, [7])
    assert manager.tokens(handle).tolist() == list(range(8))
    with pytest.raises(ValueError, match="schedule comes first"):
        manager.commit(handle, 1, [8])


def test_a_preempted_sequence_keeps_its_handle_and_history(manager: kv.BlockManager, step: kv.Step) -> None:
    handle = admit(manager, range(6)).handle
    run(step, manager, handle, [50, 51, 52])
    prompts = [manager.preempt(handle)[0] for _ in range(3)]
    assert manager.stats().preemptions == 1
    assert manager.stats().live_blocks == 0
    assert {tuple(prompt.tokens.tolist()) for prompt in prompts} == {(0, 1, 2, 3, 4, 5, 50, 51, 52)}
    for verb in (lambda: step.schedule(handle, 1), lambda: manager.fork(handle)):
        with pytest.raises(kv.PreemptedError, match="is preempted"):
            verb()
    answer = manager.allocate(prompts[0])
    assert isinstance(answer, kv.Allocated)
    assert (answer.handle, answer.num_cached_tokens, answer.num_new_tokens) == (handle, 8, 1)
    with pytest.raises(kv.StaleHandleError, match="freed or resumed"):
        manager.allocate(prompts[1])
    stats = manager.stats()
    assert (stats.hit_tokens, stats.readmit_hit_tokens) == (0, 8)
    assert (stats.queried_requests, stats.queried_tokens, stats.readmit_queried_tokens) == (1, 6, 9)


def test_a_stale_handle_is_an_error_and_not_the_next_owner(manager: kv.BlockManager, step: kv.Step) -> None:
    old = admit(manager, range(6)).handle
    manager.free(old)
    new = admit(manager, range(6)).handle
    assert new & 0xFFFFFFFF == old & 0xFFFFFFFF
    verbs: list[Callable[[], object]] = [
        lambda: manager.free(old),
        lambda: manager.free([new, old]),
        lambda: manager.sequence(old),
        lambda: manager.block_table(old),
        lambda: manager.tokens(old),
        lambda: manager.commit(old, 0),
        lambda: manager.fork(old),
        lambda: manager.truncate(old, 0),
        lambda: manager.preempt(old),
        lambda: step.schedule([new, old], 1),
    ]
    before = manager.stats()
    for verb in verbs:
        with pytest.raises(kv.StaleHandleError, match=hex(old)):
            verb()
    assert manager.stats() == before
    assert manager.free([old, new, old], missing_ok=True) == 2


def test_arguments_are_named_with_their_numbers(manager: kv.BlockManager, step: kv.Step) -> None:
    handle = admit(manager, range(6)).handle
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (
            lambda: kv.BlockManager(1, 4),
            ValueError,
            r"num_blocks is 1, expected 2 \(block 0 is the null block\)",
        ),
        (lambda: kv.BlockManager(-1, 4), ValueError, "num_blocks is -1, expected 0 or more"),
        (lambda: kv.BlockManager(8, 0), ValueError, "block_size is 0, expected 1 to"),
        (
            lambda: kv.BlockManager(8, 4, watermark_blocks=8),
            ValueError,
            "watermark_blocks is 8, expected at most 7",
        ),
        (lambda: kv.BlockManager(2**31 - 1, 2**31 - 1), ValueError, r"num_blocks \* block_size is"),
        (lambda: kv.BlockManager(2**70, 4), ValueError, "num_blocks is 9223372036854775807"),
        (lambda: kv.Step(manager, max_seqs=0), ValueError, "max_seqs is 0, expected 1 or more"),
        (lambda: manager.prepare([1, -1]), ValueError, r"tokens\[1\] is -1, expected an id in 0..2\*\*32"),
        (lambda: manager.prepare([2**32]), ValueError, r"tokens\[0\] is 4294967296"),
        (
            lambda: manager.prepare(np.zeros(3)),
            TypeError,
            "tokens is a float64 array of rank 1, expected int32",
        ),
        (lambda: manager.prepare(np.zeros((2, 2), np.int64)), TypeError, "int64 array of rank 2"),
        (lambda: manager.prepare("abc"), TypeError, "tokens is a str, expected"),
        (lambda: manager.prepare(None), TypeError, "tokens is a NoneType, expected"),
        (lambda: manager.allocate(manager.prepare([1]), -1), ValueError, "reserve is -1, expected 0 or more"),
        (lambda: step.schedule(np.array([1], np.int32), 1), TypeError, "handles is a int32 array"),
        (lambda: step.schedule(handle, np.array([1.0])), TypeError, "num_new is a float64 array"),
        (lambda: step.schedule(handle, -1), ValueError, "num_new is -1, expected 0 or more"),
        (lambda: step.schedule(handle, [1, 1]), ValueError, "num_new has 2 entries, expected 1"),
        (
            lambda: step.schedule(handle, 2**40),
            ValueError,
            "num_new holds 1099511627776, which is beyond int32",
        ),
        (lambda: step.schedule([handle] * 2, 1), ValueError, "names sequence 0x100000001 more than once"),
        (lambda: step.schedule(handle, 65), ValueError, "sum of num_new is 65, expected at most 64"),
        (lambda: step.schedule([handle] + [0] * 8, 0), kv.StaleHandleError, "handle 0x0"),
        (lambda: step.schedule(handle, 1, pad_seqs=9), ValueError, "pad_seqs is 9, expected at most 8"),
        (
            lambda: step.schedule(handle, 1, pad_tokens=65),
            ValueError,
            "pad_tokens is 65, expected at most 64",
        ),
        (
            lambda: step.schedule(handle, 1, policy="some"),
            ValueError,
            'policy is "some", expected "all" or "fit"',
        ),
        (lambda: manager.commit(handle, 1), ValueError, r"counts\[0\] is 1, expected a step in flight"),
        (
            lambda: manager.truncate(handle, 7),
            ValueError,
            r"lengths\[0\] is 7, expected at most its 6 tokens",
        ),
        (
            lambda: manager.truncate(handle, 1, spare="all"),
            ValueError,
            'spare is "all", expected "free" or "keep"',
        ),
        (
            lambda: manager.fork(handle, 2**30),
            ValueError,
            "sum of num_children is 1073741824, expected at most",
        ),
        (
            lambda: kv.BlockManager(8, 4).allocate(manager.prepare([1])),
            ValueError,
            "by another block manager",
        ),
    ]
    before = manager.stats()
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()
    assert manager.stats() == before
    assert manager.check_integrity() == []


def test_a_batch_wider_than_the_block_tables_is_refused_whole() -> None:
    manager = kv.BlockManager(9, 2)
    step = kv.Step(manager, max_seqs=2, max_tokens=16, max_blocks_per_seq=2)
    short, long = admit(manager, range(4)).handle, admit(manager, range(100, 105)).handle
    assert step.schedule(short, 4)
    manager.commit(short, 4)
    with pytest.raises(ValueError, match=r"blocks of handles\[1\] is 3, expected at most the 2 columns"):
        step.schedule([short, long], [0, 1])
    assert manager.sequence(short).num_scheduled == 4
    assert step.block_tables.tolist() == [manager.block_table(short).tolist()]


@pytest.mark.parametrize(
    ("name", "wrong", "error", "text"),
    [
        ("block_tables", np.zeros((3, 4), np.int32), ValueError, "block_tables has 3 rows, expected 2"),
        ("block_tables", np.zeros((2, 4), np.int64), TypeError, "block_tables"),
        (
            "block_tables",
            np.zeros((4, 8), np.int32)[::2, ::2],
            ValueError,
            "block_tables is not C-contiguous",
        ),
        ("positions", np.zeros(7, np.int32), ValueError, "positions has 7 entries, expected 8"),
        ("query_start_loc", np.zeros(2, np.int32), ValueError, "query_start_loc has 2 entries, expected 3"),
        ("copies", np.zeros((2, 3), np.int32), ValueError, "copies has 3 columns, expected 2"),
        ("seq_lens", np.broadcast_to(np.int32(0), 2), ValueError, "seq_lens"),
    ],
)
def test_step_buffers_are_checked_once_made(
    manager: kv.BlockManager, name: str, wrong: Any, error: type[Exception], text: str
) -> None:
    from kvblocks._core import StepBuffers

    arrays: dict[str, Any] = {
        "block_tables": np.zeros((2, 4), np.int32),
        "slot_mapping": np.zeros(8, np.int64),
        "positions": np.zeros(8, np.int32),
        "seq_lens": np.zeros(2, np.int32),
        "query_start_loc": np.zeros(3, np.int32),
        "copies": np.zeros((2, 2), np.int32),
    }
    StepBuffers(manager, **arrays)
    with pytest.raises(error, match=text):
        StepBuffers(manager, **(arrays | {name: wrong}))
    with pytest.raises(ValueError, match="shares memory"):
        StepBuffers(manager, **(arrays | {"seq_lens": arrays["positions"][:2]}))


def test_without_a_null_block_ids_start_at_zero_and_tables_are_padded_with_minus_one() -> None:
    manager = kv.BlockManager(3, 4, null_block=False)
    step = kv.Step(manager, max_seqs=3, max_tokens=16)
    assert (manager.capacity_blocks, manager.null_block_id) == (3, -1)
    long, short = admit(manager, range(8)).handle, admit(manager, range(50, 53)).handle
    assert step.schedule([long, short], [8, 3], pad_seqs=3)
    assert step.block_tables.tolist() == [[0, 1], [2, -1], [-1, -1]]


def test_block_ids_do_not_depend_on_the_seed() -> None:
    tables = []
    for seed in (1, 2):
        manager = kv.BlockManager(12, 2, seed=seed)
        step = kv.Step(manager, max_seqs=8, max_tokens=32)
        for i in range(30):
            handle = admit(manager, [i % 3, i % 2, i % 5, 1, i % 7]).handle
            run(step, manager, handle)
            tables.append((i, manager.block_table(handle).tolist()))
            manager.free(handle)
    assert tables[:30] == tables[30:]


def test_a_row_that_changes_owner_is_written_again(manager: kv.BlockManager, step: kv.Step) -> None:
    long, short = admit(manager, range(12)).handle, admit(manager, range(50, 53)).handle
    assert step.schedule([long, short], 1)
    assert step.schedule([short, long], 1)
    expected = [manager.block_table(handle).tolist() for handle in (short, long)]
    assert step.block_tables.tolist() == [expected[0] + [0, 0], expected[1]]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["prepare", "free", "commit", "fork", "truncate", "preempt", "sequence", "tokens", "schedule"]
            ),
            st.lists(
                st.one_of(
                    st.integers(-(2**80), 2**80),
                    st.floats(),
                    st.none(),
                    st.text(max_size=3),
                    st.lists(st.integers(-5, 2**33), max_size=3),
                    st.just(np.zeros(2, np.float32)),
                    st.just(np.arange(3, dtype=np.int64)),
                    st.just(np.arange(3, dtype=np.int32)),
                    st.just(object()),
                ),
                min_size=1,
                max_size=3,
            ),
        ),
        max_size=20,
    )
)
def test_wrong_arguments_only_ever_raise_the_documented_errors(calls: list[tuple[str, list[Any]]]) -> None:
    manager = kv.BlockManager(9, 2)
    step = kv.Step(manager, max_seqs=4, max_tokens=8)
    handle = admit(manager, range(5)).handle
    for verb, arguments in calls:
        owner = step if verb == "schedule" else manager
        for call in (arguments, [handle, *arguments]):
            with contextlib.suppress(ValueError, TypeError, kv.KVBlocksError):
                getattr(owner, verb)(*call)
            if not manager.stats().num_seqs:
                handle = admit(manager, range(5)).handle
        assert manager.check_integrity() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads
def test_a_forked_child_gets_a_clear_error(manager: kv.BlockManager, step: kv.Step) -> None:
    prompt = manager.prepare([1])
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            calls: list[Callable[[], object]] = [
                manager.stats,
                manager.check_integrity,
                lambda: manager.allocate(prompt),
                lambda: step.schedule([], []),
            ]
            for call in calls:
                with pytest.raises(kv.ForkedProcessError):
                    call()
            assert kv.BlockManager(4, 2).stats().free_blocks == 3
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert manager.allocate(prompt)


def test_threads_may_share_a_manager() -> None:
    manager = kv.BlockManager(400, 4)

    def work(seed: int) -> None:
        step = kv.Step(manager, max_seqs=4, max_tokens=64)
        for i in range(200):
            handle = admit(manager, [seed % 4] * 8 + [i % 3, seed]).handle
            run(step, manager, handle, [1, 2])
            children = manager.fork(handle, 2)
            assert step.schedule(children, 1)
            manager.preempt(children[:1])
            manager.free([handle, *children.tolist()])
            assert manager.stats().capacity_blocks == 399

    with ThreadPoolExecutor(8) as pool:
        for outcome in [pool.submit(work, seed) for seed in range(8)]:
            outcome.result()
    assert manager.check_integrity() == []
    assert manager.stats().live_blocks == 0
