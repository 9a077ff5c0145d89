"""The step of a batch: index arrays made once and filled by the core in one call per scheduler step.

Owns `Step` and `PackedStep`. Imports the core.
Invariant: the arrays are never reallocated, so a view, an address or a pinned copy of them stays good for the
life of the step. They hold the last batch that was scheduled; a refused one changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvblocks._core import BlockManager, StepBuffers

_T = TypeVar("_T", bound=np.generic)

# Tables wide enough for the whole of a huge pool would take gigabytes.
_DEFAULT_MAX_TOKENS_PER_SEQ: Final = 131_072
_MAX_SIZE: Final = 2**31 - 1
# Steps in flight are at most eight.
_MAX_DEPTH: Final = 64


class _Arrays:
    """Views of the memory of one step: the block tables, and all other arrays, which come first."""

    def __init__(self, memory: NDArray[np.int64], places: dict[str, Any], max_seqs: int) -> None:
        def view(name: str, dtype: type[_T]) -> NDArray[_T]:
            start, end = places[name]
            return memory.view(np.uint8)[start:end].view(dtype)

        self.block_tables = view("block_tables", np.int32).reshape(max_seqs, -1)
        self.packed = memory[: places["block_tables"][0] // 8]
        self.slot_mapping = view("slot_mapping", np.int64)
        self.positions = view("positions", np.int32)
        self.seq_lens = view("seq_lens", np.int32)
        self.query_start_loc = view("query_start_loc", np.int32)
        self.copies = view("copies", np.int32).reshape(-1, 2)
        self.changes = view("changes", np.int32).reshape(-1, 3)


class Step(StepBuffers):
    """Index arrays of one forward pass; the Step owns them, `schedule` fills them.

    max_seqs: rows; max_tokens: scheduled tokens of all rows; max_blocks_per_seq: columns of the block tables, by
    default as many as the pool has blocks or 131,072 tokens take, whichever is less. depth: sets of arrays, used
    in turn: with 2, the last step may still be copied to a device while the next is written. Raises TypeError for
    a manager that is none and for a size that is no int, ValueError for a size below 1 or above what an int32
    array can name, MemoryError where the arrays do not fit.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_seqs: int = 256,
        max_tokens: int = 8192,
        max_blocks_per_seq: int | None = None,
        depth: int = 1,
    ) -> None:
        if not isinstance(manager, BlockManager):
            raise TypeError(f"manager is {type(manager).__name__}, expected a BlockManager")
        columns = max_blocks_per_seq
        if columns is None:
            columns = min(manager.capacity_blocks, -(-_DEFAULT_MAX_TOKENS_PER_SEQ // manager.block_size))
        sizes = {
            "max_seqs": max_seqs,
            "max_tokens": max_tokens,
            "max_blocks_per_seq": columns,
            "depth": depth,
        }
        for name, size in sizes.items():
            try:
                sizes[name] = int(index(size))
            except TypeError:
                raise TypeError(f"{name} is {type(size).__name__}, expected an int") from None
            most = _MAX_DEPTH if name == "depth" else _MAX_SIZE
            if not 1 <= size <= most:
                raise ValueError(f"{name} is {size}, expected 1 to {most}")
        max_seqs, max_tokens, columns, depth = sizes.values()
        places = StepBuffers.layout(max_seqs, max_tokens, columns)
        try:
            memory = [np.zeros(places["num_words"], np.int64) for _ in range(depth)]
        except (MemoryError, ValueError):
            # NumPy calls a size that no address space holds a value.
            named = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise MemoryError(
                f"{named}: no memory for {depth} x {8 * places['num_words']} bytes of arrays"
            ) from None
        super().__init__(manager, memory, max_seqs, max_tokens, columns)
        self._block_size = manager.block_size
        self._null_block = manager.null_block_id
        self._arrays = [_Arrays(array, places, max_seqs) for array in memory]

    @property
    def _now(self) -> _Arrays:
        return self._arrays[self.current]

    @property
    def block_tables(self) -> NDArray[np.int32]:
        """Block ids [num_seqs, longest table of the step], padded with the null block; a view."""
        return self._now.block_tables[: self.num_rows, : self.num_cols]

    @property
    def block_table_buffer(self) -> NDArray[np.int32]:
        """The whole array [max_seqs, max_blocks_per_seq] that `block_tables` is a view of."""
        return self._now.block_tables

    @property
    def slot_mapping(self) -> NDArray[np.int64]:
        """Slot of each scheduled token [num_tokens], -1 for padding; a view."""
        return self._now.slot_mapping[: self.num_tokens]

    @property
    def positions(self) -> NDArray[np.int32]:
        """Position of each scheduled token in its sequence [num_tokens]; a view."""
        return self._now.positions[: self.num_tokens]

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """Tokens of each sequence [num_seqs], this step's included; a view."""
        return self._now.seq_lens[: self.num_rows]

    @property
    def query_start_loc(self) -> NDArray[np.int32]:
        """Where each row's tokens start [num_seqs + 1]; a view."""
        return self._now.query_start_loc[: self.num_rows + 1]

    @property
    def copies(self) -> NDArray[np.int32]:
        """Copy-on-write copies (src, dst) of the step [num_copies, 2]; a view."""
        return self._now.copies[: self.num_copies]

    @property
    def changes(self) -> NDArray[np.int32]:
        """What changed in the block tables since this set of arrays was filled last; a view.

        [num_changes, 3]: row, first column, number of columns of `block_table_buffer`, so that a device copy of
        it is kept up to date by copying these ranges only. They may reach beyond the columns of `block_tables`,
        where a table has become shorter.
        """
        return self._now.changes[: self.num_changes]

    @property
    def packed(self) -> NDArray[np.int64]:
        """The buffer that holds all arrays but the block tables, for one copy to a device; the whole of it."""
        return self._now.packed

    def csr(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """The block tables in FlashInfer's form, as new arrays. O(blocks).

        Returns kv_indptr [num_seqs + 1], kv_indices [total blocks] and kv_last_block_len [num_seqs], which is
        in 1..block_size, and 0 for an empty sequence. Raises ValueError for a sequence with dropped blocks.
        """
        lens = self.seq_lens
        blocks = -(-lens // self._block_size)
        indptr = np.zeros(len(lens) + 1, np.int32)
        np.cumsum(blocks, out=indptr[1:])
        indices = self.block_tables[np.arange(self.num_cols) < blocks[:, None]]
        if (indices == self._null_block).any():
            raise ValueError("a sequence of the step has dropped blocks: this form has no place for holes")
        last = (lens - (blocks - 1) * self._block_size) * (lens > 0)
        return indptr, indices, last.astype(np.int32)

    def pack(self) -> bytes:
        """The whole step in one object, to broadcast to ranks that run no manager; see `PackedStep`."""
        arrays = (getattr(self, name) for name in _PACKED)
        tables = self.block_tables
        header = np.array([_MAGIC, *tables.shape, len(self.slot_mapping), len(self.copies)], np.int64)
        return b"".join([header.tobytes(), *(np.ascontiguousarray(array).tobytes() for array in arrays)])


_MAGIC: Final = 0x3170657473766B  # "kvstep1"
_PACKED: Final = ("slot_mapping", "positions", "seq_lens", "query_start_loc", "copies", "block_tables")


@dataclass(frozen=True, eq=False)
class PackedStep:
    """The arrays of a step that another process packed: read-only views of the bytes it sent."""

    block_tables: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    positions: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    query_start_loc: NDArray[np.int32]
    copies: NDArray[np.int32]

    @classmethod
    def unpack(cls, data: bytes) -> PackedStep:
        """Read what `Step.pack` wrote. Raises ValueError for anything else."""
        header = np.frombuffer(data, np.int64, min(5, len(data) // 8)).tolist()
        if len(header) < 5 or header[0] != _MAGIC or min(header) < 0:
            raise ValueError(f"data is {len(data)} bytes that no Step.pack wrote")
        _, rows, columns, tokens, copies = header
        shapes: dict[str, tuple[int, ...]] = {
            "slot_mapping": (tokens,),
            "positions": (tokens,),
            "seq_lens": (rows,),
            "query_start_loc": (rows + 1,),
            "copies": (copies, 2),
            "block_tables": (rows, columns),
        }
        sizes = {name: (8 if name == "slot_mapping" else 4) * int(np.prod(shapes[name])) for name in _PACKED}
        if len(data) != 40 + sum(sizes.values()):
            raise ValueError(f"data has {len(data)} bytes, expected {40 + sum(sizes.values())}")
        arrays: dict[str, Any] = {}
        at = 40
        for name in _PACKED:
            dtype = np.int64 if name == "slot_mapping" else np.int32
            arrays[name] = np.frombuffer(data[at : at + sizes[name]], dtype).reshape(shapes[name])
            at += sizes[name]
        return cls(**arrays)
