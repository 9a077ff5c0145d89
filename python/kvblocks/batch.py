"""The step of a batch: index arrays made once and filled by the core in one call per scheduler step.

Owns `Step`. Imports the core.
Invariant: the arrays are never reallocated, so a view, an address or a pinned copy of them stays good for the
life of the step; they hold the last batch that was scheduled, a refused one changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from kvblocks._core import BlockManager, Scheduled, StepBuffers

if TYPE_CHECKING:
    from kvblocks._core import _Counts, _Handles


class Step:
    """Index arrays of one forward pass; the Step owns them, `schedule` fills them.

    max_seqs: rows; max_tokens: scheduled tokens of all rows; max_blocks_per_seq: columns of the block tables
    (default: the pool's capacity). Raises ValueError for a size below 1.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_seqs: int = 256,
        max_tokens: int = 8192,
        max_blocks_per_seq: int | None = None,
    ) -> None:
        columns = manager.capacity_blocks if max_blocks_per_seq is None else max_blocks_per_seq
        sizes = {"max_seqs": max_seqs, "max_tokens": max_tokens, "max_blocks_per_seq": columns}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}, expected 1 or more")
        self._block_tables = np.empty((max_seqs, columns), np.int32)
        self._slot_mapping = np.full(max_tokens, -1, np.int64)
        self._positions = np.zeros(max_tokens, np.int32)
        self._seq_lens = np.zeros(max_seqs, np.int32)
        self._query_start_loc = np.zeros(max_seqs + 1, np.int32)
        self._copies = np.zeros((max_seqs, 2), np.int32)
        self._buffers = StepBuffers(
            manager,
            self._block_tables,
            self._slot_mapping,
            self._positions,
            self._seq_lens,
            self._query_start_loc,
            self._copies,
        )
        self._num_rows = self._num_tokens = self._num_cols = self._num_copies = 0

    def schedule(
        self,
        handles: _Handles,
        num_new: _Counts,
        *,
        lookahead: _Counts = 0,
        policy: Literal["all", "fit"] = "all",
        pad_seqs: int = 0,
        pad_tokens: int = 0,
    ) -> Scheduled:
        """Schedule the next `num_new[i]` tokens of each sequence; see `StepBuffers.schedule`.

        The step's copies must run, for all layers, before its K/V is written.
        """
        scheduled = self._buffers.schedule(
            handles,
            num_new,
            lookahead=lookahead,
            policy=policy,
            pad_seqs=pad_seqs,
            pad_tokens=pad_tokens,
        )
        if scheduled or policy == "fit":
            self._num_rows = max(scheduled.num_seqs, pad_seqs)
            self._num_tokens = max(scheduled.num_tokens, pad_tokens)
            self._num_cols = scheduled.max_blocks
            self._num_copies = scheduled.num_copies
        return scheduled

    @property
    def block_tables(self) -> NDArray[np.int32]:
        """Block ids [num_seqs, longest table of the step], padded with the null block; a view."""
        return self._block_tables[: self._num_rows, : self._num_cols]

    @property
    def slot_mapping(self) -> NDArray[np.int64]:
        """Slot of each scheduled token [num_tokens], -1 for padding; a view."""
        return self._slot_mapping[: self._num_tokens]

    @property
    def positions(self) -> NDArray[np.int32]:
        """Position of each scheduled token in its sequence [num_tokens]; a view."""
        return self._positions[: self._num_tokens]

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """Tokens of each sequence [num_seqs], this step's included; a view."""
        return self._seq_lens[: self._num_rows]

    @property
    def query_start_loc(self) -> NDArray[np.int32]:
        """Where each row's tokens start [num_seqs + 1]; a view."""
        return self._query_start_loc[: self._num_rows + 1]

    @property
    def copies(self) -> NDArray[np.int32]:
        """Copy-on-write copies (src, dst) of the step [num_copies, 2]; a view."""
        return self._copies[: self._num_copies]
