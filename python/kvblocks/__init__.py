"""kvblocks: the KV-cache memory manager that a serving engine imports instead of writing its own.

`PagedKVCache` puts a block manager and a backend together; `BlockManager` and `Step` serve engines that bring
their own tensors. Importing the package needs NumPy only; backends are imported when they are asked for.
"""

from kvblocks._core import (
    Allocated,
    BlockManager,
    ForkedProcessError,
    KVBlocksError,
    Later,
    Never,
    Ok,
    PreemptedError,
    Prompt,
    Scheduled,
    Sequence,
    StaleHandleError,
    Stats,
    __version__,
)
from kvblocks.backends import Backend, get_backend
from kvblocks.batch import Step
from kvblocks.cache import PagedKVCache
from kvblocks.config import CacheConfig, parse_memory
from kvblocks.layout import LayerCache

__all__ = [
    "Allocated",
    "Backend",
    "BlockManager",
    "CacheConfig",
    "ForkedProcessError",
    "KVBlocksError",
    "Later",
    "LayerCache",
    "Never",
    "Ok",
    "PagedKVCache",
    "PreemptedError",
    "Prompt",
    "Scheduled",
    "Sequence",
    "StaleHandleError",
    "Stats",
    "Step",
    "__version__",
    "get_backend",
    "parse_memory",
]
