"""What the allocator makes of a pool, in numbers that do not depend on the machine, and what the pool itself weighs.

Guards: hit rates of exact LRU, internal fragmentation of half a block a sequence, a resident set that is paid for when
it is used.
"""

import functools
from collections import deque

import numpy as np

from kvblocks import BlockManager, Prompt, Step

from .mooncake import HIT_RATES, hit_rate, read_prompts, trace_path
from .resident import resident_bytes


@functools.cache
def serve(num_requests: int = 1500, num_blocks: int = 2000, max_seqs: int = 64) -> dict[str, float]:
    """Serve requests that share 24 system prompts by continuous batching; what the pool looked like on the way.

    Prompts of 512 shared and 16 to 512 own tokens, 1 to 256 tokens of output; the newest is preempted when the pool is
    exhausted. Deterministic.
    """
    rng = np.random.default_rng(0)
    manager = BlockManager(num_blocks, 16, watermark_blocks=max_seqs // 4, seed=0)
    step = Step(manager, max_seqs=max_seqs, max_tokens=16384, max_blocks_per_seq=96)
    systems = rng.integers(0, 32_000, (24, 512), dtype=np.int32)
    waiting: deque[tuple[Prompt, int]] = deque()
    for _ in range(num_requests):
        own = rng.integers(0, 32_000, int(rng.integers(16, 513)), dtype=np.int32)
        tokens = np.concatenate([systems[int(rng.integers(24))], own])
        waiting.append((manager.prepare(tokens), int(rng.integers(1, 257))))
    running: dict[int, int] = {}  # handle -> tokens still to be made, in order of admission
    fragmentation, sharing, live, preemptions = [], [], [], 0
    while waiting or running:
        while waiting and len(running) < max_seqs:
            answer = manager.allocate(waiting[0][0])
            if not answer:
                break
            running[answer.handle] = waiting.popleft()[1]
            step.schedule(answer.handle, answer.num_new_tokens)
            manager.commit(answer.handle, answer.num_new_tokens)
        handles = np.array(list(running), np.int64)
        scheduled = step.schedule(handles, 1, policy="fit")
        made = handles[: scheduled.num_seqs]
        manager.commit(made, 1, rng.integers(0, 32_000, len(made), dtype=np.int32))
        if not scheduled:
            victim = int(handles[-1])
            waiting.appendleft((manager.preempt(victim)[0], running.pop(victim)))
            preemptions += 1
        stats = manager.stats()
        fragmentation.append(stats.internal_fragmentation)
        sharing.append(stats.sharing)
        live.append(stats.live_blocks)
        for handle in made.tolist():
            if handle in running:
                running[handle] -= 1
                if running[handle] == 0:
                    del running[handle]
                    manager.free(handle)
    assert manager.check_integrity() == []
    stats = manager.stats()
    assert stats.live_blocks == 0
    return {
        "internal_fragmentation": float(np.mean(fragmentation)),
        "sharing": float(np.mean(sharing)),
        "live_blocks": float(np.mean(live)),
        "preemptions": float(preemptions),
        "hit_rate": stats.hit_tokens / stats.queried_tokens,
        "evicted_blocks": float(stats.evicted_blocks),
    }


class FixedWorkload:
    """See `serve`: the same numbers on every machine, so that any change is a change of behaviour."""

    def track_internal_fragmentation(self) -> float:
        """1 - used slots / allocated slots, mean over the steps."""
        return serve()["internal_fragmentation"]

    def track_hit_rate(self) -> float:
        """Prompt tokens found cached / prompt tokens asked for."""
        return serve()["hit_rate"]

    def track_sharing(self) -> float:
        """Blocks named by tables / live blocks, mean over the steps."""
        return serve()["sharing"]

    def track_evicted_blocks(self) -> float:
        """Blocks that lost their content."""
        return serve()["evicted_blocks"]

    def track_preemptions(self) -> float:
        """Sequences that had to make room."""
        return serve()["preemptions"]


class Mooncake:
    """Hit rates of the Mooncake conversation trace, see `mooncake`."""

    params = tuple(HIT_RATES)
    param_names = ("num_blocks",)
    timeout = 300

    def setup(self, num_blocks: int) -> None:
        """Skip where the trace is not."""
        path = trace_path()
        if path is None:
            raise NotImplementedError("KVBLOCKS_TRACES names no folder with the Mooncake conversation trace")
        self.path = path

    def track_hit_rate(self, num_blocks: int) -> float:
        """Prompt tokens found cached / prompt tokens; must be that of exact LRU."""
        rate = hit_rate(read_prompts(self.path), num_blocks)
        assert abs(rate - HIT_RATES[num_blocks]) < 0.0005, f"{rate} instead of {HIT_RATES[num_blocks]}"
        return rate


@functools.cache
def measured_bytes(side: str) -> tuple[float, float]:
    """Both numbers of `resident_bytes`."""
    return resident_bytes(side)


class Memory:
    """W8: resident bytes per block of a pool of 1,000,000 blocks."""

    params = ("xxh3", "sha256", "python")
    param_names = ("side",)
    timeout = 300

    def track_untouched(self, side: str) -> float:
        """Nothing allocated yet."""
        return measured_bytes(side)[0]

    def track_full(self, side: str) -> float:
        """Every block cached."""
        return measured_bytes(side)[1]


for _class in (FixedWorkload, Memory):
    for _name, _function in list(vars(_class).items()):
        if _name.startswith("track_"):
            _function.unit = "bytes/block" if _class is Memory else ""
Mooncake.track_hit_rate.unit = "of tokens"  # type: ignore[attr-defined]
