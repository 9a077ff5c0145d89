"""The block manager of nano-vllm, with its interface and its behaviour, on a kvblocks manager.

Owns `BlockManager`. Imports batch and the core. In an engine of that shape it replaces one import:

    from kvblocks.integrations.nano_vllm import BlockManager

One difference: of blocks with equal content the oldest is found first and the others stay findable after it, where the
original finds the newest and loses the others with it.

Invariant: the manager knows the tokens of a sequence up to its last full block, which is all that can be published;
`seq.block_table` is a plain list, equal to the manager's table.
"""

from __future__ import annotations

from typing import Protocol

import kvblocks._core as core
from kvblocks.batch import Step


class Sequence(Protocol):
    """What the shim reads and writes of the engine's sequences."""

    seq_id: int
    token_ids: list[int]
    block_table: list[int]
    num_cached_tokens: int
    num_scheduled_tokens: int

    def __len__(self) -> int: ...


class BlockManager:
    """Blocks with ids 0..num_blocks, handed out in the order in which they were freed; block_size in tokens.

    `manager` is the kvblocks manager underneath, for its statistics. As it learns of tokens block by block, used_slots
    leaves the partly filled last block of each sequence out.
    """

    def __init__(self, num_blocks: int, block_size: int = 256) -> None:
        self.block_size = block_size
        self.manager = core.BlockManager(num_blocks, block_size, null_block=False, reuse="first_freed")
        self._step = Step(self.manager, max_seqs=1, max_tokens=block_size)
        self._handles: dict[int, int] = {}
        # The head of the waiting queue is asked about step after step: its tokens, and the same hashed.
        self._asked: tuple[list[int], core.Prompt] | None = None

    def can_allocate(self, seq: Sequence) -> int:
        """Leading blocks of `seq` that are cached, its last block never among them; -1 if the rest does not fit now."""
        answer = self.manager.can_allocate(self._prompt(seq))
        return answer.num_cached_tokens // self.block_size if isinstance(answer, core.Ok) else -1

    def allocate(self, seq: Sequence, num_cached_blocks: int | None = None) -> None:
        """Fill the block table of `seq`, cached blocks first.

        num_cached_blocks: what `can_allocate` answered, checked if given. Raises ValueError for another number and
        for a sequence that is allocated already, RuntimeError without room.
        """
        if seq.seq_id in self._handles:
            raise ValueError(f"sequence {seq.seq_id} is allocated already")
        prompt = self._prompt(seq)
        found = self.manager.match_prefix(prompt) // self.block_size
        if num_cached_blocks not in (None, found):
            raise ValueError(f"num_cached_blocks is {num_cached_blocks}, but {found} blocks are cached")
        answer = self.manager.allocate(prompt)
        if not isinstance(answer, core.Allocated):
            raise RuntimeError(f"no room for sequence {seq.seq_id}: {answer}")
        self._asked = None
        self._handles[seq.seq_id] = answer.handle
        seq.block_table.extend(self.manager.block_table(answer.handle).tolist())
        seq.num_cached_tokens = answer.num_cached_tokens

    def deallocate(self, seq: Sequence) -> None:
        """Give the blocks of `seq` back, its last one first; their content can be found until they are reused."""
        handle = self._handles.pop(seq.seq_id, None)
        if handle is not None:
            self.manager.free(handle)
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def can_append(self, seq: Sequence) -> bool:
        """Whether there is a slot for the last token of `seq`, which has just been appended to it."""
        if self._has_slot(seq):
            return True
        stats = self.manager.stats()
        return stats.free_blocks + stats.cached_blocks > 0

    def may_append(self, seq: Sequence) -> None:
        """Give the last token of `seq` a slot: one more block if it opens one. Raises RuntimeError without room."""
        if self._has_slot(seq):
            return
        handle = self._handles[seq.seq_id]
        scheduled = self._step.schedule(handle, 0, lookahead=1)
        if not scheduled:
            raise RuntimeError(f"no room for a token of sequence {seq.seq_id}: {scheduled.refusal}")
        self.manager.commit(handle, 0)
        seq.block_table.append(int(self._step.block_tables[0, len(seq.block_table)]))

    def hash_blocks(self, seq: Sequence) -> None:
        """Publish the blocks of `seq` that the tokens just computed have filled: `num_scheduled_tokens` of them."""
        size = self.block_size
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        for start in range(seq.num_cached_tokens // size * size, end - size + 1, size):
            handle = self._handles[seq.seq_id]
            self._step.schedule(handle, size)
            self.manager.commit(handle, size, seq.token_ids[start : start + size])

    def _has_slot(self, seq: Sequence) -> bool:
        return len(seq) <= len(seq.block_table) * self.block_size

    def _prompt(self, seq: Sequence) -> core.Prompt:
        """The tokens of `seq`, hashed once while it waits."""
        if self._asked is None or self._asked[0] != seq.token_ids:
            self._asked = (list(seq.token_ids), self.manager.prepare(seq.token_ids))
        return self._asked[1]
