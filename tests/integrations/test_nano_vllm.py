"""The shim for nano-vllm in the scheduler loop of such an engine, against a model of the block manager it replaces.

Both are asked everything and must answer alike, down to the block ids. The loop also keeps what a K/V storage would
hold, one prefix a slot, and reads each sequence back through its block table before every step.
"""

import pickle
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.integrations.nano_vllm import BlockManager

Content = tuple[int, ...]  # all tokens up to the end of a block


@dataclass
class Sequence:
    seq_id: int
    token_ids: list[int]
    num_new: int = 1  # tokens to generate
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_scheduled_tokens: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


class Model:
    """A queue of free blocks, and which blocks hold which content, oldest first; tables by sequence."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = deque(range(num_blocks))
        self.owners = [0] * num_blocks
        self.contents: dict[int, Content] = {}
        self.holders: dict[Content, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.num_hits = 0

    def cached(self, seq: Sequence) -> list[int]:
        hits = []
        for end in range(self.block_size, len(seq), self.block_size):
            holders = self.holders.get(tuple(seq.token_ids[:end]), [])
            if not holders:
                break
            hits.append(holders[0])
        return hits

    def can_allocate(self, seq: Sequence) -> int:
        hits = self.cached(seq)
        in_use = sum(self.owners[block] > 0 for block in hits)
        room = len(self.free) + in_use >= -(-len(seq) // self.block_size)
        return len(hits) if room else -1

    def take(self) -> int:
        block = self.free.popleft()
        content = self.contents.pop(block, None)
        if content is not None:
            self.holders[content].remove(block)
        self.owners[block] = 1
        return block

    def allocate(self, seq: Sequence) -> None:
        table = self.cached(seq)
        self.num_hits += len(table)
        for block in table:
            if self.owners[block] == 0:
                self.free.remove(block)
            self.owners[block] += 1
        self.tables[seq.seq_id] = table
        while len(table) * self.block_size < len(seq):
            table.append(self.take())

    def deallocate(self, seq: Sequence) -> None:
        for block in reversed(self.tables.pop(seq.seq_id)):
            self.owners[block] -= 1
            if self.owners[block] == 0:
                self.free.append(block)

    def opens_a_block(self, seq: Sequence) -> bool:
        return len(seq) == len(self.tables[seq.seq_id]) * self.block_size + 1

    def can_append(self, seq: Sequence) -> bool:
        return not self.opens_a_block(seq) or len(self.free) > 0

    def may_append(self, seq: Sequence) -> None:
        if self.opens_a_block(seq):
            self.tables[seq.seq_id].append(self.take())

    def hash_blocks(self, seq: Sequence) -> None:
        computed = seq.num_cached_tokens + seq.num_scheduled_tokens
        for column in range(seq.num_cached_tokens // self.block_size, computed // self.block_size):
            block = self.tables[seq.seq_id][column]
            self.contents[block] = tuple(seq.token_ids[: (column + 1) * self.block_size])
            self.holders.setdefault(self.contents[block], []).append(block)


class Both:
    """The shim, asked side by side with the model."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.shim = BlockManager(num_blocks, block_size)
        self.model = Model(num_blocks, block_size)
        self.calls: dict[str, int] = {}

    def agree(self, seq: Sequence, call: str) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        assert seq.block_table == self.model.tables.get(seq.seq_id, [])
        stats = self.shim.manager.stats()
        assert stats.free_blocks + stats.cached_blocks == len(self.model.free)
        assert stats.cached_blocks == sum(block in self.model.contents for block in self.model.free)
        assert stats.hit_blocks == self.model.num_hits
        assert stats.logical_blocks == sum(map(len, self.model.tables.values()))

    def can_allocate(self, seq: Sequence) -> int:
        answer = self.shim.can_allocate(seq)
        assert answer == self.model.can_allocate(seq)
        self.agree(seq, "can_allocate" if answer >= 0 else "cannot_allocate")
        return answer

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> None:
        self.shim.allocate(seq, num_cached_blocks)
        self.model.allocate(seq)
        assert seq.num_cached_tokens == num_cached_blocks * self.shim.block_size < len(seq)
        self.agree(seq, "hit" if num_cached_blocks else "miss")

    def deallocate(self, seq: Sequence) -> None:
        self.shim.deallocate(seq)
        self.model.deallocate(seq)
        assert seq.num_cached_tokens == 0
        self.agree(seq, "deallocate")

    def can_append(self, seq: Sequence) -> bool:
        answer = self.shim.can_append(seq)
        assert answer == self.model.can_append(seq)
        self.agree(seq, "can_append" if answer else "cannot_append")
        return answer

    def may_append(self, seq: Sequence) -> None:
        self.shim.may_append(seq)
        self.model.may_append(seq)
        self.agree(seq, "may_append")

    def hash_blocks(self, seq: Sequence) -> None:
        self.shim.hash_blocks(seq)
        self.model.hash_blocks(seq)
        self.agree(seq, "hash_blocks")


class Engine:
    """Prefill first, one chunk at most; else decode, where who runs last yields its blocks to who runs first."""

    def __init__(self, blocks: Both, max_seqs: int, max_tokens: int) -> None:
        self.blocks = blocks
        self.max_seqs, self.max_tokens = max_seqs, max_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.storage: dict[int, Content] = {}
        self.num_preemptions = self.num_chunks = 0

    def slot(self, seq: Sequence, position: int) -> int:
        column, offset = divmod(position, self.blocks.shim.block_size)
        return seq.block_table[column] * self.blocks.shim.block_size + offset

    def prefill(self) -> list[Sequence]:
        batch: list[Sequence] = []
        room = self.max_tokens
        while self.waiting and len(batch) < self.max_seqs and room:
            seq = self.waiting[0]
            num_cached = seq.num_cached_tokens
            if not seq.block_table:
                hits = self.blocks.can_allocate(seq)
                if hits < 0:
                    break
                num_cached = hits * self.blocks.shim.block_size
            if room < len(seq) - num_cached and batch:
                break
            if not seq.block_table:
                self.blocks.allocate(seq, hits)
            seq.num_scheduled_tokens = min(len(seq) - num_cached, room)
            room -= seq.num_scheduled_tokens
            batch.append(seq)
            if seq.num_cached_tokens + seq.num_scheduled_tokens == len(seq):
                self.running.append(self.waiting.popleft())
            else:
                self.num_chunks += 1
        return batch

    def decode(self) -> list[Sequence]:
        batch: list[Sequence] = []
        while self.running and len(batch) < self.max_seqs:
            seq = self.running.popleft()
            while not self.blocks.can_append(seq):
                loser = self.running.pop() if self.running else seq
                self.blocks.deallocate(loser)
                self.waiting.appendleft(loser)
                self.num_preemptions += 1
                if loser is seq:
                    break
            else:
                seq.num_scheduled_tokens = 1
                self.blocks.may_append(seq)
                batch.append(seq)
        self.running.extendleft(reversed(batch))
        return batch

    def run_model(self, batch: list[Sequence]) -> None:
        """Write the K/V of the scheduled tokens, then read all of each sequence, as attention does."""
        ends = [seq.num_cached_tokens + seq.num_scheduled_tokens for seq in batch]
        for seq, end in zip(batch, ends, strict=True):
            for position in range(seq.num_cached_tokens, end):
                self.storage[self.slot(seq, position)] = tuple(seq.token_ids[: position + 1])
        for seq, end in zip(batch, ends, strict=True):
            for position in range(end):
                assert self.storage[self.slot(seq, position)] == tuple(seq.token_ids[: position + 1])
            assert len(set(seq.block_table)) == len(seq.block_table)

    def step(self, sampled: int) -> None:
        batch = self.prefill() or self.decode()
        assert batch
        self.run_model(batch)
        for seq in batch:
            self.blocks.hash_blocks(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            if seq.num_cached_tokens < len(seq):
                continue
            seq.token_ids.append(sampled)
            seq.num_new -= 1
            if seq.num_new == 0:
                self.blocks.deallocate(seq)
                self.running.remove(seq)


def serve(
    engine: Engine, requests: list[tuple[list[int], int, int]], sampled: list[int], num_blocks: int
) -> None:
    """Serve (prompt, tokens to generate, step of arrival) to the end; every block must come home."""
    arrivals = sorted(
        ((step, Sequence(i, list(prompt), num_new)) for i, (prompt, num_new, step) in enumerate(requests)),
        key=lambda arrival: arrival[0],
    )
    now = 0
    while arrivals or engine.waiting or engine.running:
        while arrivals and (arrivals[0][0] <= now or not (engine.waiting or engine.running)):
            engine.waiting.append(arrivals.pop(0)[1])
        engine.step(sampled[now % len(sampled)])
        assert engine.blocks.shim.manager.check_integrity() == []
        now += 1
    stats = engine.blocks.shim.manager.stats()
    assert (stats.live_blocks, stats.logical_blocks, stats.num_seqs, stats.used_slots) == (0, 0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == num_blocks == stats.capacity_blocks
    assert sorted(engine.blocks.model.free) == list(range(num_blocks))


@given(data=st.data(), block_size=st.integers(1, 4), num_blocks=st.integers(2, 12))
def test_random_traffic_answers_as_the_model(data: st.DataObject, block_size: int, num_blocks: int) -> None:
    most = num_blocks * block_size
    engine = Engine(
        Both(num_blocks, block_size),
        max_seqs=data.draw(st.integers(1, 5), "max_seqs"),
        max_tokens=data.draw(st.integers(1, 20), "max_tokens"),
    )
    prompts = st.builds(
        lambda stem, length, tail: ([stem] * length + tail)[: most - 1],
        st.integers(0, 1),
        st.integers(0, 12),
        st.lists(st.integers(0, 1), min_size=1, max_size=4),
    )
    requests = data.draw(
        st.lists(st.tuples(prompts, st.integers(1, 12), st.integers(0, 15)), min_size=1, max_size=8)
    )
    # The last token that is generated needs no slot.
    fitting = [
        (prompt, min(num_new, most + 1 - len(prompt)), step) for prompt, num_new, step in requests if prompt
    ]
    sampled = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=7))
    serve(engine, fitting, sampled, num_blocks)


def test_the_traffic_reaches_hits_chunks_preemptions_and_refusals() -> None:
    engine = Engine(Both(9, 2), max_seqs=4, max_tokens=6)
    stem = [7, 7, 7, 7]
    requests = [([*stem, *range(i, i + i % 3 + 1)], 6 + i % 4, i // 2) for i in range(12)]
    requests.append((list(range(14)), 2, 20))
    serve(engine, requests, [1, 2, 3], 9)
    assert engine.num_preemptions >= 5
    assert engine.num_chunks >= 2
    assert engine.blocks.model.num_hits >= 12
    assert {"cannot_allocate", "cannot_append", "hit", "miss"} <= set(engine.blocks.calls)


def sequence(seq_id: int, tokens: range | list[int]) -> Sequence:
    return Sequence(seq_id, list(tokens))


def compute(blocks: BlockManager, seq: Sequence) -> None:
    """Allocate a prompt and compute it whole."""
    blocks.allocate(seq, blocks.can_allocate(seq))
    seq.num_scheduled_tokens = len(seq) - seq.num_cached_tokens
    blocks.hash_blocks(seq)
    seq.num_cached_tokens, seq.num_scheduled_tokens = len(seq), 0


def test_blocks_have_256_tokens_and_ids_from_0() -> None:
    blocks = BlockManager(3)
    seq = sequence(0, range(600))
    assert blocks.block_size == 256
    assert blocks.can_allocate(seq) == 0
    blocks.allocate(seq, 0)
    assert seq.block_table == [0, 1, 2]
    assert blocks.can_allocate(sequence(1, range(1))) == -1


def test_the_block_table_is_a_plain_list() -> None:
    blocks = BlockManager(4, 4)
    seq = sequence(0, range(4))
    table = seq.block_table
    compute(blocks, seq)
    seq.token_ids.append(9)
    blocks.may_append(seq)
    assert seq.block_table is table
    assert type(table) is list
    assert [type(block) for block in table] == [int, int]
    assert pickle.loads(pickle.dumps(table)) == [0, 1]
    blocks.deallocate(seq)
    assert seq.block_table is table
    assert table == []


def test_the_last_block_is_never_a_hit() -> None:
    blocks = BlockManager(8, 4)
    compute(blocks, sequence(0, range(8)))
    found = {length: blocks.can_allocate(sequence(1, range(length))) for length in (1, 4, 5, 8, 9, 12)}
    assert found == {1: 0, 4: 0, 5: 1, 8: 1, 9: 2, 12: 2}


def test_a_block_hits_after_the_same_tokens_only() -> None:
    blocks = BlockManager(8, 2)
    compute(blocks, sequence(0, [1, 1, 2, 2, 3]))
    assert blocks.can_allocate(sequence(1, [1, 1, 2, 2, 3])) == 2
    assert blocks.can_allocate(sequence(1, [9, 9, 2, 2, 3])) == 0
    assert blocks.can_allocate(sequence(1, [1, 1, 2, 9, 3])) == 1


def test_a_freed_block_is_found_until_it_is_the_first_freed() -> None:
    blocks = BlockManager(4, 2)
    first, second = sequence(0, [1, 1, 2, 2]), sequence(1, [3, 3])
    compute(blocks, first)
    compute(blocks, second)
    blocks.deallocate(first)
    blocks.deallocate(second)
    again = sequence(2, [1, 1, 2, 2, 9])
    assert blocks.can_allocate(again) == 2
    # Never used ids come first, then the tail of what was freed first; its content is lost with it.
    third = sequence(3, [5, 5, 6, 6])
    compute(blocks, third)
    assert third.block_table == [3, 1]
    assert blocks.can_allocate(again) == -1
    assert blocks.can_allocate(sequence(4, [1, 1, 2])) == 1


def test_tokens_are_found_when_computed_not_when_allocated() -> None:
    blocks = BlockManager(8, 2)
    seq, other = sequence(0, [1, 1, 2, 2, 3]), sequence(1, [1, 1, 2, 2, 3])
    blocks.allocate(seq)
    assert blocks.can_allocate(other) == 0
    for chunk, found in ((1, 0), (1, 1), (1, 1), (1, 2), (1, 2)):
        seq.num_scheduled_tokens = chunk
        blocks.hash_blocks(seq)
        seq.num_cached_tokens += chunk
        assert blocks.can_allocate(other) == found


def test_of_equal_blocks_the_oldest_is_found_and_then_the_next() -> None:
    blocks = BlockManager(4, 2)
    twins = [sequence(0, [1, 1, 2]), sequence(1, [1, 1, 2])]
    for twin in twins:
        blocks.allocate(twin)
    for twin in twins:
        twin.num_scheduled_tokens = 3
        blocks.hash_blocks(twin)
    tables = [list(twin.block_table) for twin in twins]
    assert tables == [[0, 1], [2, 3]]
    blocks.deallocate(twins[0])
    blocks.deallocate(twins[1])
    # Blocks 1 and 0 are reused, and what block 0 held is found in block 2.
    blocks.allocate(sequence(2, [8, 8, 9, 9]))
    last = sequence(3, [1, 1, 5])
    blocks.allocate(last, 1)
    assert last.block_table == [2, 3]


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    blocks = BlockManager(3, 2)
    seq = sequence(0, [1, 1, 2, 2])
    compute(blocks, seq)
    compute(blocks, sequence(2, [4]))
    seq.token_ids.append(3)
    before = blocks.manager.stats()
    assert not blocks.can_append(seq)
    assert blocks.can_allocate(sequence(1, [5])) == -1
    with pytest.raises(RuntimeError, match="no room for a token of sequence 0: Later"):
        blocks.may_append(seq)
    with pytest.raises(RuntimeError, match="no room for sequence 1: Later"):
        blocks.allocate(sequence(1, [5]))
    with pytest.raises(RuntimeError, match=r"no room for sequence 1: Never\(need_blocks=4"):
        blocks.allocate(sequence(1, [5] * 7))
    with pytest.raises(ValueError, match="sequence 0 is allocated already"):
        blocks.allocate(seq)
    with pytest.raises(ValueError, match="num_cached_blocks is 2, but 1 blocks are cached"):
        blocks.allocate(sequence(1, [1, 1, 5]), 2)
    assert blocks.manager.stats() == before
    assert seq.block_table == [0, 1]


def test_a_sequence_without_blocks_may_be_deallocated() -> None:
    blocks = BlockManager(2, 2)
    seq = sequence(0, [1])
    blocks.deallocate(seq)
    compute(blocks, seq)
    blocks.deallocate(seq)
    blocks.deallocate(seq)
    assert blocks.manager.stats().free_blocks == 2
