"""The values of index arrays: the kernels of the CPU refuse what the specification refuses, in its words."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvblocks.backends import Backend
from kvblocks.backends.base import Tail
from kvblocks.backends.cpu import CpuBackend
from kvblocks.backends.numpy import NumpyBackend
from kvblocks.config import CacheConfig

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS, NUM_TOKENS, TAIL_ROWS = 4, 6, 3, 8, 6
EXTREMES = st.sampled_from([-(2**31), 2**31 - 1])
BACKENDS: tuple[Backend, ...] = (NumpyBackend(), CpuBackend(num_threads=1))
CACHES = [
    backend.allocate(CacheConfig(1, 1, 8, block_size=BLOCK_SIZE), NUM_BLOCKS)[0] for backend in BACKENDS
]
for each in CACHES:
    each.k[...] = each.v[...] = 1


@st.composite
def starts(draw: st.DrawFn, num_seqs: int, most: int) -> list[int]:
    """Starts of rows that mostly rise from 0 to `most` at most."""
    lengths = draw(st.lists(st.integers(0, 3), min_size=num_seqs, max_size=num_seqs))
    values = np.minimum(np.cumsum([0, *lengths]), most).tolist()
    if draw(st.integers(0, 4)) == 0:
        row = draw(st.integers(0, num_seqs))
        values[row] = draw(st.integers(-2, most + 3) | EXTREMES)
    return values


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of a step, of which most values are right."""
    num_seqs = draw(st.integers(0, 4))
    block = st.integers(0, NUM_BLOCKS - 1) | st.integers(-1, NUM_BLOCKS) | EXTREMES
    ids = draw(st.lists(block, min_size=num_seqs * MAX_BLOCKS, max_size=num_seqs * MAX_BLOCKS))
    length = st.integers(3, BLOCK_SIZE * MAX_BLOCKS) | st.integers(-1, BLOCK_SIZE * MAX_BLOCKS + 4) | EXTREMES
    lens = draw(st.lists(length, min_size=num_seqs, max_size=num_seqs))
    tail = None
    if draw(st.booleans()):
        rows = np.ones((TAIL_ROWS, 1, 8), np.float32)
        tail = Tail(rows, rows[:-1], np.array(draw(starts(num_seqs, TAIL_ROWS - 1)), np.int32))
    return {
        "block_tables": np.array(ids, np.int32).reshape(num_seqs, MAX_BLOCKS),
        "seq_lens": np.array(lens, np.int32),
        "query_start_loc": np.array(draw(starts(num_seqs, NUM_TOKENS)), np.int32),
        "window": draw(st.none() | st.integers(1, 9)),
        "tail": tail,
    }


def answer(call: Any) -> str:
    """What a call refuses; nothing where it does not."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


@given(steps())
def test_attend(step: dict[str, Any]) -> None:
    q = np.ones((NUM_TOKENS, 2, 8), np.float32)
    wanted, got = (
        answer(partial(backend.attend, cache, q, **step))
        for backend, cache in zip(BACKENDS, CACHES, strict=True)
    )
    event(wanted.partition(":")[0])
    assert got == wanted


@given(st.lists(st.integers(-1, NUM_BLOCKS) | EXTREMES, max_size=4), st.data())
def test_gather(ids: list[int], data: st.DataObject) -> None:
    table, seq_len = np.array(ids, np.int32), data.draw(st.integers(0, BLOCK_SIZE * len(ids)))
    wanted, got = (
        answer(partial(backend.gather, cache, table, seq_len))
        for backend, cache in zip(BACKENDS, CACHES, strict=True)
    )
    assert got == wanted


@st.composite
def slot_mappings(draw: st.DrawFn, num_slots: int, group: int) -> list[int]:
    """Whole groups of slots in any order, perhaps with one taken out, or another put in."""
    groups = draw(st.lists(st.integers(0, num_slots // group - 1), unique=True, max_size=4))
    slots = draw(st.permutations([slot for at in groups for slot in range(at * group, (at + 1) * group)]))
    if slots and draw(st.booleans()):
        slots.pop()
    for slot in draw(st.lists(st.integers(-2, num_slots) | EXTREMES, max_size=2)):
        slots.insert(draw(st.integers(0, len(slots))), slot)
    return slots


@pytest.mark.parametrize(("kv_format", "block_size", "group"), [("float32", 4, 1), ("kivi2r", 32, 16)])
@given(st.data())
def test_write(kv_format: str, block_size: int, group: int, data: st.DataObject) -> None:
    config = CacheConfig(1, 1, 8, block_size=block_size, kv_format=kv_format)
    slots = np.array(data.draw(slot_mappings(3 * block_size, group)), np.int64)
    rows = np.ones((len(slots), 1, 8), np.float32)
    answers = []
    for backend in BACKENDS:
        (cache,) = backend.allocate(config, 3)
        for array in cache.block_arrays:
            array[...] = 7
        answers.append(answer(partial(backend.write, cache, rows, rows, slots)))
        assert not answers[-1] or all((array == 7).all() for array in cache.block_arrays)
    event(answers[0].partition(",")[0].partition(" are ")[2] or answers[0][:24])
    assert answers[1] == answers[0]
