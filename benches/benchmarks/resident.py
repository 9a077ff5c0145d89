"""Resident memory of a pool per block, measured in a process of its own: untouched, and full of cached blocks.

Owns `resident_bytes`; run as a script it measures one side and prints the two numbers.
"""

import json
import subprocess
import sys
from pathlib import Path

NUM_BLOCKS = 1_000_000
PROMPT_BLOCKS = 256


def rss_bytes() -> int:
    """Resident set of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def resident_bytes(side: str, num_blocks: int = NUM_BLOCKS) -> tuple[float, float]:
    """Bytes per block (untouched, full) of side "xxh3", "sha256" or "python", in a fresh interpreter."""
    command = [sys.executable, "-m", __name__, side, str(num_blocks)]
    folder = Path(__file__).resolve().parents[__name__.count(".")]
    run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    untouched, full = json.loads(run.stdout)
    return float(untouched), float(full)


def _kvblocks(algorithm: str, num_blocks: int) -> tuple[int, int, int]:
    import numpy as np

    from kvblocks import Allocated, BlockManager, Step

    def fill(manager: BlockManager) -> None:
        tokens_each = 16 * PROMPT_BLOCKS
        step = Step(manager, max_seqs=1, max_tokens=tokens_each, max_blocks_per_seq=PROMPT_BLOCKS)
        for first in range(0, manager.num_blocks * 16, tokens_each):
            tokens = np.arange(first, first + tokens_each, dtype=np.int32)
            answer = manager.allocate(manager.prepare(tokens))
            assert isinstance(answer, Allocated)
            step.schedule(answer.handle, tokens_each)
            manager.commit(answer.handle, tokens_each)
            manager.free(answer.handle)
        assert manager.stats().cached_blocks == manager.capacity_blocks

    def make(size: int) -> BlockManager:
        return BlockManager(size, 16, algorithm="sha256" if algorithm == "sha256" else "xxh3")

    fill(make(1 + 4 * PROMPT_BLOCKS))  # what the first use of everything costs is not the pool's
    before = rss_bytes()
    manager = make(num_blocks)
    untouched = rss_bytes()
    fill(manager)
    return before, untouched, rss_bytes()


def _python(num_blocks: int) -> tuple[int, int, int]:
    import numpy as np

    from .reference import CachingPythonPool

    def fill(pool: CachingPythonPool) -> None:
        tokens_each = 16 * PROMPT_BLOCKS
        for first in range(0, len(pool.refs) * 16, tokens_each):
            handle = pool.allocate(pool.prepare(np.arange(first, first + tokens_each, dtype=np.int32)))
            pool.commit([handle], tokens_each)
            pool.free([handle])

    fill(CachingPythonPool(1 + 4 * PROMPT_BLOCKS, 16))
    before = rss_bytes()
    pool = CachingPythonPool(num_blocks, 16)
    untouched = rss_bytes()
    fill(pool)
    return before, untouched, rss_bytes()


if __name__ == "__main__":
    side, num_blocks = sys.argv[1], int(sys.argv[2])
    before, untouched, full = _python(num_blocks) if side == "python" else _kvblocks(side, num_blocks)
    print(json.dumps([(untouched - before) / num_blocks, (full - before) / num_blocks]))
