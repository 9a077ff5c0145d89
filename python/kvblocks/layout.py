"""From a `CacheConfig` to arrays: shapes, storage of one layer, and the meaning of a storage element.

Owns `storage_shape`, `LayerCache` and the conversion between float32 and the plain dtypes. Imports config and
formats.
Invariant: a `LayerCache` that exists has arrays of agreeing shape and dtype; a slot always means
(slot // block_size, slot % block_size) of that cache's own block size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvblocks.config import LAYOUTS, CacheConfig
from kvblocks.formats import STORAGE_DTYPES, Format, KVFormat

# Storage is a numpy.ndarray for CPU backends and an array of the same interface for device backends.
Array: TypeAlias = Any
Shape: TypeAlias = tuple[int, int, int, int]

_AXES = {
    "NHD": ("num_blocks", "block_size", "num_kv_heads", "head_dim"),
    "HND": ("num_blocks", "num_kv_heads", "block_size", "head_dim"),
}
_NHD_ORDER = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)}
_NAMES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}


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
    name = _NAMES.get(storage)
    if name is None:
        hint = "; pass .view(numpy.uint16)" if storage.name == "bfloat16" else ""
        raise TypeError(f"dtype {storage}, expected float32, float16 or uint16 (bfloat16 bits){hint}")
    return name


def storage_shape(config: CacheConfig, num_blocks: int, layer: int = 0) -> tuple[Shape, Shape]:
    """Shapes of a layer's arrays of K codes and V codes, in the order of the config's layout."""
    blocks = {"num_blocks": num_blocks, "block_size": config.block_size, "num_kv_heads": config.num_kv_heads}
    first, second, third, _ = (blocks.get(axis, 0) for axis in _AXES[config.layout])
    kv_format = config.formats[layer]
    return (
        (first, second, third, kv_format.k.row_elements(config.head_dim)),
        (first, second, third, kv_format.v.row_elements(config.head_dim_v or config.head_dim)),
    )


@dataclass(frozen=True, eq=False)
class LayerCache:
    """K and V of one layer; a view on memory that its backend, or the caller, owns.

    k: codes [num_blocks, block_size, num_kv_heads, stored elements of a row] for layout "NHD", the two middle axes
    swapped for "HND"; strides as the backend takes them. v: the same. format: a `KVFormat`, or the text of one.
    k_scale, k_zero, v_scale, v_zero: where the format has them, in the shapes that stand in `formats`, which do not
    follow the layout. Raises TypeError or ValueError that names the array, the axis and both numbers. Backends remember
    what they have seen of a cache, and tell caches apart by identity: a subclass that compares values is a TypeError.
    """

    k: Array = field(repr=False)
    v: Array = field(repr=False)
    format: KVFormat
    block_size: int
    layout: str
    k_scale: Array | None = field(default=None, repr=False)
    k_zero: Array | None = field(default=None, repr=False)
    v_scale: Array | None = field(default=None, repr=False)
    v_zero: Array | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if type(self).__eq__ is not object.__eq__:
            raise TypeError(
                f"{type(self).__name__} compares values: caches are told apart by identity, dataclass(eq=False)"
            )
        object.__setattr__(self, "format", KVFormat.parse(self.format))
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}: expected one of {', '.join(map(repr, LAYOUTS))}")
        axes = _AXES[self.layout]
        for name, array, part in (("k", self.k, self.format.k), ("v", self.v, self.format.v)):
            if array.dtype != part.storage:
                raise TypeError(f"{name}: dtype {array.dtype}, a {part} cache is stored as {part.storage}")
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
        self.format.check(self.block_size, self.head_dim, self.head_dim_v)
        _check_scales("k", self.format.k, self.k_scale, self.k_zero, self._scale_sizes(self.head_dim))
        _check_scales("v", self.format.v, self.v_scale, self.v_zero, self._scale_sizes(self.head_dim_v))

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of storage."""
        return int(self.k.shape[0])

    @property
    def num_slots(self) -> int:
        """Slots of storage, num_blocks * block_size."""
        return self.num_blocks * self.block_size

    @cached_property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        return int(self.k_nhd.shape[2])

    @cached_property
    def head_dim(self) -> int:
        """Elements of a K row."""
        return _row_values(self.format.k, self.k)

    @cached_property
    def head_dim_v(self) -> int:
        """Elements of a V row."""
        return _row_values(self.format.v, self.v)

    @property
    def k_nhd(self) -> Array:
        """Codes of K as [num_blocks, block_size, num_kv_heads, ..] whatever the layout; a view."""
        return self.k.transpose(_NHD_ORDER[self.layout])

    @property
    def v_nhd(self) -> Array:
        """Codes of V as [num_blocks, block_size, num_kv_heads, ..] whatever the layout; a view."""
        return self.v.transpose(_NHD_ORDER[self.layout])

    @cached_property
    def named_arrays(self) -> tuple[tuple[str, Array], ...]:
        """Every array of the cache with its name: codes, scales, zeros."""
        named = ((name, getattr(self, name)) for name in ("k", "v", "k_scale", "k_zero", "v_scale", "v_zero"))
        return tuple((name, array) for name, array in named if array is not None)

    @property
    def block_arrays(self) -> tuple[Array, ...]:
        """The arrays whose first axis is num_blocks: all but static scales. What a block is copied with."""
        static = {
            name for name, part in (("k_scale", self.format.k), ("v_scale", self.format.v)) if part.is_static
        }
        return tuple(array for name, array in self.named_arrays if name not in static)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(int(array.nbytes) for _, array in self.named_arrays)

    def _scale_sizes(self, dim: int) -> tuple[int, int, int, int]:
        return self.num_blocks, self.block_size, self.num_kv_heads, dim


def _row_values(part: Format, array: Array) -> int:
    return int(array.shape[3]) * part.storage.itemsize * 8 // part.bits


def _check_scales(
    name: str, part: Format, scale: Array | None, zero: Array | None, sizes: tuple[int, int, int, int]
) -> None:
    shape = part.scale_shape(*sizes)
    for kind, array, needed in (("scale", scale, shape is not None), ("zero", zero, part.has_zero)):
        if array is None and needed:
            raise ValueError(f"{name}_{kind}: missing, a {part} cache needs one of shape {shape}")
        if array is None:
            continue
        if not needed:
            raise ValueError(f"{name}_{kind}: a {part} cache has none")
        if array.dtype != part.scale_dtype:
            raise TypeError(f"{name}_{kind}: dtype {array.dtype}, expected {part.scale_dtype}")
        if tuple(array.shape) != shape:
            raise ValueError(f"{name}_{kind}: shape {tuple(array.shape)}, a {part} cache needs {shape}")


def allocate_host(
    config: CacheConfig,
    num_blocks: int,
    empty: Callable[[Shape, np.dtype[Any]], NDArray[Any]] = np.empty,
) -> list[LayerCache]:
    """One cache a layer in new host memory, of undefined contents; static scales are NaN until they are set.

    empty: makes the arrays of codes.
    """

    def scales(part: Format, dim: int) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        shape = part.scale_shape(num_blocks, config.block_size, config.num_kv_heads, dim)
        if shape is None:
            return None, None
        scale = np.full(shape, np.nan, np.float32) if part.is_static else np.empty(shape, part.scale_dtype)
        return scale, np.empty(shape, part.scale_dtype) if part.has_zero else None

    caches = []
    for layer, kv_format in enumerate(config.formats):
        k_shape, v_shape = storage_shape(config, num_blocks, layer)
        caches.append(
            LayerCache(
                empty(k_shape, kv_format.k.storage),
                empty(v_shape, kv_format.v.storage),
                kv_format,
                config.block_size,
                config.layout,
                *scales(kv_format.k, config.head_dim),
                *scales(kv_format.v, config.head_dim_v or config.head_dim),
            )
        )
    return caches


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
