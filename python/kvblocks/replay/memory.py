"""What a simulated engine asks of its KV memory.

Owns `Memory`, the protocol that `paged` and `reservations` implement, and what passes over it. Imports running.
Invariant: `admit` and `grow` either do all of what they say or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvblocks.replay.running import Running


@dataclass(frozen=True)
class Admitted:
    """A request that got memory for its prompt. cached_tokens: of those, how many need not be computed."""

    handle: int
    cached_tokens: int
    reserved_slots: int = 0


@dataclass(frozen=True)
class Refused:
    """A request for which there is no room now. Slots short of the need, and slots free but of no use to it."""

    short_slots: int
    unusable_slots: int = 0


# Rows of `Occupancy.slots`.
ALLOCATED, USED, LATER, NEVER, INTERNAL, CACHED = range(6)


@dataclass(frozen=True)
class Occupancy:
    """Slots at each of k steps, float64 [6, k]; ALLOCATED == USED + LATER + NEVER + INTERNAL.

    USED: hold a token, a shared one counted once. LATER: reserved for tokens that will come. NEVER: reserved, but their
    owner will end before. INTERNAL: lost to the unit of allocation. CACHED: free, but can still be hit.
    """

    slots: NDArray[np.float64]

    @classmethod
    def zeros(cls, num_steps: int) -> Occupancy:
        """Nothing, at num_steps steps."""
        return cls(np.zeros((6, num_steps)))

    def head(self, num_steps: int) -> Occupancy:
        """The first steps only; a view."""
        return Occupancy(self.slots[:, :num_steps])


@dataclass(frozen=True)
class Lookups:
    """What admissions found in a prefix cache, in tokens and blocks; re-admissions are counted apart."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    queried_blocks: int = 0
    hit_blocks: int = 0
    readmit_queried_tokens: int = 0
    readmit_hit_tokens: int = 0
    evicted_blocks: int = 0


class Memory(Protocol):
    """KV memory under one policy."""

    @property
    def capacity_slots(self) -> int | None:
        """Token slots; None: as many as are asked for."""

    @property
    def peak_slots(self) -> int:
        """The least capacity that would have done for what was admitted so far."""

    def fits(self, request: int) -> bool:
        """Whether the request can be served by an empty memory."""

    def admit(self, request: int) -> Admitted | Refused:
        """Make room for a prompt and count it as stored."""

    def resume(self, request: int, handle: int) -> Admitted | Refused:
        """Make room for a preempted request again: what it had stored, and one token more."""

    def grow(self, running: Running, num_steps: int) -> int:
        """Make room for one more token in every row, num_steps times or as often as possible; how often that was.

        The rows' stored tokens are as before the call.
        """

    def shortage(self, running: Running) -> int:
        """Slots short of one more token in every row; 0 where `grow` can take a step."""

    def occupancy(self, running: Running, num_steps: int) -> Occupancy:
        """Slots at the last num_steps steps, of which the rows' stored tokens are those at the end."""

    def preempt(self, handle: int) -> None:
        """Take a request's memory back; `resume` goes on with it."""

    def release(self, handles: NDArray[np.int64]) -> None:
        """End requests."""

    def lookups(self) -> Lookups:
        """Counters of the prefix cache; zeros where there is none."""
