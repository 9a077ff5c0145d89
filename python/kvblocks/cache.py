"""A paged KV cache: the block manager, a step and a backend's storage, put together for an engine.

Owns `PagedKVCache`. Imports batch, backends, config and the core; the only module where the allocator meets
tensors. Invariant: the manager decides which block, the caller decides when, the backend moves the bytes. A
step's copies are made before `schedule` returns, so nothing can be written in between. Any thread may call, but a
step belongs to one at a time: `write` and `attend` read the arrays that the next `schedule` fills anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvblocks._core import BlockManager, Scheduled
from kvblocks.backends import Backend, get_backend
from kvblocks.batch import Step
from kvblocks.config import CacheConfig, as_integer, parse_memory
from kvblocks.layout import Array, LayerCache

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvblocks._core import _Counts, _Handles, _ScheduleOptions


class PagedKVCache:
    """Paged K/V of all layers of one model, allocated by `manager`, indexed by `step`, moved by `backend`.

    num_blocks: blocks of storage, the null block included; or memory: bytes or "8GiB", of which whole blocks
    are used. Give one of the two. backend: a name, a Backend, or None for the environment's choice. max_seqs,
    max_tokens, max_blocks_per_seq: sizes of the step, see `Step`. The rest is the block manager's. The cache
    owns the storage, its contents undefined at first. Raises ValueError for sizes out of range and a backend
    that is unknown or refuses the config.
    """

    def __init__(
        self,
        config: CacheConfig,
        num_blocks: int | None = None,
        *,
        memory: str | int | None = None,
        backend: str | Backend | None = None,
        enable_prefix_cache: bool = True,
        watermark_blocks: int = 0,
        seed: int | None = None,
        max_seqs: int = 256,
        max_tokens: int = 8192,
        max_blocks_per_seq: int | None = None,
    ) -> None:
        if not isinstance(config, CacheConfig):
            raise TypeError(f"config: {type(config).__name__}, expected a CacheConfig")
        if num_blocks is None and memory is not None:
            num_bytes = parse_memory(memory)
            num_blocks = num_bytes // config.bytes_per_block
            if num_blocks < 2:
                raise ValueError(
                    f"memory is {num_bytes} bytes, expected at least two blocks of "
                    f"{config.bytes_per_block} bytes"
                )
        elif num_blocks is None or memory is not None:
            raise ValueError("give num_blocks or memory, one of the two")
        if backend is None or isinstance(backend, str):
            backend = get_backend(backend)
        elif isinstance(backend, type) or not isinstance(backend, Backend):
            raise TypeError(f"backend: {type(backend).__name__}, expected a name, a Backend or None")
        self.config = config
        self.backend = backend
        self.manager = BlockManager(
            num_blocks,
            config.block_size,
            enable_prefix_cache=enable_prefix_cache,
            watermark_blocks=watermark_blocks,
            seed=seed,
        )
        self.step = Step(
            self.manager,
            max_seqs=max_seqs,
            max_tokens=max_tokens,
            max_blocks_per_seq=max_blocks_per_seq,
        )
        self.layers: list[LayerCache] = self.backend.allocate(config, num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks of storage, the null block included."""
        return self.manager.num_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return self.num_blocks * self.config.bytes_per_block

    def schedule(self, handles: _Handles, num_new: _Counts, **options: Unpack[_ScheduleOptions]) -> Scheduled:
        """Schedule a batch (see `Step.schedule`) and make its copies in all layers. O(tokens + copied bytes).

        If the copies are interrupted, the batch is scheduled; `backend.copy_blocks(layers, step.copies)` makes
        them again, which does no harm to those already made.
        """
        scheduled = self.step.schedule(handles, num_new, **options)
        if scheduled.num_copies:
            self.backend.copy_blocks(self.layers, self.step.copies)
        return scheduled

    def write(self, layer: int, k: Array, v: Array) -> None:
        """Store the step's K [num_tokens, num_kv_heads, head_dim] and V [.., head_dim_v] of a layer in their slots."""
        self.backend.write(self._layer(layer), k, v, self.step.slot_mapping)

    def attend(
        self,
        layer: int,
        q: Array,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        out: Array | None = None,
        lse: Array | None = None,
    ) -> Array:
        """Causal attention of the step's queries over the cached K/V of a layer.

        q [num_tokens, num_q_heads, head_dim].

        Returns [num_tokens, num_q_heads, head_dim_v]; write the layer's K and V first. See `Backend.attend`.
        """
        return self.backend.attend(
            self._layer(layer),
            q,
            self.step.block_tables,
            self.step.seq_lens,
            self.step.query_start_loc,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            out=out,
            lse=lse,
        )

    def gather(self, handle: int, layer: int) -> tuple[Array, Array]:
        """K and V of a sequence's computed tokens in one layer, contiguous float32 [num_computed, heads, dim]."""
        cache = self._layer(layer)
        table = self.manager.block_table(handle)
        return self.backend.gather(cache, table, self.manager.sequence(handle).num_computed)

    def _layer(self, layer: int) -> LayerCache:
        number = as_integer(layer)
        num_layers = len(self.layers)
        if number is None or not 0 <= number < num_layers:
            raise ValueError(
                f"layer is {layer!r}: expected an integer in 0..{num_layers - 1}, the cache has {num_layers} layers"
            )
        return self.layers[number]
