"""The CUDA kernels on a GPU, launched by CuPy.

Owns `CupyBackend`, `CupyLauncher` and `CupyMemory`. Imports the device backend and kernels; CuPy when one is made.
Invariant: everything belongs to one device and is made when it is first needed; what a captured launch uses was made
before, so a capture neither allocates, compiles, loads nor waits: where it would have to, it is refused.
"""

import importlib
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends.device import DeviceBackend
from kvblocks.backends.foreign import is_dlpack_only, look_at
from kvblocks.config import CacheConfig
from kvblocks.kernels import specs
from kvblocks.kernels.cubins import Cubins
from kvblocks.kernels.launcher import Attributes, Grid, Launch
from kvblocks.kernels.specs import Instance
from kvblocks.layout import Array

_PERCENT_SHARED: Final = 100


class CaptureError(RuntimeError):
    """A stream that is being captured was asked for what only works outside of a capture."""


class CupyLauncher:
    """Loads and launches for one device; every thread may call. device: its index, by default the current one.

    A module is kept for each instance; its key in memory is (device, instance), on disk see `Cubins`.
    """

    def __init__(self, device: int | None = None, *, cubins: Cubins | None = None, cupy: Any = None) -> None:
        self._cuda = (cupy or importlib.import_module("cupy")).cuda
        self.device: int = self._cuda.runtime.getDevice() if device is None else device
        self.cubins = cubins or Cubins()
        self._functions: dict[tuple[int, Instance], Any] = {}
        self._loading = threading.Lock()

    @property
    def arch(self) -> str:
        """The architecture to compile for: "sm_90"."""
        return f"sm_{self._cuda.Device(self.device).compute_capability}"

    def load(self, instance: Instance) -> Any:
        """See `Launcher.load`. Raises CaptureError where the current stream is captured and it is not loaded yet."""
        function = self._functions.get((self.device, instance))
        if function is not None:
            return function
        self.refuse_in_capture(
            f"kernel {instance.name} is not loaded on device {self.device}: call kvblocks.gpu.warmup, or run the "
            "call once, before the capture"
        )
        with self._loading:
            if (self.device, instance) not in self._functions:
                self._functions[self.device, instance] = self._made(instance)
            return self._functions[self.device, instance]

    def _made(self, instance: Instance) -> Any:
        cubin = self.cubins.get(instance, self.arch)
        driver = self._cuda.driver
        with self.guard():
            self._cuda.runtime.free(0)  # makes the context of the device, if nobody has yet
            module = self._cuda.Module()
            module.load(cubin)
            function = module.get_function(instance.kernel.entry)
            if instance.has_mma:
                driver.funcSetAttribute(
                    function.ptr,
                    driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    max_shared_bytes(self._cuda, self.device),
                )
                # K and V go past the first-level cache, and blocks share an SM as their shared memory allows.
                driver.funcSetAttribute(
                    function.ptr, driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, _PERCENT_SHARED
                )
        return function

    def launch(
        self,
        function: Any,
        grid: Grid,
        threads: int,
        shared_bytes: int,
        params: NDArray[np.void],
        stream: int,
    ) -> None:
        """See `Launcher.launch`."""
        self.bind([Launch(function, grid, threads, shared_bytes, params)])(stream)

    def bind(self, launches: Sequence[Launch]) -> Callable[[int], None]:
        """See `Launcher.bind`."""
        # What the driver takes: for each launch an array of addresses of parameters, of which there is one.
        addresses = np.array([each.params.ctypes.data for each in launches], np.uint64)
        ready = [
            (each.function.ptr, *each.grid, each.threads, 1, 1, each.shared_bytes, addresses[at:].ctypes.data)
            for at, each in enumerate(launches)
        ]
        launch, current, device = self._cuda.driver.launchKernel, self._cuda.runtime.getDevice, self.device

        # The default keeps alive what the driver reads by address.
        def fire(stream: int, _held: Any = (addresses, tuple(launches))) -> None:
            if current() != device:
                with self.guard():
                    fire(stream)
                return
            for code, x, y, z, threads, one, two, shared_bytes, at in ready:
                launch(code, x, y, z, threads, one, two, shared_bytes, stream, at, 0)

        return fire

    def attributes(self, function: Any) -> Attributes:
        """See `Launcher.attributes`."""
        driver = self._cuda.driver
        return Attributes(
            registers=driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function.ptr),
            local_bytes=driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function.ptr),
        )

    def warmup(self, instances: Iterable[Instance] = specs.INSTANCES) -> int:
        """Load instances, compiling those that no cache has; returns how many were compiled. Seconds each for those."""
        before = self.cubins.num_compiled
        for instance in instances:
            self.load(instance)
        return self.cubins.num_compiled - before

    def guard(self) -> AbstractContextManager[Any]:
        """The launcher's device as the current one."""
        if self._cuda.runtime.getDevice() == self.device:
            return nullcontext()
        guard: AbstractContextManager[Any] = self._cuda.Device(self.device)
        return guard

    def is_capturing(self, stream: int) -> bool:
        """Whether a stream is being captured."""
        # The null stream cannot be captured, and asking it would end the capture of another one.
        return stream not in (0, 1) and bool(self._cuda.runtime.streamIsCapturing(stream))

    def refuse_in_capture(self, message: str) -> None:
        """Raise CaptureError with a message if the current stream is being captured."""
        if self.is_capturing(self._cuda.get_current_stream(self.device).ptr):
            raise CaptureError(message)


class CupyMemory:
    """CuPy's arrays and CuPy's current stream, on one device."""

    def __init__(self, launcher: CupyLauncher, *, cupy: Any = None) -> None:
        self._cupy = cupy or importlib.import_module("cupy")
        self._launcher = launcher
        self._index = launcher.device
        runtime = self._cupy.cuda.runtime
        self.num_multiprocessors: int = runtime.deviceGetAttribute(
            runtime.cudaDevAttrMultiProcessorCount, self._index
        )
        self.max_shared_bytes = max_shared_bytes(self._cupy.cuda, self._index)

    def describe(self, name: str, array: Array) -> NDArray[Any]:
        """See `Memory.describe`. Raises ValueError for an array of another device."""
        if is_dlpack_only(array):
            array = self._cupy.from_dlpack(array)
        seen = look_at(name, array)
        if seen.device is None:
            seen.device = self._cupy.cuda.runtime.pointerGetAttributes(seen.address).device
        if seen.device != self._index:
            raise ValueError(f"{name}: on device {seen.device}, the call runs on device {self._index}")
        return seen.described()

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """See `Memory.empty`. Raises CaptureError inside a capture."""
        self._launcher.refuse_in_capture(
            f"an array of shape {tuple(shape)} would be allocated inside a capture: give out= (and workspace= where "
            "keys are split), or use torch tensors, whose allocator knows captures"
        )
        with self._launcher.guard():
            return self._cupy.empty(tuple(shape), dtype)

    def scratch(self, shape: Sequence[int], dtype: Any) -> Array:
        """See `Memory.scratch`."""
        return self.empty(shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        """See `Memory.zeros`."""
        array = self.empty(shape, dtype)
        with self._launcher.guard():
            array.fill(0)
        return array

    def upload(self, array: NDArray[Any]) -> Array:
        """See `Memory.upload`."""
        self._launcher.refuse_in_capture(
            "a table would be uploaded inside a capture: call kvblocks.gpu.warmup, and run the call once, before it"
        )
        with self._launcher.guard():
            uploaded = self._cupy.asarray(array)
            # Tables are kept for later calls, which may come on another stream.
            self._cupy.cuda.get_current_stream(self._index).synchronize()
        return uploaded

    def download(self, array: Array) -> NDArray[Any]:
        """See `Memory.download`. Raises CaptureError inside a capture."""
        self._launcher.refuse_in_capture("an array would be read back inside a capture")
        with self._launcher.guard():
            self._cupy.cuda.runtime.deviceSynchronize()
            host: NDArray[Any] = self._cupy.asnumpy(array)
        return host

    def plain(self, array: Array) -> Array:
        """See `Memory.plain`. Raises CaptureError inside a capture."""
        self._launcher.refuse_in_capture("an array that is not contiguous would be copied inside a capture")
        with self._launcher.guard():
            return self._cupy.array(array, copy=True, order="C")

    def assign(self, target: Array, source: Array | int) -> None:
        """See `Memory.assign`."""
        with self._launcher.guard():
            self._cupy.asarray(target)[...] = source

    def convert(self, array: Array, dtype: Any) -> Array:
        """See `Memory.convert`."""
        with self._launcher.guard():
            return array.astype(dtype)

    def device(self) -> int:
        """See `Memory.device`: the launcher's, whichever is current."""
        return self._index

    def stream(self) -> int:
        """See `Memory.stream`: CuPy's current stream, which is the null stream until another one is made current."""
        address: int = self._cupy.cuda.get_current_stream(self._index).ptr
        return address


class CupyBackend(DeviceBackend):
    """`DeviceBackend` on a GPU, for CuPy's arrays and CuPy's current stream.

    device: its index, by default CuPy's current device. split_size: see `DeviceBackend`. Raises RuntimeError that says
    what is missing where there is no GPU, no driver or no CuPy.
    """

    def __init__(
        self, device: int | None = None, *, split_size: int | None = None, cubins: Cubins | None = None
    ) -> None:
        launcher = launcher_of(device) if cubins is None else CupyLauncher(device, cubins=cubins)
        super().__init__("cupy", launcher, CupyMemory(launcher), split_size=split_size)


@cache
def _launcher_of(device: int) -> CupyLauncher:
    return CupyLauncher(device)


def launcher_of(device: int | None = None) -> CupyLauncher:
    """The launcher of a device that everybody shares, so that a kernel is loaded once; None: CuPy's current device.

    Raises RuntimeError that says what is missing.
    """
    try:
        cupy = importlib.import_module("cupy")
        if device is None:
            device = cupy.cuda.runtime.getDevice()
        return _launcher_of(device)
    except ImportError as error:
        raise RuntimeError(
            f"the backend 'cupy' needs CuPy ({error}): pip install 'kvblocks[cupy]'"
        ) from error
    except Exception as error:
        if type(error).__name__ != "CUDARuntimeError":
            raise
        raise RuntimeError(f"the backend 'cupy' needs a GPU and its driver: {error}") from error


def max_shared_bytes(cuda: Any, device: int) -> int:
    """Dynamic shared memory that a block of a device may have, once its kernel asks for it."""
    runtime = cuda.runtime
    limit: int = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device)
    return limit


def instances_for(config: CacheConfig) -> list[Instance]:
    """What a cache of a config may launch: the kernels of its formats and head dims, and those of every cache."""
    formats = {name for each in config.formats for name in (each.k.name, each.v.name)}
    elements = {specs.ELEMENTS[name] for name in formats if name in specs.ELEMENTS}
    dims = str(config.head_dim), str(config.head_dim_v or config.head_dim)

    def is_used(instance: Instance) -> bool:
        defines = dict(instance.defines)
        return defines.get("KVB_KV") in (None, *elements) and (
            "KVB_HEAD_DIM" not in defines or (defines["KVB_HEAD_DIM"], defines["KVB_HEAD_DIM_V"]) == dims
        )

    return [instance for instance in specs.INSTANCES if is_used(instance)]
