"""The newest tokens of each sequence in 16 bit, beside blocks whose formats quantise many tokens at once.

Owns `Residual`. Imports backends, config and layout; knows handles, and asks the manager only whether one still lives.
Invariants: a block is quantised when its last token is written, from 16-bit values, so a full block is complete in
the pool before anybody else can hit it. A block that is not full stands here only. Each query sees its own step's
tokens and at least `residual_tokens` before them as they were written, or as many as this sequence has written itself.

Each sequence has a row of `residual_slots` slots, in which token t has the slot t % residual_slots: a new token takes
the place of one that left long ago, and nothing is moved. A step reads its newest tokens from a tail, the row's and its
own one after the other, and older ones from the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvblocks._core import BlockManager, StaleHandleError
from kvblocks.backends import Backend, Tail
from kvblocks.config import CacheConfig
from kvblocks.formats import residual_slots
from kvblocks.layout import LayerCache, convert, storage_dtype, to_float32

Ints = NDArray[np.int64]

_LARGEST_HALF: Final = np.float32(65504)


@dataclass
class _Plan:
    """What a step moves in each layer. Slots count the rows of all sequences as one axis."""

    rows: Ints  # of the step's sequences
    ends: Ints  # their tokens, this step's included
    tail_start: NDArray[np.int32]
    tail_slots: Ints  # where each key of the tail would stand in the residual
    is_new: NDArray[np.bool_]  # keys of the tail that the step writes; the others stand in the residual
    kept: Ints  # of the step's tokens, those that the residual keeps
    full: Ints  # of the tail, the tokens of blocks that this step fills
    full_slots: Ints  # and their slots in the pool
    fits: bool  # whether the residual holds the whole tail once it is written


@dataclass(frozen=True, eq=False)
class SavedResidual:
    """What one sequence had: the span of its tokens, and its slots per layer, all of K, then all of V."""

    start: int
    end: Ints
    rows: list[NDArray[Any] | None]


class Residual:
    """The residual of up to `num_seqs` sequences, in arrays that it owns.

    k, v: per layer [num_seqs * residual_slots, num_kv_heads, head_dim or head_dim_v] of the config's residual_dtype,
    None for layers whose format needs no residual. Raises ValueError for num_seqs below 1.
    """

    def __init__(self, config: CacheConfig, num_seqs: int) -> None:
        if num_seqs < 1:
            raise ValueError(f"residual_seqs is {num_seqs}, expected 1 or more")
        self.num_seqs = num_seqs
        self.num_slots = residual_slots(config.residual_tokens, config.block_size)
        self._config = config
        rows, dtype = (num_seqs * self.num_slots, config.num_kv_heads), storage_dtype(config.residual_dtype)

        def storage(dim: int) -> list[NDArray[Any] | None]:
            return [
                np.empty((*rows, dim), dtype) if kv_format.has_residual else None
                for kv_format in config.formats
            ]

        self.k, self.v = storage(config.head_dim), storage(config.head_dim_v or config.head_dim)
        self._row_of: dict[int, int] = {}
        self._free = list(range(num_seqs))[::-1]
        # Tokens start..end of a row's sequence were written to it, of which the newest are still there. A step that
        # was aborted half way has reached some layers only, so the end is one of each layer.
        self._start = np.zeros(num_seqs, np.int64)
        self._end = np.zeros((config.num_layers, num_seqs), np.int64)
        self._layers = np.flatnonzero([kv_format.has_residual for kv_format in config.formats])
        self._plan: _Plan | None = None
        self._tail: tuple[int, Tail] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in (*self.k, *self.v) if array is not None)

    def reserve(self, manager: BlockManager, handles: Sequence[int], num_more: int = 0) -> None:
        """Make sure that all sequences, and `num_more` to come, can have a row; changes nothing that is in use.

        Raises RuntimeError if there are too few, and ValueError for a sequence that was forked past this class.
        """
        unknown = [handle for handle in handles if handle not in self._row_of]
        for handle in unknown:
            cursor = manager.sequence(handle).num_scheduled
            if cursor % self._config.block_size:
                raise ValueError(
                    f"sequence {handle} has {cursor} tokens, of which the last {cursor % self._config.block_size} are "
                    "in no residual: fork and reorder through the cache, and truncate what was only admitted by blocks"
                )
        need = len(unknown) + num_more
        if need > len(self._free):
            self._reclaim(manager)
        if need > len(self._free):
            raise RuntimeError(
                f"{len(self._row_of)} sequences have a residual and {need} more need one, of {self.num_seqs} in all: "
                "free or preempt some, or raise residual_seqs"
            )

    def plan(
        self,
        backend: Backend,
        layers: Sequence[LayerCache],
        handles: Sequence[int],
        block_tables: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        query_start_loc: NDArray[np.int32],
    ) -> None:
        """Prepare the step that was scheduled for `handles`, which have been reserved. O(its tails)."""
        self._tail = None
        num_seqs, block_size = len(handles), self._config.block_size
        ends = seq_lens[:num_seqs].astype(np.int64)
        begins = ends - np.diff(query_start_loc[: num_seqs + 1])
        rows = np.array(
            [self._row(handle, int(n)) for handle, n in zip(handles, begins, strict=True)], np.int64
        )
        # A sequence that was cut, or comes back with fewer tokens, has written nothing newer than its cut.
        written = self._end[np.ix_(self._layers, rows)]
        exact = np.maximum(self._start[rows], written - self.num_slots)
        exact = np.where((written < begins) | (exact > begins), begins, exact)
        # The block to be filled is needed as a whole. What is lost of it was read from a complete block anyway.
        block_starts = begins // block_size * block_size
        for index, row in np.argwhere(exact > block_starts):
            first, last, layer = int(block_starts[row]), int(exact[index, row]), int(self._layers[index])
            self._restore(backend, layers[layer], layer, int(rows[row]), block_tables[row], first, last)
        starts = np.minimum(exact.max(axis=0), block_starts)
        self._start[rows] = starts
        self._end[:, rows] = begins

        old = np.maximum(begins - self._config.residual_tokens, 0) // block_size * block_size
        firsts = np.maximum(starts, old)
        row_of, position, tail_start = _spans(firsts, ends)
        # Padded rows have no keys.
        tail_start = np.pad(tail_start, (0, len(seq_lens) - num_seqs), mode="edge")
        tail_slots = rows[row_of] * self.num_slots + position % self.num_slots
        is_new = position >= begins[row_of]
        full_ends = ends // block_size * block_size
        is_full = (position >= block_starts[row_of]) & (position < full_ends[row_of])
        blocks = block_tables[row_of[is_full], position[is_full] // block_size].astype(np.int64)
        self._plan = _Plan(
            rows,
            ends,
            tail_start.astype(np.int32),
            tail_slots,
            is_new,
            np.flatnonzero((position >= (ends - self.num_slots)[row_of])[is_new]),
            np.flatnonzero(is_full),
            blocks * block_size + position[is_full] % block_size,
            bool((ends - firsts <= self.num_slots).all()),
        )

    def write(
        self, backend: Backend, cache: LayerCache, layer: int, k: NDArray[Any], v: NDArray[Any]
    ) -> None:
        """Keep the step's tokens of a layer, and quantise the blocks that they fill."""
        plan = self._planned()
        num_new = int(plan.is_new.sum())
        new_k, new_v = (self._rounded(rows[:num_new]) for rows in (k, v))
        tail = self._tail_of(layer, plan, new_k, new_v)
        if len(plan.full):
            backend.write(cache, tail.k[plan.full], tail.v[plan.full], plan.full_slots)
        slots = plan.tail_slots[plan.is_new][plan.kept]
        for storage, rows in ((self.k[layer], new_k), (self.v[layer], new_v)):
            assert storage is not None
            storage[slots] = rows[plan.kept]
        self._end[layer, plan.rows] = plan.ends
        self._tail = layer, tail

    def tail(self, layer: int) -> Tail:
        """The keys and values of the step that attention reads from here.

        Raises ValueError where another layer was written since and the step's own tokens are not all kept.
        """
        if self._tail is not None and self._tail[0] == layer:
            return self._tail[1]
        plan = self._planned()
        if (self._end[layer, plan.rows] != plan.ends).any():
            raise ValueError(f"layer {layer} was not written in this step")
        if not plan.fits:
            raise ValueError(
                f"layer {layer} was written before another one, and its step is longer than the residual of "
                f"{self.num_slots} tokens: attend to a layer before the next one is written"
            )
        return self._tail_of(layer, plan, None, None)

    def copy_rows(self, parents: Sequence[int], children: Sequence[int]) -> None:
        """Let each child have what its parent has; all are read before one is written, so they may overlap."""
        sources = [self._row_of.get(parent) for parent in parents]
        # A parent that was never scheduled has whole blocks only, and so does its child.
        for source, child in zip(sources, children, strict=True):
            if source is None and child in self._row_of:
                self._free.append(self._row_of.pop(child))
        src = np.array([source for source in sources if source is not None], np.int64)
        start, end = self._start[src], self._end[:, src]
        heirs = (child for source, child in zip(sources, children, strict=True) if source is not None)
        dst = np.array([self._row(child, 0) for child in heirs], np.int64)
        self._start[dst], self._end[:, dst] = start, end
        for array in (*self.k, *self.v):
            if array is not None:
                by_row = array.reshape(self.num_seqs, self.num_slots, *array.shape[1:])
                by_row[dst] = by_row[src]

    def save(self, handle: int) -> SavedResidual | None:
        """A copy of what a sequence has here; None if it has nothing."""
        row = self._row_of.get(handle)
        if row is None:
            return None
        at = slice(row * self.num_slots, (row + 1) * self.num_slots)
        rows = [None if array is None else array[at].copy() for array in (*self.k, *self.v)]
        return SavedResidual(int(self._start[row]), self._end[:, row].copy(), rows)

    def restore(self, handle: int, saved: SavedResidual) -> None:
        """Let a sequence that was scheduled have what `save` copied, in place of what it would write."""
        row = self._row_of[handle]
        at = slice(row * self.num_slots, (row + 1) * self.num_slots)
        for array, rows in zip((*self.k, *self.v), saved.rows, strict=True):
            if array is not None:
                array[at] = rows
        self._start[row], self._end[:, row] = saved.start, saved.end

    def newest(
        self, handle: int, layer: int, num_tokens: int
    ) -> tuple[int, NDArray[np.float32], NDArray[np.float32]]:
        """What a sequence cut to num_tokens has here: the first token's position, then K and V in float32."""
        row = self._row_of.get(handle)
        k, v = self.k[layer], self.v[layer]
        assert k is not None
        assert v is not None
        first = num_tokens
        if row is not None:
            end = int(self._end[layer, row])
            exact = max(int(self._start[row]), end - self.num_slots)
            old = max(num_tokens - self._config.residual_tokens, 0)
            if exact <= num_tokens <= end:
                first = max(exact, old // self._config.block_size * self._config.block_size)
        slots = (row or 0) * self.num_slots + np.arange(first, num_tokens) % self.num_slots
        return first, to_float32(k[slots]), to_float32(v[slots])

    def _row(self, handle: int, start: int) -> int:
        """The row of a sequence; a free one if it has none, for what it writes from token `start` on."""
        if handle not in self._row_of:
            row = self._row_of[handle] = self._free.pop()
            self._start[row] = start
            self._end[:, row] = start
        return self._row_of[handle]

    def _reclaim(self, manager: BlockManager) -> None:
        """Take the rows of sequences that were freed or preempted, of which nobody tells."""
        for handle, row in list(self._row_of.items()):
            try:
                gone = manager.sequence(handle).is_preempted
            except StaleHandleError:
                gone = True
            if gone:
                del self._row_of[handle]
                self._free.append(row)

    def _restore(
        self,
        backend: Backend,
        cache: LayerCache,
        layer: int,
        row: int,
        table: NDArray[np.int32],
        first: int,
        last: int,
    ) -> None:
        """Take tokens first..last of a row's sequence, all in one block, out of the pool."""
        block = np.ascontiguousarray(table[first // self._config.block_size :][:1])
        slots = row * self.num_slots + np.arange(first, last) % self.num_slots
        for storage, rows in zip(
            (self.k[layer], self.v[layer]), backend.gather(cache, block, last - first), strict=True
        ):
            assert storage is not None
            storage[slots] = self._rounded(rows)

    def _tail_of(
        self, layer: int, plan: _Plan, new_k: NDArray[Any] | None, new_v: NDArray[Any] | None
    ) -> Tail:
        """The tail, with the step's own tokens as given, or from the residual if it has them."""
        parts = []
        for storage, new in ((self.k[layer], new_k), (self.v[layer], new_v)):
            assert storage is not None
            part = storage[plan.tail_slots]
            if new is not None:
                part[plan.is_new] = new
            parts.append(part)
        return Tail(parts[0], parts[1], plan.tail_start)

    def _rounded(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows in 16 bit; what float16 does not reach becomes its largest number, as it does in the blocks."""
        dtype = self._config.residual_dtype
        if dtype == "float16" and rows.dtype != np.float16:
            rows = np.clip(to_float32(rows), -_LARGEST_HALF, _LARGEST_HALF)
        return convert(rows, dtype)

    def _planned(self) -> _Plan:
        if self._plan is None:
            raise ValueError("no step was scheduled through this cache")
        return self._plan


def _spans(firsts: Ints, lasts: Ints) -> tuple[Ints, Ints, Ints]:
    """Of spans firsts[i]..lasts[i], one after the other: the span and the position of each entry, and their bounds."""
    bounds = np.concatenate([[0], np.cumsum(lasts - firsts)]).astype(np.int64)
    span = np.repeat(np.arange(len(firsts)), lasts - firsts)
    return span, np.arange(bounds[-1]) - bounds[span] + firsts[span], bounds
