"""Paged policies: the real block manager, driven as an engine would drive it.

Owns `PagedMemory`. Imports the manager, batch, memory, running and trace. Invariant: nothing is modelled: blocks are
taken, hit, published, evicted and given back by `BlockManager`; only the steps of a run of growth are batched, and what
they take one by one follows from the lengths.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvblocks._core import Allocated, BlockManager, Later, Prompt
from kvblocks.batch import Step
from kvblocks.replay.memory import (
    ALLOCATED,
    CACHED,
    INTERNAL,
    USED,
    Admitted,
    Lookups,
    Occupancy,
    Refused,
)
from kvblocks.replay.running import Running
from kvblocks.traces.trace import Trace

# Rows and tokens of one call to `schedule`, and entries of its block tables: bounds on the index arrays' memory.
_MAX_ROWS: Final = 1024
_MAX_STEP_TOKENS: Final = 2**17
_MAX_TABLE_ENTRIES: Final = 2**24
# An unbounded pool has no more: a manager's memory is touched only where blocks are used, but it has to be there.
_MOST_BLOCKS: Final = 2**26


class PagedMemory:
    """Blocks of block_size tokens from a real manager.

    capacity_blocks: None for as many as the whole trace could ever hold, at most 2**26. prefix_cache: look prompts
    up, and publish their blocks. decoded: of requests whose successor is known, publish what the successor's prompt
    says they generated (see `Trace.successors`); otherwise generated tokens match nothing. watermark_blocks: left
    free by admissions. declared_output_tokens: admit only with room for that many tokens of output of everybody (no
    preemption then); None: admit whenever the prompt fits. Raises ValueError for a pool beyond the machine's memory.
    """

    def __init__(
        self,
        trace: Trace,
        block_size: int,
        capacity_blocks: int | None = None,
        *,
        prefix_cache: bool = False,
        decoded: bool = False,
        watermark_blocks: int = 0,
        declared_output_tokens: int | None = None,
    ) -> None:
        self._trace = trace
        self._final = trace.final_tokens
        self.block_size = block_size
        self._bounded = capacity_blocks is not None
        all_blocks = int(np.sum(-(-self._final // block_size)))
        self.capacity_blocks = min(all_blocks, _MOST_BLOCKS) if capacity_blocks is None else capacity_blocks
        self._manager = BlockManager(
            self.capacity_blocks + 1,
            block_size,
            enable_prefix_cache=prefix_cache,
            watermark_blocks=watermark_blocks,
            seed=0,
        )
        self._prefix_cache = prefix_cache
        self._declared = declared_output_tokens
        self._successor = trace.successors() if decoded and prefix_cache else None
        self._longest = min(int(self._final.max(initial=1)), self.capacity_blocks * block_size)
        self._columns = -(-self._longest // block_size)
        self._prefill: Final = Step(
            self._manager, max_seqs=1, max_tokens=self._longest, max_blocks_per_seq=self._columns
        )
        self._rows = max(1, min(_MAX_ROWS, _MAX_TABLE_ENTRIES // self._columns))
        self._decode: list[Step] = []
        self._nothing = np.zeros(max(self._longest, _MAX_STEP_TOKENS), np.int32)
        # The prompt at the head of the queue, hashed once however often it is refused.
        self._head: tuple[int, Prompt] | None = None
        self._preempted: dict[int, Prompt] = {}
        self._cached_before = 0

    @property
    def capacity_slots(self) -> int | None:
        """Token slots that can be allocated; None where the pool is as large as the trace."""
        return self.capacity_blocks * self.block_size if self._bounded else None

    @property
    def peak_slots(self) -> int:
        """Slots of the most blocks that were live at once: cached ones can be given up."""
        return self._manager.stats().peak_live_blocks * self.block_size

    def _declared_tokens(self, request: int) -> int | None:
        if self._declared is None:
            return None
        final = int(self._final[request])
        return max(final, int(self._trace.prompt_tokens[request]) + self._declared - 1)

    def fits(self, request: int) -> bool:
        """Whether the request, at the length it declares or will have, can be served by an empty pool."""
        most = self._declared_tokens(request) or int(self._final[request])
        return -(-most // self.block_size) <= self.capacity_blocks

    def admit(self, request: int) -> Admitted | Refused:
        """Allocate, compute and publish a prompt."""
        if self._head is None or self._head[0] != request:
            self._head = request, self._manager.prepare(self._prompt(request))
        prompt = self._head[1]
        answer = self._manager.allocate(prompt, max_tokens=self._declared_tokens(request))
        if not isinstance(answer, Allocated):
            return self._refused(answer)
        self._head = None
        self._prefill.schedule(answer.handle, answer.num_new_tokens)
        self._manager.commit(answer.handle, answer.num_new_tokens)
        return Admitted(answer.handle, answer.num_cached_tokens)

    def resume(self, request: int, handle: int) -> Admitted | Refused:
        """Allocate and compute what a preempted request had stored, and the token that it had made last."""
        prompt = self._preempted[handle]
        end = len(prompt) + 1
        answer = self._manager.allocate(prompt, end, max_tokens=self._declared_tokens(request))
        if not isinstance(answer, Allocated):
            return self._refused(answer)
        del self._preempted[handle]
        num_new = end - answer.num_cached_tokens
        self._prefill.schedule(handle, num_new)
        last = self._generated(np.array([request]), np.array([end - 1]), 1)
        self._manager.commit(handle, num_new, last)
        return Admitted(handle, answer.num_cached_tokens)

    def _refused(self, answer: object) -> Refused:
        if not isinstance(answer, Later):
            raise RuntimeError(f"a request that fits was answered {answer}")
        return Refused(answer.num_blocks * self.block_size)

    def _prompt(self, request: int) -> NDArray[np.int32]:
        num_tokens = int(self._trace.prompt_tokens[request])
        if not self._prefix_cache:
            return self._nothing[:num_tokens]
        if self._successor is not None and self._successor[request] >= 0:
            return self._trace.tokens(int(self._successor[request]), num_tokens)
        return self._trace.tokens(request)

    def grow(self, running: Running, num_steps: int) -> int:
        """Schedule and commit one token a row and step, for as many of the steps as the pool has blocks."""
        stats = self._manager.stats()
        available = stats.free_blocks + stats.cached_blocks
        self._cached_before = stats.cached_blocks
        if running.n * (num_steps // self.block_size + 1) > available:
            taken = self._taken(running.stored, num_steps)
            num_steps = int(np.searchsorted(taken, available, side="right"))
        left = num_steps
        stored = running.stored.copy()
        while left:
            part = min(left, max(1, _MAX_STEP_TOKENS // min(running.n, self._rows)))
            self._append(running, stored, part)
            stored += part
            left -= part
        return num_steps

    def shortage(self, running: Running) -> int:
        """Blocks that the next step takes beyond those that are free or cached, in slots."""
        need = int(self._taken(running.stored, 1)[0])
        stats = self._manager.stats()
        return max(need - stats.free_blocks - stats.cached_blocks, 0) * self.block_size

    def _append(self, running: Running, stored: NDArray[np.int64], num_tokens: int) -> None:
        for number, begin in enumerate(range(0, running.n, self._rows)):
            if number == len(self._decode):
                self._decode.append(
                    Step(
                        self._manager,
                        max_seqs=self._rows,
                        max_tokens=max(_MAX_STEP_TOKENS, self._rows),
                        max_blocks_per_seq=self._columns,
                    )
                )
            rows = slice(begin, begin + self._rows)
            handles = running.handle[rows]
            scheduled = self._decode[number].schedule(handles, num_tokens)
            if not scheduled:
                raise RuntimeError(f"the manager refused blocks that it had: {scheduled}")
            tokens = self._generated(running.request[rows], stored[rows], num_tokens)
            self._manager.commit(handles, num_tokens, tokens)

    def _generated(
        self, requests: NDArray[np.int64], first: NDArray[np.int64], num_tokens: int
    ) -> NDArray[np.int32]:
        """Ids of the tokens at positions first[i]..first[i] + num_tokens of each request, flat."""
        if not self._prefix_cache:
            return self._nothing[: len(requests) * num_tokens]
        trace = self._trace
        own = (trace.num_ids + requests).astype(np.int32)
        if self._successor is None:
            return np.repeat(own, num_tokens)
        successor = self._successor[requests]
        known = successor >= 0
        column = (first[:, None] + np.arange(num_tokens)) // max(trace.tokens_per_id, 1)
        begin, end = trace.starts[successor], trace.starts[successor + 1]
        place = begin[:, None] + column
        has_id = known[:, None] & (place < end[:, None])
        rest = np.where(known, trace.num_ids + successor, own).astype(np.int32)
        tokens = np.where(has_id, trace.ids[np.where(has_id, place, 0)], rest[:, None])
        return np.ascontiguousarray(tokens.ravel())

    def _taken(self, stored: NDArray[np.int64], num_steps: int) -> NDArray[np.int64]:
        """Blocks that rows of these lengths have taken after each of the next steps [num_steps]."""
        size = self.block_size
        residues = np.bincount(stored % size, minlength=size)
        # A row takes a block in the step before which its length is a multiple of the block size.
        return np.cumsum(residues[-np.arange(num_steps) % size])

    def occupancy(self, running: Running, num_steps: int) -> Occupancy:
        """From the manager's counters now, back over the steps by what each of them took."""
        stats = self._manager.stats()
        size = self.block_size
        occupancy = Occupancy.zeros(num_steps)
        slots = occupancy.slots
        slots[ALLOCATED] = stats.live_blocks * size
        slots[USED] = stats.used_slots
        if num_steps > 1:
            taken = size * self._taken(running.stored - (num_steps - 1), num_steps - 1)
            slots[ALLOCATED, :-1] -= taken[-1]
            slots[ALLOCATED, 1:-1] += taken[:-1]
            slots[USED] -= running.n * np.arange(num_steps - 1, -1, -1)
            # Cached blocks are taken once no others are left.
            free = self.capacity_blocks * size - slots[ALLOCATED]
            slots[CACHED] = np.minimum(self._cached_before * size, free)
        slots[INTERNAL] = slots[ALLOCATED] - slots[USED]
        slots[CACHED, -1] = stats.cached_blocks * size
        return occupancy

    def preempt(self, handle: int) -> None:
        """Give the blocks back and keep the history."""
        self._preempted[handle] = self._manager.preempt(handle)[0]

    def release(self, handles: NDArray[np.int64]) -> None:
        """Free sequences; what they published stays cached."""
        self._manager.free(handles)

    def lookups(self) -> Lookups:
        """The manager's counters."""
        stats = self._manager.stats()
        return Lookups(**{name: getattr(stats, name) for name in Lookups.__dataclass_fields__})

    def check(self) -> list[str]:
        """Violations that the manager's own check finds; none when sound. O(capacity)."""
        return self._manager.check_integrity()
