"""The values of a step's index arrays: the kernels of the CPU refuse what the specification refuses, in its words."""

from typing import Any

import numpy as np
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
        answer(lambda backend=backend, cache=cache: backend.attend(cache, q, **step))
        for backend, cache in zip(BACKENDS, CACHES, strict=True)
    )
    event(wanted.partition(":")[0])
    assert got == wanted


@given(st.lists(st.integers(-1, NUM_BLOCKS) | EXTREMES, max_size=4), st.data())
def test_gather(ids: list[int], data: st.DataObject) -> None:
    table, seq_len = np.array(ids, np.int32), data.draw(st.integers(0, BLOCK_SIZE * len(ids)))
    wanted, got = (
        answer(lambda backend=backend, cache=cache: backend.gather(cache, table, seq_len))
        for backend, cache in zip(BACKENDS, CACHES, strict=True)
    )
    assert got == wanted
