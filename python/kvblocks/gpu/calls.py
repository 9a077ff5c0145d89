"""The kernels as functions of an engine's own tensors.

Owns the direct functions. Imports the device that runs them and layout.
Invariant: memory is the caller's, new arrays are of his library, and work is enqueued on his stream. A call is checked
when its shapes are new, and only patched with addresses after that; values in device arrays are checked
by the kernels, which skip what is wrong and keep it for `first_error`.

For every function: arrays are torch tensors, CuPy arrays, or anything with `__cuda_array_interface__` or DLPack, all on
one device; bfloat16 and FP8 by their bits. stream: an address, or an object with `__cuda_stream__`, `.ptr` or
`.cuda_stream`; None is torch's current stream for tensors, CuPy's for everything else. Arguments must stay alive until
the stream has passed the call, as with every library's own operations; caches hold their arrays. Raises TypeError and
ValueError that name the argument and both numbers, before anything is launched.
"""

from collections.abc import Sequence
from typing import Any

from kvblocks.backends.codecs import Encoded
from kvblocks.backends.cupy import instances_for, launcher_of
from kvblocks.backends.device import DeviceBackend
from kvblocks.backends.foreign import look_at
from kvblocks.config import CacheConfig
from kvblocks.formats import Format, KVFormat
from kvblocks.gpu.dispatch import dispatcher_for, dispatcher_of
from kvblocks.gpu.libraries import libraries_in_use
from kvblocks.layout import Array, LayerCache


def layer_cache(
    k: Array,
    v: Array,
    kv_format: KVFormat | str,
    *,
    layout: str = "NHD",
    block_size: int | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> LayerCache:
    """A `LayerCache` over an engine's own pool, in the shapes of docs/layout.md; it keeps the tensors alive.

    k, v: [num_blocks, block_size, num_kv_heads, head_dim] for layout "NHD", of any strides that a cache may have; FP8
    tensors or their bytes for an FP8 format. block_size: what the pool's axis has, unless told. Make it once a layer:
    what is known of a cache hangs on the object.
    """
    seen = {"k": look_at("k", k), "v": look_at("v", v)}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    seen |= {name: look_at(name, scale) for name, scale in scales.items() if scale is not None}
    if block_size is None:
        axis = 1 if layout == "NHD" else 2
        block_size = seen["k"].shape[axis] if seen["k"].ndim == 4 else 0
    return LayerCache(format=KVFormat.parse(kv_format), block_size=block_size, layout=layout, **seen)


def _write(backend: DeviceBackend, cache: LayerCache, k: Array, v: Array, slot_mapping: Array) -> None:
    backend.write(cache, k, v, slot_mapping)


def write_kv(cache: LayerCache, k: Array, v: Array, slot_mapping: Array, *, stream: object = None) -> None:
    """Store K and V of new tokens at their slots; see `Backend.write`. One launch.

    k, v: float32, float16 or bfloat16 [>= num_slots, num_kv_heads, head_dim] of any strides. slot_mapping: int64
    [num_slots], of which negative ones are skipped.
    """
    dispatcher_for("k", k).run(
        _write, ("k", "v", "slot_mapping"), (k, v, slot_mapping), cache=cache, stream=stream
    )


ATTEND_NAMES = ("q", "block_tables", "seq_lens", "query_start_loc", "sinks", "alibi_slopes", "out", "lse")


def attend_with(
    backend: DeviceBackend,
    cache: LayerCache,
    q: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    sinks: Array | None,
    alibi_slopes: Array | None,
    out: Array | None,
    lse: Array | None,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    split_size: int | None,
) -> Array:
    """The call that `paged_attention` plans; arrays as ATTEND_NAMES names them."""
    return backend.splitting(split_size).attend(
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
        out=out,
        lse=lse,
    )


def paged_attention(
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
    split_size: int | None = None,
    workspace: Array | None = None,
    stream: object = None,
) -> Array:
    """Causal attention over the cache, decode and chunked prefill alike; see `Backend.attend`. Returns `out`.

    q: float32, float16 or bfloat16 [num_tokens, num_q_heads, head_dim]. Lengths and tables are read on the device and
    the grid depends on shapes only, so one captured call serves every step whose tables fit. split_size: keys of a
    split, a multiple of 64, for results that do not depend on the batch; None: as many splits as fill the device.
    workspace: device memory for the partial results of split keys, for captures outside of torch, which need `out` as
    well; the error says how much a call needs. None: memory that is kept for the stream. One launch, or two where keys
    are split.
    """
    return dispatcher_for("q", q).run(
        attend_with,
        ATTEND_NAMES,
        (q, block_tables, seq_lens, query_start_loc, sinks, alibi_slopes, out, lse),
        (scale, window, soft_cap, split_size),
        cache,
        (),
        stream,
        workspace,
    )


_ATTEND_CSR = (
    "q",
    "kv_indptr",
    "kv_indices",
    "kv_last_block_len",
    "query_start_loc",
    "sinks",
    "alibi_slopes",
    "out",
    "lse",
)


def _attend_csr(backend: DeviceBackend, cache: LayerCache, *arrays_and_options: Any) -> Array:
    *arrays, sinks, alibi_slopes, out, lse, max_blocks, scale, window, soft_cap, split_size = (
        arrays_and_options
    )
    return backend.splitting(split_size).attend_csr(
        cache,
        *arrays,
        max_blocks=max_blocks,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        out=out,
        lse=lse,
    )


def paged_attention_csr(
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
    split_size: int | None = None,
    workspace: Array | None = None,
    stream: object = None,
) -> Array:
    """`paged_attention` with the tables in FlashInfer's form; see `DeviceBackend.attend_csr`."""
    return dispatcher_for("q", q).run(
        _attend_csr,
        _ATTEND_CSR,
        (q, kv_indptr, kv_indices, kv_last_block_len, query_start_loc, sinks, alibi_slopes, out, lse),
        (max_blocks, scale, window, soft_cap, split_size),
        cache=cache,
        stream=stream,
        workspace=workspace,
    )


_MERGE = ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")


def _merge(
    backend: DeviceBackend, out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, out: Any, lse: Any
) -> tuple[Array, Array]:
    return backend.merge_states(out_a, lse_a, out_b, lse_b, out=out, lse=lse)


def merge_states(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    stream: object = None,
) -> tuple[Array, Array]:
    """Attention over the union of two disjoint sets of keys; see `DeviceBackend.merge_states`. One launch."""
    merged: tuple[Array, Array] = dispatcher_for("out_a", out_a).run(
        _merge, _MERGE, (out_a, lse_a, out_b, lse_b, out, lse), stream=stream
    )
    return merged


def _pool(caches: Sequence[LayerCache]) -> tuple[LayerCache, ...]:
    if not isinstance(caches, Sequence):
        raise TypeError(f"caches: {type(caches).__name__}, expected a sequence of LayerCache")
    return tuple(caches)


def _copy(backend: DeviceBackend, caches: Sequence[LayerCache], copies: Array) -> None:
    backend.copy_blocks(caches, copies)


def copy_blocks(caches: Sequence[LayerCache], copies: Array, *, stream: object = None) -> None:
    """Copy whole blocks in every cache, scales included; copies int32 [m, 2] of (source, destination). One launch."""
    pool = _pool(caches)
    if pool:
        dispatcher_for("copies", copies).run(_copy, ("copies",), (copies,), pool=pool, stream=stream)


def _move(backend: DeviceBackend, caches: Sequence[LayerCache], moves: Array, move_start: Array) -> None:
    backend.move_slots(caches, moves, move_start)


def move_slots(
    caches: Sequence[LayerCache], moves: Array, move_start: Array, *, stream: object = None
) -> None:
    """Copy tokens from slot to slot in every cache; see `DeviceBackend.move_slots`. One launch."""
    pool = _pool(caches)
    if pool:
        dispatcher_for("moves", moves).run(
            _move, ("moves", "move_start"), (moves, move_start), pool=pool, stream=stream
        )


def _gather(
    backend: DeviceBackend, cache: LayerCache, block_table: Array, seq_len: int, dtype: str
) -> tuple[Array, Array]:
    return backend.gather(cache, block_table, seq_len, dtype=dtype)


def gather_kv(
    cache: LayerCache, block_table: Array, seq_len: int, *, dtype: str = "float32", stream: object = None
) -> tuple[Array, Array]:
    """The first seq_len tokens of a sequence as new contiguous K and V, dequantised; see `Backend.gather`.

    dtype: "float32", "float16" or "bfloat16". One launch.
    """
    rows: tuple[Array, Array] = dispatcher_for("block_table", block_table).run(
        _gather, ("block_table",), (block_table,), (seq_len, dtype), cache=cache, stream=stream
    )
    return rows


def _quantize(
    backend: DeviceBackend, x: Array, scale: Array | None, kv_format: Format | str, number: float | str | None
) -> Encoded:
    given = scale if scale is not None else number
    if given is None:
        raise TypeError("scale is None: expected 'amax', a number or an array")
    return backend.quantize(x, kv_format, given)


def quantize(
    x: Array, kv_format: Format | str, scale: Array | float | str, *, stream: object = None
) -> Encoded:
    """8-bit codes of x [num_tokens, num_heads, dim] with what was lost per head; see `Backend.quantize`.

    scale: "amax" computes it; else a number, or a float32 array of the format's shape. There is no default: a scale of
    1.0 that nobody chose clips in silence. `amax` and `num_clipped` of the result tell, without waiting for the device.
    """
    plain = isinstance(scale, (str, int, float))
    encoded: Encoded = dispatcher_for("x", x).run(
        _quantize,
        ("x", "scale"),
        (x, None if plain else scale),
        (kv_format, scale if plain else None),
        stream=stream,
    )
    return encoded


def _dequantize(
    backend: DeviceBackend, codes: Array, scale: Array, kv_format: Format | str, dtype: str
) -> Array:
    return backend.dequantize(codes, kv_format, scale, dtype=dtype)


def dequantize(
    codes: Array, kv_format: Format | str, scale: Array, *, dtype: str = "float32", stream: object = None
) -> Array:
    """Values [num_tokens, num_heads, dim] of what `quantize` gave; codes of an FP8 dtype or its bytes. One launch."""
    return dispatcher_for("codes", codes).run(
        _dequantize, ("codes", "scale"), (codes, scale), (kv_format, dtype), stream=stream
    )


def first_error(array: Array) -> str | None:
    """The first wrong value that a kernel skipped since this was last asked, or None; waits for the array's device.

    array: any of those that the calls were given; it says which device and library.
    """
    dispatcher = dispatcher_for("array", array)
    return dispatcher.planner(dispatcher.library.device_of("array", array)).first_error()


def warmup(config: CacheConfig | None = None, device: int | None = None) -> int:
    """Load the kernels that a cache of a config may launch, or all, onto a device; returns how many were compiled.

    Before a capture, and so that no request waits for a compiler. device: None is CuPy's current one. Seconds of CPU
    time for each kernel that no cache has.
    """
    launcher = launcher_of(device)
    num_compiled = launcher.warmup() if config is None else launcher.warmup(instances_for(config))
    for library in libraries_in_use():
        dispatcher_of(library).planner(launcher.device)  # its report of errors, for all streams
    return num_compiled
