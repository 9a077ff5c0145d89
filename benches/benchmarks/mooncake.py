"""The prompts of the Mooncake conversation trace (FAST'25), and what share of them a pool finds cached.

The trace is `mooncake_fast25_conversation.jsonl.gz` in the folder that the environment variable KVBLOCKS_TRACES names.
Its prompts are chains of hash ids, each of 512 tokens, of which the last may be partial. Here id h stands for the
tokens 512 h to 512 h + 511, so that equal chains, and they alone, are equal prompts.
"""

import gzip
import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvblocks import Allocated, BlockManager, Step

NUM_PROMPTS = 12_031
TOKENS_PER_ID = 512
# Share of all prompt tokens found cached, prompts only, one at a time, whole blocks: pool in blocks of 16 -> share.
HIT_RATES = {65_536: 0.0564, 262_144: 0.1890, 1_048_576: 0.3437, 6_291_456: 0.3736}

_OFFSETS = np.arange(TOKENS_PER_ID, dtype=np.int32)


class Prompts:
    """The prompts in order of arrival, as hash ids; their tokens are made when asked for."""

    def __init__(self, rows: list[tuple[NDArray[np.int32], int]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> NDArray[np.int32]:
        ids, num_tokens = self.rows[at]
        return (ids[:, None] * TOKENS_PER_ID + _OFFSETS).ravel()[:num_tokens]

    @property
    def longest_tokens(self) -> int:
        """Length of the longest prompt."""
        return max(num_tokens for _, num_tokens in self.rows)


def trace_path() -> Path | None:
    """Where the trace is; None if KVBLOCKS_TRACES names no folder that holds it."""
    folder = os.environ.get("KVBLOCKS_TRACES")
    path = Path(folder, "mooncake_fast25_conversation.jsonl.gz") if folder else None
    return path if path is not None and path.is_file() else None


def read_prompts(path: Path) -> Prompts:
    """All prompts of the trace. Raises ValueError for a row whose ids do not cover its length."""
    rows = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            row = json.loads(line)
            ids, num_tokens = np.array(row["hash_ids"], np.int32), int(row["input_length"])
            if not (len(ids) - 1) * TOKENS_PER_ID < num_tokens <= len(ids) * TOKENS_PER_ID:
                raise ValueError(f"{path.name}:{number}: {len(ids)} hash ids for {num_tokens} tokens")
            rows.append((ids, num_tokens))
    return Prompts(rows)


def hit_rate(prompts: Prompts, num_blocks: int, block_size: int = 16) -> float:
    """Share of the prompts' tokens that a pool finds cached when they come one at a time."""
    manager = BlockManager(num_blocks, block_size, seed=0)
    longest = prompts.longest_tokens
    step = Step(manager, max_seqs=1, max_tokens=longest, max_blocks_per_seq=-(-longest // block_size))
    for at in range(len(prompts)):
        answer = manager.allocate(manager.prepare(prompts[at]))
        assert isinstance(answer, Allocated)
        step.schedule(answer.handle, answer.num_new_tokens)
        manager.commit(answer.handle, answer.num_new_tokens)
        manager.free(answer.handle)
    stats = manager.stats()
    return stats.hit_tokens / stats.queried_tokens
