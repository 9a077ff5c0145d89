"""The NumPy backend: the specification of what every backend computes.

Owns `NumpyBackend`. Imports config, formats, layout, the codecs and the shared checks.
Invariant: attention is computed in float64 from the exact values of the stored elements, then rounded to the
output's dtype; a key that a query may not see never influences that query's result, whatever its slot holds.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends.base import Supported, Tail
from kvblocks.backends.calls import holding
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
from kvblocks.backends.codecs import Encoded, decode, encode, per_token
from kvblocks.backends.values import check_slots, check_step, check_table
from kvblocks.config import LAYOUTS, CacheConfig
from kvblocks.formats import STORAGE_DTYPES, Format, all_formats
from kvblocks.layout import LayerCache, allocate_host, convert, dtype_name, from_float32, to_float32

Floats = NDArray[np.float64]

# Infinities and NaN in the cache or the queries are data here: they follow IEEE arithmetic without a warning.
_data_may_be_anything = np.errstate(over="ignore", invalid="ignore", divide="ignore")

_SUPPORTED = Supported(
    q_dtypes=tuple(STORAGE_DTYPES),
    k_formats=tuple(map(str, all_formats("k"))),
    v_formats=tuple(map(str, all_formats("v"))),
    mixed=True,
    layouts=LAYOUTS,
    features=frozenset({"window", "soft_cap", "sinks", "alibi", "lse", "tail"}),
)


class NumpyBackend:
    """Every format and feature, any head dims and block size; one pass over NumPy arrays per sequence."""

    name = "numpy"

    def supported(self) -> Supported:
        """See `Backend.supported`."""
        return _SUPPORTED

    def allocate(self, config: CacheConfig, num_blocks: int) -> list[LayerCache]:
        """See `Backend.allocate`."""
        check_config(_SUPPORTED, config, num_blocks)
        return allocate_host(config, num_blocks)

    @_data_may_be_anything
    def write(
        self, cache: LayerCache, k: NDArray[Any], v: NDArray[Any], slot_mapping: NDArray[np.int64]
    ) -> None:
        """See `Backend.write`."""
        check_write(_SUPPORTED, cache, k, v, slot_mapping)
        check_slots(cache, slot_mapping)
        with holding(reads=(k, v, slot_mapping), writes=_arrays(cache)):
            rows = np.flatnonzero(slot_mapping >= 0)
            # In the order of the slots, the tokens of a group stand together.
            rows = rows[np.argsort(slot_mapping[rows])]
            block, offset = np.divmod(slot_mapping[rows], cache.block_size)
            k_part, v_part = _Part.k(cache), _Part.v(cache)
            k_rows, v_rows = k_part.encode(k[rows]), v_part.encode(v[rows])
            k_part.store(k_rows, block, offset)
            v_part.store(v_rows, block, offset)

    @_data_may_be_anything
    def attend(
        self,
        cache: LayerCache,
        q: NDArray[Any],
        block_tables: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        query_start_loc: NDArray[np.int32],
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: NDArray[np.float32] | None = None,
        alibi_slopes: NDArray[np.float32] | None = None,
        tail: Tail | None = None,
        out: NDArray[Any] | None = None,
        lse: NDArray[np.float32] | None = None,
    ) -> NDArray[Any]:
        """See `Backend.attend`. Time and memory O(num_q_heads * queries * keys), one sequence at a time."""
        scale, window, soft_cap, out = check_attend(
            _SUPPORTED,
            cache,
            q,
            block_tables,
            seq_lens,
            query_start_loc,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            tail=tail,
            out=out,
            lse=lse,
        )
        check_step(cache, len(q), block_tables, seq_lens, query_start_loc, window=window, tail=tail)
        indices = (block_tables, seq_lens, query_start_loc)
        tails = () if tail is None else (tail.k, tail.v, tail.start_loc)
        reads = (q, *_arrays(cache), *indices, sinks, alibi_slopes, *tails)
        with holding(reads=reads, writes=(out, lse)):
            dtype = dtype_name(q.dtype)
            queries = to_float32(q).astype(np.float64) * scale
            out.fill(0)
            if lse is not None:
                lse.fill(-np.inf)
            for row, num_keys in enumerate(seq_lens.tolist()):
                first, last = int(query_start_loc[row]), int(query_start_loc[row + 1])
                if first == last or num_keys == 0:
                    continue
                positions = np.arange(num_keys - (last - first), num_keys)
                first_key = 0 if window is None else max(0, int(positions[0]) + 1 - window)
                table, parts = block_tables[row], (_Part.k(cache), _Part.v(cache))
                k, v = (
                    _keys(part, table, first_key, num_keys, newest).astype(np.float64)
                    for part, newest in zip(parts, _tail_of(tail, row), strict=True)
                )
                result, log_denominator = _attend_row(
                    queries[first:last],
                    k,
                    v,
                    positions - first_key,
                    window,
                    soft_cap,
                    sinks,
                    alibi_slopes,
                )
                out[first:last] = from_float32(result.astype(np.float32), dtype)
                if lse is not None:
                    lse[first:last] = log_denominator
        return out

    def copy_blocks(self, caches: Sequence[LayerCache], copies: NDArray[np.int32]) -> None:
        """See `Backend.copy_blocks`."""
        check_copies(_SUPPORTED, caches, copies)
        with holding(reads=[copies], writes=[array for cache in caches for array in cache.block_arrays]):
            src, dst = copies.T
            for cache in caches:
                for array in cache.block_arrays:
                    array[dst] = array[src]

    @_data_may_be_anything
    def gather(
        self, cache: LayerCache, block_table: NDArray[np.int32], seq_len: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `Backend.gather`."""
        check_gather(_SUPPORTED, cache, block_table, seq_len)
        check_table(cache, block_table, seq_len)
        with holding(reads=(*_arrays(cache), block_table), writes=()):
            k = _Part.k(cache).read(block_table, 0, seq_len)
            v = _Part.v(cache).read(block_table, 0, seq_len)
        return np.ascontiguousarray(k), np.ascontiguousarray(v)

    @_data_may_be_anything
    def merge_states(
        self,
        out_a: NDArray[Any],
        lse_a: NDArray[np.float32],
        out_b: NDArray[Any],
        lse_b: NDArray[np.float32],
    ) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """See `Backend.merge_states`."""
        check_merge(_SUPPORTED, out_a, lse_a, out_b, lse_b)
        with holding(reads=(out_a, lse_a, out_b, lse_b), writes=()):
            lse = np.logaddexp(lse_a.astype(np.float64), lse_b.astype(np.float64))
            merged = np.zeros(out_a.shape, np.float64)
            for out, part in ((out_a, lse_a), (out_b, lse_b)):
                takes_part = part != -np.inf
                weight = np.exp(part[takes_part] - lse[takes_part])
                merged[takes_part] += weight[:, None] * to_float32(out)[takes_part]
        return from_float32(merged.astype(np.float32), dtype_name(out_a.dtype)), lse.astype(np.float32)

    def quantize(
        self, x: NDArray[Any], kv_format: Format | str, scale: NDArray[np.float32] | float | str
    ) -> Encoded:
        """See `Backend.quantize`."""
        part, scales = check_encode(_SUPPORTED, x, kv_format, scale)
        return encode(to_float32(x), part, scales)

    def dequantize(
        self,
        codes: NDArray[Any],
        kv_format: Format | str,
        scale: NDArray[Any],
        zero: NDArray[Any] | None = None,
    ) -> NDArray[np.float32]:
        """See `Backend.dequantize`."""
        part = check_decode(_SUPPORTED, codes, kv_format, scale, zero)
        zero = None if zero is None else per_token(zero, part)
        return decode(codes, part, per_token(scale, part), zero)


def _arrays(cache: LayerCache) -> list[NDArray[Any]]:
    return [array for _, array in cache.named_arrays]


class _Part(NamedTuple):
    """The K or the V of a cache; codes in NHD order."""

    format: Format
    codes: NDArray[Any]
    scale: NDArray[Any] | None
    zero: NDArray[Any] | None

    @classmethod
    def k(cls, cache: LayerCache) -> "_Part":
        return cls(cache.format.k, cache.k_nhd, cache.k_scale, cache.k_zero)

    @classmethod
    def v(cls, cache: LayerCache) -> "_Part":
        return cls(cache.format.v, cache.v_nhd, cache.v_scale, cache.v_zero)

    def encode(self, rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]:
        """Codes, scales and zeros of rows [num_tokens, num_kv_heads, dim]."""
        if self.format.is_plain:
            return convert(rows, self.format.name), None, None
        codes, scale, zero, _, _ = encode(
            to_float32(rows), self.format, self.scale if self.format.is_static else None
        )
        return codes, scale, zero

    def store(
        self,
        encoded: tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None],
        block: NDArray[np.int64],
        offset: NDArray[np.int64],
    ) -> None:
        """Put what `encode` gave into the slots of its rows."""
        codes, scale, zero = encoded
        self.codes[block, offset] = codes
        if self.format.scaling == "token_group":
            group = self.format.group
            block, offset = block[::group], offset[::group] // group
        for array, values in ((self.scale, scale), (self.zero, zero)):
            if array is not None and not self.format.is_static:
                array[block, offset] = values

    def read(self, table: NDArray[np.int32], first: int, last: int) -> NDArray[np.float32]:
        """Tokens first..last of a sequence as float32 [last - first, num_kv_heads, dim]."""
        block_size = self.codes.shape[1]
        tokens = np.arange(first, last)
        block, offset = table[tokens // block_size], tokens % block_size
        codes = self.codes[block, offset]
        if self.format.is_plain:
            return to_float32(codes)
        assert self.scale is not None
        if self.format.is_static:
            return decode(codes, self.format, self.scale, None)
        if self.format.scaling == "token_group":
            offset = offset // self.format.group
        zero = None if self.zero is None else self.zero[block, offset]
        return decode(codes, self.format, self.scale[block, offset], zero)


def _tail_of(tail: Tail | None, row: int) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """K and V of the tail that belong to a row."""
    if tail is None:
        return None, None
    rows = slice(int(tail.start_loc[row]), int(tail.start_loc[row + 1]))
    return tail.k[rows], tail.v[rows]


def _keys(
    part: _Part, table: NDArray[np.int32], first: int, last: int, newest: NDArray[Any] | None
) -> NDArray[np.float32]:
    """Tokens first..last of a sequence as float32 [last - first, num_kv_heads, dim]; `newest` are its last ones."""
    num_stored = last - (0 if newest is None else len(newest))
    stored = part.read(table, min(first, num_stored), num_stored)
    if newest is None:
        return stored
    return np.concatenate([stored, to_float32(newest[max(0, first - num_stored) :])])


def _attend_row(
    q: Floats,
    k: Floats,
    v: Floats,
    positions: NDArray[np.int64],
    window: int | None,
    soft_cap: float | None,
    sinks: NDArray[np.float32] | None,
    alibi_slopes: NDArray[np.float32] | None,
) -> tuple[Floats, Floats]:
    """Attention of one sequence: q [t, Hq, Dk] scaled, k [n, Hkv, Dk], v [n, Hkv, Dv]; positions [t] index k.

    Returns (out [t, Hq, Dv], log of the denominator [t, Hq]).
    """
    num_queries, num_q_heads, head_dim = q.shape
    num_keys, num_kv_heads, head_dim_v = v.shape
    # The queries of a group share their keys, so they are rows of one matrix product: [Hkv, group * t, .].
    group = num_q_heads // num_kv_heads
    grouped = q.transpose(1, 0, 2).reshape(num_kv_heads, group * num_queries, head_dim)
    scores = (grouped @ k.transpose(1, 2, 0)).reshape(num_q_heads, num_queries, num_keys)
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    keys = np.arange(num_keys)
    distance = positions[:, None] - keys
    if alibi_slopes is not None:
        scores -= alibi_slopes.astype(np.float64)[:, None, None] * distance
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    np.copyto(scores, -np.inf, where=~visible)

    highest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(np.float64)[:, None, None]
        highest = np.maximum(highest, sink)
    # Where nothing has a weight, all are taken against 0, as -inf - -inf would be NaN, and the result is 0 and -inf.
    base = np.where(highest == -np.inf, 0.0, highest)
    weights = np.exp(scores - base)
    denominator = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        denominator += np.exp(sink - base)
    nothing = denominator[..., 0] == 0
    log_denominator = (base + np.log(denominator))[..., 0].T

    weights /= np.where(denominator == 0, 1.0, denominator)
    values = v.transpose(1, 0, 2)
    by_group = weights.reshape(num_kv_heads, group * num_queries, num_keys)
    out = (by_group @ values).reshape(num_q_heads, num_queries, head_dim_v)
    if num_queries > 1 and not np.isfinite(out).all():
        # A value that is not finite also reached queries that may not see it, as 0 * NaN: sum what each sees.
        per_query = weights.reshape(num_kv_heads, group, num_queries, num_keys)
        for query, seen in enumerate(visible):
            summed = per_query[:, :, query][:, :, seen] @ values[:, seen]
            out[:, query] = summed.reshape(num_q_heads, head_dim_v)
    out[nothing] = 0
    return out.transpose(1, 0, 2), log_denominator
