"""A stand-in for CuPy on a machine without a device: host memory, and launches that go to the emulator.

What the launcher hands to the driver is read back the way the driver reads it, so that the packing of arguments is
tested with the rest.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kernels.emulator import EmulatedLauncher
from kvblocks.kernels.cubins import Cubins
from kvblocks.kernels.source import read_source
from kvblocks.kernels.specs import INSTANCES, Instance

NULL_STREAM = 0
SOME_STREAM = 0x5EED


class FakeArray(np.ndarray):
    """A NumPy array that passes for one of CuPy's on device 0."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.__array_interface__ | {"strides": self.strides}

    @property
    def data(self) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(id=getattr(self.base, "device_id", 0))


@dataclass
class Launch:
    """One call of the driver."""

    instance: Instance
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    stream: int
    device: int


@dataclass
class FakeCupy:
    """The parts of the module `cupy` that kvblocks uses; attributes say what happened and what is the case."""

    current_device: int = 0
    current_stream: int = NULL_STREAM
    capturing: set[int] = field(default_factory=set)
    launches: list[Launch] = field(default_factory=list)
    attributes: list[tuple[int, int, int]] = field(default_factory=list)
    # (stream that an event was recorded on, None), (stream that waited, event).
    waits: list[tuple[int, int | None]] = field(default_factory=list)
    synchronised: list[int] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    num_modules: int = 0
    ndarray: type = FakeArray
    is_run: bool = True

    def __post_init__(self) -> None:
        self._functions: list[tuple[Instance, int]] = []
        self._emulator = EmulatedLauncher()
        runtime = SimpleNamespace(
            cudaDevAttrMultiProcessorCount=16,
            cudaDevAttrMaxSharedMemoryPerBlockOptin=97,
            getDevice=lambda: self.current_device,
            free=lambda address: None,
            deviceSynchronize=lambda: self.waited.append(self.current_device),
            streamIsCapturing=self._is_capturing,
            deviceGetAttribute=lambda attribute, device: {16: 2, 97: 227 * 1024}[attribute],
            pointerGetAttributes=lambda address: SimpleNamespace(device=0),
        )
        driver = SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
            CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=9,
            CU_FUNC_ATTRIBUTE_NUM_REGS=4,
            CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES=3,
            launchKernel=self._launch,
            funcSetAttribute=lambda code, attribute, value: self.attributes.append((code, attribute, value)),
            funcGetAttribute=lambda attribute, code: {4: 40, 3: 0}[attribute],
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            driver=driver,
            Module=lambda: _FakeModule(self),
            Device=lambda device: _FakeDevice(self, device),
            get_current_stream=lambda device=-1: _FakeStream(self, self.current_stream),
            ExternalStream=lambda address, device=-1: _FakeStream(self, address),
            Event=lambda disable_timing: SimpleNamespace(ptr=0xE),
        )
        runtime.eventRecord = lambda event, stream: self.waits.append((stream, None))

    # --- Arrays.

    def empty(self, shape: Sequence[int], dtype: Any) -> FakeArray:
        return np.empty(shape, dtype).view(FakeArray)

    def asarray(self, array: np.ndarray) -> FakeArray:
        return array if isinstance(array, FakeArray) else np.array(array).view(FakeArray)

    def array(self, array: np.ndarray, *, copy: bool, order: str) -> FakeArray:
        assert copy
        return np.array(array, order=order).view(FakeArray)

    def asnumpy(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    # --- What the driver does.

    def _is_capturing(self, stream: int) -> bool:
        assert stream not in (0, 1), "asking the null stream ends the capture of another one"
        return stream in self.capturing

    def _launch(
        self,
        code: int,
        x: int,
        y: int,
        z: int,
        threads: int,
        threads_y: int,
        threads_z: int,
        shared_bytes: int,
        stream: int,
        addresses: int,
        extra: int,
    ) -> None:
        assert (threads_y, threads_z, extra) == (1, 1, 0)
        instance, device = self._functions[code - 1]
        assert device == self.current_device, "a function belongs to the device that it was loaded on"
        self.launches.append(Launch(instance, (x, y, z), threads, shared_bytes, stream, device))
        if not self.is_run:
            return
        address = ctypes.c_uint64.from_address(addresses).value
        size = instance.kernel.params.itemsize
        params = np.frombuffer(ctypes.string_at(address, size), instance.kernel.params)[0:1].reshape(())
        function = self._emulator.load(instance)
        self._emulator.launch(function, (x, y, z), threads, shared_bytes, params, stream)


class _FakeDevice:
    def __init__(self, cupy: FakeCupy, device: int) -> None:
        self._cupy = cupy
        self._device = device
        self.compute_capability = "90"

    def __enter__(self) -> None:
        self._before, self._cupy.current_device = self._cupy.current_device, self._device

    def __exit__(self, *_: object) -> None:
        self._cupy.current_device = self._before


class _FakeStream:
    def __init__(self, cupy: FakeCupy, address: int) -> None:
        self._cupy = cupy
        self.ptr = address

    def synchronize(self) -> None:
        self._cupy.synchronised.append(self.ptr)

    def wait_event(self, event: SimpleNamespace) -> None:
        self._cupy.waits.append((self.ptr, event.ptr))

    def __enter__(self) -> None:
        self._before, self._cupy.current_stream = self._cupy.current_stream, self.ptr

    def __exit__(self, *_: object) -> None:
        self._cupy.current_stream = self._before


class _FakeModule:
    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy = cupy

    def load(self, cubin: bytes) -> None:
        self._instance = INSTANCES[int.from_bytes(cubin, "little")]
        self._cupy.num_modules += 1

    def get_function(self, entry: str) -> SimpleNamespace:
        assert entry == self._instance.kernel.entry
        self._cupy._functions.append((self._instance, self._cupy.current_device))
        return SimpleNamespace(ptr=len(self._cupy._functions), module=self)


def fake_cubins(folder: Path, *, version: tuple[int, int] = (13, 0), **options: Any) -> Cubins:
    """Cubins whose code is the number of the instance; folder: where they are kept."""
    texts = {read_source(each.kernel.file, dict(each.defines)): at for at, each in enumerate(INSTANCES)}

    def compile_cubin(text: str, name: str, arch: str, flags: Sequence[str]) -> tuple[bytes, str]:
        return texts[text].to_bytes(2, "little"), ""

    return Cubins(cache=folder, compile_cubin=compile_cubin, version=lambda: version, **options)
