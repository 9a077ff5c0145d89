"""Memory for what a call computes and nobody else reads, kept from call to call.

Owns `Scratch`. Imports memory.
Invariant: one buffer a stream, so that whoever finds it there comes behind whoever used it before. A captured graph,
which may be launched on any stream, has one of its own.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from kvblocks.backends.memory import Memory
from kvblocks.layout import Array

_SMALLEST_BYTES: Final = 1 << 20
# Streams come and go; the buffers of those that were met first do as well.
_MOST_STREAMS: Final = 64


class _Buffer(NamedTuple):
    num_bytes: int
    address: int
    array: Array


class Scratch:
    """Buffers of one device; its owner sees to it that one thread at a time asks, and launches before the next does."""

    def __init__(
        self, memory: Memory, address_of: Callable[[Array], int], is_capturing: Callable[[int], bool]
    ) -> None:
        self._memory, self._address_of, self._is_capturing = memory, address_of, is_capturing
        self._kept: dict[int, _Buffer] = {}

    def of(self, stream: int, num_bytes: int) -> tuple[int, Array]:
        """The address of at least so many bytes for work on a stream, and the array to hold until it is enqueued.

        The stream is the current one of the memory's library. Raises CaptureError where nothing can be allocated.
        """
        if self._is_capturing(stream):
            array = self._memory.empty((num_bytes,), np.uint8)
            return self._address_of(array), array
        kept = self._kept.get(stream)
        if kept is None or kept.num_bytes < num_bytes:
            size = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
            array = self._memory.empty((size,), np.uint8)
            while len(self._kept) >= _MOST_STREAMS:
                del self._kept[next(iter(self._kept))]
            self._kept[stream] = kept = _Buffer(size, self._address_of(array), array)
        return kept.address, kept.array
