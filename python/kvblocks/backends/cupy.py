"""The CUDA backend: kernels compiled by NVRTC, loaded and launched by CuPy.

Owns `CupyBackend`, its launcher and its memory. Imports device, kernels and, when an instance is made, cupy.
Invariant: a module is loaded once a device and instance, and launched while that device is current; a launch goes to
the stream of `on`, else to CuPy's current one. Nothing is compiled or loaded while the stream is being captured.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends.device import DeviceBackend
from kvblocks.kernels.cubin import load_cubin
from kvblocks.kernels.launcher import Attributes, Grid
from kvblocks.kernels.specs import INSTANCES, Instance
from kvblocks.layout import Array, LayerCache

Method = TypeVar("Method", bound=Callable[..., Any])

# CUfunction_attribute of the driver's interface.
_LOCAL_BYTES: Final = 3
_NUM_REGISTERS: Final = 4
_MAX_DYNAMIC_SHARED_BYTES: Final = 8
# Dynamic shared memory that a function has without asking.
_FREE_SHARED_BYTES: Final = 48 * 1024


@dataclass
class _Function:
    """A loaded function; the module must outlive it."""

    pointer: int
    module: Any
    max_shared_bytes: int = _FREE_SHARED_BYTES


class CupyLauncher:
    """Launches through the driver's interface as CuPy has it. modules: what stands in for CuPy in a test."""

    def __init__(self, cupy: Any = None, driver: Any = None) -> None:
        self._cupy = cupy or importlib.import_module("cupy")
        self._driver = driver or importlib.import_module("cupy_backends.cuda.api.driver")
        self._functions: dict[tuple[int, Instance], _Function] = {}
        self._archs: dict[int, str] = {}

    def load(self, instance: Instance) -> _Function:
        """See `Launcher.load`; compiles for the current device if neither memory nor disk has it."""
        device = self._cupy.cuda.runtime.getDevice()
        function = self._functions.get((device, instance))
        if function is None:
            function = self._functions[device, instance] = self._load(device, instance)
        return function

    def _load(self, device: int, instance: Instance) -> _Function:
        runtime = self._cupy.cuda.runtime
        if runtime.streamIsCapturing(self._cupy.cuda.get_current_stream().ptr):
            raise RuntimeError(
                f"{instance.name} is not loaded on device {device}, and the stream is being captured: "
                "call warmup(), or once what is captured, before the capture"
            )
        if device not in self._archs:
            self._archs[device] = f"sm_{self._cupy.cuda.Device(device).compute_capability}"
        module = self._cupy.cuda.function.Module()
        module.load(load_cubin(instance, self._archs[device]))
        return _Function(module.get_function(instance.kernel.entry).ptr, module)

    def launch(
        self,
        function: _Function,
        grid: Grid,
        threads: int,
        shared_bytes: int,
        params: NDArray[np.void],
        stream: int,
    ) -> None:
        """See `Launcher.launch`."""
        if shared_bytes > function.max_shared_bytes:
            self._driver.funcSetAttribute(function.pointer, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
            function.max_shared_bytes = shared_bytes
        # The driver takes an array of addresses of parameters, of which there is one.
        arguments = np.array([params.ctypes.data], np.uintp)
        self._driver.launchKernel(
            function.pointer, *grid, threads, 1, 1, shared_bytes, stream, arguments.ctypes.data, 0
        )

    def attributes(self, function: _Function) -> Attributes:
        """See `Launcher.attributes`."""
        get = self._driver.funcGetAttribute
        return Attributes(get(_NUM_REGISTERS, function.pointer), get(_LOCAL_BYTES, function.pointer))


class CupyMemory:
    """CuPy arrays of the current device. cupy: what stands in for CuPy in a test."""

    def __init__(self, cupy: Any = None) -> None:
        self._cupy = cupy or importlib.import_module("cupy")
        runtime = self._cupy.cuda.runtime
        device = runtime.getDevice()
        self.num_multiprocessors: int = runtime.deviceGetAttribute(
            runtime.cudaDevAttrMultiProcessorCount, device
        )
        self.max_shared_bytes: int = runtime.deviceGetAttribute(
            runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device
        )

    def describe(self, name: str, array: Array) -> NDArray[Any]:
        """See `Memory.describe`."""
        if not isinstance(array, self._cupy.ndarray):
            raise TypeError(
                f"{name}: {type(array).__name__}, expected a CuPy array (kvblocks.gpu.as_array makes one)"
            )
        if array.size == 0:
            return np.empty(array.shape, array.dtype)
        return np.asarray(_Address(array.data.ptr, array.shape, array.dtype, array.strides))

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """See `Memory.empty`."""
        return self._cupy.empty(tuple(shape), dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        """See `Memory.zeros`."""
        return self._cupy.zeros(tuple(shape), dtype)

    def upload(self, array: NDArray[Any]) -> Array:
        """See `Memory.upload`."""
        return self._cupy.asarray(array)

    def download(self, array: Array) -> NDArray[Any]:
        """See `Memory.download`."""
        host: NDArray[Any] = self._cupy.asnumpy(array)
        return host

    def plain(self, array: Array) -> Array:
        """See `Memory.plain`."""
        return self._cupy.ascontiguousarray(array).copy()

    def device(self) -> int:
        """See `Memory.device`."""
        return int(self._cupy.cuda.runtime.getDevice())

    def stream(self) -> int:
        """See `Memory.stream`."""
        return int(self._cupy.cuda.get_current_stream().ptr)


class _Address:
    """The array interface of device memory, of which NumPy keeps the numbers and reads nothing."""

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, False),
            "shape": tuple(shape),
            "typestr": np.dtype(dtype).str,
            "strides": tuple(strides),
        }


def _guarded(method: Method) -> Method:
    """Run a method on the device of its arrays, which must be one."""

    @wraps(method)
    def run(self: "CupyBackend", *args: Any, **kwargs: Any) -> Any:
        device = _device_of((*args, *kwargs.values()))
        if device is None:
            return method(self, *args, **kwargs)
        with self.cupy.cuda.Device(device):
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


def _device_of(arguments: Sequence[Any]) -> int | None:
    """The device that all arrays among the arguments are on; None if there is no array."""
    device: int | None = None
    for argument in arguments:
        if isinstance(argument, LayerCache):
            own = _device_of([array for _, array in argument.named_arrays])
        elif isinstance(argument, (list, tuple)):
            own = _device_of(argument)
        else:
            own = getattr(getattr(argument, "device", None), "id", None)
        if own is None:
            continue
        if device is not None and own != device:
            raise ValueError(
                f"arrays are on devices {device} and {own}: expected all of a call on one device"
            )
        device = own
    return device


class CupyBackend(DeviceBackend):
    """`DeviceBackend` over CuPy arrays. cupy, driver: what stands in for CuPy in a test.

    Raises ImportError that says what to install where CuPy is not.
    """

    def __init__(self, *, split_size: int | None = None, cupy: Any = None, driver: Any = None) -> None:
        try:
            self.cupy = cupy or importlib.import_module("cupy")
        except ImportError as error:
            raise ImportError(
                "the cupy backend needs CuPy: pip install 'cupy-cuda13x[ctk]' (kvblocks.gpu.check() says more)"
            ) from error
        super().__init__(
            "cupy", CupyLauncher(self.cupy, driver), CupyMemory(self.cupy), split_size=split_size
        )

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        """Send the launches and allocations of a block to a stream: see `stream_address` for what counts as one."""
        with self.cupy.cuda.ExternalStream(stream_address(stream)):
            yield

    def warmup(self, instances: Sequence[Instance] = INSTANCES) -> None:
        """Load instances on the current device, compiling what no cache has: before a capture, or a first step."""
        for instance in instances:
            self.launcher.load(instance)

    write = _guarded(DeviceBackend.write)
    attend = _guarded(DeviceBackend.attend)
    copy_blocks = _guarded(DeviceBackend.copy_blocks)
    move_slots = _guarded(DeviceBackend.move_slots)
    gather = _guarded(DeviceBackend.gather)
    merge_states = _guarded(DeviceBackend.merge_states)
    quantize = _guarded(DeviceBackend.quantize)
    dequantize = _guarded(DeviceBackend.dequantize)


def stream_address(stream: object) -> int:
    """The address of a stream: an int, or an object with `.ptr` (CuPy), `.cuda_stream` (torch) or `__cuda_stream__`."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    for name in ("ptr", "cuda_stream"):
        address = getattr(stream, name, None)
        if isinstance(address, int):
            return address
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, address = protocol() if callable(protocol) else protocol
        if version != 0:
            raise ValueError(f"stream: version {version} of __cuda_stream__, expected 0")
        return int(address)
    raise TypeError(
        f"stream: {type(stream).__name__}, expected an address or an object with ptr, cuda_stream or __cuda_stream__"
    )
