"""The index arrays of a step on the device, at addresses that never change.

Owns `DeviceStep`. Imports the step, the launcher and transfers.
Invariant: what the device reads is a copy of its own. A step's arrays may be written again as soon as `upload` returns,
and a staging buffer is written again only once the device has read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends.foreign import stream_address
from kvblocks.batch import Step
from kvblocks.gpu.libraries import Library, library_named
from kvblocks.gpu.transfers import CupyTransport, Event, Transport
from kvblocks.kernels import params, specs
from kvblocks.layout import Array

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvblocks._core import BlockManager, Scheduled, _Counts, _Handles, _ScheduleOptions

_MOST_BLOCKS: Final = 1024
# Steps whose changes are kept apart, where nobody uploads.
_MOST_PENDING: Final = 32
_ARRAYS: Final = ("slot_mapping", "positions", "seq_lens", "query_start_loc", "copies")


class DeviceArrays(NamedTuple):
    """The fixed arrays on the device, each of its largest size: the first rows are what the step's own views have."""

    block_tables: Array
    slot_mapping: Array
    positions: Array
    seq_lens: Array
    query_start_loc: Array
    copies: Array


@dataclass
class _Staging:
    host: NDArray[np.int32]
    device: Array
    address: int
    event: Event | None = None


class DeviceStep(Step):
    """A `Step` with a copy of its arrays on a device, which `upload` brings up to date: one copy and one launch.

    library: "torch" or "cupy", whose arrays `on_device` are. device: its index. num_staged: uploads under way before
    the next one waits for the oldest. transport, using: what stands in for CuPy in a test. The other arguments are
    those of `Step`. Device memory: the arrays once, and num_staged times as staging, which is pinned on the host too.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        library: str = "torch",
        device: int = 0,
        num_staged: int = 2,
        max_seqs: int = 256,
        max_tokens: int = 8192,
        max_blocks_per_seq: int | None = None,
        transport: Transport | None = None,
        using: Library | None = None,
    ) -> None:
        if num_staged < 1:
            raise ValueError(f"num_staged is {num_staged}, expected 1 or more")
        super().__init__(
            manager, max_seqs=max_seqs, max_tokens=max_tokens, max_blocks_per_seq=max_blocks_per_seq
        )
        self._library = using or library_named(library)
        self._device = device
        self._transport = transport or CupyTransport(device)
        self._launcher = self._library.launcher(device)
        memory = self._library.memory(device)
        # Where each array starts in the arena, in words of 4 bytes; multiples of 4 keep them aligned.
        self._offsets: dict[str, int] = {}
        num_words = 0
        whole = {"block_tables": self.block_table_buffer} | {
            name: getattr(self._now, name) for name in _ARRAYS
        }
        for name, array in whole.items():
            self._offsets[name] = num_words
            num_words += -(-array.nbytes // 16) * 4
        arena = memory.empty((num_words,), np.int32)
        self._arena = arena
        self._arena_address = self._library.address_of(arena)
        self.on_device = DeviceArrays(
            **{
                name: self._library.part(arena, self._offsets[name], array.shape, array.dtype)
                for name, array in whole.items()
            }
        )
        # Of a batch the runs are the arrays and the changed ranges: of a row, each column at most once.
        self._most_runs = len(_ARRAYS) + max_seqs * (1 + self.block_table_buffer.shape[1] // 2)
        staged = 4 * self._most_runs + num_words
        self._ring = []
        for _ in range(num_staged):
            buffer = memory.empty((staged,), np.int32)
            pinned = self._transport.pinned((staged,), np.int32)
            self._ring.append(_Staging(pinned, buffer, self._library.address_of(buffer)))
        self._turn = 0
        # Changes are counted from a table of null blocks, which the device does not have yet.
        rows, columns = self.block_table_buffer.shape
        everything = np.zeros((rows, 3), np.int32)
        everything[:, 0], everything[:, 2] = np.arange(rows), columns
        self._pending: list[NDArray[np.int32]] = [everything]

    def schedule(self, handles: _Handles, num_new: _Counts, **options: Unpack[_ScheduleOptions]) -> Scheduled:
        """See `Step.schedule`; what it changed in the tables is kept until `upload`."""
        scheduled = super().schedule(handles, num_new, **options)
        if len(self.changes):
            self._pending.append(self.changes.copy())
            if len(self._pending) > _MOST_PENDING:
                self._pending = [self._changed_ranges()]
        return scheduled

    def upload(self, stream: object = None) -> None:
        """Bring `on_device` up to date on a stream, behind what it already has; the host waits only for the ring.

        stream: see `kvblocks.gpu.calls`; what reads the arrays belongs on it too. Not to be captured: a captured graph
        reads the arrays, and this runs before it is launched. O(tokens + changed blocks).
        """
        address = self._library.current_stream(self._device) if stream is None else stream_address(stream)
        function = self._launcher.load(specs.only(specs.UPLOAD_STEP))
        staging = self._ring[self._turn]
        if staging.event is not None:
            staging.event.synchronize()
        num_runs, num_words = self._stage(staging.host)
        self._transport.copy(staging.address, staging.host.ctypes.data, 4 * num_words, address)
        record = np.zeros((), params.UPLOAD)
        record["runs"], record["words"] = staging.address, staging.address + 16 * num_runs
        record["arena"], record["num_runs"] = self._arena_address, num_runs
        grid = (min(num_runs, _MOST_BLOCKS), 1, 1)
        self._launcher.launch(function, grid, specs.UPLOAD_STEP.threads, 0, record, address)
        staging.event = self._transport.record(address)
        self._turn = (self._turn + 1) % len(self._ring)
        self._pending.clear()

    def _stage(self, host: NDArray[np.int32]) -> tuple[int, int]:
        """Write the runs and then their words; how many of both there are together."""
        ranges = self._changed_ranges()
        arrays = [(self._offsets[name], np.ascontiguousarray(getattr(self, name))) for name in _ARRAYS]
        arrays = [(offset, array) for offset, array in arrays if array.size]
        num_runs = len(arrays) + len(ranges)
        runs = host[: 4 * num_runs].reshape(num_runs, 4)
        words = host[4 * num_runs :]
        at = 0
        for run, (offset, array) in zip(runs, arrays, strict=False):
            values = array.reshape(-1).view(np.int32)
            words[at : at + len(values)] = values
            run[:] = (at, offset, len(values), 0)
            at += len(values)
        if len(ranges):
            table = self.block_table_buffer
            row, first, count = ranges.T.astype(np.int64)
            starts = np.cumsum(count) - count
            total = int(count.sum())
            from_table = row * table.shape[1] + first
            index = np.repeat(from_table - starts, count) + np.arange(total)
            words[at : at + total] = table.reshape(-1)[index]
            changed = runs[len(arrays) :]
            changed[:, 0], changed[:, 1] = at + starts, self._offsets["block_tables"] + from_table
            changed[:, 2], changed[:, 3] = count, 0
            at += total
        return num_runs, 4 * num_runs + at

    def _changed_ranges(self) -> NDArray[np.int32]:
        """Row, first column and number of columns of what changed since the last upload."""
        if not self._pending:
            return np.zeros((0, 3), np.int32)
        if len(self._pending) == 1:
            return self._pending[0]
        ranges = np.unique(np.concatenate(self._pending), axis=0)
        columns = self.block_table_buffer.shape[1]
        if len(ranges) > self._most_runs - len(_ARRAYS) or ranges[:, 2].sum() > self.block_table_buffer.size:
            rows = np.unique(ranges[:, 0])
            ranges = np.stack([rows, np.zeros_like(rows), np.full_like(rows, columns)], axis=1)
        return ranges
