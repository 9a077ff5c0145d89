"""The libraries whose arrays a call may bring: what they say of an array, where new ones come from, which stream.

Owns `Library` with `TorchLibrary` and `CupyLibrary`, and `library_of`. Imports the CuPy backend; torch and CuPy when
one of their arrays is met.
Invariant: a call's new arrays are of the library of its arguments and its work is ordered with that library's, so a
caller who synchronises as he would with his own operations is right.
"""

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvblocks._core import look_at_tensors
from kvblocks.backends.cupy import CaptureError, CupyMemory, launcher_of
from kvblocks.backends.foreign import cupy_stream, is_dlpack_only, look_at
from kvblocks.backends.memory import Memory
from kvblocks.gpu.patches import ALIGNMENT
from kvblocks.kernels.launcher import Launcher
from kvblocks.layout import Array


class Library(Protocol):
    """What a direct function needs of the arrays that it is given."""

    def look(
        self, names: Sequence[str], arrays: tuple[Array | None, ...], stream: int | None
    ) -> tuple[list[int], object]:
        """The addresses, and what else decides how a call is planned: shapes, strides, dtypes, devices, alignments.

        0 and None for None. stream: that the call goes to, None the current one, which waits for arrays that are still
        being written elsewhere. Raises TypeError that names what is no array of the library.
        """

    def address_of(self, array: Array) -> int:
        """The address of an array that `memory` made."""

    def part(self, array: Array, first: int, shape: Sequence[int], dtype: Any) -> Array:
        """A view of a one-dimensional int32 array of `memory`, from an element on, in another shape and dtype."""

    def describe(self, name: str, array: Array, device: int) -> NDArray[Any]:
        """See `Memory.describe`."""

    def device_of(self, name: str, array: Array) -> int:
        """The index of the device of an argument. Raises TypeError that names what is on none."""

    def current_stream(self, device: int) -> int:
        """The address of the stream that the library enqueues on."""

    def on(self, stream: int, device: int) -> AbstractContextManager[Any]:
        """A block whose work and new arrays of the library belong to a stream."""

    def planning_on(self, stream: int, device: int) -> AbstractContextManager[Any]:
        """A block in which launcher and memory see which stream a call will go to, and so whether it is captured."""

    def is_capturing(self, stream: int, device: int) -> bool:
        """Whether a stream is being captured."""

    def launcher(self, device: int) -> Launcher:
        """The launcher of a device."""

    def memory(self, device: int) -> Memory:
        """New arrays of the library on a device."""


class CupyLibrary:
    """CuPy's arrays, and through CuPy whatever has `__cuda_array_interface__` or DLPack."""

    def __init__(self) -> None:
        self._cupy: Any = importlib.import_module("cupy")

    def look(
        self, names: Sequence[str], arrays: tuple[Array | None, ...], stream: int | None
    ) -> tuple[list[int], object]:
        """See `Library.look`."""
        own = self._cupy.ndarray
        addresses: list[int] = []
        looks: list[object] = []
        for name, array in zip(names, arrays, strict=True):
            if array is None:
                addresses.append(0)
                looks.append(None)
                continue
            if isinstance(array, own):
                address, device = array.data.ptr, array.device.id
                looks += array.shape, array.strides, array.dtype.char, device, address % ALIGNMENT
            else:
                if is_dlpack_only(array):
                    array = self._imported(array, stream)
                seen = look_at(name, array)
                self._order_after(array, stream)
                address = seen.address
                looks += (
                    seen.shape,
                    seen.strides,
                    seen.dtype.str,
                    seen.device,
                    address % ALIGNMENT,
                    seen.is_readonly,
                )
            addresses.append(address)
        return addresses, tuple(looks)

    def address_of(self, array: Array) -> int:
        """See `Library.address_of`."""
        return int(array.data.ptr)

    def part(self, array: Array, first: int, shape: Sequence[int], dtype: Any) -> Array:
        """See `Library.part`."""
        return _part(array, first, shape, np.dtype(dtype), np.dtype(dtype))

    def _imported(self, array: Array, stream: int | None) -> Array:
        """CuPy's view of an array that only DLPack tells of, whose owner orders a stream behind its contents."""
        if stream is None:
            return self._cupy.from_dlpack(array)
        with self._stream(stream):
            return self._cupy.from_dlpack(array)

    def _order_after(self, array: Array, stream: int | None) -> None:
        """Let a stream wait for the one that the array's owner says its contents come from."""
        producer = getattr(array, "__cuda_array_interface__", {}).get("stream")
        if producer is None:
            return
        consumer = self._cupy.cuda.get_current_stream() if stream is None else self._stream(stream)
        if producer != consumer.ptr:
            event = self._cupy.cuda.Event(disable_timing=True)
            self._cupy.cuda.runtime.eventRecord(event.ptr, producer)
            consumer.wait_event(event)

    def _stream(self, address: int) -> Any:
        return cupy_stream(self._cupy.cuda, address, self._cupy.cuda.runtime.getDevice())

    def describe(self, name: str, array: Array, device: int) -> NDArray[Any]:
        """See `Library.describe`."""
        return self.memory(device).describe(name, array)

    def device_of(self, name: str, array: Array) -> int:
        """See `Library.device_of`."""
        if isinstance(array, self._cupy.ndarray):
            return int(array.device.id)
        seen = look_at(name, self._cupy.from_dlpack(array) if is_dlpack_only(array) else array)
        if seen.device is None:
            return int(self._cupy.cuda.runtime.pointerGetAttributes(seen.address).device)
        return seen.device

    def current_stream(self, device: int) -> int:
        """See `Library.current_stream`."""
        return int(self._cupy.cuda.get_current_stream(device).ptr)

    def on(self, stream: int, device: int) -> AbstractContextManager[Any]:
        """See `Library.on`."""
        context: AbstractContextManager[Any] = cupy_stream(self._cupy.cuda, stream, device)
        return context

    planning_on = on

    def is_capturing(self, stream: int, device: int) -> bool:
        """See `Library.is_capturing`."""
        return launcher_of(device).is_capturing(stream)

    def launcher(self, device: int) -> Launcher:
        """See `Library.launcher`."""
        return launcher_of(device)

    def memory(self, device: int) -> Memory:
        """See `Library.memory`."""
        return CupyMemory(launcher_of(device))


class TorchLibrary:
    """torch's tensors; every dtype by its bits, FP8 and bfloat16 too. New tensors come from torch's allocator."""

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        # current_stream() makes an object; this is what it asks.
        self._raw_stream: Any = getattr(
            importlib.import_module("torch._C"), "_cuda_getCurrentRawStream", None
        )
        # What torch tells in C, of all tensors of a call at once; before torch 2.10 it does not.
        self._exchange = getattr(self._torch.Tensor, "__dlpack_c_exchange_api__", None)

    def look(
        self, names: Sequence[str], arrays: tuple[Array | None, ...], stream: int | None
    ) -> tuple[list[int], object]:
        """See `Library.look`."""
        if self._exchange is not None:
            try:
                return look_at_tensors(self._exchange, self._torch.Tensor, arrays)
            except (TypeError, ValueError, RuntimeError, BufferError):
                pass  # a tensor of a class of its own, or what is no tensor: looked at one by one
        addresses: list[int] = []
        looks: list[object] = []
        try:
            for array in arrays:
                if array is None:
                    addresses.append(0)
                    looks.append(None)
                    continue
                address = array.data_ptr()
                addresses.append(address)
                # Most are contiguous, which costs less to ask than their strides.
                looks += (
                    array.shape,
                    array.is_contiguous() or array.stride(),
                    array.dtype,
                    array.get_device(),
                    address % ALIGNMENT,
                )
        except AttributeError:
            for name, array in zip(names, arrays, strict=True):
                if array is not None and not isinstance(array, self._torch.Tensor):
                    look_at(name, array)
                    raise TypeError(f"{name}: {type(array).__name__}, expected a torch tensor") from None
            raise
        return addresses, tuple(looks)

    def address_of(self, array: Array) -> int:
        """See `Library.address_of`."""
        return int(array.data_ptr())

    def part(self, array: Array, first: int, shape: Sequence[int], dtype: Any) -> Array:
        """See `Library.part`."""
        return _part(array, first, shape, np.dtype(dtype), getattr(self._torch, np.dtype(dtype).name))

    def describe(self, name: str, array: Array, device: int) -> NDArray[Any]:
        """See `Library.describe`."""
        return CupyMemory(launcher_of(device)).describe(name, array)

    def device_of(self, name: str, array: Array) -> int:
        """See `Library.device_of`."""
        device = int(array.get_device())
        if device < 0:
            look_at(name, array)  # says that it is on the host
        return device

    def current_stream(self, device: int) -> int:
        """See `Library.current_stream`."""
        if self._raw_stream is not None:
            return int(self._raw_stream(device))
        return int(self._torch.cuda.current_stream(device).cuda_stream)

    def on(self, stream: int, device: int) -> AbstractContextManager[Any]:
        """See `Library.on`."""
        cuda = self._torch.cuda
        # An external stream of address 0 would be one of torch's pool.
        named = cuda.ExternalStream(stream, device=device) if stream else cuda.default_stream(device)
        context: AbstractContextManager[Any] = cuda.stream(named)
        return context

    def planning_on(self, stream: int, device: int) -> AbstractContextManager[Any]:
        """See `Library.planning_on`."""
        return self._planning_on(stream, device)

    @contextmanager
    def _planning_on(self, stream: int, device: int) -> Iterator[None]:
        with ExitStack() as both:
            both.enter_context(cupy_stream(importlib.import_module("cupy").cuda, stream, device))
            both.enter_context(self.on(stream, device))
            yield

    def is_capturing(self, stream: int, device: int) -> bool:
        """See `Library.is_capturing`."""
        return launcher_of(device).is_capturing(stream)

    def launcher(self, device: int) -> Launcher:
        """See `Library.launcher`."""
        return launcher_of(device)

    def memory(self, device: int) -> Memory:
        """See `Library.memory`."""
        launcher = launcher_of(device)
        attributes = CupyMemory(launcher)
        return TorchMemory(
            self._torch.device("cuda", device),
            attributes.num_multiprocessors,
            attributes.max_shared_bytes,
            launcher.is_capturing,
        )


class TorchMemory:
    """New tensors of one device. An element of 16 bits without a sign is a bfloat16, as everywhere."""

    def __init__(
        self,
        device: Any,
        num_multiprocessors: int,
        max_shared_bytes: int,
        is_capturing: Callable[[int], bool],
    ) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._is_capturing = is_capturing
        self._device = device
        self.num_multiprocessors = num_multiprocessors
        self.max_shared_bytes = max_shared_bytes
        torch = self._torch
        self._dtypes: dict[np.dtype[Any], Any] = {
            np.dtype(np.float32): torch.float32,
            np.dtype(np.float16): torch.float16,
            np.dtype(np.uint16): torch.bfloat16,
            np.dtype(np.uint8): torch.uint8,
            np.dtype(np.int8): torch.int8,
            np.dtype(np.uint32): torch.int32,  # counts below 2^31, and bits
            np.dtype(np.int32): torch.int32,
            np.dtype(np.int64): torch.int64,
        }

    def describe(self, name: str, array: Array) -> NDArray[Any]:
        """See `Memory.describe`."""
        return look_at(name, array).described()

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """See `Memory.empty`."""
        return self._torch.empty(tuple(shape), dtype=self._dtypes[np.dtype(dtype)], device=self._device)

    def scratch(self, shape: Sequence[int], dtype: Any) -> Array:
        """See `Memory.scratch`."""
        return self.empty(shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        """See `Memory.zeros`."""
        return self._torch.zeros(tuple(shape), dtype=self._dtypes[np.dtype(dtype)], device=self._device)

    def upload(self, array: NDArray[Any]) -> Array:
        """See `Memory.upload`. Raises CaptureError inside a capture."""
        self._refuse_in_capture()
        return self._torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def download(self, array: Array) -> NDArray[Any]:
        """See `Memory.download`. Raises CaptureError inside a capture."""
        self._refuse_in_capture()
        self._torch.cuda.synchronize(self._device)
        host: NDArray[Any] = array.cpu().numpy()
        return host

    def _refuse_in_capture(self) -> None:
        if self._is_capturing(self.stream()):
            raise CaptureError(
                "a host's array would be copied inside a capture: call kvblocks.gpu.warmup, and run the call once, "
                "before it"
            )

    def plain(self, array: Array) -> Array:
        """See `Memory.plain`."""
        return array.clone(memory_format=self._torch.contiguous_format)

    def assign(self, target: Array, source: Array | int) -> None:
        """See `Memory.assign`."""
        if isinstance(source, int):
            target.fill_(source)
        else:
            target.copy_(source)

    def convert(self, array: Array, dtype: Any) -> Array:
        """See `Memory.convert`."""
        return array.to(self._dtypes[np.dtype(dtype)])

    def device(self) -> int:
        """See `Memory.device`."""
        return int(self._device.index or 0)

    def stream(self) -> int:
        """See `Memory.stream`."""
        return int(self._torch.cuda.current_stream(self._device).cuda_stream)


def _part(array: Array, first: int, shape: Sequence[int], dtype: np.dtype[Any], own_dtype: Any) -> Array:
    num_words = math.prod(shape) * dtype.itemsize // 4
    return array[first : first + num_words].view(own_dtype).reshape(tuple(shape))


# By the type of an array, so that a call finds its library at the cost of one look-up.
_LIBRARIES: Final[dict[type, Library]] = {}


def library_of(name: str, array: object) -> Library:
    """The library of an argument. Raises TypeError that names it for what is no array on a GPU."""
    library = _LIBRARIES.get(type(array))
    if library is None:
        torch = sys.modules.get("torch")  # who has a tensor has imported it
        if torch is not None and isinstance(array, torch.Tensor):
            library = _torch()
        else:
            if not is_dlpack_only(array):
                look_at(name, array)
            library = _cupy()
        _LIBRARIES[type(array)] = library
    return library


@cache
def _torch() -> TorchLibrary:
    return TorchLibrary()


@cache
def _cupy() -> CupyLibrary:
    return CupyLibrary()


def library_named(name: str) -> Library:
    """The library "torch" or "cupy". Raises ValueError for another name."""
    if name not in ("torch", "cupy"):
        raise ValueError(f"library is {name!r}: expected 'torch' or 'cupy'")
    return _torch() if name == "torch" else _cupy()


def libraries_in_use() -> list[Library]:
    """CuPy, and torch where it has been imported and has devices."""
    torch = sys.modules.get("torch")
    has_torch = torch is not None and torch.cuda.is_available()
    return [_cupy(), *([_torch()] if has_torch else [])]
