"""Arrays of other libraries as what kernels need of them: address, shape, strides, dtype, device.

Owns `DeviceArray`, `look_at`, `stream_address` and `cupy_stream`. Imports NumPy only: torch and CuPy are met as
objects.
Invariant: nothing is copied and nothing waits; a `DeviceArray` keeps what it looks at alive.
"""

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# What elements are stored as, by the names of torch's and of ml_dtypes' dtypes: bits where NumPy has no such dtype.
_STORAGE: Final = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "int8": np.int8,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "int32": np.int32,
    "uint32": np.uint32,
    "int64": np.int64,
}
# kDLCUDA, kDLCUDAHost, kDLCUDAManaged of DLPack.
_DLPACK_DEVICES: Final = (2, 3, 13)


class DeviceArray:
    """A view of memory that somebody else owns: what a `LayerCache` is made of where the pool is an engine's.

    owner: kept alive. address: of the first element. strides: in bytes. dtype: of the storage, uint16 for bfloat16 and
    uint8 for fp8. device: the index of the GPU, or None where the owner does not tell.
    """

    __slots__ = ("address", "device", "dtype", "is_readonly", "owner", "shape", "strides")

    def __init__(
        self,
        owner: object,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
        device: int | None,
        *,
        is_readonly: bool = False,
    ) -> None:
        self.is_readonly = is_readonly
        self.owner = owner
        self.address = address
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.device = device

    @property
    def ndim(self) -> int:
        """Axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are neighbours, the last axis first."""
        steps = zip(self.shape, self.strides, _contiguous(self.shape, self.dtype.itemsize), strict=True)
        return all(stride == step for size, stride, step in steps if size > 1)

    def transpose(self, axes: tuple[int, ...]) -> "DeviceArray":
        """The same memory with its axes in another order."""
        shape, strides = (tuple(each[axis] for axis in axes) for each in (self.shape, self.strides))
        return self.part(0, shape, strides)

    def part(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> "DeviceArray":
        """A view of the same memory, some bytes from its first element on."""
        return DeviceArray(
            self.owner,
            self.address + offset,
            shape,
            strides,
            self.dtype,
            self.device,
            is_readonly=self.is_readonly,
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._interface()

    def described(self) -> NDArray[Any]:
        """A NumPy array of the same address, shape, dtype and strides, which nobody may read."""
        return np.asarray(_Described(self._interface()))

    def _interface(self) -> dict[str, Any]:
        # An array without elements may have no address, which NumPy would take for "make one".
        address = self.address or 256
        return {
            "data": (address, self.is_readonly),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": self.dtype.str,
            "version": 3,
        }


class _Described:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def look_at(name: str, array: object) -> DeviceArray:
    """What stands behind a torch tensor, a CuPy array, or any object with `__cuda_array_interface__`.

    Raises TypeError that names the argument for anything else, and for a dtype that is neither NumPy's nor stored here.
    """
    if isinstance(array, DeviceArray):
        return array
    if hasattr(array, "data_ptr") and hasattr(array, "stride"):
        return _look_at_tensor(name, array)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        wanted = "a torch tensor on a GPU, a CuPy array, or an object with __cuda_array_interface__"
        hint = " (cupy.from_dlpack makes one of it)" if hasattr(array, "__dlpack__") else ""
        raise TypeError(f"{name}: {type(array).__name__}, expected {wanted}{hint}")
    shape = tuple(interface["shape"])
    dtype = _storage(name, str(getattr(array, "dtype", np.dtype(interface["typestr"]))))
    strides = interface.get("strides") or _contiguous(shape, dtype.itemsize)
    device = getattr(getattr(array, "device", None), "id", None)
    address, is_readonly = interface["data"]
    return DeviceArray(array, address, shape, tuple(strides), dtype, device, is_readonly=is_readonly)


def _look_at_tensor(name: str, tensor: Any) -> DeviceArray:
    if tensor.device.type != "cuda":
        raise TypeError(f"{name}: a tensor on {tensor.device}, expected one on a GPU")
    dtype = _storage(name, str(tensor.dtype).removeprefix("torch."))
    strides = tuple(step * dtype.itemsize for step in tensor.stride())
    return DeviceArray(tensor, tensor.data_ptr(), tuple(tensor.shape), strides, dtype, tensor.device.index)


def is_dlpack_only(array: object) -> bool:
    """Whether an array on a GPU can be read through DLPack and in no other way."""
    if hasattr(array, "data_ptr") or hasattr(array, "__cuda_array_interface__"):
        return False
    device = getattr(array, "__dlpack_device__", None)
    return device is not None and device()[0] in _DLPACK_DEVICES


def _storage(name: str, dtype: str) -> np.dtype[Any]:
    try:
        # A dtype of NumPy that no kernel reads is for the check of the call to refuse, which knows what it wants.
        return np.dtype(_STORAGE.get(dtype, dtype))
    except TypeError:
        raise TypeError(f"{name}: dtype {dtype}, expected one of {', '.join(_STORAGE)}") from None


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    steps = [itemsize]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * size)
    return tuple(reversed(steps[: len(shape)]))


def stream_address(stream: object) -> int:
    """The address of a stream: an int, or an object with `__cuda_stream__`, `.ptr` (CuPy) or `.cuda_stream` (torch).

    Raises TypeError for anything else.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _, address = protocol() if callable(protocol) else protocol
        return int(address)
    for attribute in ("ptr", "cuda_stream"):
        address = getattr(stream, attribute, None)
        if isinstance(address, int):
            return address
    raise TypeError(
        f"stream: {type(stream).__name__}, expected None, an address, or an object with __cuda_stream__ or .ptr"
    )


class _Named:
    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def cupy_stream(cuda: Any, address: int, device: int) -> Any:
    """CuPy's object for a stream that somebody else owns; cuda: the module `cupy.cuda`."""
    wrap = getattr(getattr(cuda, "Stream", None), "from_external", None)
    if wrap is None:  # before CuPy 14, which warns of ExternalStream
        return cuda.ExternalStream(address, device)
    with cuda.Device(device):
        return wrap(_Named(address))
