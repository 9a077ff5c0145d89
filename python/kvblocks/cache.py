"""A paged KV cache: the block manager, a step and a backend's storage, put together for an engine.

Owns `PagedKVCache` and `SavedSequence`. Imports what stands below it and the core; here the allocator meets tensors.
Invariant: the manager decides which block, the caller decides when, the backend moves the bytes. A step's copies are
made before `schedule` returns, so nothing can be written in between. Any thread may call, but a step belongs to one at
a time: `write` and `attend` read the arrays that the next `schedule` fills anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvblocks._core import BlockManager, Scheduled
from kvblocks.backends import Backend, get_backend
from kvblocks.batch import Step
from kvblocks.config import CacheConfig, as_integer, parse_memory
from kvblocks.formats import Format, Part
from kvblocks.layout import Array, LayerCache, dtype_name, from_float32, to_float32
from kvblocks.rotation import rotate

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvblocks._core import _Counts, _Handles, _ScheduleOptions
    from kvblocks.calibration import Calibration
    from kvblocks.residual import Residual, SavedResidual


@dataclass(frozen=True, eq=False)
class SavedSequence:
    """A sequence's tokens outside a cache, of `num_tokens` tokens; what `PagedKVCache.restore` takes.

    blocks: per layer, the arrays of `LayerCache.block_arrays` with one entry of each block [columns, ..]. scales: the
    static scales of the cache that it is from.
    """

    config: CacheConfig = field(repr=False)
    num_tokens: int
    blocks: list[list[Array]] = field(repr=False)
    scales: list[Array] = field(repr=False)
    residual: SavedResidual | None = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        rows = [] if self.residual is None else [array for array in self.residual.rows if array is not None]
        return sum(
            int(array.nbytes) for array in (*(array for arrays in self.blocks for array in arrays), *rows)
        )


class PagedKVCache:
    """Paged K/V of all layers of one model, allocated by `manager`, indexed by `step`, moved by `backend`.

    num_blocks: blocks of storage, the null block included; or memory: bytes or "8GiB", of which whole blocks
    are used. Give one of the two. backend: a name, a Backend, or None for the environment's choice. max_seqs,
    max_tokens, max_blocks_per_seq: sizes of the step, see `Step`. residual_seqs: sequences that may have a
    residual at once, where a format has one; max_seqs by default. calibration: takes in all that is written, until it
    is frozen. The rest is the block manager's. The cache owns the storage, its contents undefined at first; static
    scales have to be set before the first write.
    Raises ValueError for sizes out of range and a backend that is unknown or refuses the config.
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
        residual_seqs: int | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        if not isinstance(config, CacheConfig):
            raise TypeError(f"config: {type(config).__name__}, expected a CacheConfig")
        if residual_seqs is None:
            residual_seqs = max_seqs
        if num_blocks is None and memory is not None:
            num_bytes = parse_memory(memory)
            fixed = config.fixed_bytes + residual_seqs * config.bytes_per_seq
            num_blocks = max(0, num_bytes - fixed) // config.bytes_per_block
            if num_blocks < 2:
                beside = f" beside {fixed} bytes for scales and {residual_seqs} residuals" if fixed else ""
                raise ValueError(
                    f"memory is {num_bytes} bytes, expected at least two blocks of "
                    f"{config.bytes_per_block} bytes{beside}"
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
        self.residual: Residual | None = None
        if config.has_residual:
            from kvblocks.residual import (
                Residual,
            )  # few formats have one, and importing the package should be cheap

            self.residual = Residual(config, residual_seqs)
        self._step_rows: list[int] = []  # handles of the step, where there is a residual
        self.calibration = calibration
        self._written = [False] * config.num_layers

    @property
    def num_blocks(self) -> int:
        """Blocks of storage, the null block included."""
        return self.manager.num_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of storage: blocks, static scales and residuals."""
        residual = 0 if self.residual is None else self.residual.num_seqs * self.config.bytes_per_seq
        return self.num_blocks * self.config.bytes_per_block + self.config.fixed_bytes + residual

    def set_scales(
        self, layer: int, *, k: Array | float | None = None, v: Array | float | None = None
    ) -> None:
        """Set the static scales of a layer: a number, or float32 of the shape that the format has.

        Raises ValueError for a format without static scales, for scales that are no finite numbers > 0, and once the
        layer has been written, as its codes would change their meaning.
        """
        cache, number = self._layer(layer), int(layer)
        given = (
            ("k", k, cache.format.k, cache.k_scale),
            ("v", v, cache.format.v, cache.v_scale),
        )
        checked = []
        for name, scale, part, target in given:
            if scale is None:
                continue
            if not part.is_static or target is None:
                raise ValueError(f"{name}: {part} has no static scale")
            values = np.asarray(scale, np.float32)
            if values.ndim and values.shape != target.shape:
                raise ValueError(f"{name}: shape {values.shape}, {part} needs {target.shape}")
            if not (np.isfinite(values) & (values > 0)).all():
                raise ValueError(f"{name}: expected finite scales > 0")
            checked.append((target, values))
        if checked:
            self._refuse_written(number)
        for target, values in checked:
            target[...] = values

    def apply_scales(self, calibration: Calibration, percent: float = 100) -> None:
        """Set every static scale from a calibration; `percent` of a head's elements are not clipped.

        Scales of channels are those of their largest magnitude, whatever percent is. Raises as `set_scales` and
        `Calibration.scale` do, before the first one is set.
        """
        scales: list[dict[str, Array]] = []
        for layer, kv_format in enumerate(self.config.formats):
            of_layer: dict[str, Array] = {}
            parts: tuple[tuple[Part, Format], ...] = (("k", kv_format.k), ("v", kv_format.v))
            for name, part in parts:
                if part.is_static:
                    reach = 100 if part.scaling == "channel" else percent
                    of_layer[name] = calibration.scale(name, layer, part, reach)
            scales.append(of_layer)
        for layer, of_layer in enumerate(scales):
            if of_layer:
                self._refuse_written(layer)
        for layer, of_layer in enumerate(scales):
            self.set_scales(layer, **of_layer)

    def schedule(self, handles: _Handles, num_new: _Counts, **options: Unpack[_ScheduleOptions]) -> Scheduled:
        """Schedule a batch (see `Step.schedule`) and make its copies in all layers. O(tokens + copied bytes).

        If the copies are interrupted, the batch is scheduled; `backend.copy_blocks(layers, step.copies)` makes
        them again, which does no harm to those already made. Raises RuntimeError if more sequences than
        residual_seqs need a residual.
        """
        rows: list[int] = []
        if self.residual is not None:
            rows = _as_list(handles)
            self.residual.reserve(self.manager, rows)
        scheduled = self.step.schedule(handles, num_new, **options)
        if scheduled.num_copies and not options.get("append"):  # rows that are appended copy nothing
            self.backend.copy_blocks(self.layers, self.step.copies)
        if self.residual is not None and (scheduled or options.get("policy") == "fit"):
            rows = (self._step_rows if options.get("append") else []) + rows
            self._step_rows = rows[: scheduled.num_seqs]
            self.residual.plan(
                self.backend,
                self.layers,
                self._step_rows,
                self.step.block_tables,
                self.step.seq_lens,
                self.step.query_start_loc,
            )
        return scheduled

    def fork(self, handles: _Handles, num_children: _Counts = 1) -> NDArray[np.int64]:
        """Fork sequences (see `BlockManager.fork`) with their residuals, which are copied.

        Raises RuntimeError, before anything is forked, if the children need more residuals than are left.
        """
        if self.residual is None:
            return self.manager.fork(handles, num_children)
        parents = np.array(_as_list(handles), np.int64)
        per_parent = np.broadcast_to(np.asarray(num_children), parents.shape)
        self.residual.reserve(self.manager, [], num_more=int(per_parent.sum()))
        children = self.manager.fork(handles, num_children)
        self.residual.copy_rows(np.repeat(parents, per_parent).tolist(), children.tolist())
        return children

    def reorder(self, handles: _Handles, parents: NDArray[np.int32]) -> None:
        """Let sequence i continue what sequence `parents[i]` has computed (see `BlockManager.reorder`)."""
        children = _as_list(handles)
        if self.residual is not None:
            self.residual.reserve(self.manager, children)
        self.manager.reorder(handles, parents)
        if self.residual is not None:
            self.residual.copy_rows([children[parent] for parent in np.asarray(parents).tolist()], children)

    def save(self, handle: int) -> SavedSequence:
        """Copy a sequence's computed tokens out of the cache: whole blocks of every layer, and its residual.

        The copy owns its memory, and the sequence may be freed. O(its blocks).
        """
        num_tokens = self.manager.sequence(handle).num_computed
        table = self.manager.block_table(handle)[: -(-num_tokens // self.config.block_size)]
        blocks = [[array[table] for array in cache.block_arrays] for cache in self.layers]
        residual = None if self.residual is None else self.residual.save(int(handle))
        scales = [array.copy() for array in self._static_scales()]
        return SavedSequence(self.config, num_tokens, blocks, scales, residual)

    def restore(self, handle: int, saved: SavedSequence) -> None:
        """Bring saved tokens back, bit for bit, in place of the writes of a step.

        Admit the sequence anew, schedule all that it lacks of the saved tokens, call this, commit. Blocks that were
        found in the prefix cache are left as they are; admit with use_cache=False to have the saved ones. Raises
        ValueError, before anything is written, unless the cache has the same config and static scales, and the
        sequence as many tokens scheduled as were saved. O(its blocks).
        """
        sequence = self.manager.sequence(handle)
        if saved.config != self.config:
            raise ValueError(f"saved from a cache of {saved.config}, this one is of {self.config}")
        for array, scale in zip(self._static_scales(), saved.scales, strict=True):
            if array.shape != scale.shape or not (array == scale).all():
                raise ValueError(
                    "saved from a cache with other static scales: its codes mean something else here"
                )
        if sequence.num_scheduled != saved.num_tokens:
            raise ValueError(
                f"sequence {handle} has {sequence.num_scheduled} tokens scheduled, {saved.num_tokens} were saved"
            )
        first = sequence.num_computed // self.config.block_size
        table = self.manager.block_table(handle)[first : -(-saved.num_tokens // self.config.block_size)]
        for cache, arrays in zip(self.layers, saved.blocks, strict=True):
            for array, blocks in zip(cache.block_arrays, arrays, strict=True):
                array[table] = blocks[first:]
        if self.residual is not None and saved.residual is not None:
            self.residual.restore(int(handle), saved.residual)
        self._written = [True] * len(self.layers)

    def write(self, layer: int, k: Array, v: Array) -> None:
        """Store the step's K [num_tokens, num_kv_heads, head_dim] and V [.., head_dim_v] of a layer in their slots."""
        cache = self._layer(layer)
        if cache.format.has_residual:
            _check_rows("k", k, len(self.step.slot_mapping), cache.num_kv_heads, cache.head_dim)
            _check_rows("v", v, len(self.step.slot_mapping), cache.num_kv_heads, cache.head_dim_v)
        rows = _turned(k, cache.format.k.rotated), _turned(v, cache.format.v.rotated)
        if self.residual is not None and cache.format.has_residual:
            self.residual.write(self.backend, cache, int(layer), *rows)
        else:
            self.backend.write(cache, *rows, self.step.slot_mapping)
        self._written[int(layer)] = True
        if self.calibration is not None:
            written = np.flatnonzero(self.step.slot_mapping >= 0)
            self.calibration.observe(int(layer), k[written], v[written])

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
        cache = self._layer(layer)
        tail = None
        if self.residual is not None and cache.format.has_residual:
            tail = self.residual.tail(int(layer))
        turned = cache.format.k.rotated or cache.format.v.rotated
        if turned:
            _check_floats("q", q)
            expected = (*q.shape[:2], cache.head_dim_v)
            if out is not None and (out.dtype != q.dtype or out.shape != expected):
                raise ValueError(
                    f"out: {out.dtype} of shape {tuple(out.shape)}, expected {q.dtype} of shape {expected}"
                )
        result = self.backend.attend(
            cache,
            _turned(to_float32(q), cache.format.k.rotated) if turned else q,
            self.step.block_tables,
            self.step.seq_lens,
            self.step.query_start_loc,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            tail=tail,
            out=None if turned else out,
            lse=lse,
        )
        if not turned:
            return result
        rounded = from_float32(_turned(result, cache.format.v.rotated), dtype_name(q.dtype))
        if out is None:
            return rounded
        out[...] = rounded
        return out

    def gather(self, handle: int, layer: int) -> tuple[Array, Array]:
        """K and V of a sequence's computed tokens in one layer, contiguous float32 [num_computed, heads, dim]."""
        cache = self._layer(layer)
        table = self.manager.block_table(handle)
        num_tokens = self.manager.sequence(handle).num_computed
        k, v = self.backend.gather(cache, table, num_tokens)
        if self.residual is not None and cache.format.has_residual:
            first, newest_k, newest_v = self.residual.newest(int(handle), int(layer), num_tokens)
            k[first:], v[first:] = newest_k, newest_v
        return (
            rotate(k) if cache.format.k.rotated else k,
            rotate(v) if cache.format.v.rotated else v,
        )

    def _static_scales(self) -> list[Array]:
        parts = ((cache.format.k, cache.k_scale) for cache in self.layers)
        parts_v = ((cache.format.v, cache.v_scale) for cache in self.layers)
        return [scale for part, scale in (*parts, *parts_v) if part.is_static]

    def _refuse_written(self, layer: int) -> None:
        if self._written[layer]:
            raise ValueError(f"layer {layer} has been written with the scales that it has")

    def _layer(self, layer: int) -> LayerCache:
        number = as_integer(layer)
        num_layers = len(self.layers)
        if number is None or not 0 <= number < num_layers:
            raise ValueError(
                f"layer is {layer!r}: expected an integer in 0..{num_layers - 1}, the cache has {num_layers} layers"
            )
        return self.layers[number]


def _as_list(handles: _Handles) -> list[int]:
    return [int(handle) for handle in np.atleast_1d(np.asarray(handles))]


def _check_floats(name: str, array: Array) -> None:
    try:
        dtype_name(array.dtype)
    except (AttributeError, TypeError) as error:
        raise TypeError(f"{name}: {error}") from None


def _check_rows(name: str, rows: Array, num_tokens: int, num_kv_heads: int, dim: int) -> None:
    """What a backend would check, for rows that are rotated or kept before one sees them."""
    _check_floats(name, rows)
    if rows.ndim != 3 or len(rows) < num_tokens or rows.shape[1:] != (num_kv_heads, dim):
        raise ValueError(
            f"{name}: shape {tuple(rows.shape)}, expected ({num_tokens} or more, {num_kv_heads}, {dim}) for this step"
        )


def _turned(rows: Array, rotated: bool) -> Array:
    """Rows in float32 and rotated, where the format wants that; else as they are."""
    return rotate(to_float32(rows)) if rotated else rows
