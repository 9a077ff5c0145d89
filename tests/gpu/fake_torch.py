"""A stand-in for torch on a machine without a device: tensors in host memory that say they are on device 0.

It shares streams, and what is captured, with the stand-in for CuPy, as the real ones share a driver.
"""

from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from gpu.fake import FakeCupy

_NAMES = ("float32", "float16", "bfloat16", "uint8", "int8", "int32", "int64")


class DType:
    """torch.float16 and the like: by its name, and what NumPy stores it as."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.storage = np.dtype(np.uint16 if name == "bfloat16" else name)

    def __str__(self) -> str:
        return f"torch.{self.name}"


DTYPES = {name: DType(name) for name in _NAMES}
DTYPES |= {"float8_e4m3fn": DType("uint8"), "float8_e5m2": DType("uint8")}


class Tensor:
    """The methods that kvblocks asks of a tensor."""

    def __init__(self, array: np.ndarray, dtype: DType | None = None) -> None:
        self.array = array
        self.dtype = dtype or next(each for each in DTYPES.values() if each.storage == array.dtype)
        self.device = SimpleNamespace(type="cuda", index=0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def get_device(self) -> int:
        return 0

    def clone(self, *, memory_format: object) -> "Tensor":
        return Tensor(np.ascontiguousarray(self.array).copy(), self.dtype)

    def to(self, target: object) -> "Tensor":
        if isinstance(target, DType):
            return Tensor(self.array.astype(target.storage), target)
        return Tensor(self.array.copy(), self.dtype)

    def cpu(self) -> "Tensor":
        return self

    def numpy(self) -> np.ndarray:
        return self.array.copy()

    def fill_(self, value: int) -> None:
        self.array.fill(value)

    def copy_(self, source: "Tensor") -> None:
        self.array[...] = source.array


class FakeTorch(ModuleType):
    """The parts of the module `torch` that kvblocks uses; allocations are counted."""

    def __init__(self, cupy: FakeCupy) -> None:
        super().__init__("torch")
        self._cupy = cupy
        self.num_allocated = 0
        self.Tensor = Tensor
        self.contiguous_format = "contiguous"
        self.device = lambda kind, index: SimpleNamespace(type=kind, index=index)
        self.from_numpy = Tensor
        for name, dtype in DTYPES.items():
            setattr(self, name, dtype)
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            current_stream=lambda device: SimpleNamespace(cuda_stream=cupy.current_stream),
            ExternalStream=lambda address, device: address,
            default_stream=lambda device: 0,
            stream=self._on,
            synchronize=lambda device: cupy.waited.append(device.index),
        )
        self._C = ModuleType("torch._C")

    def empty(self, shape: Any, *, dtype: DType, device: object) -> Tensor:
        self.num_allocated += 1
        array = np.empty(shape, dtype.storage)
        array.reshape(-1).view(np.uint8).fill(0xFF)
        return Tensor(array, dtype)

    def zeros(self, shape: Any, *, dtype: DType, device: object) -> Tensor:
        self.num_allocated += 1
        return Tensor(np.zeros(shape, dtype.storage), dtype)

    @contextmanager
    def _on(self, stream: int) -> Any:
        before, self._cupy.current_stream = self._cupy.current_stream, stream
        yield
        self._cupy.current_stream = before
