"""A backend whose kernels run through a launcher: on a GPU by CuPy, or emulated on a host.

Owns `DeviceBackend` and how arguments become the kernels' parameters. Imports layout, the shared checks,
attention and kernels.
Invariant: what a call checks it reads from shapes, dtypes, strides and addresses alone, so that no call waits for the
device; wrong values in index arrays are skipped by the kernels and kept in an error report. Every launch goes to the
stream that `Memory.stream` names at that moment.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends.attention import PreparedAttention, plan_attention
from kvblocks.backends.base import Supported, Tail
from kvblocks.backends.checks import (
    check_attend,
    check_config,
    check_copies,
    check_decode,
    check_encode,
    check_gather,
    check_merge,
    check_write,
)
from kvblocks.backends.codecs import Encoded
from kvblocks.backends.expect import check_moves, expect_dtype, expect_shape
from kvblocks.backends.geometry import (
    Record,
    address_of,
    block_arrays,
    block_region,
    fill_paged,
    parts_of,
    slot_region,
    steps_by,
    strides,
)
from kvblocks.backends.memory import Memory
from kvblocks.config import LAYOUTS, CacheConfig, as_integer
from kvblocks.formats import STORAGE_DTYPES, Format, all_formats
from kvblocks.kernels import params as records
from kvblocks.kernels import specs
from kvblocks.kernels.launcher import Launch, Launcher
from kvblocks.kernels.specs import DTYPES, SCALE_MODES, Instance
from kvblocks.layout import Array, LayerCache, dtype_name, storage_dtype, storage_shape

_CODES: Final = {
    1: "a slot of slot_mapping that the cache does not have",
    2: "a block of block_tables that the cache does not have",
    3: "a length in seq_lens beyond the row's table",
    4: "more queries than keys, or a query_start_loc that does not ascend",
    5: "a block of copies that the cache does not have",
    6: "a slot of moves that the cache does not have",
}
_INT32_MAX: Final = 2**31 - 1
_MOST_BLOCKS_OF_A_LOOP: Final = 4096

_FORMATS: Final = tuple(part for part in all_formats("k") if part.name in DTYPES)
_V_FORMATS: Final = tuple(part for part in all_formats("v") if part.name in DTYPES)


class DeviceBackend:
    """16-bit, 32-bit, FP8 and int8 formats, any block size, head dims up to 576; float32 accumulation.

    split_size: keys of a split of attention, a multiple of 64; results of a row then do not depend on the batch that it
    is in. None: as many splits as fill the device.
    """

    def __init__(
        self, name: str, launcher: Launcher, memory: Memory, *, split_size: int | None = None
    ) -> None:
        self.name = name
        self.launcher = launcher
        self.memory = memory
        self.split_size = _checked_split_size(split_size)
        # A report a device, as kernels reach the memory of their own.
        self._errors: dict[int, Array] = {}
        self._described: WeakKeyDictionary[LayerCache, LayerCache] = WeakKeyDictionary()
        # By the first cache of a pool: a captured graph reads a table for as long as the pool lives.
        self._tables: WeakKeyDictionary[LayerCache, dict[bytes, Array]] = WeakKeyDictionary()

    def splitting(self, split_size: int | None) -> "DeviceBackend":
        """The same backend, its tables and its error report included, with another split_size."""
        if split_size == self.split_size:
            return self
        other = copy(self)
        other.split_size = _checked_split_size(split_size)
        return other

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
        seen = self._see_cache(cache)
        views = see("k", k), see("v", v), see("slot_mapping", slot_mapping)
        check_write(_SUPPORTED, seen, *views)
        num_slots = len(views[2])
        if num_slots == 0:
            return
        record = np.zeros((), records.WRITE)
        sources = (self._rows(k, views[0]), self._rows(v, views[1]))
        slots = self._plain(slot_mapping, views[2])
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
        record["slot_mapping"], record["error"] = address_of(slots.view), self._error_address()
        record["num_slots"], record["num_heads"] = num_slots, seen.num_kv_heads
        record["lanes_log2"] = lanes_log2 = min(5, (chunks - 1).bit_length())
        rows_of_block = specs.WRITE_KV.threads >> lanes_log2
        blocks = -(-num_slots * 2 * seen.num_kv_heads // rows_of_block)
        self._launch(
            specs.write_kv(seen.format.k.name), (min(blocks, _MOST_BLOCKS_OF_A_LOOP), 1, 1), 0, record
        )

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
        the last block. max_blocks: of the longest sequence, by which keys are split; None: all of kv_indices. The
        caller answers for the values of kv_indptr, which are compared with nothing.
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
        starts, blocks = self._plain(kv_indptr, indptr), self._plain(kv_indices, indices)
        shaped = np.broadcast_to(blocks.view[:longest], (len(last), longest))
        prepared, _ = self._prepare_attention(
            cache,
            q,
            _Csr(starts.view, shaped),
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
        seen = self._see_cache(cache)
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
        seen = [self._see_cache(cache) for cache in caches]
        view = self.memory.describe("copies", copies)
        check_copies(_SUPPORTED, seen, view)
        if len(view) == 0 or not seen:
            return
        pairs = self._plain(copies, view)
        regions = [block_region(array) for cache in seen for array in block_arrays(cache)]
        block_bytes = max(
            int(region["run_bytes"]) * int(region["num_tokens"]) * int(region["num_heads"])
            for region in regions
        )
        num_pieces = max(1, min(64, block_bytes // (specs.COPY_BLOCKS.threads * 4 * 16)))
        record = np.zeros((), records.COPY)
        table = self._region_table(caches[0], regions)
        record["regions"], record["copies"] = (
            address_of(self.memory.describe("regions", table)),
            address_of(pairs.view),
        )
        record["error"] = self._error_address()
        record["num_copies"], record["num_pieces"] = len(view), num_pieces
        instance = specs.only(specs.COPY_BLOCKS)
        self._launch(instance, (len(view) * num_pieces, len(regions), 1), 0, record)

    def move_slots(self, caches: Sequence[LayerCache], moves: Array, move_start: Array) -> None:
        """Copy tokens from slot to slot in every cache, so that an accepted branch of a draft tree stands in a row.

        moves int64 [m, 2] of (source, destination) slots, a negative one skips the move; move_start int32 [n + 1]:
        sequence i owns moves move_start[i]..move_start[i + 1], which are done in their order. One launch.
        """
        seen = [self._see_cache(cache) for cache in caches]
        moves_view = self.memory.describe("moves", moves)
        start_view = self.memory.describe("move_start", move_start)
        check_moves(moves_view, start_view)
        if len(start_view) < 2 or len(moves_view) == 0 or not seen:
            return
        held = self._plain(moves, moves_view), self._plain(move_start, start_view)
        regions = [slot_region(array) for cache in seen for array in block_arrays(cache)]
        widest = max(
            int(region["run_bytes"]) // int(region["unit_bytes"]) * int(region["num_heads"])
            for region in regions
        )
        record = np.zeros((), records.MOVE)
        table = self._region_table(caches[0], regions)
        record["regions"] = address_of(self.memory.describe("regions", table))
        record["moves"], record["move_start"] = (address_of(each.view) for each in held)
        record["error"] = self._error_address()
        instance = specs.only(specs.MOVE_SLOTS)
        columns = min(64, -(-widest // specs.MOVE_SLOTS.threads))
        self._launch(instance, (len(start_view) - 1, len(regions), columns), 0, record)

    def gather(
        self, cache: LayerCache, block_table: Array, seq_len: int, *, dtype: str = "float32"
    ) -> tuple[Array, Array]:
        """See `Backend.gather`. One launch. dtype: of the rows: "float32", "float16" or "bfloat16"."""
        seen = self._see_cache(cache)
        view = self.memory.describe("block_table", block_table)
        check_gather(_SUPPORTED, seen, view, seq_len)
        storage, parts = storage_dtype(dtype), parts_of(seen)
        rows = tuple(self.memory.empty((seq_len, seen.num_kv_heads, part.dim), storage) for part in parts)
        if seq_len == 0:
            return rows[0], rows[1]
        table = self._plain(block_table, view)
        record = np.zeros((), records.GATHER)
        for into, part, target in zip(record["part"], parts, rows, strict=True):
            into["cache"], into["scales"] = address_of(part.codes), address_of(part.scale)
            into["rows"] = address_of(self.memory.describe("rows", target))
            fill_paged(into["paged"], part.codes)
            into["head_dim"], into["scale_mode"] = part.dim, part.mode
        record["block_table"], record["error"] = address_of(table.view), self._error_address()
        record["num_tokens"], record["num_heads"] = seq_len, seen.num_kv_heads
        record["dtype"] = DTYPES[dtype]
        chunks = seen.num_kv_heads * -(-max(part.dim for part in parts) // 8)
        grid = (-(-chunks // specs.GATHER_KV.threads), min(seq_len, 65535), 2)
        self._launch(specs.gather_kv(seen.format.k.name), grid, 0, record)
        return rows[0], rows[1]

    def merge_states(self, out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
        """See `Backend.merge_states`. One launch."""
        see = self.memory.describe
        views = see("out_a", out_a), see("lse_a", lse_a), see("out_b", out_b), see("lse_b", lse_b)
        check_merge(_SUPPORTED, *views)
        out, lse = (
            self.memory.empty(views[0].shape, views[0].dtype),
            self.memory.empty(views[1].shape, np.float32),
        )
        num_tokens, num_q_heads, head_dim_v = views[0].shape
        num_rows = num_tokens * num_q_heads
        if num_rows == 0 or head_dim_v == 0:
            return out, lse
        record = np.zeros((), records.MERGE)
        held = []
        pairs = ((out_a, views[0], lse_a, views[1]), (out_b, views[2], lse_b, views[3]))
        for into, (state, state_view, sums, sums_view) in zip(record["state"], pairs, strict=True):
            rows, lses = self._rows(state, state_view), self._aligned(sums, sums_view)
            held += [rows, lses]
            into["out"], into["lse"] = address_of(rows.view), address_of(lses.view)
            into["out_token_stride"], into["out_head_stride"] = strides(rows.view)[:2]
            into["lse_token_stride"], into["lse_head_stride"] = strides(lses.view)
        record["out"], record["lse"] = address_of(see("out", out)), address_of(see("lse", lse))
        record["num_rows"], record["num_q_heads"] = num_rows, num_q_heads
        record["head_dim_v"], record["dtype"] = head_dim_v, DTYPES[dtype_name(views[0].dtype)]
        instance = specs.only(specs.MERGE_STATES)
        self._launch(instance, (min(-(-num_rows // 4), _MOST_BLOCKS_OF_A_LOOP), 1, 1), 0, record)
        return out, lse

    def quantize(self, x: Array, kv_format: Format | str, scale: Array | float | str) -> Encoded:
        """See `Backend.quantize`. One launch, and one before it where a static scale is computed."""
        see = self.memory.describe
        view = see("x", x)
        given = scale if isinstance(scale, (str, int, float)) or scale is None else see("scale", scale)
        part, scales = check_encode(_SUPPORTED, view, kv_format, given)
        num_tokens, num_heads, dim = view.shape
        shape = part.scale_shape(num_tokens, 1, num_heads, dim)
        assert shape is not None
        shape = (num_tokens, num_heads) if part.scaling == "token_head" else shape
        codes = self.memory.empty(view.shape, part.storage)
        # Magnitudes are compared as their bits; those of 0 are 0.
        largest = self.memory.zeros((num_heads,), np.float32)
        num_clipped = self.memory.zeros((num_heads,), np.uint32)
        if scales is None:
            device_scale = self.memory.empty(shape, np.float32)
        elif isinstance(scale, (int, float)):
            device_scale = self.memory.upload(scales)
        else:
            device_scale = self._plain(scale, scales).array
        record = np.zeros((), records.QUANTIZE)
        source = self._rows(x, view)
        record["source"], record["codes"] = address_of(source.view), address_of(see("codes", codes))
        record["scales"] = address_of(see("scale", device_scale))
        measured = self.memory.zeros(shape if part.is_static else (1,), np.uint32)
        record["measured"] = address_of(see("measured", measured))
        record["num_clipped"] = address_of(see("num_clipped", num_clipped))
        record["largest"] = address_of(see("largest", largest))
        record["token_stride"], record["head_stride"] = strides(source.view)[:2]
        record["num_tokens"], record["num_heads"], record["head_dim"] = num_tokens, num_heads, dim
        record["dtype"], record["scale_mode"] = DTYPES[dtype_name(view.dtype)], SCALE_MODES[part.scaling]
        record["lanes_log2"] = lanes_log2 = min(5, (-(-dim // 8) - 1).bit_length())
        record["is_vector"] = dim % 8 == 0 and steps_by(source.view, 16)
        blocks = -(-num_tokens * num_heads // (specs.QUANTIZE.threads >> lanes_log2))
        if blocks and dim:
            phases = (2,) if scales is not None else (0, 1) if part.is_static else (1,)
            for record["phase"] in phases:
                grid = (min(blocks, _MOST_BLOCKS_OF_A_LOOP), 1, 1)
                self._launch(specs.quantize(part.name), grid, 0, record)
        return Encoded(codes, device_scale, None, largest, self.memory.convert(num_clipped, np.int64))

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
        see = self.memory.describe
        view, scale_view = see("codes", codes), see("scale", scale)
        part = check_decode(
            _SUPPORTED, view, kv_format, scale_view, None if zero is None else see("zero", zero)
        )
        values = self.memory.empty(view.shape, storage_dtype(dtype))
        if view.size == 0:
            return values
        plain, scales = self._plain(codes, view), self._plain(scale, scale_view)
        record = np.zeros((), records.DEQUANTIZE)
        record["codes"], record["scales"] = address_of(plain.view), address_of(scales.view)
        record["rows"] = address_of(see("values", values))
        num_tokens, num_heads, dim = view.shape
        record["num_rows"], record["num_heads"], record["head_dim"] = num_tokens * num_heads, num_heads, dim
        record["dtype"], record["scale_mode"] = DTYPES[dtype], SCALE_MODES[part.scaling]
        blocks = -(-num_tokens * num_heads * -(-dim // 8) // specs.DEQUANTIZE.threads)
        self._launch(specs.dequantize(part.name), (min(blocks, _MOST_BLOCKS_OF_A_LOOP), 1, 1), 0, record)
        return values

    def first_error(self) -> str | None:
        """The first wrong value that a kernel skipped since this was last asked, or None; waits for the device."""
        report = self._error()
        code, row, column, value = self.memory.download(report).tolist()
        if code == 0:
            return None
        self.memory.assign(report, 0)
        self.memory.download(report)  # cleared before a kernel on another stream could report again
        return f"{_CODES[code]}: row {row}, column {column}, value {value}"

    # --- Arguments.

    def _see_cache(self, cache: LayerCache) -> LayerCache:
        if not isinstance(cache, LayerCache):
            raise TypeError(f"cache: {type(cache).__name__}, expected a LayerCache")
        if cache not in self._described:
            arrays = {name: self.memory.describe(name, array) for name, array in cache.named_arrays}
            self._described[cache] = LayerCache(
                format=cache.format, block_size=cache.block_size, layout=cache.layout, **arrays
            )
        return self._described[cache]

    def _plain(self, array: Array, view: NDArray[Any]) -> "_Held":
        """The array itself if it is contiguous and aligned, else a copy that is."""
        if view.flags.c_contiguous and view.flags.aligned:
            return _Held(array, view)
        return self._copied(array)

    def _aligned(self, array: Array, view: NDArray[Any]) -> "_Held":
        return _Held(array, view) if view.flags.aligned else self._copied(array)

    def _rows(self, array: Array, view: NDArray[Any]) -> "_Held":
        """The array itself if the elements of its rows are neighbours, else a copy whose are."""
        neighbours = view.shape[-1] <= 1 or view.strides[-1] == view.itemsize
        return _Held(array, view) if neighbours and view.flags.aligned else self._copied(array)

    def _copied(self, array: Array) -> "_Held":
        copy = self.memory.plain(array)
        return _Held(copy, self.memory.describe("copy", copy))

    def _error(self) -> Array:
        device = self.memory.device()
        if device not in self._errors:  # uploaded, so that it is there for the streams of all callers
            self._errors[device] = self.memory.upload(np.zeros(4, np.int32))
        return self._errors[device]

    def _error_address(self) -> int:
        return address_of(self.memory.describe("error", self._error()))

    def _region_table(self, first: LayerCache, regions: list[Record]) -> Array:
        host = np.array(regions, records.REGION)
        key = host.tobytes()
        tables = self._tables.setdefault(first, {})
        if key not in tables:
            tables[key] = self.memory.upload(host.view(np.uint8))
        return tables[key]

    def _fill_queries(
        self, record: Record, q: Array, q_view: NDArray[Any], out: NDArray[Any], lse: NDArray[Any] | None
    ) -> "_Held":
        rows = self._rows(q, q_view)
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
    ) -> "list[_Held]":
        see = self.memory.describe
        if isinstance(block_tables, _Csr):
            tables = _Held(block_tables, block_tables.shaped)
            record["kv_indptr"] = address_of(block_tables.indptr)
        else:
            # A row of a table is read in place, whatever the stride between rows.
            tables = self._rows(block_tables, see("block_tables", block_tables))
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
                held.append(self._plain(array, see(name, array)))
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
        record["error"] = self._error_address()

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
        launches = [self._prepare(plan.instance, plan.grid, plan.shared_bytes, whole)]
        if plan.num_splits > 1:
            grid = (-(-num_rows // plan.num_splits // 4), 1, 1)
            launches.append(self._prepare(specs.only(specs.COMBINE_SPLITS), grid, 0, record))
        return launches, partials

    # --- Launches.

    def _prepare(
        self, instance: Instance, grid: tuple[int, int, int], shared_bytes: int, record: Record
    ) -> Launch:
        return Launch(self.launcher.load(instance), grid, instance.kernel.threads, shared_bytes, record)

    def _launch(
        self, instance: Instance, grid: tuple[int, int, int], shared_bytes: int, record: Record
    ) -> None:
        self.launcher.launch(*self._prepare(instance, grid, shared_bytes, record), self.memory.stream())


def _checked_split_size(split_size: int | None) -> int | None:
    if split_size is not None and (split_size < 64 or split_size % 64):
        raise ValueError(f"split_size is {split_size}: expected a multiple of 64, or None")
    return split_size


class _Csr(NamedTuple):
    """Tables as one list of blocks that `indptr` cuts. shaped: the list as the table that checks expect."""

    indptr: NDArray[Any]
    shaped: NDArray[Any]


class _Held(NamedTuple):
    """An array that must live until the launch, and its description."""

    array: Array
    view: NDArray[Any]


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
