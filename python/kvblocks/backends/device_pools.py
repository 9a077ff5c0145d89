"""Blocks and tokens of all layers of a pool, copied on a device in one launch.

Owns `copy_blocks` and `move_slots` of `DeviceBackend`, and `RegionTables`. Imports what calls of kernels share.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from kvblocks.backends.base import Supported
from kvblocks.backends.checks import check_copies
from kvblocks.backends.expect import check_moves
from kvblocks.backends.geometry import Record, address_of, block_arrays, block_region, slot_region
from kvblocks.backends.kernels import Kernels
from kvblocks.backends.memory import Memory
from kvblocks.kernels import params as records
from kvblocks.kernels import specs
from kvblocks.layout import Array, LayerCache


class RegionTables:
    """The addresses of pools on the device, by the first cache of a pool.

    A table lives as long as that cache: a captured graph reads it for as long as the pool lives.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._tables: WeakKeyDictionary[LayerCache, dict[bytes, Array]] = WeakKeyDictionary()

    def of(self, first: LayerCache, regions: list[Record]) -> Array:
        """The table of the regions of a pool, uploaded if it is new."""
        host = np.array(regions, records.REGION)
        key = host.tobytes()
        tables = self._tables.setdefault(first, {})
        if key not in tables:
            tables[key] = self._memory.upload(host.view(np.uint8))
        return tables[key]

    def holder(self, first: LayerCache) -> object:
        """What keeps the tables of a pool alive for whoever holds it."""
        return self._tables.setdefault(first, {})

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))


def copy_blocks(
    kernels: Kernels, tables: RegionTables, supported: Supported, caches: Sequence[LayerCache], copies: Array
) -> None:
    """See `Backend.copy_blocks`. One launch for all caches; their table of addresses is kept on the device."""
    seen = [kernels.see_cache(cache) for cache in caches]
    view = kernels.memory.describe("copies", copies)
    check_copies(supported, seen, view)
    if len(view) == 0 or not seen:
        return
    pairs = kernels.plain(copies, view)
    regions = [block_region(array) for cache in seen for array in block_arrays(cache)]
    block_bytes = max(
        int(region["run_bytes"]) * int(region["num_tokens"]) * int(region["num_heads"]) for region in regions
    )
    num_pieces = max(1, min(64, block_bytes // (specs.COPY_BLOCKS.threads * 4 * 16)))
    record = np.zeros((), records.COPY)
    table = tables.of(caches[0], regions)
    record["regions"], record["copies"] = (
        address_of(kernels.memory.describe("regions", table)),
        address_of(pairs.view),
    )
    record["error"] = kernels.error_address()
    record["num_copies"], record["num_pieces"] = len(view), num_pieces
    instance = specs.only(specs.COPY_BLOCKS)
    kernels.launch(instance, (len(view) * num_pieces, len(regions), 1), 0, record)


def move_slots(
    kernels: Kernels, tables: RegionTables, caches: Sequence[LayerCache], moves: Array, move_start: Array
) -> None:
    """Copy tokens from slot to slot in every cache, so that an accepted branch of a draft tree stands in a row.

    moves int64 [m, 2] of (source, destination) slots, a negative one skips the move; move_start int32 [n + 1]:
    sequence i owns moves move_start[i]..move_start[i + 1], which are done in their order. One launch.
    """
    seen = [kernels.see_cache(cache) for cache in caches]
    moves_view = kernels.memory.describe("moves", moves)
    start_view = kernels.memory.describe("move_start", move_start)
    check_moves(moves_view, start_view)
    if len(start_view) < 2 or len(moves_view) == 0 or not seen:
        return
    held = kernels.plain(moves, moves_view), kernels.plain(move_start, start_view)
    regions = [slot_region(array) for cache in seen for array in block_arrays(cache)]
    widest = max(
        int(region["run_bytes"]) // int(region["unit_bytes"]) * int(region["num_heads"]) for region in regions
    )
    record = np.zeros((), records.MOVE)
    table = tables.of(caches[0], regions)
    record["regions"] = address_of(kernels.memory.describe("regions", table))
    record["moves"], record["move_start"] = (address_of(each.view) for each in held)
    record["error"], record["num_moves"] = kernels.error_address(), len(moves_view)
    instance = specs.only(specs.MOVE_SLOTS)
    columns = min(64, -(-widest // specs.MOVE_SLOTS.threads))
    kernels.launch(instance, (len(start_view) - 1, len(regions), columns), 0, record)
