"""Attention on a device: which kernel, over which grid, and a launch that can be repeated.

Owns `plan_attention` and `PreparedAttention`. Imports layout, geometry and kernels.
Invariant: a plan depends on shapes, dtypes and addresses, never on values, so that what was captured or prepared stays
right for every later step.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvblocks.backends.geometry import Record
from kvblocks.backends.memory import Memory
from kvblocks.kernels import specs
from kvblocks.kernels.launcher import Launch, Launcher
from kvblocks.kernels.specs import DTYPES, Instance
from kvblocks.layout import Array, LayerCache

# Keys of a split are at least this many, and splits at most so many: more would cost more than they save.
_SMALLEST_SPLIT_TOKENS: Final = 256
_MOST_SPLITS: Final = 64
# Splits begin at multiples of so many keys: `split_granule` of attention.cuh.
_SPLIT_GRANULE: Final = 64
_MOST_BLOCKS_OF_Z: Final = 65_535
# Of an SM. Shared memory beyond what one block may have, which each block takes for the system.
_REGISTERS: Final = 65_536
_RESERVED_SHARED: Final = 1024


class Plan(NamedTuple):
    """The first launch of an attention; the second, where there are splits, combines them.

    lanes_log2: of the kernel without tensor cores; None for the other.
    """

    instance: Instance
    grid: tuple[int, int, int]
    shared_bytes: int
    num_splits: int
    lanes_log2: int | None


def plan_attention(
    record: Record, seen: LayerCache, num_multiprocessors: int, max_shared_bytes: int, split_size: int | None
) -> Plan:
    """Choose the kernel and the grid for a record that is filled but for its splits."""
    num_tokens, num_seqs = int(record["num_tokens"]), int(record["num_seqs"])
    num_kv_heads = int(record["num_kv_heads"])
    group = int(record["num_q_heads"]) // num_kv_heads
    is_mla = _is_mla(record, seen, max_shared_bytes)
    row_warps = 0 if is_mla else _row_warps(record, seen, group, max_shared_bytes)
    rows_of_tile = 32 if is_mla else 16 * row_warps if row_warps else 2
    num_tiles = num_tokens * group // rows_of_tile + num_seqs + 1
    busy_tiles = max(min(num_seqs, num_tokens), -(-num_tokens * group // rows_of_tile), 1)
    max_keys = seen.block_size * int(record["max_blocks"])
    kv_dtype, dims, lanes_log2 = seen.format.k.name, (seen.head_dim, seen.head_dim_v), None
    if is_mla:
        instance, shared = specs.mla_decode(kv_dtype), specs.mla_shared_bytes(kv_dtype)
    elif row_warps:
        instance = specs.attention_mma(kv_dtype, *dims, row_warps)
        shared = specs.mma_shared_bytes(kv_dtype, *dims, row_warps)
    else:
        lanes_log2, vectors = specs.simt_lanes_log2(kv_dtype, max(dims))
        instance = specs.attention_simt(kv_dtype, vectors)
        shared = specs.simt_shared_bytes(kv_dtype, lanes_log2, vectors)
    slots = num_multiprocessors * _blocks_per_sm(instance, shared, max_shared_bytes)
    num_busy_blocks = busy_tiles * num_kv_heads
    # Chunked prefill that fills the device is bound by its products: parts of its many rows would only cost.
    if split_size is None and row_warps == 4 and num_busy_blocks >= slots:
        num_splits = 1
    else:
        num_splits = _num_splits(num_busy_blocks, max_keys, slots, split_size)
    return Plan(instance, (num_tiles, num_kv_heads, num_splits), shared, num_splits, lanes_log2)


def _blocks_per_sm(instance: Instance, shared_bytes: int, max_shared_bytes: int) -> int:
    """Blocks that an SM holds at once, by the registers and the shared memory that they take."""
    by_registers = _REGISTERS // (instance.kernel.threads * instance.max_registers)
    by_shared = (max_shared_bytes + _RESERVED_SHARED) // (shared_bytes + _RESERVED_SHARED)
    return max(1, min(by_registers, by_shared))


def _is_mla(record: Record, seen: LayerCache, max_shared_bytes: int) -> bool:
    """Whether V is the first part of K's rows, as of latents, and the kernel for that can run."""
    kv_dtype, q_dtype = seen.format.k.name, int(record["q_dtype"])
    return (
        (seen.head_dim, seen.head_dim_v) == specs.MLA_HEAD_DIMS
        and kv_dtype in specs.MLA_DTYPES
        and record["k"] == record["v"]
        and bool((record["k_paged"] == record["v_paged"]).all())
        and bool(record["k_is_vector"])
        and q_dtype in (DTYPES[name] for name in _exact(kv_dtype))
        and specs.mla_shared_bytes(kv_dtype) <= max_shared_bytes
    )


def _exact(kv_dtype: str) -> tuple[str, ...]:
    """The dtypes of Q that survive rounding to the type of the products."""
    return ("bfloat16",) if kv_dtype == "bfloat16" else ("float16", "bfloat16")


def _row_warps(record: Record, seen: LayerCache, group: int, max_shared_bytes: int) -> int:
    """Rows of a tensor-core tile / 16, or 0 where the kernel without tensor cores is the right one.

    That is where its rows would be mostly empty, where Q would not survive rounding to the type of the products, and
    where rows cannot be read 16 bytes at a time.
    """
    kv_dtype, q_dtype = seen.format.k.name, int(record["q_dtype"])
    rows = group * -(-int(record["num_tokens"]) // max(1, int(record["num_seqs"])))
    if (
        kv_dtype == "float32"
        or q_dtype not in (DTYPES[name] for name in _exact(kv_dtype))
        or seen.format.k.scaling == "channel"
        or (seen.head_dim, seen.head_dim_v) not in specs.MMA_HEAD_DIMS
        or not (record["k_is_vector"] and record["v_is_vector"])
        or rows <= 2
    ):
        return 0
    # A device with little shared memory takes the small tiles, which the large ones would not fit beside their keys.
    fitting = (
        row_warps
        for row_warps in ((4, 1) if rows > 32 else (1,))
        if specs.mma_shared_bytes(kv_dtype, seen.head_dim, seen.head_dim_v, row_warps) <= max_shared_bytes
    )
    return next(fitting, 0)


def _num_splits(num_busy_blocks: int, max_keys: int, slots: int, split_size: int | None) -> int:
    """Blocks that share a row's keys: the fewest that fill the device's waves nearly as well as any number does.

    slots: blocks that the device holds at once.
    """
    if split_size is not None:
        num_splits = max(1, -(-max_keys // split_size))
        if num_splits > _MOST_BLOCKS_OF_Z:
            raise ValueError(
                f"split_size is {split_size}: {num_splits} splits of {max_keys} keys, at most {_MOST_BLOCKS_OF_Z}"
            )
        return num_splits
    most = max(1, min(_MOST_SPLITS, max_keys // _SMALLEST_SPLIT_TOKENS))

    def keys_in_turn(splits: int) -> int:
        """Keys that the device goes through one after the other: waves of blocks times keys of a block."""
        keys = -(-max_keys // splits)
        keys = -(-keys // _SPLIT_GRANULE) * _SPLIT_GRANULE if splits > 1 else keys
        return math.ceil(num_busy_blocks * -(-max_keys // max(keys, 1)) / slots) * keys

    fewest = min(map(keys_in_turn, range(1, most + 1)))
    return next(splits for splits in range(1, most + 1) if keys_in_turn(splits) <= fewest / 0.95)


class PreparedAttention:
    """An attention over fixed arrays, ready to be launched again with whatever these hold by then.

    The arrays are kept alive. A call costs one launch, or two where keys are split, and checks nothing.
    """

    def __init__(
        self,
        launcher: Launcher,
        memory: Memory,
        launches: Sequence[Launch],
        out: Array,
        held: Sequence[object],
    ) -> None:
        self.out = out
        self._memory, self._held = memory, tuple(held)
        self._fire = launcher.bind(launches)

    def __call__(self) -> Array:
        """Enqueue on the stream that is current; returns `out`."""
        self._fire(self._memory.stream())
        return self.out
