"""What may stand in the index arrays that kernels of the CPU look at themselves, in NumPy.

Owns `check_step`, `check_table` and `check_slots`. Imports layout, backends.base and expect.
Invariant: nothing is written. The kernels of the CPU refuse the same values in the same words; these functions are the
specification.
"""

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends.base import Tail
from kvblocks.backends.expect import expect_distinct
from kvblocks.layout import LayerCache


def check_step(
    cache: LayerCache,
    num_tokens: int,
    block_tables: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    query_start_loc: NDArray[np.int32],
    *,
    window: int | None,
    tail: Tail | None,
) -> None:
    """Refuse values of a step over `num_tokens` queries that name what is not there; ValueError with the row.

    The arrays have passed `check_attend`. O(rows * columns).
    """
    lens = seq_lens.astype(np.int64)
    num_tail = np.zeros_like(lens) if tail is None else _tail_keys(tail, lens)
    starts = query_start_loc.astype(np.int64)
    num_queries = np.diff(starts)
    if starts[0] != 0:
        raise ValueError(f"query_start_loc: row 0 starts at {starts[0]}, expected 0")
    if (num_queries < 0).any():
        row = int((num_queries < 0).argmax())
        raise ValueError(
            f"query_start_loc: row {row} starts at {starts[row]} and ends before that, at {starts[row + 1]}"
        )
    if starts[-1] > num_tokens:
        raise ValueError(
            f"query_start_loc: row {len(lens) - 1} ends at {starts[-1]}, q has {num_tokens} tokens"
        )
    capacity = block_tables.shape[1] * cache.block_size
    stored = lens - num_tail
    bad = (lens < 0) | (stored > capacity)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"seq_lens: row {row} is {lens[row]}, its table of {block_tables.shape[1]} blocks of "
            f"{cache.block_size} holds 0..{capacity} tokens"
        )
    bad = (num_queries > lens) & (lens > 0)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"query_start_loc: row {row} has {num_queries[row]} queries, seq_lens gives it {lens[row]} keys"
        )

    # Keys before the window of a row's first query are never read, so their blocks may be gone.
    first_key = np.zeros_like(lens) if window is None else np.maximum(lens - num_queries + 1 - window, 0)
    first_block = np.where(num_queries > 0, first_key // cache.block_size, 0)[:, None]
    num_blocks = np.where(num_queries > 0, -(-stored // cache.block_size), 0)[:, None]
    tables = block_tables[:, : num_blocks.max(initial=0)]
    column = np.arange(tables.shape[1])
    read = (column >= first_block) & (column < num_blocks)
    bad = read & ((tables < 0) | (tables >= cache.num_blocks))
    if bad.any():
        row, col = (int(axis) for axis in np.unravel_index(int(bad.argmax()), bad.shape))
        raise ValueError(
            f"block_tables: row {row}, column {col} is block {tables[row, col]}, the cache has "
            f"{cache.num_blocks} blocks"
        )


def _tail_keys(tail: Tail, lens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Keys of each row that are in the tail, once they are known to be there."""
    starts = tail.start_loc.astype(np.int64)
    num_keys: NDArray[np.int64] = np.diff(starts)
    rows = min(len(tail.k), len(tail.v))
    if starts[0] != 0 or starts[-1] > rows:
        raise ValueError(
            f"tail.start_loc: from {starts[0]} to {starts[-1]}, expected from 0 to at most the {rows} rows of k and v"
        )
    bad = (num_keys < 0) | (num_keys > lens)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"tail.start_loc: row {row} has {num_keys[row]} keys, seq_lens gives it {lens[row]} in all"
        )
    return num_keys


def check_table(cache: LayerCache, block_table: NDArray[np.int32], seq_len: int) -> None:
    """Refuse a table whose first `seq_len` tokens lie in no block of the cache; ValueError with the column."""
    used = block_table[: -(-seq_len // cache.block_size)]
    bad = (used < 0) | (used >= cache.num_blocks)
    if bad.any():
        column = int(bad.argmax())
        raise ValueError(
            f"block_table: column {column} is block {used[column]}, the cache has {cache.num_blocks} blocks"
        )


def check_slots(cache: LayerCache, slot_mapping: NDArray[np.int64]) -> None:
    """Refuse slots that a write cannot take, and parts of groups of tokens; ValueError with the rows or slots."""
    bad = (slot_mapping < -1) | (slot_mapping >= cache.num_slots)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"slot_mapping: row {row} is slot {slot_mapping[row]}, expected -1 (skip) or one of the cache's "
            f"{cache.num_slots} slots"
        )
    written = np.flatnonzero(slot_mapping >= 0)
    expect_distinct("slot_mapping", "slot", slot_mapping[written], written)
    for part in (cache.format.k, cache.format.v):
        if part.scaling == "token_group":
            groups, sizes = np.unique(slot_mapping[written] // part.group, return_counts=True)
            if (sizes != part.group).any():
                at = int((sizes != part.group).argmax())
                raise ValueError(
                    f"slot_mapping: slots {groups[at] * part.group}..{(groups[at] + 1) * part.group} are a group of "
                    f"tokens, which is written as a whole, and {sizes[at]} of them are named"
                )
