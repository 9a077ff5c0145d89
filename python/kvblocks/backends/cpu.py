"""The CPU backend: the kernels of the Rust crate kvblocks-cpu over NumPy arrays.

Owns `CpuBackend` and how many threads and which instructions it uses. Imports kvblocks._core, layout and the shared
checks.
Invariant: arguments pass the shared checks before a kernel sees them, but for the values of index arrays, which the
kernel looks at itself; the kernels get flat views of the caller's memory, and a copy only of what is not
contiguous.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvblocks._core import (
    cpu_amax,
    cpu_attend,
    cpu_copy_blocks,
    cpu_gather,
    cpu_merge_states,
    cpu_simd,
    cpu_write,
)
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
from kvblocks.backends.codecs import Encoded, encode, scale_of
from kvblocks.backends.pages import empty
from kvblocks.backends.tensors import as_numpy, like
from kvblocks.config import LAYOUTS, CacheConfig, as_integer
from kvblocks.formats import STORAGE_DTYPES, Format, all_formats
from kvblocks.layout import LayerCache, allocate_host, dtype_name, to_float32

# More than any machine has; a larger number is a mistake.
_MOST_THREADS = 1024

_SUPPORTED = Supported(
    q_dtypes=tuple(STORAGE_DTYPES),
    k_formats=tuple(map(str, all_formats("k"))),
    v_formats=tuple(map(str, all_formats("v"))),
    mixed=True,
    layouts=LAYOUTS,
    features=frozenset({"window", "soft_cap", "sinks", "alibi", "lse", "tail"}),
)


class CpuBackend:
    """Every format and feature, any head dims and block size; float32 inside; releases the interpreter.

    num_threads: threads of a call, the caller's included; None asks KVBLOCKS_CPU_THREADS of the environment, then
    takes the cores that this process may use. Results do not depend on it. simd: "avx512bf16", "avx512", "avx2" or
    "portable"; None asks KVBLOCKS_CPU_SIMD, then takes the widest that the processor has. Raises ValueError that
    names the source and what is allowed.
    """

    name = "cpu"

    def __init__(self, *, num_threads: int | None = None, simd: str | None = None) -> None:
        self._how = (_simd(simd), _num_threads(num_threads))

    @property
    def simd(self) -> str:
        """The instruction set of the kernels."""
        return self._how[0]

    @property
    def num_threads(self) -> int:
        """Threads of a call at most, the caller's included."""
        return self._how[1]

    def supported(self) -> Supported:
        """See `Backend.supported`."""
        return _SUPPORTED

    def allocate(self, config: CacheConfig, num_blocks: int) -> list[LayerCache]:
        """See `Backend.allocate`."""
        check_config(_SUPPORTED, config, num_blocks)
        return allocate_host(config, num_blocks, empty)

    def write(
        self, cache: LayerCache, k: NDArray[Any], v: NDArray[Any], slot_mapping: NDArray[np.int64]
    ) -> None:
        """See `Backend.write`."""
        k, v, slot_mapping = map(as_numpy, (k, v, slot_mapping))
        check_write(_SUPPORTED, cache, k, v, slot_mapping)
        with holding(reads=(k, v, slot_mapping), writes=_arrays(cache)):
            slots = _plain(slot_mapping)
            # Copies are made for both parts before the first is written, as they may run out of memory.
            rows_k, rows_v = (_flat(rows[: len(slots)]) for rows in (k, v))
            part_k, part_v = _parts(cache)
            # The kernel of K refuses wrong slots, those of V then pass: only K has groups of tokens.
            for part, rows, dtype in (
                (part_k, rows_k, dtype_name(k.dtype)),
                (part_v, rows_v, dtype_name(v.dtype)),
            ):
                scales = part.written_scales()
                cpu_write(part.written_storage(), scales, (rows, dtype), slots, False, self._how)
                part.take_scales(scales)

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
        """See `Backend.attend`. Time O(num_q_heads * queries * visible keys); tensors give a tensor.

        Memory O(queries * num_q_heads * head_dim_v), and a little more where few queries have many keys. With
        "avx512bf16", a few queries of bfloat16 round the weights of V to bfloat16, as their results are (docs/cpu.md);
        lse is that of the weights before. Otherwise products and sums are float32.
        """
        given, result = q, out
        q, block_tables, seq_lens, query_start_loc = map(
            as_numpy, (q, block_tables, seq_lens, query_start_loc)
        )
        sinks, alibi_slopes, out, lse = map(as_numpy, (sinks, alibi_slopes, out, lse))
        if isinstance(tail, Tail):
            tail = Tail(*map(as_numpy, (tail.k, tail.v, tail.start_loc)))
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
        indices = (block_tables, seq_lens, query_start_loc)
        tails = () if tail is None else (tail.k, tail.v, tail.start_loc)
        reads = (q, *_arrays(cache), *indices, sinks, alibi_slopes, *tails)
        with holding(reads=reads, writes=(out, lse)):
            # Where a result may not be contiguous, the kernel fills a buffer that is copied over.
            out_buffer = np.ascontiguousarray(out)
            lse_buffer = None if lse is None else np.ascontiguousarray(lse)
            part_k, part_v = _parts(cache)
            cpu_attend(
                (_flat(q), dtype_name(q.dtype), q.shape[1]),
                (part_k.storage, part_k.scales()),
                (part_v.storage, part_v.scales()),
                None
                if tail is None
                else (_flat(tail.k), _flat(tail.v), dtype_name(tail.k.dtype), _plain(tail.start_loc)),
                (
                    _flat(block_tables),
                    block_tables.shape[1],
                    _plain(seq_lens),
                    _plain(query_start_loc),
                ),
                (
                    scale,
                    window,
                    soft_cap,
                    None if sinks is None else _plain(sinks),
                    None if alibi_slopes is None else _plain(alibi_slopes),
                ),
                (_flat(out_buffer), None if lse_buffer is None else _flat(lse_buffer)),
                self._how,
            )
            if out_buffer is not out:
                out[...] = out_buffer
            if lse is not None and lse_buffer is not None and lse_buffer is not lse:
                lse[...] = lse_buffer
        return like(out, given) if result is None else result

    def copy_blocks(self, caches: Sequence[LayerCache], copies: NDArray[np.int32]) -> None:
        """See `Backend.copy_blocks`."""
        copies = as_numpy(copies)
        check_copies(_SUPPORTED, caches, copies)
        with holding(reads=[copies], writes=[array for cache in caches for array in cache.block_arrays]):
            pairs = _flat(copies)
            src, dst = copies.T
            for cache in caches:
                for part in _parts(cache):
                    cpu_copy_blocks(part.written_storage(), pairs, self._how)
                    if not part.format.is_static:
                        for array in part.arrays[1:]:
                            array[dst] = array[src]

    def gather(
        self, cache: LayerCache, block_table: NDArray[np.int32], seq_len: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `Backend.gather`."""
        block_table = as_numpy(block_table)
        check_gather(_SUPPORTED, cache, block_table, seq_len)
        with holding(reads=(*_arrays(cache), block_table), writes=()):
            table = _plain(block_table)
            # On huge pages, as the system takes longer to make small ones than the kernel to fill them.
            k, v = (
                empty((seq_len, cache.num_kv_heads, dim), np.dtype(np.float32))
                for dim in (cache.head_dim, cache.head_dim_v)
            )
            for part, rows in zip(_parts(cache), (k, v), strict=True):
                storage = (part.storage, part.scales())
                cpu_gather(storage, table, int(seq_len), _flat(rows), self._how)
        return k, v

    def merge_states(
        self,
        out_a: NDArray[Any],
        lse_a: NDArray[np.float32],
        out_b: NDArray[Any],
        lse_b: NDArray[np.float32],
    ) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """See `Backend.merge_states`."""
        given = out_a
        out_a, lse_a, out_b, lse_b = map(as_numpy, (out_a, lse_a, out_b, lse_b))
        check_merge(_SUPPORTED, out_a, lse_a, out_b, lse_b)
        out, lse = np.empty(out_a.shape, out_a.dtype), np.empty(lse_a.shape, np.float32)
        with holding(reads=(out_a, lse_a, out_b, lse_b), writes=()):
            cpu_merge_states(
                (_flat(out_a), _flat(lse_a)),
                (_flat(out_b), _flat(lse_b)),
                dtype_name(out_a.dtype),
                out_a.shape[2],
                (_flat(out), _flat(lse)),
                self._how,
            )
        return like(out, given), like(lse, given)

    def quantize(
        self, x: NDArray[Any], kv_format: Format | str, scale: NDArray[np.float32] | float | str
    ) -> Encoded:
        """See `Backend.quantize`."""
        x, scale = as_numpy(x), as_numpy(scale)
        part, scales = check_encode(_SUPPORTED, x, kv_format, scale)
        with holding(reads=(x, scales), writes=()):
            return self._encode(x, part, scales)

    def _encode(self, x: NDArray[Any], part: Format, scale: NDArray[np.float32] | None) -> Encoded:
        if x.size == 0:
            return encode(to_float32(x), part, scale)
        num_tokens, num_heads, dim = x.shape
        rows = _flat(x), dtype_name(x.dtype)
        if scale is None and part.is_static:
            amax = cpu_amax(rows, num_heads * dim, self._how).reshape(num_heads, dim)
            by = {"tensor": amax.max().reshape(1), "head": amax.max(axis=1), "channel": amax}
            scale = scale_of(by[part.scaling], part)
        # A cache of blocks as small as groups allow; what shares no block has no axis of one either.
        block_size = part.group if part.scaling == "token_group" else 1
        codes = np.empty((num_tokens, num_heads, part.row_elements(dim)), part.storage)
        made = _Part(part, codes, codes.reshape(-1, block_size, *codes.shape[1:]), scale, None)
        if scale is None:
            shape = part.scale_shape(num_tokens // block_size, block_size, num_heads, dim)
            assert shape is not None
            new = [np.empty((shape[0], *shape[2:]), part.scale_dtype) for _ in range(1 + part.has_zero)]
            made = replace(made, scale=new[0], zero=new[1] if part.has_zero else None)
        scales = made.written_scales() if scale is None else made.scales()
        lost = cpu_write(made.storage, scales, rows, np.arange(num_tokens), True, self._how)
        assert lost is not None
        return Encoded(codes, made.scale, made.zero, *lost)

    def dequantize(
        self,
        codes: NDArray[Any],
        kv_format: Format | str,
        scale: NDArray[Any],
        zero: NDArray[Any] | None = None,
    ) -> NDArray[np.float32]:
        """See `Backend.dequantize`."""
        codes, scale, zero = map(as_numpy, (codes, scale, zero))
        part = check_decode(_SUPPORTED, codes, kv_format, scale, zero)
        num_tokens, num_heads, stored = codes.shape
        values = np.empty(
            (num_tokens, num_heads, stored * 8 * part.storage.itemsize // part.bits), np.float32
        )
        if values.size:
            with holding(reads=(codes, scale, zero), writes=()):
                # One block that holds all tokens.
                block = _plain(codes)[None]
                stored_part = _Part(part, block, block, scale, zero)
                table = np.zeros(1, np.int32)
                cpu_gather(
                    (stored_part.storage, stored_part.scales()),
                    table,
                    num_tokens,
                    _flat(values),
                    self._how,
                )
        return values


def _arrays(cache: LayerCache) -> list[NDArray[Any]]:
    return [array for _, array in cache.named_arrays]


# Codes as one axis, their name, strides and sizes; as the kernels take them.
_Storage: TypeAlias = tuple[NDArray[Any], str, tuple[int, ...]]
# Who shares a scale, scales, zeros, size of a group, bits of a code.
_Scales: TypeAlias = tuple[str, NDArray[Any], NDArray[Any] | None, int, int]


@dataclass(frozen=True, eq=False)
class _Part:
    """The K or the V of a cache; codes in NHD order as well."""

    format: Format
    codes: NDArray[Any]
    nhd: NDArray[Any]
    scale: NDArray[Any] | None
    zero: NDArray[Any] | None

    @property
    def arrays(self) -> list[NDArray[Any]]:
        return [array for array in (self.codes, self.scale, self.zero) if array is not None]

    @cached_property
    def storage(self) -> _Storage:
        """The codes for a kernel that reads: a view, so it never ages."""
        name = "packed" if self.format.bits < 8 else self.format.name
        return _span(self.codes), name, _geometry(self.nhd)

    def written_storage(self) -> _Storage:
        """The codes for a kernel that writes: a new view, as one from when the array was read-only stays so."""
        return _span(self.codes), *self.storage[1:]

    def scales(self) -> _Scales | None:
        """The scales as the kernels take them."""
        if self.scale is None:
            return None
        scaling, scale = self.format.scaling, self.scale
        if scaling == "tensor":
            scaling, scale = "head", np.repeat(scale, self.nhd.shape[2])
        zero = None if self.zero is None else _flat(self.zero)
        return scaling, _flat(scale), zero, self.format.group, self.format.bits

    def written_scales(self) -> _Scales | None:
        """The scales as a write takes them: where nobody gave them, it makes them."""
        scales = self.scales()
        return ("made", *scales[1:]) if scales is not None and scales[0] == "token_head" else scales

    def take_scales(self, written: _Scales | None) -> None:
        """Keep the scales and zeros that a write made and could not put where they belong."""
        if written is None or self.format.is_static:
            return
        for mine, theirs in ((self.scale, written[1]), (self.zero, written[2])):
            if mine is not None and theirs is not None and not np.may_share_memory(mine, theirs):
                mine[...] = theirs.view(mine.dtype).reshape(mine.shape)


# What depends on a cache alone is worked out once for it; a part holds the arrays of its cache and views of them.
_known: WeakKeyDictionary[LayerCache, tuple[_Part, _Part]] = WeakKeyDictionary()


def _parts(cache: LayerCache) -> tuple[_Part, _Part]:
    """K and V of a cache that has passed the checks."""
    parts = _known.get(cache)
    if parts is None:
        parts = _known[cache] = (
            _Part(cache.format.k, cache.k, cache.k_nhd, cache.k_scale, cache.k_zero),
            _Part(cache.format.v, cache.v, cache.v_nhd, cache.v_scale, cache.v_zero),
        )
    return parts


def _simd(name: str | None) -> str:
    available = cpu_simd()
    source = "simd"
    if name is None:
        source, name = "KVBLOCKS_CPU_SIMD", os.environ.get("KVBLOCKS_CPU_SIMD") or available[0]
    if name not in available:
        raise ValueError(f"{source} is {name!r}: this processor has {', '.join(map(repr, available))}")
    return name


def _num_threads(number: int | None) -> int:
    if number is not None:
        return _in_range("num_threads", number, as_integer(number))
    text = os.environ.get("KVBLOCKS_CPU_THREADS")
    if not text:
        return _num_cores()
    return _in_range("KVBLOCKS_CPU_THREADS", text, int(text) if text.isdecimal() else None)


def _in_range(source: str, value: object, number: int | None) -> int:
    if number is None or not 1 <= number <= _MOST_THREADS:
        raise ValueError(f"{source} is {value!r}: expected an integer in 1..{_MOST_THREADS}")
    return number


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself if a kernel can read it where it is, else a copy."""
    return np.ascontiguousarray(array) if array.flags.aligned else array.copy()


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    """A plain array as one axis (a view), any other as a copy; float16 as its uint16 bits."""
    return _bits(_plain(array).reshape(-1))


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(np.uint16) if array.dtype == np.float16 else array


def _span(array: NDArray[Any]) -> NDArray[Any]:
    """K or V as the one-axis view from its first to its last element; float16 as its uint16 bits."""
    if array.flags.c_contiguous:
        return _bits(array.reshape(-1))
    itemsize = array.itemsize
    num_elements = 1 + sum(
        (size - 1) * stride // itemsize for size, stride in zip(array.shape, array.strides, strict=True)
    )
    return _bits(np.lib.stride_tricks.as_strided(array, (num_elements,), (itemsize,)))


def _geometry(nhd: NDArray[Any]) -> tuple[int, ...]:
    """Strides and sizes of K or V for the kernels, in elements; an axis of one entry needs no stride."""
    steps = (
        stride // nhd.itemsize if size > 1 else 0
        for size, stride in zip(nhd.shape[:3], nhd.strides[:3], strict=True)
    )
    return (*steps, *nhd.shape)
