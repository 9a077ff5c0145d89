"""kvblocks: the KV-cache memory manager that a serving engine imports instead of writing its own.

`PagedKVCache` puts a block manager and a backend together; `BlockManager` and `Step` serve engines that bring
their own tensors. Importing the package needs NumPy only; backends are imported when they are asked for.
"""

from kvblocks._core import (
    Allocated,
    BlockManager,
    Dropped,
    ForkedProcessError,
    Fragmentation,
    Freed,
    KVBlocksError,
    Later,
    Never,
    Ok,
    PreemptedError,
    Prompt,
    Scheduled,
    Sequence,
    SequenceUsage,
    StaleHandleError,
    Stats,
    Usage,
    __version__,
    block_hashes,
)
from kvblocks.backends import Backend, get_backend
from kvblocks.batch import PackedStep, Step
from kvblocks.cache import PagedKVCache, SavedSequence
from kvblocks.config import CacheConfig, parse_memory
from kvblocks.formats import FORMATS, Format, KVFormat
from kvblocks.layout import LayerCache

__all__ = [
    "FORMATS",
    "Allocated",
    "Backend",
    "BlockManager",
    "CacheConfig",
    "Dropped",
    "ForkedProcessError",
    "Format",
    "Fragmentation",
    "Freed",
    "KVBlocksError",
    "KVFormat",
    "Later",
    "LayerCache",
    "Never",
    "Ok",
    "PackedStep",
    "PagedKVCache",
    "PreemptedError",
    "Prompt",
    "SavedSequence",
    "Scheduled",
    "Sequence",
    "SequenceUsage",
    "StaleHandleError",
    "Stats",
    "Step",
    "Usage",
    "__version__",
    "block_hashes",
    "get_backend",
    "parse_memory",
]
