"""The pool that an engine would write itself in Python: a deque of free ids, a dict of block tables.

Owns `PythonPool`. It does the same work as the manager without a prefix cache, with no checks: what it costs is the
yardstick, measured in the same run.
"""

from collections import deque

import numpy as np


class PythonPool:
    """Block tables of sequences, and the index arrays of a decode step, by plain loops."""

    def __init__(self, num_blocks: int, block_size: int, max_seqs: int, max_blocks: int) -> None:
        self.block_size = block_size
        self.free_ids = deque(range(1, num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.block_tables = np.zeros((max_seqs, max_blocks), np.int32)
        self.slot_mapping = np.zeros(max_seqs, np.int64)
        self.seq_lens = np.zeros(max_seqs, np.int32)
        self.next_handle = 0

    def allocate(self, num_tokens: int) -> int:
        """A sequence with blocks for `num_tokens` tokens."""
        num_blocks = -(-num_tokens // self.block_size)
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        self.tables[handle] = [self.free_ids.popleft() for _ in range(num_blocks)]
        self.lengths[handle] = num_tokens
        return handle

    def decode(self, handles: list[int]) -> None:
        """One more token of each sequence; fills the arrays of the step."""
        for row, handle in enumerate(handles):
            position = self.lengths[handle]
            table = self.tables[handle]
            if position == len(table) * self.block_size:
                table.append(self.free_ids.popleft())
                self.block_tables[row, len(table) - 1] = table[-1]
            self.slot_mapping[row] = table[-1] * self.block_size + position % self.block_size
            self.seq_lens[row] = self.lengths[handle] = position + 1

    def truncate(self, handles: list[int], length: int) -> None:
        """Cut each sequence to `length` tokens."""
        for handle in handles:
            table = self.tables[handle]
            while len(table) > -(-length // self.block_size):
                self.free_ids.appendleft(table.pop())
            self.lengths[handle] = length

    def free(self, handles: list[int]) -> None:
        """Give all blocks of the sequences back."""
        for handle in handles:
            self.free_ids.extendleft(reversed(self.tables.pop(handle)))
            del self.lengths[handle]
