"""Addresses, strides and alignment: what kernels are told of arrays.

Owns `Part` and the functions that fill records of addresses. Imports layout and kernels.
Invariant: arrays are looked at and never read; they may be descriptions of memory that only a device reaches.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvblocks.formats import Format
from kvblocks.kernels import params as records
from kvblocks.kernels.specs import SCALE_MODES
from kvblocks.layout import LayerCache

Record = NDArray[np.void]


class Part(NamedTuple):
    """K or V of a cache for a kernel; codes in NHD order."""

    format: Format
    codes: NDArray[Any]
    scale: NDArray[Any] | None
    dim: int

    @property
    def mode(self) -> int:
        """The scaling, as element.cuh numbers it."""
        return SCALE_MODES[self.format.scaling]


def parts_of(seen: LayerCache) -> tuple[Part, Part]:
    """K and V of a cache."""
    return (
        Part(seen.format.k, seen.k_nhd, seen.k_scale, seen.head_dim),
        Part(seen.format.v, seen.v_nhd, seen.v_scale, seen.head_dim_v),
    )


def address_of(view: NDArray[Any] | None) -> int:
    """The address of the first element; 0 for None."""
    return 0 if view is None else view.ctypes.data


def strides(view: NDArray[Any]) -> tuple[int, ...]:
    """Strides in elements; an axis of one entry has none."""
    return tuple(
        stride // view.itemsize if size > 1 else 0
        for size, stride in zip(view.shape, view.strides, strict=True)
    )


def steps_by(view: NDArray[Any], num_bytes: int) -> bool:
    """Whether every row begins at a multiple of num_bytes."""
    return view.ctypes.data % num_bytes == 0 and all(
        stride * view.itemsize % num_bytes == 0 for stride in strides(view)[:-1]
    )


def fill_paged(into: Record, nhd: NDArray[Any]) -> None:
    """Fill a record of paged.cuh from codes in NHD order."""
    into["block_stride"], into["token_stride"], into["head_stride"] = strides(nhd)[:3]
    into["block_size"], into["num_blocks"] = nhd.shape[1], nhd.shape[0]


def block_arrays(seen: LayerCache) -> list[NDArray[Any]]:
    """What a block is copied with: codes in NHD order, and scales of its tokens."""
    static = [part.scale for part in parts_of(seen) if part.format.is_static]
    scales = [scale for scale in (seen.k_scale, seen.v_scale) if scale is not None]
    return [seen.k_nhd, seen.v_nhd, *(scale for scale in scales if not any(scale is each for each in static))]


def _region(
    array: NDArray[Any], num_tokens: int, num_heads: int, strides: tuple[int, int], run: int
) -> Record:
    """A record of region.cuh; strides in bytes of a token and of a head."""
    region = np.zeros((), records.REGION)
    block_stride = array.strides[0] if array.shape[0] > 1 else 0
    region["base"], region["block_stride"] = array.ctypes.data, block_stride
    region["token_stride"], region["head_stride"] = strides
    region["run_bytes"], region["num_blocks"] = run, array.shape[0]
    region["num_tokens"], region["num_heads"] = num_tokens, num_heads
    together = math.gcd(array.ctypes.data, block_stride, *strides, run)
    region["unit_bytes"] = 16 if together % 16 == 0 else 4 if together % 4 == 0 else 1
    return region


def block_region(array: NDArray[Any]) -> Record:
    """An array [num_blocks, ..] whose blocks are copied: each as one run where its bytes are neighbours."""
    inner = [
        (size, stride) for size, stride in zip(array.shape[1:], array.strides[1:], strict=True) if size > 1
    ]
    extent = sum((size - 1) * stride for size, stride in inner) + array.itemsize
    block_bytes = math.prod(array.shape[1:]) * array.itemsize
    if extent == block_bytes:
        return _region(array, 1, 1, (0, 0), block_bytes)
    return slot_region(array)


def slot_region(array: NDArray[Any]) -> Record:
    """An array [num_blocks, block_size, ..] whose tokens are moved: rows of a head, or the scales of a token."""
    step = [stride if size > 1 else 0 for size, stride in zip(array.shape, array.strides, strict=True)]
    if array.ndim == 4:
        run = array.shape[3] * array.itemsize
        return _region(array, array.shape[1], array.shape[2], (step[1], step[2]), run)
    return _region(array, array.shape[1], array.shape[2], (step[1], step[2]), array.itemsize)
