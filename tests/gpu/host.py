"""A library whose arrays are NumPy's and whose kernels are emulated: direct calls as a whole, without a device."""

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from kernels.emulator import EmulatedLauncher, HostMemory
from kvblocks.backends.foreign import DeviceArray


class HostLibrary:
    """Answers like kvblocks.gpu.libraries.CupyLibrary, over host memory; `streams` are the launches' streams."""

    def __init__(self) -> None:
        self.current = 0x5EED
        self.entered: list[int] = []
        self.streams: list[int] = []
        self.capturing: set[int] = set()
        self._launcher = _Watched(self.streams)
        self._memory = HostMemory()

    def look(self, names: Any, arrays: Any, stream: Any) -> tuple[list[int], object]:
        addresses = [0 if array is None else array.ctypes.data for array in arrays]
        looks = [
            array if array is None else (array.shape, array.strides, array.dtype.char, address & 15)
            for array, address in zip(arrays, addresses, strict=True)
        ]
        return addresses, tuple(looks)

    def address_of(self, array: Any) -> int:
        return array.ctypes.data

    def part(self, array: Any, first: int, shape: Any, dtype: Any) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize // 4
        return array[first : first + size].view(dtype).reshape(shape)

    def describe(self, name: str, array: Any, device: int) -> np.ndarray:
        return array.described() if isinstance(array, DeviceArray) else self._memory.describe(name, array)

    def device_of(self, name: str, array: Any) -> int:
        return 0

    def current_stream(self, device: int) -> int:
        return self.current

    def on(self, stream: int, device: int) -> AbstractContextManager[Any]:
        self.entered.append(stream)
        return nullcontext()

    def planning_on(self, stream: int, device: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def is_capturing(self, stream: int, device: int) -> bool:
        return stream in self.capturing

    def launcher(self, device: int) -> EmulatedLauncher:
        return self._launcher

    def memory(self, device: int) -> HostMemory:
        return self._memory


class _Watched(EmulatedLauncher):
    def __init__(self, streams: list[int]) -> None:
        super().__init__()
        self._streams = streams

    def launch(self, *arguments: Any) -> None:
        self._streams.append(arguments[-1])
        super().launch(*arguments)


class Queue:
    """A transport whose streams do nothing until somebody waits: what a device that lags behind looks like."""

    def __init__(self) -> None:
        self.work: list[Any] = []
        self.num_waits = 0
        self.order: list[tuple[str, int]] = []
        self._next_stream = 0x100

    def pinned(self, shape: Any, dtype: Any) -> np.ndarray:
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(0xFF)
        return array

    def is_pinned(self, address: int) -> bool:
        return True

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        self.order.append(("copy", stream))
        self.work.append(lambda: ctypes.memmove(destination, source, num_bytes))

    def record(self, stream: int) -> "QueueEvent":
        self.order.append(("record", stream))
        return QueueEvent(self, len(self.work))

    def wait(self, stream: int, event: "QueueEvent") -> None:
        self.order.append(("wait", stream))

    def new_stream(self) -> int:
        self._next_stream += 1
        return self._next_stream

    def run(self, count: int | None = None) -> None:
        """Do what was enqueued, the first `count` pieces of work since the beginning or all."""
        for number, piece in enumerate(self.work):
            if piece is not None and (count is None or number < count):
                self.work[number] = None
                piece()


class QueueEvent:
    def __init__(self, queue: Queue, count: int) -> None:
        self._queue, self._count = queue, count

    def is_done(self) -> bool:
        return all(piece is None for piece in self._queue.work[: self._count])

    def synchronize(self) -> None:
        self._queue.num_waits += not self.is_done()
        self._queue.run(self._count)


class QueuedLibrary(HostLibrary):
    """Launches wait in a queue too."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        launcher = self._launcher
        launch = launcher.launch

        def later(*arguments: Any) -> None:
            held = tuple(each.copy() if isinstance(each, np.ndarray) else each for each in arguments)
            queue.order.append(("launch", arguments[-1]))
            queue.work.append(lambda: launch(*held))

        launcher.launch = later  # type: ignore[method-assign]
