"""A backend whose kernels run through a launcher: on a GPU by CuPy, or emulated on a host.

Owns `DeviceBackend` and how arguments become the kernels' parameters. Imports layout, the shared checks, what calls of
kernels share, attention, codecs and pools.
Invariant: what a call checks it reads from shapes, dtypes, strides and addresses alone, so that no call waits for the
device; wrong values in index arrays are skipped by the kernels and kept in an error report. Every launch goes to the
stream that `Memory.stream` names at that moment.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends import device_codecs, device_pools
from kvblocks.backends.attention import PreparedAttention, plan_attention
from kvblocks.backends.base import Supported, Tail
from kvblocks.backends.checks import (
    check_attend,
    check_config,
    check_gather,
    check_merge,
    check_write,
)
from kvblocks.backends.codecs import Encoded
from kvblocks.backends.expect import expect_dtype, expect_shape
from kvblocks.backends.geometry import (
    Record,
    address_of,
    fill_paged,
    parts_of,
    steps_by,
    strides,
)
from kvblocks.backends.kernels import MOST_BLOCKS_OF_A_LOOP, Held, Kernels
from kvblocks.backends.memory import Memory
from kvblocks.config import LAYOUTS, CacheConfig, as_integer
from kvblocks.formats import STORAGE_DTYPES, Format, all_formats
from kvblocks.kernels import params as records
from kvblocks.kernels import specs
from kvblocks.kernels.launcher import Launch, Launcher
from kvblocks.kernels.specs import DTYPES
from kvblocks.layout import Array, LayerCache, dtype_name, storage_dtype, storage_shape

_INT32_MAX: Final = 2**31 - 1

_FORMATS: Final = tuple(part for part in all_formats("k") if part.name in DTYPES)
_V_FORMATS: Final = tuple(part for part in all_formats("v") if part.name in DTYPES)


class DeviceBackend(Kernels):
    """16-bit, 32-bit, FP8 and int8 formats, any block size, head dims up to 576; float32 accumulation.

    split_size: keys of a split of attention, a multiple of 64; results of a row then do not depend on the batch that it
    is in. None: as many splits as fill the device.
    """

    def __init__(
        self, name: str, launcher: Launcher, memory: Memory, *, split_size: int | None = None
    ) -> None:
        super().__init__(launcher, memory)
        self.name = name
        self.split_size = _checked_split_size(split_size)
        self._tables = device_pools.RegionTables(memory)

    def splitting(self, split_size: int | None) -> "DeviceBackend":
        """The same backend, its tables and its error report included, with another split_size."""
        if split_size == self.split_size:
            return self
        other = copy(self)
        other.split_size = _checked_split_size(split_size)
        return other

    def tables_of(self, caches: Sequence[LayerCache]) -> object:
        """What keeps the tables that `copy_blocks` and `move_slots` read for a pool alive for whoever holds it."""
        return self._tables.holder(caches[0])

    def supported(self) -> Supported:
        """See `Backend.supported`."""
        return _SUPPORTED

    def allocate(self, config: CacheConfig, num_blocks: int) -> list[LayerCache]:
        """See `Backend.allocate`."""
        check_config(_SUPPORTED, config, num_blocks)
        sizes = num_blocks, config.block_size, config.num_kv_heads

        def scales(part: Format, dim: int) -> Array | None:
            shape = part.scale_shape(*sizes, dim)
            if shape is None:
                return None
            if part.is_static:  # NaN until it is set
                return self.memory.upload(np.full(shape, np.nan, np.float32))
            return self.memory.empty(shape, np.float32)

        caches = []
        for layer, kv_format in enumerate(config.formats):
            k_shape, v_shape = storage_shape(config, num_blocks, layer)
            caches.append(
                LayerCache(
                    self.memory.empty(k_shape, kv_format.k.storage),
                    self.memory.empty(v_shape, kv_format.v.storage),
                    kv_format,
                    config.block_size,
                    config.layout,
                    k_scale=scales(kv_format.k, config.head_dim),
                    v_scale=scales(kv_format.v, config.head_dim_v or config.head_dim),
                )
            )
        return caches

    def write(self, cache: LayerCache, k: Array, v: Array, slot_mapping: Array) -> None:
        """See `Backend.write`. One launch."""
        see = self.memory.describe
        seen = self.see_cache(cache)
        views = see("k", k), see("v", v), see("slot_mapping", slot_mapping)
        check_write(_SUPPORTED, seen, *views)
        num_slots = len(views[2])
        if num_slots == 0:
            return
        record = np.zeros((), records.WRITE)
        sources = (self.rows(k, views[0]), self.rows(v, views[1]))
        slots = self.plain(slot_mapping, views[2])
        chunks = 1
        for into, source, part in zip(record["part"], sources, parts_of(seen), strict=True):
            view = source.view
            into["source"], into["cache"] = address_of(view), address_of(part.codes)
            into["scales"] = address_of(part.scale)
            into["token_stride"], into["head_stride"] = strides(view)[:2]
            fill_paged(into["paged"], part.codes)
            into["head_dim"] = part.dim
            into["dtype"] = DTYPES[dtype_name(view.dtype)]
            into["scale_mode"] = part.mode
            into["is_vector"] = (
                part.dim % 8 == 0
                and steps_by(view, 16)
                and steps_by(part.codes, min(16, 8 * part.codes.itemsize))
            )
            chunks = max(chunks, -(-part.dim // 8))
        record["slot_mapping"], record["error"] = address_of(slots.view), self.error_address()
        record["num_slots"], record["num_heads"] = num_slots, seen.num_kv_heads
        record["lanes_log2"] = lanes_log2 = min(5, (chunks - 1).bit_length())
        rows_of_block = specs.WRITE_KV.threads >> lanes_log2
        blocks = -(-num_slots * 2 * seen.num_kv_heads // rows_of_block)
        self.launch(specs.write_kv(seen.format.k.name), (min(blocks, MOST_BLOCKS_OF_A_LOOP), 1, 1), 0, record)

    def attend(
        self,
        cache: LayerCache,
        q: Array,
        block_tables: Array,
        seq_lens: Array,
        query_start_loc: Array,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        tail: Tail | None = None,
        out: Array | None = None,
        lse: Array | None = None,
    ) -> Array:
        """See `Backend.attend`. One launch, and one more where keys are split; the grid depends on shapes only."""
        prepared, _ = self._prepare_attention(
            cache,
            q,
            block_tables,
            seq_lens,
            query_start_loc,
            out=out,
            optional={"lse": lse, "sinks": sinks, "alibi_slopes": alibi_slopes},
            options={"scale": scale, "window": window, "soft_cap": soft_cap, "tail": tail},
        )
        return self._attended(prepared, out)

    def attend_csr(
        self,
        cache: LayerCache,
        q: Array,
        kv_indptr: Array,
        kv_indices: Array,
        kv_last_block_len: Array,
        query_start_loc: Array,
        *,
        max_blocks: int | None = None,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        out: Array | None = None,
        lse: Array | None = None,
    ) -> Array:
        """`attend` with the tables in FlashInfer's form, as `Step.csr` gives them.

        kv_indptr int32 [num_seqs + 1]; kv_indices int32 [total blocks]; kv_last_block_len int32 [num_seqs], tokens of
        the last block. max_blocks: of the longest sequence, by which keys are split; None: all of kv_indices. A
        sequence whose part of kv_indptr is wrong has no keys, as one of a wrong length.
        """
        see = self.memory.describe
        indptr, indices = see("kv_indptr", kv_indptr), see("kv_indices", kv_indices)
        last = see("kv_last_block_len", kv_last_block_len)
        for name, view in (("kv_indptr", indptr), ("kv_indices", indices), ("kv_last_block_len", last)):
            expect_dtype(name, view, np.int32)
            expect_shape(name, view, ((name, None),))
        expect_shape("kv_indptr", indptr, (("num_seqs + 1", len(last) + 1),))
        longest = len(indices) if max_blocks is None else as_integer(max_blocks)
        if longest is None or not 0 <= longest <= len(indices):
            raise ValueError(f"max_blocks is {max_blocks!r}: expected an integer in 0..{len(indices)}")
        starts, blocks = self.plain(kv_indptr, indptr), self.plain(kv_indices, indices)
        shaped = np.broadcast_to(blocks.view[:longest], (len(last), longest))
        prepared, _ = self._prepare_attention(
            cache,
            q,
            _Csr(starts.view, shaped, len(indices)),
            kv_last_block_len,
            query_start_loc,
            out=out,
            optional={"lse": lse, "sinks": sinks, "alibi_slopes": alibi_slopes},
            options={"scale": scale, "window": window, "soft_cap": soft_cap, "tail": None},
        )
        return self._attended(prepared, out)

    def _attended(self, prepared: PreparedAttention, out: Array | None) -> Array:
        """Launch; the result stands in `out` where the caller gave one, also one that no kernel could write."""
        result = prepared()
        if out is None or result is out:
            return result
        self.memory.assign(out, result)
        return out

    def prepare_attend(
        self,
        cache: LayerCache,
        q: Array,
        block_tables: Array,
        seq_lens: Array,
        query_start_loc: Array,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        out: Array | None = None,
        lse: Array | None = None,
    ) -> PreparedAttention:
        """`attend` without its launches: for an engine that keeps its arrays, checks once and launches in every step.

        All arrays, workspace included, are fixed from here on. An array that would have to be copied is a ValueError,
        as a later change of it would not be seen.
        """
        prepared, copied = self._prepare_attention(
            cache,
            q,
            block_tables,
            seq_lens,
            query_start_loc,
            out=out,
            optional={"lse": lse, "sinks": sinks, "alibi_slopes": alibi_slopes},
            options={"scale": scale, "window": window, "soft_cap": soft_cap, "tail": None},
        )
        if copied:
            raise ValueError(
                "prepare_attend: expected arrays with contiguous rows, and contiguous lengths and tables"
            )
        return prepared

    def _prepare_attention(
        self,
        cache: LayerCache,
        q: Array,
        block_tables: Array,
        seq_lens: Array,
        query_start_loc: Array,
        *,
        out: Array | None,
        optional: dict[str, Array | None],
        options: dict[str, Any],
    ) -> tuple[PreparedAttention, bool]:
        """Check, and fill the parameters; whether an array had to be copied, `out` among them."""
        see = self.memory.describe
        seen = self.see_cache(cache)
        arrays = (q, block_tables, seq_lens, query_start_loc)
        names = ("q", "block_tables", "seq_lens", "query_start_loc")
        views = [
            array.shaped if isinstance(array, _Csr) else see(name, array)
            for name, array in zip(names, arrays, strict=True)
        ]
        seen_optional: dict[str, Any] = {
            name: None if array is None else see(name, array)
            for name, array in (optional | {"out": out}).items()
        }
        checked = check_attend(
            _SUPPORTED, seen, views[0], views[1], views[2], views[3], **seen_optional, **options
        )
        num_tokens, num_q_heads, _ = views[0].shape
        shape = (num_tokens, num_q_heads, seen.head_dim_v)
        # Rows of a result are written where they are if their elements are neighbours.
        given = seen_optional["out"]
        in_place = given is None or strides(given)[2] == 1 or seen.head_dim_v == 1
        target = out if out is not None and in_place else self.memory.empty(shape, views[0].dtype)
        record = np.zeros((), records.ATTEND)
        held = [self._fill_queries(record, q, views[0], see("out", target), seen_optional["lse"])]
        sinks, alibi_slopes = optional["sinks"], optional["alibi_slopes"]
        held += self._fill_step(record, block_tables, seq_lens, query_start_loc, sinks, alibi_slopes)
        self._fill_cache(record, seen)
        record["scale"], record["soft_cap"] = checked.scale, checked.soft_cap or 0.0
        record["window"] = _INT32_MAX if checked.window is None else checked.window
        launches, partials = self._attention(record, seen) if num_tokens else ([], [])
        per_head = [each for each in (sinks, alibi_slopes) if each is not None]
        originals = (q, block_tables, seq_lens, query_start_loc, *per_head)
        copied = not in_place or any(
            each.array is not original for each, original in zip(held, originals, strict=True)
        )
        kept = (cache, held, partials, optional)
        return PreparedAttention(self.launcher, self.memory, launches, target, kept), copied

    def copy_blocks(self, caches: Sequence[LayerCache], copies: Array) -> None:
        """See `Backend.copy_blocks`. One launch for all caches; their table of addresses is kept on the device."""
        device_pools.copy_blocks(self, self._tables, _SUPPORTED, caches, copies)

    def move_slots(self, caches: Sequence[LayerCache], moves: Array, move_start: Array) -> None:
        """See `device_pools.move_slots`. One launch for all caches."""
        device_pools.move_slots(self, self._tables, caches, moves, move_start)

    def gather(
        self, cache: LayerCache, block_table: Array, seq_len: int, *, dtype: str = "float32"
    ) -> tuple[Array, Array]:
        """See `Backend.gather`. One launch. dtype: of the rows: "float32", "float16" or "bfloat16"."""
        seen = self.see_cache(cache)
        view = self.memory.describe("block_table", block_table)
        check_gather(_SUPPORTED, seen, view, seq_len)
        storage, parts = storage_dtype(dtype), parts_of(seen)
        rows = tuple(self.memory.empty((seq_len, seen.num_kv_heads, part.dim), storage) for part in parts)
        if seq_len == 0:
            return rows[0], rows[1]
        table = self.plain(block_table, view)
        record = np.zeros((), records.GATHER)
        for into, part, target in zip(record["part"], parts, rows, strict=True):
            into["cache"], into["scales"] = address_of(part.codes), address_of(part.scale)
            into["rows"] = address_of(self.memory.describe("rows", target))
            fill_paged(into["paged"], part.codes)
            into["head_dim"], into["scale_mode"] = part.dim, part.mode
        record["block_table"], record["error"] = address_of(table.view), self.error_address()
        record["num_tokens"], record["num_heads"] = seq_len, seen.num_kv_heads
        record["dtype"] = DTYPES[dtype]
        chunks = seen.num_kv_heads * -(-max(part.dim for part in parts) // 8)
        grid = (-(-chunks // specs.GATHER_KV.threads), min(seq_len, 65535), 2)
        self.launch(specs.gather_kv(seen.format.k.name), grid, 0, record)
        return rows[0], rows[1]

    def merge_states(
        self,
        out_a: Array,
        lse_a: Array,
        out_b: Array,
        lse_b: Array,
        *,
        out: Array | None = None,
        lse: Array | None = None,
    ) -> tuple[Array, Array]:
        """See `Backend.merge_states`. One launch. out, lse: where the results go, apart from all else."""
        see = self.memory.describe
        views = see("out_a", out_a), see("lse_a", lse_a), see("out_b", out_b), see("lse_b", lse_b)
        given = None if out is None else see("out", out)
        check_merge(_SUPPORTED, *views, out=given, lse=None if lse is None else see("lse", lse))
        if given is not None and given.size and given.shape[2] > 1 and strides(given)[2] != 1:
            raise ValueError(f"out: strides {given.strides} in bytes, expected rows of neighbouring elements")
        out = self.memory.empty(views[0].shape, views[0].dtype) if out is None else out
        lse = self.memory.empty(views[1].shape, np.float32) if lse is None else lse
        out_view, lse_view = see("out", out), see("lse", lse)
        num_tokens, num_q_heads, head_dim_v = views[0].shape
        num_rows = num_tokens * num_q_heads
        if num_rows == 0 or head_dim_v == 0:
            return out, lse
        record = np.zeros((), records.MERGE)
        held = []
        pairs = ((out_a, views[0], lse_a, views[1]), (out_b, views[2], lse_b, views[3]))
        for into, (state, state_view, sums, sums_view) in zip(record["state"], pairs, strict=True):
            rows, lses = self.rows(state, state_view), self.aligned(sums, sums_view)
            held += [rows, lses]
            into["out"], into["lse"] = address_of(rows.view), address_of(lses.view)
            into["out_token_stride"], into["out_head_stride"] = strides(rows.view)[:2]
            into["lse_token_stride"], into["lse_head_stride"] = strides(lses.view)
        record["out"], record["lse"] = address_of(out_view), address_of(lse_view)
        record["out_token_stride"], record["out_head_stride"] = strides(out_view)[:2]
        record["lse_token_stride"], record["lse_head_stride"] = strides(lse_view)
        record["num_rows"], record["num_q_heads"] = num_rows, num_q_heads
        record["head_dim_v"], record["dtype"] = head_dim_v, DTYPES[dtype_name(views[0].dtype)]
        instance = specs.only(specs.MERGE_STATES)
        self.launch(instance, (min(-(-num_rows // 4), MOST_BLOCKS_OF_A_LOOP), 1, 1), 0, record)
        return out, lse

    def quantize(self, x: Array, kv_format: Format | str, scale: Array | float | str) -> Encoded:
        """See `Backend.quantize`. One launch, and one before it where a static scale is computed."""
        return device_codecs.quantize(self, _SUPPORTED, x, kv_format, scale)

    def dequantize(
        self,
        codes: Array,
        kv_format: Format | str,
        scale: Array,
        zero: Array | None = None,
        *,
        dtype: str = "float32",
    ) -> Array:
        """See `Backend.dequantize`. One launch. dtype: of the values: "float32", "float16" or "bfloat16"."""
        return device_codecs.dequantize(self, _SUPPORTED, codes, kv_format, scale, zero, dtype=dtype)

    # --- Arguments.

    def _fill_queries(
        self, record: Record, q: Array, q_view: NDArray[Any], out: NDArray[Any], lse: NDArray[Any] | None
    ) -> Held:
        rows = self.rows(q, q_view)
        record["q"], record["out"], record["lse"] = address_of(rows.view), address_of(out), address_of(lse)
        record["q_token_stride"], record["q_head_stride"] = strides(rows.view)[:2]
        record["out_token_stride"], record["out_head_stride"] = strides(out)[:2]
        if lse is not None:
            record["lse_token_stride"], record["lse_head_stride"] = strides(lse)
        record["num_tokens"], record["num_q_heads"], record["head_dim"] = rows.view.shape
        record["q_dtype"] = DTYPES[dtype_name(rows.view.dtype)]
        return rows

    def _fill_step(
        self,
        record: Record,
        block_tables: Array,
        seq_lens: Array,
        query_start_loc: Array,
        sinks: Array | None,
        alibi_slopes: Array | None,
    ) -> list[Held]:
        see = self.memory.describe
        if isinstance(block_tables, _Csr):
            tables = Held(block_tables, block_tables.shaped)
            record["kv_indptr"], record["num_indices"] = (
                address_of(block_tables.indptr),
                block_tables.num_indices,
            )
        else:
            # A row of a table is read in place, whatever the stride between rows.
            tables = self.rows(block_tables, see("block_tables", block_tables))
        record["block_tables"], record["block_table_stride"] = (
            address_of(tables.view),
            strides(tables.view)[0],
        )
        record["max_blocks"] = tables.view.shape[1]
        held = [tables]
        for name, array in (
            ("seq_lens", seq_lens),
            ("query_start_loc", query_start_loc),
            ("sinks", sinks),
            ("alibi_slopes", alibi_slopes),
        ):
            if array is not None:
                held.append(self.plain(array, see(name, array)))
                record[name] = address_of(held[-1].view)
        record["num_seqs"] = tables.view.shape[0]
        return held

    def _fill_cache(self, record: Record, seen: LayerCache) -> None:
        for name, part in zip("kv", parts_of(seen), strict=True):
            record[name], record[f"{name}_scales"] = address_of(part.codes), address_of(part.scale)
            record[f"{name}_scale_mode"] = part.mode
            fill_paged(record[f"{name}_paged"], part.codes)
            row_bytes = part.dim * part.codes.itemsize
            record[f"{name}_is_vector"] = row_bytes % 16 == 0 and steps_by(part.codes, 16)
        record["num_kv_heads"], record["head_dim_v"] = seen.num_kv_heads, seen.head_dim_v
        record["error"] = self.error_address()

    # --- Attention.

    def _attention(self, record: Record, seen: LayerCache) -> tuple[list[Launch], list[Array]]:
        """The launches of an attention whose record lacks only its splits, and the arrays of their partial results."""
        memory = self.memory
        plan = plan_attention(
            record, seen, memory.num_multiprocessors, memory.max_shared_bytes, self.split_size
        )
        partials: list[Array] = []
        record["num_splits"], record["split_size"] = plan.num_splits, self.split_size or 0
        num_rows = plan.num_splits * int(record["num_tokens"]) * int(record["num_q_heads"])
        if plan.num_splits > 1:
            partials = [memory.scratch((num_rows, size), np.float32) for size in (seen.head_dim_v, 1)]
            record["partial_out"], record["partial_lse"] = (
                address_of(memory.describe("partial", each)) for each in partials
            )
        whole = record
        if plan.lanes_log2 is not None:
            whole = np.zeros((), records.SIMT)
            whole["attend"], whole["lanes_log2"] = record, plan.lanes_log2
        launches = [self.prepare(plan.instance, plan.grid, plan.shared_bytes, whole)]
        if plan.num_splits > 1:
            grid = (-(-num_rows // plan.num_splits // 4), 1, 1)
            launches.append(self.prepare(specs.only(specs.COMBINE_SPLITS), grid, 0, record))
        return launches, partials


def _checked_split_size(split_size: int | None) -> int | None:
    if split_size is None:
        return None
    size = as_integer(split_size)
    if size is None or not 64 <= size <= _INT32_MAX or size % 64:
        raise ValueError(f"split_size is {split_size!r}: expected a multiple of 64 below 2^31, or None")
    return size


class _Csr(NamedTuple):
    """Tables as one list of blocks that `indptr` cuts. shaped: the list as the table that checks expect."""

    indptr: NDArray[Any]
    shaped: NDArray[Any]
    num_indices: int


_SUPPORTED: Final = Supported(
    q_dtypes=tuple(STORAGE_DTYPES),
    k_formats=tuple(map(str, _FORMATS)),
    v_formats=tuple(map(str, _V_FORMATS)),
    mixed=False,
    layouts=LAYOUTS,
    features=frozenset({"window", "soft_cap", "sinks", "alibi", "lse"}),
    head_dims=range(1, specs.MAX_HEAD_DIM + 1),
    checks_values=False,
)
