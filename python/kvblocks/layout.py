"""From a `CacheConfig` to arrays: shapes, storage of one layer, and the meaning of a storage element.

Owns `storage_shape`, `LayerCache` and the conversion between float32 and the cache dtypes. Imports config.
Invariant: a `LayerCache` that exists has arrays of agreeing shape and dtype; a slot always means
(slot // block_size, slot % block_size) of that cache's own block size.
"""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvblocks.config import LAYOUTS, STORAGE_DTYPES, CacheConfig

# Storage is a numpy.ndarray for CPU backends and an array of the same interface for device backends.
Array: TypeAlias = Any
Shape: TypeAlias = tuple[int, int, int, int]

_AXES = {
    "NHD": ("num_blocks", "block_size", "num_kv_heads", "head_dim"),
    "HND": ("num_blocks", "num_kv_heads", "block_size", "head_dim"),
}
_NHD_ORDER = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)}


def storage_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype that stores a cache dtype; uint16 for the bits of "bfloat16"."""
    try:
        return STORAGE_DTYPES[name]
    except KeyError:
        raise ValueError(
            f"dtype is {name!r}: expected one of {', '.join(map(repr, STORAGE_DTYPES))}"
        ) from None


def dtype_name(storage: np.dtype[Any]) -> str:
    """The dtype that an array stands for: a uint16 array is always bfloat16 bits.

    Raises TypeError for a dtype that stands for none.
    """
    for name, dtype in STORAGE_DTYPES.items():
        if storage == dtype:
            return name
    hint = "; pass .view(numpy.uint16)" if storage.name == "bfloat16" else ""
    raise TypeError(f"dtype {storage}, expected float32, float16 or uint16 (bfloat16 bits){hint}")


def storage_shape(config: CacheConfig, num_blocks: int) -> tuple[Shape, Shape]:
    """Shapes of one layer's K and V arrays, in the order of the config's layout."""
    blocks = {"num_blocks": num_blocks, "block_size": config.block_size, "num_kv_heads": config.num_kv_heads}
    first, second, third, _ = (blocks.get(axis, 0) for axis in _AXES[config.layout])
    head_dim_v = config.head_dim_v or config.head_dim
    return (first, second, third, config.head_dim), (first, second, third, head_dim_v)


@dataclass(frozen=True, eq=False)
class LayerCache:
    """K and V of one layer; a view on memory that its backend, or the caller, owns.

    k: [num_blocks, block_size, num_kv_heads, head_dim] for layout "NHD", the two middle axes swapped for
    "HND"; strides as the backend takes them. v: the same with head_dim_v. dtype: the name of the cache dtype.
    Raises TypeError or ValueError that names the array, the axis and both numbers.
    """

    k: Array = field(repr=False)
    v: Array = field(repr=False)
    dtype: str
    block_size: int
    layout: str

    def __post_init__(self) -> None:
        storage = storage_dtype(self.dtype)
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}: expected one of {', '.join(map(repr, LAYOUTS))}")
        axes = _AXES[self.layout]
        for name, array in (("k", self.k), ("v", self.v)):
            if array.dtype != storage:
                raise TypeError(f"{name}: dtype {array.dtype}, a {self.dtype} cache is stored as {storage}")
            if array.ndim != 4:
                raise ValueError(f"{name}: {array.ndim} axes, expected 4 ({', '.join(axes)})")
            for axis, size in enumerate(array.shape):
                if size < 1:
                    raise ValueError(f"{name}: axis {axis} ({axes[axis]}) is {size}, expected 1 or more")
            axis = axes.index("block_size")
            if array.shape[axis] != self.block_size:
                raise ValueError(
                    f"{name}: axis {axis} (block_size) is {array.shape[axis]}, "
                    f"the cache has {self.block_size}"
                )
        for axis in range(3):
            if self.k.shape[axis] != self.v.shape[axis]:
                raise ValueError(
                    f"v: axis {axis} ({axes[axis]}) is {self.v.shape[axis]}, k has {self.k.shape[axis]}"
                )

    @property
    def num_blocks(self) -> int:
        """Blocks of storage."""
        return int(self.k.shape[0])

    @property
    def num_slots(self) -> int:
        """Slots of storage, num_blocks * block_size."""
        return self.num_blocks * self.block_size

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        return int(self.k_nhd.shape[2])

    @property
    def head_dim(self) -> int:
        """Elements of a K row."""
        return int(self.k.shape[3])

    @property
    def head_dim_v(self) -> int:
        """Elements of a V row."""
        return int(self.v.shape[3])

    @property
    def k_nhd(self) -> Array:
        """K as [num_blocks, block_size, num_kv_heads, head_dim] whatever the layout; a view."""
        return self.k.transpose(_NHD_ORDER[self.layout])

    @property
    def v_nhd(self) -> Array:
        """V as [num_blocks, block_size, num_kv_heads, head_dim_v] whatever the layout; a view."""
        return self.v.transpose(_NHD_ORDER[self.layout])


def allocate_host(config: CacheConfig, num_blocks: int) -> list[LayerCache]:
    """One cache a layer in new host memory, of undefined contents."""
    dtype = storage_dtype(config.dtype)
    k_shape, v_shape = storage_shape(config, num_blocks)
    return [
        LayerCache(
            np.empty(k_shape, dtype), np.empty(v_shape, dtype), config.dtype, config.block_size, config.layout
        )
        for _ in range(config.num_layers)
    ]


def to_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Exact values of a float32, float16 or uint16 (bfloat16 bits) array; float32 is returned as is."""
    if array.dtype == np.uint16:
        wide: NDArray[np.uint32] = array.astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)
    return array.astype(np.float32, copy=False)


def from_float32(array: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Round float32 values to nearest even, in the storage of a cache dtype; float32 is returned as is.

    Values beyond the range of float16 or bfloat16 become infinite; a NaN stays a NaN.
    """
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array).view(np.uint32)
        # Half of the dropped field, less one if the kept part is even; the carry may run into the exponent.
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        # The quiet bit: a NaN whose payload lies in the dropped half must not become infinite.
        nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
        kept: NDArray[np.uint32] = np.where(np.isnan(array), nan, rounded)
        return kept.astype(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(storage_dtype(dtype), copy=False)


def convert(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Round an array of any accepted dtype to a cache dtype; the same dtype is returned as is."""
    if array.dtype == storage_dtype(dtype):
        return array
    return from_float32(to_float32(array), dtype)
