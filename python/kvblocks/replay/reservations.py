"""Policies without paging, as models: a contiguous region for each request, reserved when it is admitted.

Owns `ReservedMemory` and `RESERVATIONS`. Imports memory, regions, running and trace. Invariant: a region is as long as
the request will ever be, so `grow` never fails and nothing is preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvblocks.replay.memory import (
    ALLOCATED,
    INTERNAL,
    LATER,
    NEVER,
    USED,
    Admitted,
    Lookups,
    Occupancy,
    Refused,
)
from kvblocks.replay.regions import UNBOUNDED, Buddy, FirstFit
from kvblocks.replay.running import Running
from kvblocks.traces.trace import Trace


def _power_of_two(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length()


# Policy -> slots reserved for a request of (prompt, output, longest allowed) tokens. The names follow figure 2 of Kwon
# et al. (PagedAttention, SOSP 2023): "max", "pow2" (the output guessed to a power of two) and "oracle".
RESERVATIONS: Final[dict[str, Callable[[int, int, int], int]]] = {
    "contiguous": lambda prompt, output, longest: longest,
    "pow2": lambda prompt, output, longest: min(prompt + _power_of_two(output) - 1, longest),
    "buddy": lambda prompt, output, longest: _power_of_two(prompt + output - 1),
    "oracle": lambda prompt, output, longest: prompt + output - 1,
}


class ReservedMemory:
    """Contiguous regions under a policy of `RESERVATIONS`; longest: tokens of the longest request allowed.

    "contiguous" knows only that longest, "pow2" the prompt and the output to a power of two, "buddy" and "oracle" the
    output exactly; "buddy" takes regions of powers of two from the buddy system, the others fit theirs first.
    capacity: slots, None for as many as are asked for.
    """

    def __init__(self, trace: Trace, policy: str, longest: int, capacity: int | None = None) -> None:
        self._trace = trace
        self._size = RESERVATIONS[policy]
        # What buddy adds to the true length is lost to its unit; the others add tokens that never come.
        self._rounds = policy == "buddy"
        self._longest = longest
        self.capacity_slots = capacity
        self._regions = (Buddy if self._rounds else FirstFit)(UNBOUNDED if capacity is None else capacity)
        self.peak_slots = 0
        self._held: dict[int, int] = {}

    def _reserve(self, request: int) -> int:
        prompt, output = self._trace.prompt_tokens[request], self._trace.output_tokens[request]
        return self._size(int(prompt), int(output), self._longest)

    def fits(self, request: int) -> bool:
        """Whether an empty memory has a region for the request."""
        size, capacity = self._reserve(request), self.capacity_slots
        if capacity is None:
            return True
        return size <= (1 << capacity.bit_length() >> 1 if self._rounds else capacity)

    def admit(self, request: int) -> Admitted | Refused:
        """Reserve a region; its address is the handle."""
        size = self._reserve(request)
        start = self._regions.allocate(size)
        if start is None:
            free = self._regions.free_slots
            return Refused(max(size - free, 0), min(free, size))
        self.peak_slots = max(self.peak_slots, start + size)
        self._held[start] = size
        return Admitted(start, 0, size)

    def resume(self, request: int, handle: int) -> Admitted | Refused:
        """Never called: nothing is preempted."""
        raise NotImplementedError("a reservation is never preempted")

    def grow(self, running: Running, num_steps: int) -> int:
        """All steps: the room is reserved."""
        return num_steps

    def shortage(self, running: Running) -> int:
        """None: the room is reserved."""
        return 0

    def occupancy(self, running: Running, num_steps: int) -> Occupancy:
        """From the lengths."""
        used = int(running.stored.sum()) - running.n * np.arange(num_steps - 1, -1, -1)
        final, reserved = int(running.final.sum()), int(running.reserved.sum())
        occupancy = Occupancy.zeros(num_steps)
        slots = occupancy.slots
        slots[ALLOCATED] = reserved
        slots[USED] = used
        slots[LATER] = final - used
        slots[INTERNAL if self._rounds else NEVER] = reserved - final
        return occupancy

    def preempt(self, handle: int) -> None:
        """Never called: `grow` never fails."""
        raise NotImplementedError("a reservation is never preempted")

    def release(self, handles: NDArray[np.int64]) -> None:
        """Give regions back."""
        for start in handles.tolist():
            self._regions.free(start, self._held.pop(start))

    def lookups(self) -> Lookups:
        """None: nothing is shared."""
        return Lookups()
