"""What every call of a kernel does with its arguments: look, copy what must be copied, launch, report.

Owns `Kernels` and `Held`. Imports layout, geometry and kernels.
Invariant: arrays are looked at, never read; every launch goes to the stream that `Memory.stream` names at that moment.
"""

from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends.geometry import Record, address_of
from kvblocks.backends.memory import Memory
from kvblocks.kernels.launcher import Launch, Launcher
from kvblocks.kernels.specs import Instance
from kvblocks.layout import Array, LayerCache

_CODES: Final = {
    1: "a slot of slot_mapping that the cache does not have",
    2: "a block of block_tables that the cache does not have",
    3: "a length in seq_lens beyond the row's table",
    4: "more queries than keys, or a query_start_loc that does not ascend",
    5: "a block of copies that the cache does not have",
    6: "a slot of moves that the cache does not have",
    7: "a move_start that does not ascend within moves",
    8: "a kv_indptr that does not ascend within kv_indices",
}
# Blocks of a kernel that goes through its rows in a loop.
MOST_BLOCKS_OF_A_LOOP: Final = 4096


class Held(NamedTuple):
    """An array that must live until the launch, and its description."""

    array: Array
    view: NDArray[Any]


class Kernels:
    """A launcher and the memory that its kernels reach."""

    def __init__(self, launcher: Launcher, memory: Memory) -> None:
        self.launcher = launcher
        self.memory = memory
        # A report a device, as kernels reach the memory of their own.
        self._errors: dict[int, Array] = {}
        self._described: WeakKeyDictionary[LayerCache, LayerCache] = WeakKeyDictionary()

    def first_error(self) -> str | None:
        """The first wrong value that a kernel skipped since this was last asked, or None; waits for the device."""
        report = self._error()
        code, row, column, value = self.memory.download(report).tolist()
        if code == 0:
            return None
        self.memory.assign(report, 0)
        self.memory.download(report)  # cleared before a kernel on another stream could report again
        return f"{_CODES[code]}: row {row}, column {column}, value {value}"

    def see_cache(self, cache: LayerCache) -> LayerCache:
        """A cache whose arrays are descriptions, looked at once."""
        if not isinstance(cache, LayerCache):
            raise TypeError(f"cache: {type(cache).__name__}, expected a LayerCache")
        if cache not in self._described:
            arrays = {name: self.memory.describe(name, array) for name, array in cache.named_arrays}
            self._described[cache] = LayerCache(
                format=cache.format, block_size=cache.block_size, layout=cache.layout, **arrays
            )
        return self._described[cache]

    def plain(self, array: Array, view: NDArray[Any]) -> Held:
        """The array itself if it is contiguous and aligned, else a copy that is."""
        if view.flags.c_contiguous and view.flags.aligned:
            return Held(array, view)
        return self._copied(array)

    def aligned(self, array: Array, view: NDArray[Any]) -> Held:
        """The array itself if it is aligned, else a copy that is."""
        return Held(array, view) if view.flags.aligned else self._copied(array)

    def rows(self, array: Array, view: NDArray[Any]) -> Held:
        """The array itself if the elements of its rows are neighbours, else a copy whose are."""
        neighbours = view.shape[-1] <= 1 or view.strides[-1] == view.itemsize
        return Held(array, view) if neighbours and view.flags.aligned else self._copied(array)

    def _copied(self, array: Array) -> Held:
        copy = self.memory.plain(array)
        return Held(copy, self.memory.describe("copy", copy))

    def _error(self) -> Array:
        device = self.memory.device()
        if device not in self._errors:  # uploaded, so that it is there for the streams of all callers
            self._errors[device] = self.memory.upload(np.zeros(4, np.int32))
        return self._errors[device]

    def error_address(self) -> int:
        """Where kernels report the first wrong value."""
        return address_of(self.memory.describe("error", self._error()))

    def prepare(
        self, instance: Instance, grid: tuple[int, int, int], shared_bytes: int, record: Record
    ) -> Launch:
        """A launch of an instance, which is loaded for it."""
        return Launch(self.launcher.load(instance), grid, instance.kernel.threads, shared_bytes, record)

    def launch(
        self, instance: Instance, grid: tuple[int, int, int], shared_bytes: int, record: Record
    ) -> None:
        """Launch an instance now."""
        self.launcher.launch(*self.prepare(instance, grid, shared_bytes, record), self.memory.stream())
