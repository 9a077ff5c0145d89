"""The pool that an engine would write itself in Python: a deque of free ids, dicts of tables and of cached blocks.

Owns `PythonPool`, a plain free list, and `CachingPythonPool`, which shares blocks by their content. Both do the same
work as the manager with no checks: what they cost is the yardstick, measured in the same run.
"""

from array import array
from collections import OrderedDict, deque
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray


class PythonPrompt:
    """Length, token bytes and chained keys of a prompt."""

    __slots__ = ("data", "keys", "num_tokens")

    def __init__(self, num_tokens: int, data: bytes, keys: list[int]) -> None:
        self.num_tokens = num_tokens
        self.data = data
        self.keys = keys


class _Sequence:
    """Block table and cursors, in tokens but `num_published`."""

    __slots__ = ("keys", "num_computed", "num_published", "num_scheduled", "table", "tail")

    def __init__(self, table: list[int], num_computed: int, keys: list[int], tail: bytes) -> None:
        self.table = table
        self.num_computed = self.num_scheduled = num_computed
        self.keys = keys
        self.num_published = 0
        self.tail = array("i", tail)


class PythonPool:
    """Block tables of sequences, and the index arrays of a step, by plain loops; no sharing, no prefix cache."""

    def __init__(
        self, num_blocks: int, block_size: int, *, max_seqs: int = 1, max_tokens: int = 1, max_blocks: int = 1
    ) -> None:
        self.block_size = block_size
        self.free_ids = deque(range(1, num_blocks))
        self.seqs: dict[int, _Sequence] = {}
        self.next_handle = 0
        self.block_tables = np.zeros((max_seqs, max_blocks), np.int32)
        self.slot_mapping = np.zeros(max_tokens, np.int64)
        self.positions = np.zeros(max_tokens, np.int32)
        self.seq_lens = np.zeros(max_seqs, np.int32)
        self.query_start_loc = np.zeros(max_seqs + 1, np.int32)
        self.shown: list[tuple[int, int]] = [(-1, 0)] * max_seqs
        self.changes: list[tuple[int, int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.offsets = np.arange(block_size)

    def prepare(self, tokens: NDArray[np.int32]) -> PythonPrompt:
        """A prompt without keys."""
        return PythonPrompt(len(tokens), b"", [])

    def take(self, num_blocks: int) -> list[int]:
        """Blocks off the free list."""
        popleft = self.free_ids.popleft
        return [popleft() for _ in range(num_blocks)]

    def allocate(self, prompt: PythonPrompt) -> int:
        """A sequence with blocks for its whole prompt."""
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        self.seqs[handle] = _Sequence(self.take(-(-prompt.num_tokens // self.block_size)), 0, [], b"")
        return handle

    def free(self, handles: list[int]) -> None:
        """Give all blocks of the sequences back."""
        for handle in handles:
            self.free_ids.extendleft(reversed(self.seqs.pop(handle).table))

    def make_tail_writable(self, seq: _Sequence) -> None:
        """Nothing is shared."""

    def schedule(self, handles: list[int], num_new: int) -> None:
        """The next `num_new` tokens of each sequence; fills the arrays of the step."""
        size, seqs, shown = self.block_size, self.seqs, self.shown
        slots: list[int] = []
        lens: list[int] = []
        self.changes, self.copies = [], []
        for row, handle in enumerate(handles):
            seq = seqs[handle]
            table, start = seq.table, seq.num_scheduled
            seq.num_scheduled = end = start + num_new
            if start % size:
                self.make_tail_writable(seq)
            if end > len(table) * size:
                table += self.take(-(-end // size) - len(table))
            if num_new == 1:
                slots.append(table[start // size] * size + start % size)
            else:
                first = start // size
                ids = np.array(table[first : -(-end // size)], np.int64)[:, None] * size + self.offsets
                at = row * num_new
                self.slot_mapping[at : at + num_new] = ids.ravel()[start - first * size : end - first * size]
                self.positions[at : at + num_new] = np.arange(start, end)
            lens.append(end)
            known = shown[row]
            if known != (handle, len(table)):
                column = known[1] if known[0] == handle else 0
                self.block_tables[row, column : len(table)] = table[column:]
                shown[row] = (handle, len(table))
                self.changes.append((row, column, len(table) - column))
        num_rows = len(handles)
        self.seq_lens[:num_rows] = lens
        self.query_start_loc[: num_rows + 1] = np.arange(num_rows + 1) * num_new
        if num_new == 1:
            self.slot_mapping[:num_rows] = slots
            self.positions[:num_rows] = self.seq_lens[:num_rows] - 1


class CachingPythonPool(PythonPool):
    """Blocks are found by a 64-bit key chained over their tokens, and evicted by least recent use, unchecked."""

    def __init__(
        self, num_blocks: int, block_size: int, *, max_seqs: int = 1, max_tokens: int = 1, max_blocks: int = 1
    ) -> None:
        super().__init__(
            num_blocks, block_size, max_seqs=max_seqs, max_tokens=max_tokens, max_blocks=max_blocks
        )
        self.refs = [0] * num_blocks
        self.index: dict[int, int] = {}
        self.keys: dict[int, int] = {}
        self.cached: OrderedDict[int, int] = OrderedDict()

    def prepare(self, tokens: NDArray[np.int32]) -> PythonPrompt:
        """A prompt with the key of each full block."""
        data = tokens.tobytes()
        width = 4 * self.block_size
        key, keys = 0, []
        for at in range(0, len(data) - width + 1, width):
            key = hash((key, data[at : at + width]))
            keys.append(key)
        return PythonPrompt(len(tokens), data, keys)

    def take(self, num_blocks: int) -> list[int]:
        """Blocks off the free list, then the least recently used ones."""
        free_ids, cached, index, keys, refs = self.free_ids, self.cached, self.index, self.keys, self.refs
        blocks = []
        for _ in range(num_blocks):
            if free_ids:
                block = free_ids.popleft()
            else:
                block, key = cached.popitem(last=False)
                del index[key], keys[block]
            refs[block] = 1
            blocks.append(block)
        return blocks

    def allocate(self, prompt: PythonPrompt) -> int:
        """A sequence with its cached blocks, and blocks for the rest of its prompt."""
        size, refs, cached, index = self.block_size, self.refs, self.cached, self.index
        table: list[int] = []
        for key in prompt.keys[: (prompt.num_tokens - 1) // size]:
            block = index.get(key)
            if block is None:
                break
            if refs[block] == 0:
                del cached[block]
            refs[block] += 1
            table.append(block)
        num_hits = len(table)
        table += self.take(-(-prompt.num_tokens // size) - num_hits)
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        tail = prompt.data[4 * size * len(prompt.keys) :]
        self.seqs[handle] = seq = _Sequence(table, num_hits * size, list(prompt.keys), tail)
        seq.num_published = num_hits
        return handle

    def make_tail_writable(self, seq: _Sequence) -> None:
        """A copy of the last block if others own it too."""
        block = seq.table[-1]
        if self.refs[block] > 1:
            self.refs[block] -= 1
            seq.table[-1] = self.take(1)[0]
            self.copies.append((block, seq.table[-1]))

    def commit(self, handles: list[int], count: int, tokens: list[int] | None = None) -> None:
        """Accept `count` tokens of each sequence: of its prompt, or one each of `tokens`; publish full blocks."""
        size, seqs = self.block_size, self.seqs
        for row, handle in enumerate(handles):
            seq = seqs[handle]
            seq.num_computed += count
            if tokens is not None:
                tail = seq.tail
                tail.append(tokens[row])
                if len(tail) == size:
                    seq.keys.append(hash((seq.keys[-1] if seq.keys else 0, tail.tobytes())))
                    del tail[:]
            full = seq.num_computed // size
            while seq.num_published < full:
                key, block = seq.keys[seq.num_published], seq.table[seq.num_published]
                seq.num_published += 1
                if key not in self.index:
                    self.index[key] = block
                    self.keys[block] = key

    def fork(self, handle: int, num_children: int) -> list[int]:
        """Children that share all blocks of a sequence."""
        parent, refs = self.seqs[handle], self.refs
        for block in parent.table:
            refs[block] += num_children
        children = list(range(self.next_handle, self.next_handle + num_children))
        for child in children:
            seq = _Sequence(list(parent.table), parent.num_computed, list(parent.keys), parent.tail.tobytes())
            seq.num_published = parent.num_published
            self.seqs[child] = seq
        self.next_handle += num_children
        return children

    def free(self, handles: list[int]) -> None:
        """Give all blocks of the sequences back, the tail first; published ones stay cached."""
        refs, keys, cached, appendleft = self.refs, self.keys, self.cached, self.free_ids.appendleft
        for handle in handles:
            for block in reversed(self.seqs.pop(handle).table):
                refs[block] -= 1
                if refs[block] == 0:
                    key = keys.get(block)
                    if key is None:
                        appendleft(block)
                    else:
                        cached[block] = key

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that nobody owns."""
        for block, key in self.cached.items():
            del self.index[key], self.keys[block]
            self.free_ids.append(block)
        self.cached.clear()


def python_chain(data: bytes, block_size: int) -> int:
    """Last key of the chain by Python's own hash."""
    width, key = 4 * block_size, 0
    for at in range(0, len(data) - width + 1, width):
        key = hash((key, data[at : at + width]))
    return key


def sha256_chain(data: bytes, block_size: int) -> bytes:
    """Last digest of the chain by hashlib."""
    width, digest = 4 * block_size, bytes(32)
    for at in range(0, len(data) - width + 1, width):
        digest = sha256(digest + data[at : at + width]).digest()
    return digest
