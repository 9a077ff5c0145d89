"""Host memory for a pool: on huge pages where the system has them, and aligned to cache lines.

Owns `empty`. Imports NumPy and the standard library.
Invariant: an array owns its memory, which is given back with the last view of it.
"""

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PAGE_BYTES = 2 << 20


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A new array of undefined contents, zero at first; from 2 MiB on it starts at a multiple of 2 MiB.

    Linux is then asked for huge pages (madvise), which save an attention kernel half of its waits for addresses; a
    system that does not give them, or another system, gives small ones. Pages become real when they are touched.
    Raises MemoryError, or ValueError beyond the address space, as numpy.empty does.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _PAGE_BYTES or not hasattr(mmap, "MAP_PRIVATE"):
        return np.empty(shape, dtype)
    # A private mapping: shared ones, mmap's default, have huge pages on few systems.
    try:
        mapping = mmap.mmap(-1, num_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        return np.empty(shape, dtype)  # which says in the usual way that there is not so much
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel that was built without them refuses.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(mapping, np.uint8)
    start = -raw.ctypes.data % _PAGE_BYTES
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
