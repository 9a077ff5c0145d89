"""A library whose arrays are NumPy's and whose kernels are emulated: direct calls as a whole, without a device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from kernels.emulator import EmulatedLauncher, HostMemory


class HostLibrary:
    """Answers like kvblocks.gpu.libraries.CupyLibrary, over host memory; `streams` are the launches' streams."""

    def __init__(self) -> None:
        self.current = 0x5EED
        self.entered: list[int] = []
        self.streams: list[int] = []
        self._launcher = _Watched(self.streams)
        self._memory = HostMemory()

    def look(self, array: Any) -> tuple[int, object]:
        address = array.ctypes.data
        return address, (array.shape, array.strides, array.dtype.char, address & 15)

    def address_of(self, array: Any) -> int:
        return array.ctypes.data

    def describe(self, name: str, array: Any, device: int) -> np.ndarray:
        return self._memory.describe(name, array)

    def device_of(self, array: Any) -> int:
        return 0

    def current_stream(self, device: int) -> int:
        return self.current

    def on(self, stream: int, device: int) -> AbstractContextManager[Any]:
        self.entered.append(stream)
        return nullcontext()

    def planning_on(self, stream: int, device: int) -> AbstractContextManager[Any]:
        return nullcontext()

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
