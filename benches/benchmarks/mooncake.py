"""The prompts of the Mooncake conversation trace (FAST'25), and what share of them a pool finds cached.

The trace is `mooncake_fast25_conversation.jsonl.gz` in the folder that the environment variable KVBLOCKS_TRACES names.
Its prompts are chains of hash ids, each of 512 tokens, of which the last may be partial.
"""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvblocks.replay.hit_rate import lru_hit_rate
from kvblocks.traces.readers import read_trace
from kvblocks.traces.trace import Trace

NUM_PROMPTS = 12_031
# Share of all prompt tokens found cached, prompts only, one at a time, whole blocks: pool in blocks of 16 -> share.
HIT_RATES = {65_536: 0.0564, 262_144: 0.1890, 1_048_576: 0.3437, 6_291_456: 0.3736}


class Prompts:
    """The prompts in order of arrival, as rows of hash ids and length; their tokens are made when asked for."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        lengths = trace.prompt_tokens.tolist()
        spans = pairwise(trace.starts.tolist())
        self.rows = [(trace.ids[a:b], length) for (a, b), length in zip(spans, lengths, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> NDArray[np.int32]:
        return self.trace.tokens(at)

    @property
    def longest_tokens(self) -> int:
        """Length of the longest prompt."""
        return int(self.trace.prompt_tokens.max())


def trace_path() -> Path | None:
    """Where the trace is; None if KVBLOCKS_TRACES names no folder that holds it."""
    folder = os.environ.get("KVBLOCKS_TRACES")
    path = Path(folder, "mooncake_fast25_conversation.jsonl.gz") if folder else None
    return path if path is not None and path.is_file() else None


def read_prompts(path: Path) -> Prompts:
    """All prompts of the trace."""
    return Prompts(read_trace(path, strict=True))


def hit_rate(prompts: Prompts, num_blocks: int, block_size: int = 16) -> float:
    """Share of the prompts' tokens that a pool finds cached when they come one at a time."""
    return lru_hit_rate(prompts.trace, block_size, num_blocks - 1).tokens
