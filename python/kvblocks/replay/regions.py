"""Allocators of contiguous regions, as engines without paging have them: first fit, and the buddy system.

Owns `FirstFit` and `Buddy`. Imports the standard library only. Sizes and addresses are in token slots. Invariant:
regions never overlap; a region that is given back is merged with its free neighbours (first fit) or buddies.
"""

from __future__ import annotations

import bisect
import heapq
from typing import Final

# "As much as is asked for": beyond the tokens of any trace.
UNBOUNDED: Final = 2**48


class FirstFit:
    """Regions of any size, each at the lowest address with room. O(holes) to allocate and to free."""

    def __init__(self, capacity: int) -> None:
        self.free_slots = capacity
        self._starts = [0] if capacity else []
        self._sizes = [capacity] if capacity else []

    def allocate(self, size: int) -> int | None:
        """The address of a region of `size` slots, or None where no hole is large enough."""
        for at, hole in enumerate(self._sizes):
            if hole >= size:
                start = self._starts[at]
                if hole == size:
                    del self._starts[at], self._sizes[at]
                else:
                    self._starts[at] += size
                    self._sizes[at] -= size
                self.free_slots -= size
                return start
        return None

    def free(self, start: int, size: int) -> None:
        """Give a region back."""
        self.free_slots += size
        at = bisect.bisect_left(self._starts, start)
        if at < len(self._starts) and start + size == self._starts[at]:
            size += self._sizes[at]
            del self._starts[at], self._sizes[at]
        if at and self._starts[at - 1] + self._sizes[at - 1] == start:
            self._sizes[at - 1] += size
        else:
            self._starts.insert(at, start)
            self._sizes.insert(at, size)


class Buddy:
    """Regions of powers of two, each aligned to its size, at the lowest address (Knuth, TAOCP 1, 2.5). O(log capacity).

    A capacity that is no power of two is the sum of its powers of two, largest first.
    """

    def __init__(self, capacity: int) -> None:
        self.free_slots = capacity
        self._heaps: list[list[int]] = [[] for _ in range(capacity.bit_length())]
        self._free: list[set[int]] = [set() for _ in self._heaps]
        start = 0
        for order in reversed(range(capacity.bit_length())):
            if capacity >> order & 1:
                self._put(start, order)
                start += 1 << order

    def _put(self, start: int, order: int) -> None:
        self._free[order].add(start)
        heapq.heappush(self._heaps[order], start)

    def _take(self, order: int) -> int | None:
        # What was merged away is still on the heap, but no longer in the set.
        heap, free = self._heaps[order], self._free[order]
        while heap:
            start = heapq.heappop(heap)
            if start in free:
                free.remove(start)
                return start
        return None

    def allocate(self, size: int) -> int | None:
        """The address of a region of `size` slots, a power of two, or None where no free region is large enough."""
        order = size.bit_length() - 1
        for larger in range(order, len(self._heaps)):
            start = self._take(larger)
            if start is not None:
                for half in reversed(range(order, larger)):
                    self._put(start + (1 << half), half)
                self.free_slots -= size
                return start
        return None

    def free(self, start: int, size: int) -> None:
        """Give a region back."""
        self.free_slots += size
        order = size.bit_length() - 1
        while order + 1 < len(self._free) and start ^ (1 << order) in self._free[order]:
            self._free[order].remove(start ^ (1 << order))
            start &= ~(1 << order)
            order += 1
        self._put(start, order)
