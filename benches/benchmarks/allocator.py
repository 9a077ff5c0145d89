"""The block manager beside a pool in plain Python, in the same run on the same machine.

Guards: a decode step of a large batch costs little beside the model's, and admission costs per block, not per call.
Every benchmark leaves the pools as it found them, so each sample measures the same state; teardown asserts it. The
`track_ratio_` benchmarks interleave both sides and divide the medians: time of kvblocks / time of the Python pool.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np

from kvblocks import BlockManager, Step

from .reference import PythonPool

BLOCK_SIZE = 16
PROMPT_TOKENS = 1024
NEW_TOKENS = 64


def ratio(ours: Callable[[], None], reference: Callable[[], None], rounds: int = 15) -> float:
    """Median time of `ours` over that of `reference`, run in turn after one round of warming up."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for call, column in zip((ours, reference), times, strict=True):
            start = time.perf_counter()
            call()
            if number > 0:
                column.append(time.perf_counter() - start)
    return statistics.median(times[0]) / statistics.median(times[1])


class Pools:
    """Both pools, large enough for `num_seqs` sequences."""

    params = (1, 32, 256)
    param_names = ("num_seqs",)

    def setup(self, num_seqs: int) -> None:
        """Make both pools; the prompts share nothing and the prefix cache is off, as the Python pool has none."""
        blocks = (PROMPT_TOKENS + NEW_TOKENS) // BLOCK_SIZE
        num_blocks = 1 + num_seqs * blocks
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_cache=False)
        self.step = Step(
            self.manager,
            max_seqs=num_seqs,
            max_tokens=num_seqs * PROMPT_TOKENS,
            max_blocks_per_seq=blocks,
        )
        self.pool = PythonPool(num_blocks, BLOCK_SIZE, num_seqs, blocks)
        tokens = np.arange(num_seqs * PROMPT_TOKENS, dtype=np.int32).reshape(num_seqs, PROMPT_TOKENS)
        self.prompts = [self.manager.prepare(row) for row in tokens]

    def teardown(self, num_seqs: int) -> None:
        """All blocks must be home."""
        assert self.manager.stats().live_blocks == 0
        assert self.manager.check_integrity() == []
        assert len(self.pool.free_ids) == self.manager.capacity_blocks
        assert num_seqs == len(self.prompts)


class Admission(Pools):
    """Allocate each prompt, then free all of them."""

    def time_kvblocks(self, num_seqs: int) -> None:
        """The block manager."""
        self.manager.free([seq.handle for prompt in self.prompts if (seq := self.manager.allocate(prompt))])

    def time_python_pool(self, num_seqs: int) -> None:
        """The Python pool."""
        self.pool.free([self.pool.allocate(PROMPT_TOKENS) for _ in range(num_seqs)])

    def track_ratio_admission(self, num_seqs: int) -> float:
        """Time of kvblocks / time of the Python pool."""
        return ratio(lambda: self.time_kvblocks(num_seqs), lambda: self.time_python_pool(num_seqs))

    track_ratio_admission.unit = "kvblocks / Python"  # type: ignore[attr-defined]


class Decode(Pools):
    """NEW_TOKENS decode steps of the whole batch, then cut back to the prompt."""

    def setup(self, num_seqs: int) -> None:
        """Admit and compute the prompts on both sides."""
        super().setup(num_seqs)
        admitted = [seq.handle for prompt in self.prompts if (seq := self.manager.allocate(prompt))]
        assert len(admitted) == num_seqs
        self.handles = np.array(admitted, dtype=np.int64)
        self.step.schedule(self.handles, PROMPT_TOKENS)
        self.manager.commit(self.handles, PROMPT_TOKENS)
        self.sampled = np.arange(num_seqs, dtype=np.int32)
        self.pool_handles = [self.pool.allocate(PROMPT_TOKENS) for _ in range(num_seqs)]

    def teardown(self, num_seqs: int) -> None:
        """Free the sequences, whose lengths must be as at the start."""
        assert {self.manager.sequence(handle).num_tokens for handle in self.handles} == {PROMPT_TOKENS}
        self.manager.free(self.handles)
        self.pool.free(self.pool_handles)
        super().teardown(num_seqs)

    def time_kvblocks(self, num_seqs: int) -> None:
        """The block manager and its step."""
        for _ in range(NEW_TOKENS):
            self.step.schedule(self.handles, 1)
            self.manager.commit(self.handles, 1, self.sampled)
        self.manager.truncate(self.handles, PROMPT_TOKENS)

    def time_python_pool(self, num_seqs: int) -> None:
        """The Python pool."""
        for _ in range(NEW_TOKENS):
            self.pool.decode(self.pool_handles)
        self.pool.truncate(self.pool_handles, PROMPT_TOKENS)

    def track_ratio_decode(self, num_seqs: int) -> float:
        """Time of kvblocks / time of the Python pool."""
        return ratio(lambda: self.time_kvblocks(num_seqs), lambda: self.time_python_pool(num_seqs))

    track_ratio_decode.unit = "kvblocks / Python"  # type: ignore[attr-defined]
