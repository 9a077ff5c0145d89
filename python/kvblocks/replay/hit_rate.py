"""How much of the prompts a prefix cache finds, against its capacity: exact LRU, others, the optimum, the ceiling.

Owns `HitRate`, `lru_hit_rate`, `model_hit_rate`, `ceiling` and `curve`. Imports the manager, batch and trace.
Definition, everywhere here: prompts come one at a time in order of arrival; only prompts are cached, in whole blocks;
at least one token of a prompt is always computed; a request longer than the cache is left out. The rate is tokens found
/ prompt tokens.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvblocks._core import Allocated, BlockManager
from kvblocks.batch import Step
from kvblocks.traces.trace import Trace

# Eviction policies that are modelled: in "fifo" a hit is no use; "lfu" evicts what was used least often since it is
# cached, of equals the least recent; "optimum" is Belady's, which knows the future.
MODELS: Final = ("lru", "fifo", "lfu", "optimum")


@dataclass(frozen=True)
class HitRate:
    """What was found of what was asked for."""

    hit_tokens: int = 0
    queried_tokens: int = 0
    hit_blocks: int = 0
    queried_blocks: int = 0
    left_out: int = 0

    @property
    def tokens(self) -> float:
        """Share of prompt tokens that need not be computed."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def blocks(self) -> float:
        """Share of full prompt blocks that were found."""
        return self.hit_blocks / self.queried_blocks if self.queried_blocks else 0.0


def lru_hit_rate(
    trace: Trace, block_size: int, capacity_blocks: int, tell: Callable[[int], Any] = lambda done: None
) -> HitRate:
    """Exact LRU: the real block manager. O(blocks)."""
    fits = -(-trace.prompt_tokens // block_size) <= capacity_blocks
    longest = int(trace.prompt_tokens[fits].max(initial=1))
    manager = BlockManager(capacity_blocks + 1, block_size, seed=0)
    step = Step(manager, max_seqs=1, max_tokens=longest, max_blocks_per_seq=-(-longest // block_size))
    for request in np.flatnonzero(fits).tolist():
        answer = manager.allocate(manager.prepare(trace.tokens(request)))
        if not isinstance(answer, Allocated):
            raise RuntimeError(f"an empty pool refused request {request}: {answer}")
        step.schedule(answer.handle, answer.num_new_tokens)
        manager.commit(answer.handle, answer.num_new_tokens)
        manager.free(answer.handle)
        tell(1)
    stats = manager.stats()
    return HitRate(
        stats.hit_tokens, stats.queried_tokens, stats.hit_blocks, stats.queried_blocks, int((~fits).sum())
    )


@dataclass(eq=False)
class Segments:
    """A trace as chains of segments: the blocks whose last token lies in one hash id, which are hit or evicted alike.

    node int64 [starts[n]]: which segment, equal for equal prefixes only. blocks int64 [starts[n]]: how many blocks it
    has here; 0 for ids that complete no block.
    """

    trace: Trace
    block_size: int

    def __post_init__(self) -> None:
        trace, size = self.trace, self.block_size
        lengths = np.diff(trace.starts)
        place = np.arange(len(trace.ids)) - np.repeat(trace.starts[:-1], lengths)
        begin = place * trace.tokens_per_id
        end = np.minimum(begin + trace.tokens_per_id, np.repeat(trace.prompt_tokens, lengths))
        self.blocks = end // size - begin // size
        self.place = place
        self.node = self._nodes()
        # Full blocks that no hash id covers are a request's own: they are never hit, but they take room.
        self.own_blocks = trace.prompt_tokens // size - np.array(
            [int(self.blocks[a:b].sum()) for a, b in self._spans()], np.int64
        )

    def _spans(self) -> Iterator[tuple[int, int]]:
        return itertools.pairwise(self.trace.starts.tolist())

    def _nodes(self) -> NDArray[np.int64]:
        known: dict[tuple[int, int], int] = {}
        nodes = []
        ids = self.trace.ids.tolist()
        for begin, end in self._spans():
            parent = -1
            for at in range(begin, end):
                parent = known.setdefault((parent, ids[at]), len(known))
                nodes.append(parent)
        return np.array(nodes, np.int64)

    def next_request(self, served: NDArray[np.bool_]) -> NDArray[np.int64]:
        """For each segment the next of the requests served [n] that has it, or n [starts[n]]."""
        requests = np.repeat(np.arange(len(self.trace)), np.diff(self.trace.starts))
        order = np.argsort(self.node, kind="stable")
        order = order[served[requests[order]]]
        following = np.full(len(self.node), len(self.trace))
        same = self.node[order][1:] == self.node[order][:-1]
        following[order[:-1][same]] = requests[order[1:][same]]
        return following

    @property
    def distinct_blocks(self) -> int:
        """Different blocks of the trace: a cache of so many evicts nothing."""
        largest = np.zeros(int(self.node.max(initial=-1)) + 1, np.int64)
        np.maximum.at(largest, self.node, self.blocks)
        return int(largest.sum() + self.own_blocks.sum())


def ceiling(segments: Segments) -> HitRate:
    """What an infinite cache finds. O(hash ids)."""
    return model_hit_rate(segments, None, "fifo")


def model_hit_rate(
    segments: Segments,
    capacity_blocks: int | None,
    policy: str,
    tell: Callable[[int], Any] = lambda done: None,
) -> HitRate:
    """A cache under a policy of `MODELS`; capacity None: infinite. O(hash ids * log).

    All blocks of a request are in the cache while it is served, and are not evicted for one another. "optimum" evicts
    what is used again last (Belady 1966), of equals the one deeper in its prompt: no policy that keeps the blocks of
    the request it serves finds more. A parent is used no later than its children, so it never loses them.
    """
    trace, size = segments.trace, segments.block_size
    needs = -(-trace.prompt_tokens // size)
    served = np.ones(len(trace), bool) if capacity_blocks is None else needs <= capacity_blocks
    following = segments.next_request(served).tolist() if policy == "optimum" else []
    node, blocks, place = segments.node.tolist(), segments.blocks.tolist(), segments.place.tolist()
    own_blocks, starts, prompts = (
        segments.own_blocks.tolist(),
        trace.starts.tolist(),
        trace.prompt_tokens.tolist(),
    )
    cache = _ModelCache(capacity_blocks)
    hit_blocks = queried_blocks = queried_tokens = clock = 0
    for request in np.flatnonzero(served).tolist():
        prompt, span = prompts[request], range(starts[request], starts[request + 1])
        chain = [(node[at], blocks[at]) for at in span]
        if own_blocks[request]:
            # Of this request alone: numbers below 0, which no segment has.
            chain.append((-1 - request, own_blocks[request]))
        found, old = cache.take(chain, int(needs[request]) - prompt // size)
        hit_blocks += min(found, (prompt - 1) // size)
        queried_blocks += prompt // size
        queried_tokens += prompt
        # Given back tail first, so that of one request the end is older than the beginning.
        for index in reversed(range(len(chain))):
            clock += 1
            before = old[index]
            if policy == "optimum":
                at = span.start + index
                next_use, depth = (following[at], place[at]) if at < span.stop else (len(trace), 0)
                rank = (-next_use, -depth)
            elif policy == "fifo":
                rank = before or (clock, 0)
            else:
                uses = 1 + (before[0] if before else 0)
                rank = (uses if policy == "lfu" else 0, clock)
            cache.give(*chain[index], rank)
        tell(1)
    return HitRate(hit_blocks * size, queried_tokens, hit_blocks, queried_blocks, int((~served).sum()))


class _ModelCache:
    """Segments of blocks in a cache, evicted from the end of the one with the least rank.

    A segment in use has no rank, so it is not evicted. The heap may hold ranks that are no longer true.
    """

    def __init__(self, capacity_blocks: int | None) -> None:
        self._capacity = capacity_blocks
        self._used = 0
        self._resident: dict[int, int] = {}
        self._rank: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], int]] = []

    def take(self, chain: list[tuple[int, int]], partial: int) -> tuple[int, list[tuple[int, int] | None]]:
        """Serve a prompt of these (segment, blocks), and `partial` blocks that are not full.

        Returns the blocks found before the first gap, and the ranks that the segments had.
        """
        found, needed, broken = 0, 0, False
        old = []
        for segment, want in chain:
            have = self._resident.get(segment, 0)
            if not broken:
                found += min(have, want)
                broken = have < want
            # What stands behind a gap cannot be hit: it is computed again in its place.
            needed += max(want - have, 0)
            old.append(self._rank.pop(segment, None))
        if self._capacity is not None:
            self._evict(self._used + needed + partial - self._capacity)
        self._used += needed
        return found, old

    def give(self, segment: int, num_blocks: int, rank: tuple[int, int]) -> None:
        """Give a segment back, of which so many blocks were in use."""
        resident = max(self._resident.get(segment, 0), num_blocks)
        if resident:
            self._resident[segment] = resident
            self._rank[segment] = rank
            heapq.heappush(self._heap, (rank, segment))

    def _evict(self, num_blocks: int) -> None:
        while num_blocks > 0 and self._heap:
            rank, segment = self._heap[0]
            if self._rank.get(segment) != rank:
                heapq.heappop(self._heap)
                continue
            part = min(self._resident[segment], num_blocks)
            self._resident[segment] -= part
            self._used -= part
            num_blocks -= part
            if not self._resident[segment]:
                heapq.heappop(self._heap)
                del self._resident[segment], self._rank[segment]


def capacities(segments: Segments, num_points: int = 6) -> list[int]:
    """Cache sizes worth a look, in blocks: from the longest prompt to all distinct blocks, evenly by factor."""
    size = segments.block_size
    most = segments.distinct_blocks
    least = min(-(-int(segments.trace.prompt_tokens.max()) // size), most)
    points = np.geomspace(max(least, 1), max(most, 1), num_points)
    return sorted({round(float(point)) for point in points})


def curve(
    segments: Segments, sizes: Sequence[int], tell: Callable[[int], Any] = lambda done: None
) -> Iterator[tuple[int, dict[str, HitRate]]]:
    """For each cache size in blocks: its hit rates by policy, "lru" from the real manager."""
    for size in sizes:
        rates = {"lru": lru_hit_rate(segments.trace, segments.block_size, size, tell)}
        for policy in MODELS[1:]:
            rates[policy] = model_hit_rate(segments, size, policy, tell)
        yield size, rates
