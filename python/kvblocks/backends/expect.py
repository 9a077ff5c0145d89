"""Single expectations of host arrays and numbers, from which the checks of whole calls are made.

Owns the functions `expect_..`: each raises TypeError or ValueError that names the argument, the axis and both numbers.
Imports layout. Invariant: nothing is written and nothing is cast here.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvblocks.layout import dtype_name

_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


def expect_array(name: str, value: object) -> None:
    """A NumPy array."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name}: {type(value).__name__}, expected a NumPy array")


def expect_dtype(name: str, array: NDArray[Any], dtype: type[np.generic]) -> None:
    """A NumPy array of one dtype."""
    expect_array(name, array)
    if array.dtype != dtype:
        raise TypeError(f"{name}: dtype {array.dtype}, expected {np.dtype(dtype)}")


def expect_floats(name: str, array: NDArray[Any], supported: tuple[str, ...]) -> None:
    """A NumPy array of one of the supported floating-point dtypes, uint16 meaning bfloat16 bits."""
    expect_array(name, array)
    try:
        dtype = dtype_name(array.dtype)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    if dtype not in supported:
        raise TypeError(f"{name}: dtype {dtype}, expected one of {', '.join(supported)}")


def expect_shape(name: str, array: NDArray[Any], axes: tuple[tuple[str, int | None], ...]) -> None:
    """Compare a shape with (axis name, size) pairs; a size of None is free."""
    if array.ndim != len(axes):
        raise ValueError(
            f"{name}: {array.ndim} axes, expected {len(axes)} ({', '.join(axis for axis, _ in axes)})"
        )
    for number, (axis, size) in enumerate(axes):
        if size is not None and array.shape[number] != size:
            raise ValueError(f"{name}: axis {number} ({axis}) is {array.shape[number]}, expected {size}")


def expect_result(name: str, array: NDArray[Any]) -> None:
    """An array that can be written in place, each element for itself."""
    expect_aligned(name, array)
    for axis, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        if size > 1 and stride == 0 and array.size:
            raise ValueError(f"{name}: axis {axis} has a stride of 0, so its {size} entries are one")
    expect_writeable(name, array)


def expect_writeable(name: str, array: NDArray[Any]) -> None:
    """An array that is not read-only."""
    if not array.flags.writeable:
        raise ValueError(f"{name}: the array is read-only")


def expect_aligned(name: str, array: NDArray[Any]) -> None:
    """An array whose elements stand at multiples of their size."""
    if not array.flags.aligned:
        raise ValueError(
            f"{name}: the array is misaligned, expected elements at multiples of {array.itemsize} bytes"
        )


def expect_nested(name: str, array: NDArray[Any]) -> None:
    """Refuse the storage of a cache unless its rows are contiguous and each axis steps over the narrower ones."""
    if array.flags.c_contiguous:
        return
    sizes, strides = array.shape, array.strides
    last = array.ndim - 1
    if sizes[last] > 1 and strides[last] != array.itemsize:
        raise ValueError(
            f"{name}: axis {last} has a stride of {strides[last]} bytes, expected {array.itemsize}"
        )
    extent = sizes[last] * array.itemsize
    for axis in sorted((axis for axis in range(last) if sizes[axis] > 1), key=strides.__getitem__):
        if strides[axis] < extent:
            raise ValueError(
                f"{name}: axis {axis} has a stride of {strides[axis]} bytes, expected at least {extent}"
            )
        extent += (sizes[axis] - 1) * strides[axis]


def expect_apart(
    written: tuple[tuple[str, NDArray[Any] | None], ...], read: tuple[tuple[str, NDArray[Any] | None], ...]
) -> None:
    """Refuse arrays that share memory; one that would take long to decide counts as shared."""
    for name_a, a in written:
        if a is None:
            continue
        for name_b, b in read:
            # NumPy's stubs know only two of the values that max_work takes.
            if b is not None and np.may_share_memory(a, b, max_work=1000):  # type: ignore[arg-type]
                raise ValueError(f"{name_a} and {name_b} share memory")


def expect_distinct(name: str, what: str, values: NDArray[Any], rows: NDArray[Any]) -> None:
    """Refuse a value that appears twice, naming both rows."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    same = ordered[1:] == ordered[:-1]
    if same.any():
        at = int(same.argmax())
        raise ValueError(
            f"{name}: rows {rows[order[at]]} and {rows[order[at + 1]]} both name {what} {ordered[at]}"
        )


def expect_listed(field: str, value: object, allowed: Sequence[object] | None) -> None:
    """One of the allowed values, of which None allows any."""
    if allowed is None or value in allowed:
        return
    if isinstance(allowed, range):
        raise ValueError(
            f"{field} is {value!r}: supported are {allowed[0]}..{allowed[-1]} in steps of {allowed.step}"
        )
    raise ValueError(f"{field} is {value!r}: supported are {', '.join(map(str, allowed))}")


def as_float32(value: object) -> float | None:
    """A number whose float32 is 0 or normal, as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if number == 0 or _SMALLEST_NORMAL <= abs(number) <= _LARGEST:
        return number
    return None


def check_moves(moves: NDArray[Any], move_start: NDArray[Any]) -> None:
    """Refuse moves of slots, and the starts of their sequences, of another dtype or shape."""
    for name, array, dtype in (("moves", moves, np.int64), ("move_start", move_start, np.int32)):
        expect_dtype(name, array, dtype)
    expect_shape("moves", moves, (("num_moves", None), ("source, destination", 2)))
    expect_shape("move_start", move_start, (("num_seqs + 1", None),))
