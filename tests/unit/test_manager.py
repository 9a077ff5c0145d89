"""The verbs of `BlockManager` and `Step` as Python sees them: answers, arguments, errors, processes, threads."""

import inspect
import os
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvblocks as kv
from kvblocks._core import StepBuffers

VERBS = [name for name, verb in vars(kv.BlockManager).items() if callable(verb) and not name.startswith("_")]


def run(step: kv.Step, manager: kv.BlockManager, handle: int, ids: list[int] | None = None) -> None:
    """Compute what is known of a sequence, then one step a token of `ids`."""
    cursors = manager.sequence(handle)
    num_new = cursors.num_tokens - cursors.num_scheduled
    assert step.schedule(handle, num_new)
    manager.commit(handle, num_new)
    for token in ids or []:
        assert step.schedule(handle, 1)
        manager.commit(handle, 1, [token])


def admit(manager: kv.BlockManager, tokens: Any, reserve: int | None = None, **keys: Any) -> kv.Allocated:
    answer = manager.allocate(manager.prepare(tokens, **keys), reserve)
    assert isinstance(answer, kv.Allocated)
    return answer


@pytest.fixture
def manager() -> kv.BlockManager:
    return kv.BlockManager(11, 4)


@pytest.mark.parametrize("typecode", ["i", "I", "q", "h"])
def test_an_array_array_is_taken_like_a_list(manager: kv.BlockManager, typecode: str) -> None:
    ids = array(typecode, range(9))
    prompt = manager.prepare(ids)
    assert (prompt.tokens == np.arange(9)).all()
    assert (prompt.block_hashes == manager.prepare(list(range(9))).block_hashes).all()
    step = kv.Step(manager, max_seqs=2, max_tokens=16, max_blocks_per_seq=4)
    handles = array("q", [admit(manager, ids).handle])
    ids.append(9)  # nobody holds on to its memory
    assert step.schedule(handles, array("i", [9]))
    manager.commit(handles, array("i", [9]))
    assert step.schedule(handles, 1)
    manager.commit(handles, 1, array(typecode, [7]))
    assert manager.tokens(handles[0]).tolist() == [*range(9), 7]
    with pytest.raises(TypeError, match=r"tokens\[0\] is a float, expected an int"):
        manager.prepare(array("d", [1.0]))
    with pytest.raises(ValueError, match=r"tokens\[1\] is -1"):
        manager.prepare(array("i", [1, -1]))


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
    freed = manager.free(first.handle)
    assert (freed.num_blocks, freed.num_deferred) == (1, 0)
    assert freed
    assert repr(freed) == "Freed(num_blocks=1, num_deferred=0)"


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
    verbs: list[Callable[[], object]] = [
        lambda: step.schedule(handle, 1),
        lambda: manager.commit(handle, 0),
        lambda: manager.abort_step(handle),
        lambda: manager.fork(handle),
        lambda: manager.reorder(handle, [0]),
        lambda: manager.truncate(handle, 0),
        lambda: manager.drop_range(handle, 0, 0),
        lambda: manager.move_slots(handle, 0, []),
        lambda: manager.begin_transfer(handle),
    ]
    for verb in verbs:
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
        lambda: manager.abort_step(old),
        lambda: manager.reorder([new, old], [0, 1]),
        lambda: manager.drop_range(old, 0, 1),
        lambda: manager.move_slots([new, old], 0, []),
        lambda: manager.set_max_tokens([new, old], 9),
        lambda: manager.reclaimable([new, old]),
        lambda: manager.begin_transfer(old),
        lambda: step.schedule([new, old], 1),
    ]
    before = manager.stats()
    for verb in verbs:
        with pytest.raises(kv.StaleHandleError, match=hex(old)):
            verb()
    assert manager.stats() == before
    assert manager.free([old, new, old], missing_ok=True).num_blocks == 2


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
        (lambda: kv.Step(manager, max_seqs=0), ValueError, "max_seqs is 0, expected 1 to 2147483647"),
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
        (
            lambda: manager.allocate(manager.prepare([1]), max_resident_blocks=0),
            ValueError,
            "max_resident_blocks is 0, expected 1 or more",
        ),
        (
            lambda: manager.can_allocate(manager.prepare([1]), max_resident_blocks=0),
            ValueError,
            "max_resident_blocks is 0, expected 1 or more",
        ),
        (lambda: step.schedule(np.array([1], np.int32), 1), TypeError, "handles is an int32 array"),
        (lambda: step.schedule(handle, np.array([1.0])), TypeError, "num_new is a float64 array"),
        (lambda: step.schedule(handle, -1), ValueError, "num_new is -1, expected 0 or more"),
        (lambda: step.schedule(handle, [1, 1]), ValueError, "num_new has 2 entries, expected 1"),
        (
            lambda: step.schedule(handle, 2**40),
            ValueError,
            "num_new holds 1099511627776, which is beyond int32",
        ),
        (lambda: step.schedule([handle] * 2, 1), ValueError, f"names sequence {handle:#x} more than once"),
        (lambda: step.schedule(handle, 65), ValueError, "sum of num_new is 65, expected at most 64"),
        (lambda: step.schedule([handle, 0], 0), kv.StaleHandleError, "handle 0x0"),
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


SIZES = MAX_SEQS, MAX_TOKENS, MAX_BLOCKS = 2, 8, 4
PLACES = StepBuffers.layout(*SIZES)
NUM_WORDS = PLACES["num_words"]


def view(memory: NDArray[np.int64], name: str, dtype: Any) -> list[int]:
    """One of the arrays of a step's memory."""
    numbers: list[int] = memory.view(np.uint8)[slice(*PLACES[name])].view(dtype).tolist()
    return numbers


@pytest.mark.parametrize(
    ("memory", "error", "text"),
    [
        ([], ValueError, "memory is empty"),
        (
            [np.zeros(NUM_WORDS - 1, np.int64)],
            ValueError,
            f"memory has {NUM_WORDS - 1} entries, expected {NUM_WORDS}",
        ),
        ([np.zeros(NUM_WORDS, np.int32)], TypeError, "memory holds an item that is no int64 array"),
        ([np.zeros((NUM_WORDS, 1), np.int64)], TypeError, "memory holds an item that is no int64 array"),
        (np.zeros(NUM_WORDS, np.int64), TypeError, "memory holds an item that is no int64 array"),
        ([np.zeros(2 * NUM_WORDS, np.int64)[::2]], ValueError, "memory is not C-contiguous"),
        ([np.zeros(8 * NUM_WORDS + 1, np.uint8)[1:].view(np.int64)], ValueError, "not aligned to 8 bytes"),
        ([np.broadcast_to(np.int64(0), NUM_WORDS)], ValueError, "memory is"),
    ],
)
def test_step_buffers_are_checked_once_made(
    manager: kv.BlockManager, memory: Any, error: type[Exception], text: str
) -> None:
    StepBuffers(manager, [np.zeros(NUM_WORDS, np.int64)], *SIZES)
    with pytest.raises(error, match=text):
        StepBuffers(manager, memory, *SIZES)


def test_step_buffers_must_not_share_memory_nor_be_read_only(manager: kv.BlockManager) -> None:
    memory = np.zeros(2 * NUM_WORDS - 1, np.int64)
    with pytest.raises(ValueError, match="shares memory"):
        StepBuffers(manager, [memory[:NUM_WORDS], memory[-NUM_WORDS:]], *SIZES)
    memory.flags.writeable = False
    with pytest.raises(ValueError, match="memory is read-only"):
        StepBuffers(manager, [memory[:NUM_WORDS]], *SIZES)


@pytest.mark.parametrize("place", range(3))
def test_sizes_of_step_buffers_are_named(manager: kv.BlockManager, place: int) -> None:
    sizes = list(SIZES)
    sizes[place] = -1
    name = ("max_seqs", "max_tokens", "max_blocks_per_seq")[place]
    with pytest.raises(ValueError, match=f"{name} is -1"):
        StepBuffers(manager, [np.zeros(NUM_WORDS, np.int64)], *sizes)
    with pytest.raises(ValueError, match=f"{name} is -1"):
        StepBuffers.layout(*sizes)
    sizes[place] = 2**31
    with pytest.raises(ValueError, match=f"{name} is 2147483648, expected at most 2147483647"):
        StepBuffers(manager, [np.zeros(NUM_WORDS, np.int64)], *sizes)
    sizes[place] = 2**80
    with pytest.raises(ValueError, match=f"{name} is 9223372036854775807, expected at most"):
        StepBuffers.layout(*sizes)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_seqs": 2**40}, ValueError, "max_seqs is 1099511627776, expected 1 to 2147483647"),
        ({"max_tokens": 0}, ValueError, "max_tokens is 0, expected 1 to 2147483647"),
        ({"max_seqs": "3"}, TypeError, "max_seqs is str, expected an int"),
        ({"max_tokens": None}, TypeError, "max_tokens is NoneType, expected an int"),
        ({"max_blocks_per_seq": 1.5}, TypeError, "max_blocks_per_seq is float, expected an int"),
        ({"max_blocks_per_seq": 2**31}, ValueError, "max_blocks_per_seq is 2147483648, expected 1 to"),
        ({"depth": 65}, ValueError, "depth is 65, expected 1 to 64"),
        (
            {"max_seqs": 2**31 - 1, "max_blocks_per_seq": 2**31 - 1},
            MemoryError,
            "max_seqs 2147483647, max_tokens 8192, max_blocks_per_seq 2147483647, depth 1: no memory for 1 x 18",
        ),
    ],
)
def test_sizes_of_a_step_are_named_with_their_bounds(
    manager: kv.BlockManager, options: dict[str, int], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        kv.Step(manager, **options)


def test_a_step_of_no_manager_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="manager is NoneType, expected a BlockManager"):
        kv.Step(None)  # type: ignore[arg-type]


def test_step_buffers_are_made_once_and_not_used_before(manager: kv.BlockManager) -> None:
    class Unmade(StepBuffers):
        def __init__(self) -> None:
            pass

    with pytest.raises(RuntimeError, match="__init__ of the step was not called"):
        Unmade().schedule([], 1)
    with pytest.raises(RuntimeError, match="not called"):
        _ = Unmade().num_rows
    memory = np.zeros(NUM_WORDS, np.int64)
    step = StepBuffers(manager, [memory], *SIZES)
    step.schedule(admit(manager, range(6)).handle, 6)
    shown = view(memory, "block_tables", np.int32)
    assert shown[:2] == [1, 2]
    with pytest.raises(RuntimeError, match="__init__ of the step was called twice"):
        StepBuffers.__init__(step, manager, [memory], *SIZES)
    assert view(memory, "block_tables", np.int32) == shown


def test_step_buffers_write_to_no_memory_before_all_is_checked(manager: kv.BlockManager) -> None:
    memory = np.full(NUM_WORDS, 7, np.int64)
    with pytest.raises(ValueError, match="memory has 1 entries"):
        StepBuffers(manager, [memory, np.zeros(1, np.int64)], *SIZES)
    assert (memory == 7).all()


def test_steps_use_their_arrays_in_turn(manager: kv.BlockManager) -> None:
    step = kv.Step(manager, max_seqs=2, depth=3)
    assert (step.current, step.num_rows, step.num_tokens) == (2, 0, 0)
    handle = admit(manager, range(6)).handle
    seen = []
    for num_new in (3, 1, 1, 1):
        assert step.schedule(handle, num_new, pad_tokens=4)
        seen.append((step.current, step.num_rows, step.num_tokens, step.positions[:num_new].tolist()))
    assert seen == [(0, 1, 4, [0, 1, 2]), (1, 1, 4, [3]), (2, 1, 4, [4]), (0, 1, 4, [5])]
    assert not step.schedule(handle, 1000)
    assert step.current == 0


def test_the_callers_arrays_are_filled_and_cannot_be_resized(manager: kv.BlockManager) -> None:
    memory = np.full(NUM_WORDS, -1, np.int64)
    sizes = {name: place[1] - place[0] for name, place in PLACES.items() if name != "num_words"}
    assert sizes == {
        "slot_mapping": 8 * MAX_TOKENS,
        "positions": 4 * MAX_TOKENS,
        "seq_lens": 4 * MAX_SEQS,
        "query_start_loc": 4 * (MAX_SEQS + 1),
        "copies": 8 * MAX_SEQS,
        "changes": 12 * MAX_SEQS,
        "block_tables": 4 * MAX_SEQS * MAX_BLOCKS,
    }
    starts = sorted(place for name, place in PLACES.items() if name != "num_words")
    assert all(start % 8 == 0 for start, _ in starts)
    assert all(end <= start for (_, end), (start, _) in pairwise(starts))
    assert starts[-1] == PLACES["block_tables"]
    assert starts[-1][1] <= 8 * NUM_WORDS
    buffers = StepBuffers(manager, [memory], *SIZES)
    assert view(memory, "block_tables", np.int32) == [0] * 8
    handle = admit(manager, range(6)).handle
    scheduled = buffers.schedule(handle, 6, pad_seqs=2, pad_tokens=8)
    assert (scheduled.num_seqs, scheduled.num_tokens, scheduled.num_changes, scheduled.max_blocks) == (
        1,
        6,
        1,
        2,
    )
    assert (buffers.num_rows, buffers.num_tokens, buffers.num_changes, buffers.num_cols) == (2, 8, 1, 2)
    table = manager.block_table(handle).tolist()
    assert view(memory, "block_tables", np.int32) == [*table, 0, 0, *[0] * 4]
    assert view(memory, "slot_mapping", np.int64) == [*(table[i // 4] * 4 + i % 4 for i in range(6)), -1, -1]
    assert view(memory, "positions", np.int32)[:6] == list(range(6))
    assert view(memory, "seq_lens", np.int32) == [6, 0]
    assert view(memory, "query_start_loc", np.int32) == [0, 6, 6]
    assert view(memory, "changes", np.int32)[:3] == [0, 0, 2]
    with pytest.raises(ValueError, match="cannot resize"):
        memory.resize((64,), refcheck=True)


def test_whoever_applies_the_changes_keeps_a_copy_of_the_tables(manager: kv.BlockManager) -> None:
    depth = 2
    step = kv.Step(manager, max_seqs=4, max_tokens=64, depth=depth)
    copies = [np.zeros((4, 10), np.int32) for _ in range(depth)]
    handles = [admit(manager, range(100 * n, 100 * n + 6)).handle for n in range(3)]
    batches: list[list[int]] = [
        handles,
        handles[:1],
        handles[::-1],
        handles,
        [],
        handles[1:],
        handles,
        handles,
    ]
    seen: list[Any] = []
    for number, batch in enumerate(batches):
        assert step.schedule(batch, 1, pad_seqs=4)
        manager.commit(batch, 1, [1] * sum(manager.sequence(h).num_computed >= 6 for h in batch))
        copy = copies[number % depth]
        for row, first, columns in step.changes.tolist():
            assert columns > 0
            copy[row, first : first + columns] = 0
            width = step.block_tables.shape[1]
            part = step.block_tables[row, first : min(first + columns, width)]
            copy[row, first : first + len(part)] = part
        for row, handle in enumerate(batch):
            table = manager.block_table(handle).tolist()
            assert copy[row].tolist() == table + [0] * (10 - len(table))
        assert (copy[len(batch) :] == 0).all()
        # The other member of the ring is as it was left.
        if seen:
            np.testing.assert_array_equal(seen[-1][0], seen[-1][1])
        seen.append((step.seq_lens, step.seq_lens.copy()))
    assert step.changes.shape[1] == 3


def test_a_step_that_changes_no_table_has_no_changes(manager: kv.BlockManager, step: kv.Step) -> None:
    handle = admit(manager, range(5)).handle
    assert step.schedule(handle, 1).num_changes == 1
    for _ in range(4):
        assert step.schedule(handle, 1).num_changes == 0
    assert step.schedule(handle, 3).num_changes == 0
    assert step.schedule(handle, 1).num_changes == 1
    assert step.changes.tolist() == [[0, 2, 1]]


def test_the_ring_gives_each_step_arrays_of_its_own(manager: kv.BlockManager) -> None:
    step = kv.Step(manager, max_seqs=2, max_tokens=16, depth=3)
    handle = admit(manager, range(3)).handle
    addresses = []
    for n in range(6):
        assert step.schedule(handle, 1)
        addresses.append(
            (step.packed.ctypes.data, step.slot_mapping.ctypes.data, step.block_tables.ctypes.data)
        )
        assert step.seq_lens.tolist() == [n + 1]
    assert addresses[:3] == addresses[3:]
    assert len(set(addresses)) == 3
    with pytest.raises(ValueError, match="depth is 0, expected 1 to 64"):
        kv.Step(manager, depth=0)


def test_a_refused_step_leaves_the_last_one_in_place(manager: kv.BlockManager) -> None:
    step = kv.Step(manager, max_seqs=2, max_tokens=128, depth=2)
    handle = admit(manager, range(6)).handle
    assert step.schedule(handle, 6)
    packed = step.pack()
    refusal = step.schedule(handle, 100).refusal
    assert isinstance(refusal, kv.Never)
    assert step.pack() == packed
    assert step.schedule(handle, 1)
    assert step.pack() != packed


def test_the_tables_in_flashinfers_form(manager: kv.BlockManager, step: kv.Step) -> None:
    handles = [admit(manager, range(100 * n, 100 * n + n)).handle for n in (8, 0, 5)]
    assert step.schedule(handles, [8, 0, 5], lookahead=4, pad_seqs=5)
    indptr, indices, last = step.csr()
    tables = [manager.block_table(handle).tolist() for handle in handles]
    assert indptr.tolist() == [0, 2, 2, 4, 4, 4]
    assert indices.tolist() == tables[0][:2] + tables[2][:2]  # look-ahead blocks hold no token yet
    assert last.tolist() == [4, 0, 1, 0, 0]
    assert {array.dtype for array in (indptr, indices, last)} == {np.dtype(np.int32)}


def test_a_step_travels_as_one_object(manager: kv.BlockManager, step: kv.Step) -> None:
    parent = admit(manager, range(6)).handle
    run(step, manager, parent)
    handles = [parent, *manager.fork(parent, 2).tolist()]
    assert step.schedule(handles, 2, pad_seqs=5, pad_tokens=9).num_copies == 2
    data = step.pack()
    there = kv.PackedStep.unpack(data)
    for name in ("block_tables", "slot_mapping", "positions", "seq_lens", "query_start_loc", "copies"):
        sent, received = getattr(step, name), getattr(there, name)
        np.testing.assert_array_equal(received, sent)
        assert received.dtype == sent.dtype
        assert not received.flags.writeable
    for broken in (b"", data[:-1], data + b"0", data[8:], data[:40], b"x" * len(data), bytes(len(data))):
        with pytest.raises(ValueError, match="data"):
            kv.PackedStep.unpack(broken)
    assert step.schedule([], []).num_seqs == 0
    assert kv.PackedStep.unpack(step.pack()).block_tables.shape == (0, 0)


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads
def test_a_forked_child_gets_a_clear_error(manager: kv.BlockManager, step: kv.Step) -> None:
    prompt = manager.prepare([1])
    arguments: dict[str, tuple[Any, ...]] = {
        "prepare": ([1],),
        **dict.fromkeys(("match_prefix", "can_allocate", "allocate"), (prompt,)),
        **dict.fromkeys(("commit", "reorder", "truncate", "set_max_tokens"), ([], [])),
        **dict.fromkeys(("abort_step", "fork", "preempt", "free", "reclaimable", "sequence_usage"), ([],)),
        **dict.fromkeys(("sequence", "block_table", "tokens", "begin_transfer"), (0,)),
        **dict.fromkeys(("complete_transfer", "fail_transfer", "cancel_transfer"), (0,)),
        "move_slots": ([], [], []),
        "drop_range": (0, 0, 0),
    }
    assert set(arguments) <= set(VERBS)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for verb in VERBS:
                with pytest.raises(kv.ForkedProcessError):
                    getattr(manager, verb)(*arguments.get(verb, ()))
            with pytest.raises(kv.ForkedProcessError):
                step.schedule([], [])
            with pytest.raises(kv.ForkedProcessError):
                kv.Step(manager)
            assert kv.BlockManager(4, 2).stats().free_blocks == 3
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert manager.allocate(prompt)


def test_sixteen_threads_may_share_a_manager() -> None:
    manager = kv.BlockManager(700, 4, merge=True, series_every=100, series_len=4)

    def work(seed: int) -> None:
        step = kv.Step(manager, max_seqs=4, max_tokens=64, depth=2)
        for i in range(120):
            handle = admit(manager, [seed % 4] * 8 + [i % 3, seed]).handle
            run(step, manager, handle, [1, 2])
            first, second = manager.fork(handle, 2).tolist()
            assert step.schedule([first, second], 1)
            manager.abort_step(second)
            assert manager.move_slots(first, 1, [0]).shape == (0, 2)
            assert manager.sequence(handle).num_computed == 12 == len(manager.tokens(handle))
            transfer = manager.begin_transfer(handle)
            (prompt,) = manager.preempt(first)
            manager.reorder([handle, second], [1, 0])
            manager.drop_range(handle, 0, 4)
            manager.set_max_tokens(second, 20)
            manager.truncate(second, 5 + i % 5)
            assert manager.match_prefix(prompt) <= 8
            assert manager.can_allocate(prompt)
            assert manager.allocate(prompt)
            usage = manager.sequence_usage([handle, first, second])
            assert 0 < usage.reclaimable_blocks <= usage.private_blocks <= usage.live_blocks
            assert len(manager.block_table(handle)) == 3
            if i % 40 == seed:
                manager.reset_prefix_cache()
                manager.drop_namespace(salt="none")
                manager.reset_peaks()
                assert manager.check_integrity() == []
                assert manager.fragmentation().free_blocks <= 699
                assert len(manager.series()) <= 4
                assert manager.namespace_usage().num_seqs >= 3
                assert manager.reclaimable(first) <= 3
                assert transfer in manager.pending_transfers()[:, 0]
            manager.free([handle, first, second])
            (manager.complete_transfer, manager.fail_transfer, manager.cancel_transfer)[i % 3](transfer)
            stats = manager.stats()
            total = stats.free_blocks + stats.live_blocks + stats.cached_blocks + stats.held_blocks
            assert total == stats.capacity_blocks == 699

    source = inspect.getsource(work)
    assert [verb for verb in VERBS if f"manager.{verb}" not in source] == [
        "prepare",
        "commit",
    ]  # in `admit`, `run`
    with ThreadPoolExecutor(16) as pool:
        for outcome in [pool.submit(work, seed) for seed in range(16)]:
            outcome.result()
    assert manager.check_integrity() == []
    stats = manager.stats()
    assert (stats.live_blocks, stats.held_blocks, stats.num_seqs, stats.num_transfers) == (0, 0, 0, 0)
    ended = (stats.completed_transfers, stats.failed_transfers, stats.cancelled_transfers)
    assert (ended, stats.preemptions) == ((16 * 40,) * 3, 16 * 120)


def test_commit_takes_the_missing_ids_or_all_of_them(manager: kv.BlockManager, step: kv.Step) -> None:
    a, b = admit(manager, range(6)).handle, admit(manager, range(50, 53)).handle
    assert step.schedule([a, b], [8, 3])
    before = manager.stats()
    for wrong, text in [
        ([1], "tokens has 1 entries, expected 2"),
        (
            [0, 1, 2, 3, 4, 5, 60, 61, 50, 51, 99],
            r"tokens\[10\] is 99, expected 52, the known id of that token",
        ),
        ([9, 1, 2, 3, 4, 5, 60, 61, 50, 51, 52], r"tokens\[0\] is 9, expected 0"),
    ]:
        with pytest.raises(ValueError, match=text):
            manager.commit([a, b], [8, 3], wrong)
    assert manager.stats() == before
    manager.commit([a, b], [8, 3], [0, 1, 2, 3, 4, 5, 60, 61, 50, 51, 52])
    assert manager.tokens(a).tolist() == [0, 1, 2, 3, 4, 5, 60, 61]
    assert step.schedule(a, 2)
    manager.commit(a, 2, [62, 63])
    assert manager.tokens(a).tolist()[8:] == [62, 63]


def test_beams_are_reordered_at_once(manager: kv.BlockManager, step: kv.Step) -> None:
    beams = [admit(manager, range(6)).handle]
    run(step, manager, beams[0])
    beams += manager.fork(beams, 2).tolist()
    assert step.schedule(beams, 1)
    manager.commit(beams, 1, [70, 71, 72])
    live = manager.stats().live_blocks
    manager.reorder(beams, [2, 0, 2])
    assert [manager.tokens(beam).tolist()[-1] for beam in beams] == [72, 70, 72]
    assert manager.stats().live_blocks == live - 1
    for call, text in [
        (lambda: manager.reorder(beams, [0, 1]), "parents has 2 entries, expected 3"),
        (
            lambda: manager.reorder(beams, [0, 1, 3]),
            r"parents\[2\] is 3, expected a row of the batch, 0 to 2",
        ),
        (lambda: manager.reorder(beams, [0, 1, -1]), r"parents\[2\] is -1"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()
    assert step.schedule(beams, 1).num_copies == 1
    with pytest.raises(ValueError, match="no step in flight"):
        manager.reorder(beams, [0, 1, 2])
    assert manager.check_integrity() == []


def test_forks_of_many_parents_come_grouped(manager: kv.BlockManager, step: kv.Step) -> None:
    parents = [admit(manager, range(100 * n, 100 * n + 2 + n)).handle for n in range(3)]
    for parent in parents:
        run(step, manager, parent)
    children = manager.fork(parents, np.array([2, 0, 1], np.int32))
    assert children.dtype == np.int64
    assert [manager.tokens(child).tolist() for child in children] == [[0, 1], [0, 1], [200, 201, 202, 203]]


def test_options_are_named_with_their_choices() -> None:
    for name, wrong, text in [
        ("full_hit", "page", 'full_hit is "page", expected "block" or "token"'),
        ("publish", "never", 'publish is "never", expected "commit" or "schedule"'),
        ("reuse", "lru", 'reuse is "lru", expected "last_freed" or "first_freed"'),
        ("algorithm", "md5", 'algorithm is "md5", expected "xxh3" or "sha256"'),
        ("series_len", 2**40, "series_len is 1099511627776, expected at most"),
    ]:
        options: dict[str, Any] = {name: wrong}
        with pytest.raises(ValueError, match=text):
            kv.BlockManager(8, 4, **options)


@pytest.mark.parametrize(("reuse", "expected"), [("last_freed", [1, 5, 6]), ("first_freed", [6, 1, 4])])
def test_the_order_of_reuse_is_a_choice(reuse: Any, expected: list[int]) -> None:
    manager = kv.BlockManager(7, 4, reuse=reuse)
    step = kv.Step(manager)
    first, second, third = (admit(manager, [n]).handle for n in range(3))
    cached = admit(manager, range(10, 14)).handle
    run(step, manager, cached)
    manager.free(first)
    last = admit(manager, [9]).handle
    manager.free(cached)
    manager.free(last)
    taken = [manager.block_table(admit(manager, [n]).handle).tolist()[0] for n in range(20, 23)]
    assert manager.block_table(second).tolist() == [2]
    assert manager.block_table(third).tolist() == [3]
    assert taken == expected


def test_a_prompt_of_an_earlier_preemption_is_stale(manager: kv.BlockManager, step: kv.Step) -> None:
    handle = admit(manager, [1, 2, 3]).handle
    run(step, manager, handle, [4])
    (first,) = manager.preempt(handle)
    assert manager.allocate(first)
    run(step, manager, handle, [5, 6])
    (second,) = manager.preempt(handle)
    with pytest.raises(kv.StaleHandleError, match="freed or resumed"):
        manager.allocate(first)
    assert manager.allocate(second)
    assert manager.tokens(handle).tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("end", ["free", "preempt"])
def test_what_was_scheduled_and_never_committed_cannot_be_hit(end: str) -> None:
    manager = kv.BlockManager(16, 4, publish="schedule")
    step = kv.Step(manager, max_seqs=2, max_tokens=32)
    handle = admit(manager, range(8)).handle
    assert step.schedule(handle, 8)
    longer = manager.prepare(range(9))
    assert manager.match_prefix(longer) == 8
    getattr(manager, end)(handle)
    assert manager.match_prefix(longer) == 0
    assert manager.check_integrity() == []


def test_changes_refer_to_the_whole_buffer(manager: kv.BlockManager, step: kv.Step) -> None:
    handle = admit(manager, range(24)).handle
    copy = np.zeros_like(step.block_table_buffer)
    for shorten in (None, 4, None):
        if shorten:
            manager.truncate(handle, shorten)
        known = manager.sequence(handle)
        assert step.schedule(handle, max(known.num_tokens - known.num_scheduled, 1))
        manager.commit(
            handle, manager.sequence(handle).num_scheduled - known.num_computed, [1] * bool(shorten)
        )
        for row, first, columns in step.changes.tolist():
            copy[row, first : first + columns] = step.block_table_buffer[row, first : first + columns]
        assert copy.tolist() == step.block_table_buffer.tolist()
        if shorten is None and known.num_tokens > 4:
            continue
        break


def test_csr_has_no_place_for_holes() -> None:
    for null_block in (True, False):
        manager = kv.BlockManager(9, 4, null_block=null_block)
        step = kv.Step(manager, max_seqs=2, max_tokens=32)
        handle = admit(manager, range(12)).handle
        run(step, manager, handle)
        manager.drop_range(handle, 0, 4)
        assert step.schedule(handle, 1)
        with pytest.raises(ValueError, match="dropped blocks"):
            step.csr()


def test_merged_blocks_count_as_reclaimable_and_go_with_the_last_step_that_used_them() -> None:
    manager = kv.BlockManager(16, 4, merge=True)
    step = kv.Step(manager, max_seqs=2, max_tokens=32)
    first, second = admit(manager, range(4)).handle, admit(manager, range(4)).handle
    assert step.schedule([first, second], 4)
    assert step.schedule(second, 1)
    manager.commit([first, second], 4)
    # The duplicate is still read by the step in flight.
    assert manager.stats().live_blocks == 3
    assert manager.reclaimable(second) == 2
    manager.abort_step(second)
    assert manager.stats().live_blocks == 1
    assert manager.check_integrity() == []


def test_nobody_merges_into_a_block_that_the_same_commit_takes_back() -> None:
    manager = kv.BlockManager(16, 4, merge=True, publish="schedule")
    step = kv.Step(manager, max_seqs=2, max_tokens=32)
    first, second = admit(manager, range(6)).handle, admit(manager, range(6)).handle
    assert step.schedule([first, second], 6)
    # Both have published their first block; the first one's, which is the older, is not computed now.
    manager.commit([second, first], [4, 2])
    assert manager.check_integrity() == []
    blocks = [manager.block_table(handle)[0] for handle in (first, second)]
    assert blocks[0] != blocks[1]
    assert manager.match_prefix(manager.prepare(range(6))) == 4


def test_a_merge_into_a_cached_block_shows_in_the_peaks() -> None:
    manager = kv.BlockManager(16, 4, merge=True)
    step = kv.Step(manager, max_seqs=2, max_tokens=32)
    first = admit(manager, range(4)).handle
    run(step, manager, first)
    manager.free(first)
    second = admit(manager, range(4)).handle
    assert step.schedule(second, 4)
    assert step.schedule(second, 0)
    manager.commit(second, 4)
    # The cached block is in use again, and the step in flight still reads the one it replaces.
    stats = manager.stats()
    assert (stats.live_blocks, stats.peak_live_blocks) == (2, 2)
    assert manager.check_integrity() == []


def test_beams_that_grow_by_reordering_show_in_the_peaks(manager: kv.BlockManager, step: kv.Step) -> None:
    long, short = admit(manager, range(16)).handle, admit(manager, [50]).handle
    run(step, manager, long)
    run(step, manager, short)
    manager.reset_peaks()
    manager.reorder([long, short], [0, 0])
    assert manager.stats().peak_logical_blocks == manager.stats().logical_blocks == 8


def test_a_declared_maximum_beyond_the_pool_is_refused(manager: kv.BlockManager) -> None:
    handle = admit(manager, range(4)).handle
    with pytest.raises(ValueError, match=r"max_tokens\[0\] is 41, expected at most 40"):
        manager.set_max_tokens(handle, 41)
    manager.set_max_tokens(handle, 40)
    assert manager.stats().promised_blocks == 9


@pytest.mark.parametrize("length", [0, NUM_WORDS - 1, NUM_WORDS + 1])
def test_memory_resized_behind_the_step_is_refused(manager: kv.BlockManager, length: int) -> None:
    memory = np.zeros(NUM_WORDS, np.int64)
    buffers = StepBuffers(manager, [memory], *SIZES)
    memory.resize(length, refcheck=False)
    handle = admit(manager, range(4)).handle
    with pytest.raises(ValueError, match=f"memory has {length} entries, expected {NUM_WORDS}"):
        buffers.schedule(handle, 1)
    assert manager.sequence(handle).num_scheduled == 0


def test_media_keep_their_order_when_a_prompt_is_cut() -> None:
    manager = kv.BlockManager(40, 1)
    step = kv.Step(manager, max_seqs=2, max_tokens=32)
    media = [("B", 0, 2), ("A", 0, 10)]
    answer = manager.allocate(manager.prepare([7] * 12, media=media))
    assert isinstance(answer, kv.Allocated)
    run(step, manager, answer.handle)
    manager.truncate(answer.handle, 2)
    (prompt,) = manager.preempt(answer.handle)
    assert manager.match_prefix(prompt) == 1
    resumed = manager.allocate(prompt)
    assert isinstance(resumed, kv.Allocated)
    run(step, manager, resumed.handle)
    assert manager.check_integrity() == []


@pytest.mark.parametrize("publish", ["commit", "schedule"])
def test_a_chunk_of_one_prompt_token_that_opens_a_block_needs_no_id(publish: Any) -> None:
    manager = kv.BlockManager(10, 2, publish=publish)
    step = kv.Step(manager, max_seqs=1, max_tokens=8)
    handle = admit(manager, range(8), reserve=2).handle
    step.schedule(handle, 2)
    manager.commit(handle, 2)
    for _ in range(6):
        step.schedule(handle, 1)
        manager.commit(handle, 1)
    assert manager.tokens(handle).tolist() == list(range(8))
    assert manager.match_prefix(manager.prepare(range(9))) == 8
    assert manager.check_integrity() == []


@pytest.mark.parametrize("media", [None, [("image", 700, 3)]])
def test_a_long_prompt_is_found_as_far_as_it_is_cached(media: Any) -> None:
    manager = kv.BlockManager(2000, 1)
    step = kv.Step(manager, max_seqs=2, max_tokens=2048)
    ids = np.arange(1500, dtype=np.int32)
    run(step, manager, admit(manager, ids, media=media).handle)
    for length in (1, 256, 257, 512, 513, 800, 1025, 1499):
        other = ids.copy()
        other[length:] = 7
        assert manager.match_prefix(manager.prepare(other, media=media)) == length
    allocation = admit(manager, ids, media=media)
    assert allocation.num_cached_tokens == 1499
    assert manager.check_integrity() == []


def test_a_media_item_that_is_cut_short_is_another_item_from_the_cut_on() -> None:
    manager = kv.BlockManager(40, 4)
    step = kv.Step(manager, max_seqs=2, max_tokens=32)
    whole = manager.prepare([7] * 16, media=[("image", 2, 12)])
    answer = manager.allocate(whole)
    assert isinstance(answer, kv.Allocated)
    run(step, manager, answer.handle)
    manager.truncate(answer.handle, 10)
    step.schedule(answer.handle, 3)
    manager.commit(answer.handle, 3, [7, 7, 7])
    (prompt,) = manager.preempt(answer.handle)
    # The blocks before the cut hold what they held; the one that was cut holds the end of a shorter item.
    assert prompt.block_hashes[:2].tolist() == whole.block_hashes[:2].tolist()
    assert prompt.block_hashes[2].tolist() != whole.block_hashes[2].tolist()
    assert manager.match_prefix(prompt) == 12
    assert (
        manager.match_prefix(manager.prepare([7] * 16, media=[("image", 2, 12)])) == 12
    )  # its own third block
    shorter = manager.prepare([7] * 13, media=[("image", 2, 8)])
    assert manager.match_prefix(shorter) == 0
    assert manager.check_integrity() == []


def test_what_a_media_item_was_cut_to_is_not_hit_as_an_item_of_that_length() -> None:
    manager = kv.BlockManager(40, 4)
    step = kv.Step(manager, max_seqs=2, max_tokens=32)
    handle = admit(manager, range(9), media=[("image", 5, 3)]).handle
    run(step, manager, handle)
    manager.truncate(handle, 7)
    step.schedule(handle, 2)
    manager.commit(handle, 2, [70, 80])
    # Positions 5 and 6 were computed with all of the image; position 7 is none of it.
    ids = [0, 1, 2, 3, 4, 5, 6, 70, 80]
    for media in ([("image", 5, 2)], [("image", 5, 3)], [("image", 5, 4)], None):
        assert manager.match_prefix(manager.prepare(ids, media=media)) == 4
    # Cut again behind the first cut, it stays what it was, and its own history is found.
    manager.truncate(handle, 8)
    step.schedule(handle, 1)
    manager.commit(handle, 1, [80])
    (prompt,) = manager.preempt(handle)
    assert manager.match_prefix(prompt) == 8
    assert manager.check_integrity() == []


def test_a_sequence_knows_what_it_shares_and_what_is_its_own() -> None:
    manager = kv.BlockManager(20, 4)
    step = kv.Step(manager, max_seqs=4, max_tokens=32)
    one = admit(manager, range(10)).handle
    run(step, manager, one)
    alone = manager.sequence_usage(one)
    assert (alone.live_blocks, alone.shared_blocks, alone.private_blocks, alone.reclaimable_blocks) == (
        3,
        0,
        3,
        3,
    )
    assert (alone.used_slots, alone.allocated_slots, alone.reserved_slots) == (10, 12, 0)
    assert alone.internal_fragmentation == pytest.approx(2 / 12)
    (two,) = manager.fork(one).tolist()
    assert step.schedule(two, 1, lookahead=5)  # copies the tail, and reserves a block more
    manager.commit(two, 1, [7])
    usage = manager.sequence_usage(two)
    assert (usage.live_blocks, usage.shared_blocks, usage.private_blocks, usage.reclaimable_blocks) == (
        4,
        2,
        2,
        2,
    )
    assert (usage.used_slots, usage.allocated_slots, usage.reserved_slots) == (11, 16, 5)
    both = manager.sequence_usage([one, two])
    assert (both.live_blocks, both.logical_blocks, both.shared_blocks, both.reclaimable_blocks) == (
        5,
        7,
        0,
        5,
    )
    assert both.used_slots == manager.stats().used_slots == 10 + 3
    assert both.sharing == manager.stats().sharing == 7 / 5
    transfer = manager.begin_transfer(two, 2, 3)
    assert manager.sequence_usage(two).reclaimable_blocks == 1 == manager.reclaimable(two)
    assert manager.sequence_usage(two).private_blocks == 2
    manager.cancel_transfer(transfer)
    with pytest.raises(ValueError, match="more than once"):
        manager.sequence_usage([one, one])


def test_the_totals_of_a_namespace_outlive_what_belongs_to_it() -> None:
    manager = kv.BlockManager(20, 4)
    step = kv.Step(manager, max_seqs=4, max_tokens=32)
    prompt = manager.prepare(range(10), salt="tenant")
    for _ in range(2):
        answer = manager.allocate(prompt)
        assert isinstance(answer, kv.Allocated)
        run(step, manager, answer.handle)
        manager.free(answer.handle)
    manager.reset_prefix_cache()
    usage = manager.namespace_usage(salt="tenant")
    assert (usage.live_blocks, usage.cached_blocks, usage.held_blocks, usage.num_seqs) == (0, 0, 0, 0)
    assert (usage.queried_requests, usage.queried_blocks, usage.queried_tokens) == (2, 4, 20)
    assert (usage.hit_requests, usage.hit_blocks, usage.hit_tokens) == (1, 2, 8)
    assert usage.peak_live_blocks == 3
    for salt in range(4096):
        handle = manager.allocate(manager.prepare([1], salt=salt))
        assert isinstance(handle, kv.Allocated)
        manager.free(handle.handle)
        assert (manager.namespace_usage(salt="tenant") == usage) == (salt < 4095)
    assert manager.namespace_usage(salt="tenant") == manager.namespace_usage(salt="nobody")
    assert manager.namespace_usage(salt=4095).queried_requests == 1
    assert manager.stats().queried_requests == 2 + 4096
    assert manager.check_integrity() == []


def test_evictions_and_copies_are_counted_where_they_belong() -> None:
    manager = kv.BlockManager(7, 4, null_block=True)
    step = kv.Step(manager, max_seqs=4, max_tokens=32)

    def serve(tokens: list[int], salt: str) -> int:
        answer = manager.allocate(manager.prepare(tokens, salt=salt))
        assert isinstance(answer, kv.Allocated)
        run(step, manager, answer.handle)
        return answer.handle

    manager.free(serve(list(range(16)), "a"))  # 4 blocks cached, 2 free
    handle = serve(list(range(50, 59)), "b")  # 3 blocks: one of a's gives way
    a, b, stats = manager.namespace_usage(salt="a"), manager.namespace_usage(salt="b"), manager.stats()
    assert (a.evicted_blocks, a.evicted_tokens, a.evicting_requests) == (1, 4, 0)
    assert (b.evicted_blocks, b.evicted_tokens, b.evicting_requests) == (0, 0, 1)
    assert (stats.evicted_blocks, stats.evicted_tokens, stats.evicting_requests) == (1, 4, 1)
    (child,) = manager.fork(handle).tolist()
    assert step.schedule([handle, child], 1)  # the copy of the tail evicts
    b = manager.namespace_usage(salt="b")
    assert (b.copied_blocks, b.evicting_requests, manager.stats().evicted_blocks) == (1, 2, 2)
    assert manager.stats().reclaimable_blocks == manager.stats().cached_blocks == 2


def test_handles_of_transfers_and_sequences_cannot_be_confused(manager: kv.BlockManager) -> None:
    handle = admit(manager, range(4)).handle
    transfer = manager.begin_transfer(handle)
    assert handle < 2**62 <= transfer < 2**63
    with pytest.raises(
        kv.StaleHandleError, match=r"0x4000000000000000 names no sequence: it is a transfer's"
    ):
        manager.free(transfer)
    with pytest.raises(kv.StaleHandleError, match=r"0x100000000 names no transfer: it is a sequence's"):
        manager.complete_transfer(handle)
    assert manager.complete_transfer(transfer) == 0
    with pytest.raises(kv.StaleHandleError, match="names no transfer: it has ended, or was never begun"):
        manager.complete_transfer(transfer)
    assert manager.begin_transfer(handle) == transfer + 1
