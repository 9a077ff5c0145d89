"""Argument checks shared by the backends that take host arrays.

Owns one function per method of `Backend`. Imports config, layout and backends.base.
Invariant: nothing is written and nothing is cast here; what passes can be computed without a further check, and
every array that will be written can be. Only the values that `values` looks at are left to it, or to the kernels that
read them.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends.base import Supported, Tail
from kvblocks.backends.expect import (
    as_float32,
    expect_aligned,
    expect_apart,
    expect_array,
    expect_distinct,
    expect_dtype,
    expect_floats,
    expect_listed,
    expect_nested,
    expect_result,
    expect_shape,
    expect_writeable,
)
from kvblocks.config import CacheConfig, as_integer
from kvblocks.formats import Format, KVFormat, parse_format
from kvblocks.layout import LayerCache

_INT32_MAX = 2**31 - 1

# Caches that passed, with the tables that they passed: what is checked of a cache stays as it is.
_passed: WeakKeyDictionary[LayerCache, list[Supported]] = WeakKeyDictionary()
# Caches of which no array that a write changes shares memory with another.
_apart: WeakSet[LayerCache] = WeakSet()


class AttendArgs(NamedTuple):
    """The optional arguments of `attend`, resolved."""

    scale: float
    window: int | None
    soft_cap: float | None
    out: NDArray[Any]


def check_config(supported: Supported, config: CacheConfig, num_blocks: int) -> None:
    """Refuse a config outside `supported`, naming the field and the supported list."""
    for kv_format in dict.fromkeys(config.formats):
        _format(supported, kv_format)
    expect_listed("layout", config.layout, supported.layouts)
    expect_listed("head_dim", config.head_dim, supported.head_dims)
    expect_listed("head_dim_v", config.head_dim_v, supported.head_dims)
    expect_listed("block_size", config.block_size, supported.block_sizes)
    if as_integer(num_blocks) is None or not 1 <= num_blocks <= _INT32_MAX:
        raise ValueError(f"num_blocks is {num_blocks!r}: expected an integer in 1..{_INT32_MAX}")


def check_write(
    supported: Supported,
    cache: LayerCache,
    k: NDArray[Any],
    v: NDArray[Any],
    slot_mapping: NDArray[np.int64],
) -> None:
    """Check the arguments of `write`."""
    _cache(supported, cache)
    for name, array, dim in (("k", k, cache.head_dim), ("v", v, cache.head_dim_v)):
        expect_floats(name, array, supported.q_dtypes)
        expect_shape(
            name, array, (("num_tokens", None), ("num_kv_heads", cache.num_kv_heads), ("head_dim", dim))
        )
    expect_dtype("slot_mapping", slot_mapping, np.int64)
    expect_shape("slot_mapping", slot_mapping, (("num_slots", None),))
    num_slots = len(slot_mapping)
    for name, array in (("k", k), ("v", v)):
        if len(array) < num_slots:
            raise ValueError(f"{name}: axis 0 (num_tokens) is {len(array)}, slot_mapping has {num_slots}")
    if supported.checks_values:
        _check_static_scales(cache)
    stored = _arrays(cache)
    for name, array in stored:
        expect_writeable(name, array)
    expect_apart((("k", k), ("v", v), ("slot_mapping", slot_mapping)), stored)
    if cache not in _apart:
        # Static scales are read only, and K and V may share one.
        read = {f"cache.{name}_scale" for name in "kv" if getattr(cache.format, name).is_static}
        for index, one in enumerate(stored):
            others = stored[index + 1 :]
            expect_apart((one,), tuple(each for each in others if not {one[0], each[0]} <= read))
        _apart.add(cache)


def _check_static_scales(cache: LayerCache) -> None:
    """Refuse static scales that nobody has set."""
    for name, part, scale in (
        ("k_scale", cache.format.k, cache.k_scale),
        ("v_scale", cache.format.v, cache.v_scale),
    ):
        if part.is_static and scale is not None and not (np.isfinite(scale) & (scale > 0)).all():
            raise ValueError(
                f"cache.{name}: the static scale of {part} is not set: expected finite numbers > 0"
            )


def check_attend(
    supported: Supported,
    cache: LayerCache,
    q: NDArray[Any],
    block_tables: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    query_start_loc: NDArray[np.int32],
    *,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    sinks: NDArray[np.float32] | None,
    alibi_slopes: NDArray[np.float32] | None,
    tail: Tail | None = None,
    out: NDArray[Any] | None,
    lse: NDArray[np.float32] | None,
) -> AttendArgs:
    """Check the arguments of `attend`; resolves the scale and makes `out` where it is not given."""
    _cache(supported, cache)
    expect_floats("q", q, supported.q_dtypes)
    expect_shape("q", q, (("num_tokens", None), ("num_q_heads", None), ("head_dim", cache.head_dim)))
    num_tokens, num_q_heads, _ = q.shape
    if num_q_heads == 0 or num_q_heads % cache.num_kv_heads:
        raise ValueError(
            f"q: axis 1 (num_q_heads) is {num_q_heads}, not a multiple of the cache's {cache.num_kv_heads} "
            "(num_kv_heads)"
        )

    features = (
        ("window", window),
        ("soft_cap", soft_cap),
        ("sinks", sinks),
        ("alibi", alibi_slopes),
        ("lse", lse),
        ("tail", tail),
    )
    for feature, value in features:
        if value is not None and feature not in supported.features:
            expect_listed("feature", feature, tuple(sorted(supported.features)))
    factor = 1.0 / math.sqrt(cache.head_dim) if scale is None else as_float32(scale)
    if factor is None:
        raise ValueError(f"scale is {scale!r}: expected 0 or a normal float32 number")
    cap = None if soft_cap is None else as_float32(soft_cap)
    if soft_cap is not None and (cap is None or cap <= 0):
        raise ValueError(
            f"soft_cap is {soft_cap!r}: expected a normal float32 number > 0, or None for no cap"
        )
    width = None if window is None else as_integer(window)
    if window is not None and (width is None or width < 1):
        raise ValueError(f"window is {window!r}: expected an integer >= 1, or None for no window")
    if width is not None:
        width = min(width, _INT32_MAX)  # lengths are int32, so a wider one sees everything too
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is None:
            continue
        expect_dtype(name, per_head, np.float32)
        expect_shape(name, per_head, (("num_q_heads", num_q_heads),))
        if not supported.checks_values:
            continue
        allowed = np.isfinite(per_head) | ((name == "sinks") & np.isneginf(per_head))
        if not allowed.all():
            head = int(allowed.argmin())
            raise ValueError(f"{name}: head {head} is {per_head[head]}, expected a finite number")

    out_shape = (("num_tokens", num_tokens), ("num_q_heads", num_q_heads), ("head_dim_v", cache.head_dim_v))
    _check_results(out, lse, out_shape, ("q", q.dtype))
    tails: tuple[tuple[str, NDArray[Any]], ...] = ()
    if tail is not None:
        tails = _check_tail(supported, cache, tail, seq_lens)
    _check_rows(block_tables, seq_lens, query_start_loc)
    if out is not None or lse is not None:
        expect_apart(
            (("out", out), ("lse", lse)),
            (
                ("q", q),
                *_arrays(cache),
                *tails,
                ("sinks", sinks),
                ("alibi_slopes", alibi_slopes),
                ("block_tables", block_tables),
                ("seq_lens", seq_lens),
                ("query_start_loc", query_start_loc),
            ),
        )
        expect_apart((("out", out),), (("lse", lse),))
    if out is None:
        out = np.empty((num_tokens, num_q_heads, cache.head_dim_v), q.dtype)
    return AttendArgs(factor, width, cap, out)


def check_copies(supported: Supported, caches: Sequence[LayerCache], copies: NDArray[np.int32]) -> None:
    """Check the arguments of `copy_blocks`."""
    for cache in caches:
        _cache(supported, cache)
        for name, array in _arrays(cache):
            expect_writeable(name, array)
    expect_dtype("copies", copies, np.int32)
    expect_shape("copies", copies, (("num_copies", None), ("src, dst", 2)))
    for cache in caches:
        expect_apart((("copies", copies),), _arrays(cache))
    if len(copies) == 0 or len(caches) == 0 or not supported.checks_values:
        return
    num_blocks = min(cache.num_blocks for cache in caches)
    bad = ((copies < 0) | (copies >= num_blocks)).any(axis=1)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"copies: row {row} is {copies[row, 0]} -> {copies[row, 1]}, the cache has {num_blocks} blocks"
        )
    src, dst = copies.T
    expect_distinct("copies", "destination block", dst, np.arange(len(copies)))
    sources = set(src.tolist())
    for row, block in enumerate(dst.tolist()):
        if block in sources:
            raise ValueError(f"copies: row {row} has block {block} as destination, another row as source")


def check_gather(
    supported: Supported, cache: LayerCache, block_table: NDArray[np.int32], seq_len: int
) -> None:
    """Check the arguments of `gather`."""
    _cache(supported, cache)
    expect_dtype("block_table", block_table, np.int32)
    expect_shape("block_table", block_table, (("max_blocks", None),))
    capacity = len(block_table) * cache.block_size
    if as_integer(seq_len) is None or not 0 <= seq_len <= capacity:
        raise ValueError(
            f"seq_len is {seq_len!r}: expected an integer in 0..{capacity}, the tokens of "
            f"{len(block_table)} blocks"
        )


def check_merge(
    supported: Supported,
    out_a: NDArray[Any],
    lse_a: NDArray[np.float32],
    out_b: NDArray[Any],
    lse_b: NDArray[np.float32],
    *,
    out: NDArray[Any] | None = None,
    lse: NDArray[np.float32] | None = None,
) -> None:
    """Check the arguments of `merge_states`, and where its results go."""
    expect_floats("out_a", out_a, supported.q_dtypes)
    expect_shape("out_a", out_a, (("num_tokens", None), ("num_q_heads", None), ("head_dim_v", None)))
    num_tokens, num_q_heads, head_dim_v = out_a.shape
    shape = (("num_tokens", num_tokens), ("num_q_heads", num_q_heads), ("head_dim_v", head_dim_v))
    expect_array("out_b", out_b)
    if out_b.dtype != out_a.dtype:
        raise TypeError(f"out_b: dtype {out_b.dtype}, out_a has {out_a.dtype}")
    expect_shape("out_b", out_b, shape)
    for name, sums in (("lse_a", lse_a), ("lse_b", lse_b)):
        expect_dtype(name, sums, np.float32)
        expect_shape(name, sums, shape[:2])
    _check_results(out, lse, shape, ("out_a", out_a.dtype))
    states = (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b))
    expect_apart((("out", out), ("lse", lse)), states)
    expect_apart((("out", out),), (("lse", lse),))


def _check_results(
    out: NDArray[Any] | None,
    lse: NDArray[np.float32] | None,
    shape: tuple[tuple[str, int], ...],
    like: tuple[str, np.dtype[Any]],
) -> None:
    """Check where outputs [num_tokens, num_q_heads, head_dim_v] of the dtype of `like` go, and their sums."""
    if out is not None:
        expect_array("out", out)
        name, dtype = like
        if out.dtype != dtype:
            raise TypeError(f"out: dtype {out.dtype}, {name} has {dtype}")
        expect_shape("out", out, shape)
        expect_result("out", out)
    if lse is not None:
        expect_dtype("lse", lse, np.float32)
        expect_shape("lse", lse, shape[:2])
        expect_result("lse", lse)


def _check_rows(
    block_tables: NDArray[np.int32], seq_lens: NDArray[np.int32], query_start_loc: NDArray[np.int32]
) -> None:
    """Check the dtypes and shapes of a step's index arrays."""
    expect_dtype("block_tables", block_tables, np.int32)
    expect_dtype("seq_lens", seq_lens, np.int32)
    expect_dtype("query_start_loc", query_start_loc, np.int32)
    expect_shape("seq_lens", seq_lens, (("num_seqs", None),))
    num_seqs = len(seq_lens)
    expect_shape("block_tables", block_tables, (("num_seqs", num_seqs), ("max_blocks", None)))
    expect_shape("query_start_loc", query_start_loc, (("num_seqs + 1", num_seqs + 1),))


def _cache(supported: Supported, cache: LayerCache) -> None:
    if not isinstance(cache, LayerCache):
        raise TypeError(f"cache: {type(cache).__name__}, expected a LayerCache")
    if supported in _passed.get(cache, ()):
        return
    for name, array in _arrays(cache):
        expect_array(name, array)
        expect_aligned(name, array)
        expect_nested(name, array)
    _format(supported, cache.format)
    expect_listed("layout", cache.layout, supported.layouts)
    expect_listed("head_dim", cache.head_dim, supported.head_dims)
    expect_listed("head_dim_v", cache.head_dim_v, supported.head_dims)
    expect_listed("block_size", cache.block_size, supported.block_sizes)
    _passed.setdefault(cache, []).append(supported)


def _arrays(cache: LayerCache) -> tuple[tuple[str, NDArray[Any]], ...]:
    return tuple((f"cache.{name}", array) for name, array in cache.named_arrays)


def _check_tail(
    supported: Supported, cache: LayerCache, tail: Tail, seq_lens: NDArray[np.int32]
) -> tuple[tuple[str, NDArray[Any]], ...]:
    """Check the tail of `attend`; its arrays with their names."""
    if not isinstance(tail, Tail):
        raise TypeError(f"tail: {type(tail).__name__}, expected a Tail")
    for name, array, dim in (("tail.k", tail.k, cache.head_dim), ("tail.v", tail.v, cache.head_dim_v)):
        expect_floats(name, array, supported.q_dtypes)
        expect_shape(
            name, array, (("num_tokens", None), ("num_kv_heads", cache.num_kv_heads), ("head_dim", dim))
        )
    expect_dtype("seq_lens", seq_lens, np.int32)
    expect_shape("seq_lens", seq_lens, (("num_seqs", None),))
    expect_dtype("tail.start_loc", tail.start_loc, np.int32)
    expect_shape("tail.start_loc", tail.start_loc, (("num_seqs + 1", len(seq_lens) + 1),))
    return ("tail.k", tail.k), ("tail.v", tail.v), ("tail.start_loc", tail.start_loc)


def check_encode(
    supported: Supported, x: NDArray[Any], kv_format: Format | str, scale: object
) -> tuple[Format, NDArray[np.float32] | None]:
    """Check the arguments of `quantize`; the format and the scale, None where it is to be computed."""
    part = _scaled_format(supported, kv_format)
    expect_floats("x", x, supported.q_dtypes)
    expect_shape("x", x, (("num_tokens", None), ("num_heads", None), ("head_dim", None)))
    num_tokens, num_heads, dim = x.shape
    if part.bits < 8 and dim % 8:
        raise ValueError(f"x: axis 2 (head_dim) is {dim}, {part} needs a multiple of 8")
    if part.scaling == "token_group" and num_tokens % part.group:
        raise ValueError(
            f"x: axis 0 (num_tokens) is {num_tokens}, {part} needs a multiple of {part.group} (its group)"
        )
    if isinstance(scale, str):
        if scale != "amax":
            raise ValueError(f"scale is {scale!r}: expected 'amax', a number or an array")
        return part, None
    if part.has_zero:
        raise ValueError(f"scale: {part} computes its own, expected 'amax'")
    shape = part.scale_shape(num_tokens, 1, num_heads, dim)
    assert shape is not None
    if part.scaling == "token_head":
        shape = (num_tokens, num_heads)
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if is_number:
        scale = np.full(shape, scale, np.float32)
    expect_dtype("scale", scale, np.float32)  # type: ignore[arg-type]
    array: NDArray[np.float32] = scale  # type: ignore[assignment]
    if array.shape != shape:
        raise ValueError(f"scale: shape {array.shape}, {part} needs {shape}")
    if (is_number or supported.checks_values) and not (np.isfinite(array) & (array > 0)).all():
        raise ValueError("scale: expected finite numbers > 0")
    return part, array


def check_decode(
    supported: Supported,
    codes: NDArray[Any],
    kv_format: Format | str,
    scale: NDArray[Any],
    zero: NDArray[Any] | None,
) -> Format:
    """Check the arguments of `dequantize`; the format."""
    part = _scaled_format(supported, kv_format)
    expect_dtype("codes", codes, part.storage.type)
    expect_shape("codes", codes, (("num_tokens", None), ("num_heads", None), ("stored elements", None)))
    num_tokens, num_heads, stored = codes.shape
    dim = stored * 8 * part.storage.itemsize // part.bits
    if part.scaling == "token_group" and num_tokens % part.group:
        raise ValueError(
            f"codes: axis 0 (num_tokens) is {num_tokens}, {part} needs a multiple of {part.group} (its group)"
        )
    # As one block of all tokens, whose axis the arrays here do not have.
    shape = part.scale_shape(1, num_tokens, num_heads, dim)
    assert shape is not None
    shape = shape if part.is_static else shape[1:]
    for name, array, needed in (("scale", scale, True), ("zero", zero, part.has_zero)):
        if array is None and not needed:
            continue
        if not needed:
            raise ValueError(f"{name}: {part} has none")
        expect_dtype(name, array, part.scale_dtype.type)  # type: ignore[arg-type]
        if array is not None and array.shape != shape:
            raise ValueError(f"{name}: shape {array.shape}, {part} needs {shape}")
    return part


def _scaled_format(supported: Supported, kv_format: Format | str) -> Format:
    part = kv_format if isinstance(kv_format, Format) else parse_format(kv_format, "k")
    expect_listed("kv_format", str(part), tuple(dict.fromkeys((*supported.k_formats, *supported.v_formats))))
    if part.is_plain:
        raise ValueError(f"kv_format is {part}: expected a format with a scale")
    return part


def _format(supported: Supported, kv_format: KVFormat) -> None:
    expect_listed("k_format", str(kv_format.k), supported.k_formats)
    expect_listed("v_format", str(kv_format.v), supported.v_formats)
    if not supported.mixed and kv_format.k.name != kv_format.v.name:
        raise ValueError(f"kv_format is {kv_format}: supported is one format for K and V")
