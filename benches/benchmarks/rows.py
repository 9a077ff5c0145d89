"""The rows of the speed table.

Owns the subclasses of `Row`, and `ROWS`. Blocks hold 16 tokens; handles and tokens are given as arrays, single handles
as ints. Pools have been used as a whole once before anything is timed. Each class says which calls its row holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvblocks import Allocated, BlockManager, Step, block_hashes

from .mooncake import Prompts, read_prompts, trace_path
from .reference import CachingPythonPool, PythonPool, python_chain, sha256_chain
from .row import Laps, Row, now

BLOCK_SIZE = 16
MAX_BLOCKS = 2048
VOCABULARY = 128_256


class UnavailableError(Exception):
    """A row whose input is not on this machine."""


def state_of(manager: BlockManager, pool: PythonPool) -> tuple[object, ...]:
    """Where the blocks of both pools are, and what is wrong with them."""
    stats = manager.stats()
    ours = (stats.live_blocks, stats.cached_blocks, stats.free_blocks, stats.num_seqs, stats.logical_blocks)
    theirs: tuple[int, ...] = (len(pool.free_ids), len(pool.seqs))
    if isinstance(pool, CachingPythonPool):
        theirs += (len(pool.cached), len(pool.index))
    return (*ours, *manager.check_integrity(), *theirs)


def touch(manager: BlockManager, step: Step, num_tokens: int = 2048) -> None:
    """Use every block of the pool once, tokens and hashes included, and leave it free."""
    handles = []
    for first in range(0, manager.capacity_blocks - num_tokens // BLOCK_SIZE + 1, num_tokens // BLOCK_SIZE):
        start = VOCABULARY + first * BLOCK_SIZE
        prompt = manager.prepare(np.arange(start, start + num_tokens, dtype=np.int32))
        handles.append(admit(manager, step, prompt_handle(manager.allocate(prompt)), num_tokens))
    manager.free(np.array(handles, np.int64))
    manager.reset_prefix_cache()


def prompt_handle(answer: object) -> int:
    """The handle of an admission that cannot fail."""
    assert isinstance(answer, Allocated)
    return answer.handle


def admit(manager: BlockManager, step: Step, handle: int, num_tokens: int) -> int:
    """Compute the first tokens of an admitted prompt."""
    step.schedule(handle, num_tokens)
    manager.commit(handle, num_tokens)
    return handle


def random_prompts(seed: int, num_prompts: int, num_tokens: int) -> list[NDArray[np.int32]]:
    """Prompts that share nothing."""
    rng = np.random.default_rng(seed)
    return list(rng.integers(0, VOCABULARY, (num_prompts, num_tokens), dtype=np.int32))


class Decode(Row):
    """W1: one token more for each of 256 (1,024) sequences of 1,024 to 4,096 tokens, pool of 65,536 (262,144) blocks.

    The row "a" is `schedule` (tables, slots, positions, lengths, changed ranges), the row "b" is `commit` (ids given as
    int32 array, hashed and published). In each step one row of 16 opens a block and one fills one. A sample is 64 steps
    from the same lengths on; going back to them (free, forget, admit again) is not timed. Tables have 2,048
    columns (P091).
    """

    parts = ("schedule", "commit")
    cycles = 64

    def __init__(self, part: Literal["schedule", "commit"], num_seqs: int) -> None:
        self.counted = (part,)
        self.num_seqs = num_seqs
        num_blocks = 256 * num_seqs
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, seed=0)
        self.step = Step(self.manager, max_seqs=num_seqs, max_tokens=4096, max_blocks_per_seq=MAX_BLOCKS)
        self.pool = CachingPythonPool(
            num_blocks, BLOCK_SIZE, max_seqs=num_seqs, max_tokens=4096, max_blocks=MAX_BLOCKS
        )
        touch(self.manager, self.step)
        rng = np.random.default_rng(1)
        lengths = rng.integers(64, 252, num_seqs) * BLOCK_SIZE + rng.permutation(num_seqs) % BLOCK_SIZE
        tokens = [rng.integers(0, VOCABULARY, length, dtype=np.int32) for length in lengths]
        self.prompts = [self.manager.prepare(row) for row in tokens]
        self.pool_prompts = [self.pool.prepare(row) for row in tokens]
        self.sampled = rng.integers(0, VOCABULARY, (self.cycles, num_seqs), dtype=np.int32)
        self.pool_sampled = self.sampled.tolist()
        self.handles = np.zeros(0, np.int64)
        self.pool_handles: list[int] = []
        self.rewind_kvblocks()
        self.rewind_python_pool()

    def rewind_kvblocks(self) -> None:
        """Back to the prompts."""
        self.manager.free(self.handles)
        self.manager.reset_prefix_cache()
        handles = []
        for prompt in self.prompts:
            answer = self.manager.allocate(prompt)
            assert answer
            handles.append(admit(self.manager, self.step, answer.handle, answer.num_new_tokens))
        self.handles = np.array(handles, np.int64)
        # The first step writes whole tables and looks at each row: take it back.
        self.step.schedule(self.handles, 1)
        self.manager.abort_step(self.handles)
        self.step.schedule(self.handles, 0)
        self.manager.commit(self.handles, 0)

    def rewind_python_pool(self) -> None:
        """Back to the prompts."""
        pool = self.pool
        pool.free(self.pool_handles)
        pool.reset_prefix_cache()
        self.pool_handles = [pool.allocate(prompt) for prompt in self.pool_prompts]
        for handle in self.pool_handles:
            seq = pool.seqs[handle]
            seq.num_scheduled = len(seq.keys) * BLOCK_SIZE + len(seq.tail)
            pool.commit([handle], seq.num_scheduled)
        pool.schedule(self.pool_handles, 0)

    def kvblocks(self, cycle: int) -> Laps:
        """One cycle of the manager."""
        sampled = self.sampled[cycle]
        t0 = now()
        self.step.schedule(self.handles, 1)
        t1 = now()
        self.manager.commit(self.handles, 1, sampled)
        t2 = now()
        return t1 - t0, t2 - t1

    def python_pool(self, cycle: int) -> Laps:
        """One cycle of the Python pool."""
        sampled = self.pool_sampled[cycle]
        t0 = now()
        self.pool.schedule(self.pool_handles, 1)
        t1 = now()
        self.pool.commit(self.pool_handles, 1, sampled)
        t2 = now()
        return t1 - t0, t2 - t1

    def sample_kvblocks(self) -> list[Laps]:
        """All cycles of the manager, then back to the start."""
        laps = super().sample_kvblocks()
        self.rewind_kvblocks()
        return laps

    def sample_python_pool(self) -> list[Laps]:
        """All cycles of the Python pool, then back to the start."""
        laps = super().sample_python_pool()
        self.rewind_python_pool()
        return laps

    def state(self) -> tuple[object, ...]:
        """What a sample must leave as it was."""
        lengths = [self.manager.sequence(handle).num_tokens for handle in self.handles.tolist()]
        theirs = [self.pool.seqs[handle].num_scheduled for handle in self.pool_handles]
        assert lengths == theirs
        return (*state_of(self.manager, self.pool), *lengths)


class Uncached(Row):
    """W2 without cache: `prepare`, `allocate` and `free` of a 2,048-token prompt, pool of 65,536 blocks."""

    parts = counted = ("prepare", "allocate", "free")

    def __init__(self, num_blocks: int = 65_536) -> None:
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_cache=False)
        touch(self.manager, Step(self.manager, max_seqs=1, max_tokens=2048))
        self.pool = PythonPool(num_blocks, BLOCK_SIZE)
        self.prompts = random_prompts(2, self.cycles, 2048)

    def kvblocks(self, cycle: int) -> Laps:
        """One cycle of the manager."""
        manager, tokens = self.manager, self.prompts[cycle]
        t0 = now()
        prompt = manager.prepare(tokens)
        t1 = now()
        answer = manager.allocate(prompt)
        assert answer
        t2 = now()
        manager.free(answer.handle)
        del prompt
        t3 = now()
        return t1 - t0, t2 - t1, t3 - t2

    def python_pool(self, cycle: int) -> Laps:
        """One cycle of the Python pool."""
        pool, tokens = self.pool, self.prompts[cycle]
        t0 = now()
        prompt = pool.prepare(tokens)
        t1 = now()
        handle = pool.allocate(prompt)
        t2 = now()
        pool.free([handle])
        del prompt
        t3 = now()
        return t1 - t0, t2 - t1, t3 - t2

    def state(self) -> tuple[object, ...]:
        """What a sample must leave as it was."""
        return state_of(self.manager, self.pool)


class Requests(Row):
    """`prepare`, `allocate`, `schedule`, `commit` and `free` of one request after the other; prefix cache on.

    All new tokens are scheduled in one step and committed, so that their full blocks are published. `order` names the
    prompts that a sample asks for; it is asked for twice before anything is timed.
    """

    parts = counted = ("prepare", "allocate", "schedule", "commit", "free")

    def __init__(
        self,
        num_blocks: int,
        prompts: list[NDArray[np.int32]] | Prompts,
        order: list[int],
        *,
        longest_tokens: int,
        start_empty: bool = False,
    ) -> None:
        columns = -(-longest_tokens // BLOCK_SIZE)
        self.num_blocks, self.longest_tokens, self.columns = num_blocks, longest_tokens, columns
        self.renew_kvblocks()
        self.pool = CachingPythonPool(num_blocks, BLOCK_SIZE, max_tokens=longest_tokens, max_blocks=columns)
        self.prompts, self.order, self.cycles = prompts, order, len(order)
        self.start_empty = start_empty
        for _ in range(0 if start_empty else 2):
            self.sample_kvblocks()
            self.sample_python_pool()

    def renew_kvblocks(self) -> None:
        """A manager whose pool has been used once; free blocks of neighbouring ids follow one another."""
        self.manager = BlockManager(self.num_blocks, BLOCK_SIZE, seed=0)
        self.step = Step(
            self.manager,
            max_seqs=1,
            max_tokens=self.longest_tokens,
            max_blocks_per_seq=self.columns,
        )
        touch(self.manager, self.step)

    def kvblocks(self, cycle: int) -> Laps:
        """One cycle of the manager."""
        manager, step, tokens = self.manager, self.step, self.prompts[self.order[cycle]]
        t0 = now()
        prompt = manager.prepare(tokens)
        t1 = now()
        answer = manager.allocate(prompt)
        assert answer
        handle, num_new = answer.handle, answer.num_new_tokens
        t2 = now()
        step.schedule(handle, num_new)
        t3 = now()
        manager.commit(handle, num_new)
        t4 = now()
        manager.free(handle)
        del prompt
        t5 = now()
        return t1 - t0, t2 - t1, t3 - t2, t4 - t3, t5 - t4

    def python_pool(self, cycle: int) -> Laps:
        """One cycle of the Python pool."""
        pool, tokens = self.pool, self.prompts[self.order[cycle]]
        t0 = now()
        prompt = pool.prepare(tokens)
        t1 = now()
        handle = pool.allocate(prompt)
        num_new = prompt.num_tokens - pool.seqs[handle].num_computed
        t2 = now()
        pool.schedule([handle], num_new)
        t3 = now()
        pool.commit([handle], num_new)
        t4 = now()
        pool.free([handle])
        del prompt
        t5 = now()
        return t1 - t0, t2 - t1, t3 - t2, t4 - t3, t5 - t4

    def sample_kvblocks(self) -> list[Laps]:
        """All cycles of the manager, then back to the start."""
        laps = super().sample_kvblocks()
        if self.start_empty:
            # Not only emptied: ids would be shuffled, from sample to sample.
            self.renew_kvblocks()
        return laps

    def sample_python_pool(self) -> list[Laps]:
        """All cycles of the Python pool, then back to the start."""
        laps = super().sample_python_pool()
        if self.start_empty:
            self.pool.reset_prefix_cache()
        return laps

    def state(self) -> tuple[object, ...]:
        """What a sample must leave as it was."""
        return state_of(self.manager, self.pool)


class Evicting(Requests):
    """W2 with cache: 2,048-token prompts that share nothing, pool of 65,536 full of cached blocks: each block evicts.

    `prepare`, `allocate`, `schedule`, `commit`, `free`.
    """

    def __init__(self, num_blocks: int = 65_536) -> None:
        count = num_blocks * BLOCK_SIZE // 2048 + 64
        super().__init__(num_blocks, random_prompts(3, count, 2048), list(range(count)), longest_tokens=2048)


class SharedPrefix(Requests):
    """W3: 2,000 shared and 200 own tokens, the own ones of all requests more than the pool of 65,536 blocks holds.

    `prepare`, `allocate`, `schedule` (200 or so new tokens), `commit`, `free`.
    """

    def __init__(self, num_blocks: int = 65_536) -> None:
        count = num_blocks // 12 + 64
        rng = np.random.default_rng(4)
        shared = rng.integers(0, VOCABULARY, 2000, dtype=np.int32)
        own = rng.integers(0, VOCABULARY, (count, 200), dtype=np.int32)
        prompts = [np.concatenate([shared, row]) for row in own]
        super().__init__(num_blocks, prompts, list(range(count)), longest_tokens=2200)


class WorkingSet(Requests):
    """W4: 2,112-token requests, drawn at random from a working set twice the pool of 65,536 blocks.

    `prepare`, `allocate`, `schedule` (of what is not cached), `commit`, `free`.
    """

    def __init__(self, num_blocks: int = 65_536) -> None:
        count = 2 * num_blocks * BLOCK_SIZE // 2112
        order = np.random.default_rng(6).integers(0, count, 3 * count).tolist()
        super().__init__(num_blocks, random_prompts(5, count, 2112), order, longest_tokens=2112)


class Fork(Row):
    """W5: `fork` a 4,090-token sequence into 8, `schedule` a token for each child, `commit` the 8, `free` the 8.

    Each child copies the partly filled last block.
    """

    parts = counted = ("fork", "schedule", "commit", "free")

    def __init__(self, num_blocks: int = 65_536) -> None:
        tokens = random_prompts(7, 1, 4090)[0]
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, seed=0)
        self.step = Step(self.manager, max_seqs=8, max_tokens=4096, max_blocks_per_seq=MAX_BLOCKS)
        self.pool = CachingPythonPool(
            num_blocks, BLOCK_SIZE, max_seqs=8, max_tokens=4096, max_blocks=MAX_BLOCKS
        )
        touch(self.manager, self.step)
        handle = prompt_handle(self.manager.allocate(self.manager.prepare(tokens)))
        self.parent = np.array([admit(self.manager, self.step, handle, 4090)], np.int64)
        self.pool_parent = self.pool.allocate(self.pool.prepare(tokens))
        self.pool.schedule([self.pool_parent], 4090)
        self.pool.commit([self.pool_parent], 4090)
        self.sampled = np.arange(8, dtype=np.int32)
        self.pool_sampled = self.sampled.tolist()
        self.kvblocks(0)
        self.python_pool(0)

    def kvblocks(self, cycle: int) -> Laps:
        """One cycle of the manager."""
        manager = self.manager
        t0 = now()
        children = manager.fork(self.parent, 8)
        t1 = now()
        self.step.schedule(children, 1)
        t2 = now()
        manager.commit(children, 1, self.sampled)
        t3 = now()
        manager.free(children)
        t4 = now()
        return t1 - t0, t2 - t1, t3 - t2, t4 - t3

    def python_pool(self, cycle: int) -> Laps:
        """One cycle of the Python pool."""
        pool = self.pool
        t0 = now()
        children = pool.fork(self.pool_parent, 8)
        t1 = now()
        pool.schedule(children, 1)
        t2 = now()
        pool.commit(children, 1, self.pool_sampled)
        t3 = now()
        pool.free(children)
        t4 = now()
        return t1 - t0, t2 - t1, t3 - t2, t4 - t3

    def state(self) -> tuple[object, ...]:
        """What a sample must leave as it was."""
        assert self.step.copies.shape == (8, 2)
        assert len(self.pool.copies) == 8
        return state_of(self.manager, self.pool)


class Trace(Requests):
    """W6: the prompts of the Mooncake conversation trace, one at a time, from an empty cache on; mean per request.

    `prepare`, `allocate`, `schedule`, `commit`, `free`. Raises UnavailableError without the trace.
    """

    def __init__(self, num_blocks: int, num_prompts: int | None = None) -> None:
        path = trace_path()
        if path is None:
            raise UnavailableError("KVBLOCKS_TRACES names no folder with the Mooncake conversation trace")
        self.trace = read_prompts(path)
        order = list(range(num_prompts or len(self.trace)))
        longest = self.trace.longest_tokens
        super().__init__(num_blocks, self.trace, order, longest_tokens=longest, start_empty=True)


class HashChain(Row):
    """W7: `block_hashes` of 32,768 tokens given as int32 array, ns per token; hashlib, or Python's hash, beside it.

    `prepare` of the same tokens is timed too and is no part of the row.
    """

    parts = ("block_hashes", "prepare")
    counted = ("block_hashes",)
    num_tokens = 32_768
    cycles = 5
    unit_ns = float(num_tokens)
    unit = "ns/token"

    def __init__(self, algorithm: Literal["xxh3", "sha256"]) -> None:
        self.algorithm: Literal["xxh3", "sha256"] = algorithm
        self.manager = BlockManager(1024, BLOCK_SIZE, seed=0, algorithm=algorithm)
        self.tokens = random_prompts(8, 1, self.num_tokens)[0]
        self.data = self.tokens.tobytes()
        hashes = block_hashes(self.tokens, BLOCK_SIZE, seed=0, algorithm=algorithm)
        assert (self.manager.prepare(self.tokens).block_hashes == hashes).all()

    def kvblocks(self, cycle: int) -> Laps:
        """One cycle of the manager."""
        t0 = now()
        block_hashes(self.tokens, BLOCK_SIZE, seed=0, algorithm=self.algorithm)
        t1 = now()
        self.manager.prepare(self.tokens)
        t2 = now()
        return t1 - t0, t2 - t1

    def python_pool(self, cycle: int) -> Laps:
        """One cycle of the Python pool."""
        t0 = now()
        if self.algorithm == "sha256":
            sha256_chain(self.data, BLOCK_SIZE)
        else:
            python_chain(self.data, BLOCK_SIZE)
        t1 = now()
        return t1 - t0, 0


class Build(Row):
    """W8: a manager of 1,000,000 blocks made, in ms; its end is not timed. Memory: see `resident`."""

    parts = counted = ("build",)
    cycles = 1
    unit_ns = 1e6
    unit = "ms"

    def kvblocks(self, cycle: int) -> Laps:
        """One cycle of the manager."""
        t0 = now()
        manager = BlockManager(1_000_000, BLOCK_SIZE)
        t1 = now()
        assert manager.capacity_blocks == 999_999
        return (t1 - t0,)

    def python_pool(self, cycle: int) -> Laps:
        """One cycle of the Python pool."""
        t0 = now()
        pool = CachingPythonPool(1_000_000, BLOCK_SIZE)
        t1 = now()
        assert len(pool.free_ids) == 999_999
        return (t1 - t0,)


@dataclass(frozen=True)
class Entry:
    """A row of the table: how it is made and what it should cost, in its own unit."""

    make: Callable[[], Row]
    goal: float
    samples: int = 25
    python_samples: int = 25
    quick: Callable[[], Row] | None = None


ROWS: dict[str, Entry] = {
    "W1a 256": Entry(partial(Decode, "schedule", 256), 2),
    "W1b 256": Entry(partial(Decode, "commit", 256), 4),
    "W1a 1024": Entry(partial(Decode, "schedule", 1024), 5, 15, 5),
    "W1b 1024": Entry(partial(Decode, "commit", 1024), 15, 15, 5),
    "W2 uncached": Entry(Uncached, 2, 50, 25),
    "W2 evicting": Entry(Evicting, 8, 25, 5),
    "W3": Entry(SharedPrefix, 4, 7, 3),
    "W4": Entry(WorkingSet, 9, 7, 3),
    "W5": Entry(Fork, 4, 50, 10),
    "W6 65536": Entry(partial(Trace, 65_536), 50, 5, 1, partial(Trace, 65_536, 500)),
    "W6 1048576": Entry(partial(Trace, 1_048_576), 80, 5, 1, partial(Trace, 1_048_576, 500)),
    "W7 xxh3": Entry(partial(HashChain, "xxh3"), 0.6, 40, 10),
    "W7 sha256": Entry(partial(HashChain, "sha256"), 6, 20, 10),
    "W8 build": Entry(Build, 8, 15, 5),
}
