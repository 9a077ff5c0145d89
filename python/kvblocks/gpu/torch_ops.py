"""The direct calls as operators of torch: `torch.ops.kvblocks.*`, for torch.compile, torch.export and CUDA graphs.

Owns the operators' schemas, their fake versions (shapes and dtypes without data) and their CPU versions. Imports torch,
the direct calls and the host backends; importing this module registers the operators.
Invariant: an operator takes tensors and plain values only and makes its `LayerCache` out of them, so that a traced
graph holds nothing else; what it writes into stands in its schema as mutated. On a GPU it is the call of `calls`, on
the host that of the `cpu` backend, or of `numpy` for a format that `cpu` lacks.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvblocks.backends import Backend, get_backend
from kvblocks.backends.expect import check_moves
from kvblocks.backends.foreign import DeviceArray, look_at
from kvblocks.backends.geometry import block_arrays
from kvblocks.formats import Format, KVFormat, parse_format
from kvblocks.gpu import calls
from kvblocks.layout import LayerCache

_DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_BITS: Final = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_MOST_CACHES: Final = 1024
_caches: OrderedDict[object, LayerCache] = OrderedDict()


def _layer_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_format: str,
    layout: str,
) -> LayerCache:
    """The cache of these tensors; the same object for the same memory, of which it holds nothing alive."""
    tensors = {"k": k_cache, "v": v_cache, "k_scale": k_scale, "v_scale": v_scale}
    given = {name: each for name, each in tensors.items() if each is not None}
    key = (
        kv_format,
        layout,
        *((name, t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in given.items()),
    )
    found = _caches.get(key)
    if found is not None:
        return found
    arrays: dict[str, Any] = {}
    for name, tensor in given.items():
        if tensor.is_cuda:
            seen = look_at(name, tensor)
            arrays[name] = DeviceArray(None, seen.address, seen.shape, seen.strides, seen.dtype, seen.device)
        else:
            arrays[name] = _host(tensor)
    if k_cache.is_cuda:
        made = calls.layer_cache(arrays.pop("k"), arrays.pop("v"), kv_format, layout=layout, **arrays)
        while len(_caches) >= _MOST_CACHES:
            _caches.popitem(last=False)
        _caches[key] = made
        return made
    block_size = k_cache.shape[1 if layout == "NHD" else 2]
    return LayerCache(format=KVFormat.parse(kv_format), block_size=block_size, layout=layout, **arrays)


def _pool(
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
    k_scales: Sequence[Tensor],
    v_scales: Sequence[Tensor],
    kv_format: str,
    layout: str,
) -> list[LayerCache]:
    for name, given in (("v_caches", v_caches), ("k_scales", k_scales), ("v_scales", v_scales)):
        if len(given) != len(k_caches) and (given or name == "v_caches"):
            raise ValueError(f"{name}: {len(given)} tensors, k_caches has {len(k_caches)}")
    none: Sequence[Tensor | None] = [None] * len(k_caches)
    parts = zip(k_caches, v_caches, k_scales or none, v_scales or none, strict=True)
    return [_layer_cache(*part, kv_format, layout) for part in parts]


def _host(tensor: Tensor) -> NDArray[Any]:
    """A tensor's memory as a NumPy array."""
    bits = _BITS.get(tensor.dtype)
    array: NDArray[Any] = (tensor.detach() if bits is None else tensor.detach().view(bits)).numpy()
    return array


def _host_or_none(tensor: Tensor | None) -> NDArray[Any] | None:
    return None if tensor is None else _host(tensor)


def _tensor(array: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype is not None and tensor.dtype != dtype else tensor


@cache
def _cpu(kv_format: str) -> Backend:
    """The fastest host backend that has a format of a cache."""
    parts, backend = KVFormat.parse(kv_format), get_backend("cpu")
    supported = backend.supported()
    listed = str(parts.k) in supported.k_formats and str(parts.v) in supported.v_formats
    return backend if listed else get_backend("numpy")


@cache
def _codec(part: Format) -> Backend:
    """The fastest host backend that has a format of K or V."""
    backend = get_backend("cpu")
    return backend if str(part) in backend.supported().k_formats else get_backend("numpy")


def _eight_bits(kv_format: str) -> Format:
    """The format of codes of 8 bits, which have no more than a scale. Raises ValueError for another one."""
    part = parse_format(kv_format, "k")
    if part.bits != 8:
        raise ValueError(f"kv_format is {kv_format!r}: expected a format of 8 bits")
    return part


def _storage(part: Format) -> torch.dtype:
    """The dtype in which codes come back."""
    dtypes = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    return dtypes.get(part.name, torch.int8)


@torch.library.custom_op("kvblocks::write_kv", mutates_args=("k_cache", "v_cache", "k_scale", "v_scale"))
def write_kv(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_format: str,
    layout: str = "NHD",
) -> None:
    """See `calls.write_kv`; the pool's tensors in place of a cache."""
    cache_ = _layer_cache(k_cache, v_cache, k_scale, v_scale, kv_format, layout)
    if k.is_cuda:
        calls.write_kv(cache_, k, v, slot_mapping)
    else:
        _cpu(kv_format).write(cache_, _host(k), _host(v), _host(slot_mapping))


@write_kv.register_fake
def _(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_format: str,
    layout: str = "NHD",
) -> None:
    return None


@torch.library.custom_op("kvblocks::paged_attention", mutates_args=())
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    kv_format: str,
    layout: str = "NHD",
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    split_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `calls.paged_attention`; returns (out, lse)."""
    cache_ = _layer_cache(k_cache, v_cache, k_scale, v_scale, kv_format, layout)
    index = block_tables, seq_lens, query_start_loc
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    per_head = {"sinks": sinks, "alibi_slopes": alibi_slopes}
    return _attend(cache_, v_cache.shape[-1], q, index, options, per_head, split_size)


def _attend(
    cache_: LayerCache,
    head_dim_v: int,
    q: Tensor,
    index: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
    per_head: dict[str, Tensor | None],
    split_size: int | None,
) -> tuple[Tensor, Tensor]:
    """New (out, lse) of attention over a cache, on the device of q."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    out = torch.empty((*q.shape[:2], head_dim_v), dtype=q.dtype, device=q.device)
    tables, lens, starts = index
    given: dict[str, Any] = options | per_head
    if q.is_cuda:
        calls.paged_attention(
            cache_, q, tables, lens, starts, **given, out=out, lse=lse, split_size=split_size
        )
        return out, lse
    given |= {name: _host_or_none(each) for name, each in per_head.items()}
    given |= {"out": _host(out), "lse": _host(lse)}
    _cpu(str(cache_.format)).attend(cache_, _host(q), _host(tables), _host(lens), _host(starts), **given)
    return out, lse


@paged_attention.register_fake
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    kv_format: str,
    layout: str = "NHD",
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    split_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:2], v_cache.shape[-1])), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("kvblocks::write_latents", mutates_args=("latents", "scale"))
def write_latents(
    compressed: Tensor,
    rotary: Tensor,
    slot_mapping: Tensor,
    latents: Tensor,
    scale: Tensor | None,
    kv_format: str,
) -> None:
    """See `latents.write_latents`; latents: the pool [num_blocks, block_size, 576]."""
    dim, whole = compressed.shape[-1], latents.unsqueeze(2)
    cache_ = _layer_cache(whole[..., :dim], whole[..., dim:], scale, scale, kv_format, "NHD")
    k, v = compressed.unsqueeze(1), rotary.unsqueeze(1)
    if compressed.is_cuda:
        calls.write_kv(cache_, k, v, slot_mapping)
    else:
        _cpu(kv_format).write(cache_, _host(k), _host(v), _host(slot_mapping))


@write_latents.register_fake
def _(
    compressed: Tensor,
    rotary: Tensor,
    slot_mapping: Tensor,
    latents: Tensor,
    scale: Tensor | None,
    kv_format: str,
) -> None:
    return None


@torch.library.custom_op("kvblocks::mla_decode", mutates_args=())
def mla_decode(
    q: Tensor,
    latents: Tensor,
    latent_scale: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    kv_format: str,
    scale: float,
    head_dim_v: int = 512,
    split_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `latents.mla_decode`; latents: the pool [num_blocks, block_size, 576]. Returns (out, lse)."""
    whole = latents.unsqueeze(2)
    cache_ = _layer_cache(whole, whole[..., :head_dim_v], latent_scale, latent_scale, kv_format, layout="NHD")
    index = block_tables, seq_lens, query_start_loc
    return _attend(cache_, head_dim_v, q, index, {"scale": scale}, {}, split_size)


@mla_decode.register_fake
def _(
    q: Tensor,
    latents: Tensor,
    latent_scale: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    kv_format: str,
    scale: float,
    head_dim_v: int = 512,
    split_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:2], head_dim_v)), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("kvblocks::merge_states", mutates_args=())
def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """See `calls.merge_states`."""
    if out_a.is_cuda:
        return calls.merge_states(out_a, lse_a, out_b, lse_b)
    out, lse = _cpu("float32").merge_states(*map(_host, (out_a, lse_a, out_b, lse_b)))
    return _tensor(out, out_a.dtype), _tensor(lse)


@merge_states.register_fake
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


@torch.library.custom_op(
    "kvblocks::copy_blocks", mutates_args=("k_caches", "v_caches", "k_scales", "v_scales")
)
def copy_blocks(
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
    k_scales: Sequence[Tensor],
    v_scales: Sequence[Tensor],
    copies: Tensor,
    kv_format: str,
    layout: str = "NHD",
) -> None:
    """See `calls.copy_blocks`; the scales of all layers or, where the format has none, of no layer."""
    pool = _pool(k_caches, v_caches, k_scales, v_scales, kv_format, layout)
    if copies.is_cuda:
        calls.copy_blocks(pool, copies)
    else:
        _cpu(kv_format).copy_blocks(pool, _host(copies))


@copy_blocks.register_fake
def _(
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
    k_scales: Sequence[Tensor],
    v_scales: Sequence[Tensor],
    copies: Tensor,
    kv_format: str,
    layout: str = "NHD",
) -> None:
    return None


@torch.library.custom_op(
    "kvblocks::move_slots", mutates_args=("k_caches", "v_caches", "k_scales", "v_scales")
)
def move_slots(
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
    k_scales: Sequence[Tensor],
    v_scales: Sequence[Tensor],
    moves: Tensor,
    move_start: Tensor,
    kv_format: str,
    layout: str = "NHD",
) -> None:
    """See `calls.move_slots`; the pool's tensors as for `copy_blocks`."""
    pool = _pool(k_caches, v_caches, k_scales, v_scales, kv_format, layout)
    if moves.is_cuda:
        calls.move_slots(pool, moves, move_start)
    else:
        _move_on_host(pool, _host(moves), _host(move_start))


@move_slots.register_fake
def _(
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
    k_scales: Sequence[Tensor],
    v_scales: Sequence[Tensor],
    moves: Tensor,
    move_start: Tensor,
    kv_format: str,
    layout: str = "NHD",
) -> None:
    return None


def _move_on_host(pool: Sequence[LayerCache], moves: NDArray[Any], move_start: NDArray[Any]) -> None:
    """The moves in their order; host backends have no such call. Raises what `DeviceBackend.move_slots` does."""
    check_moves(moves, move_start)
    if len(move_start) < 2 or len(moves) == 0 or not pool:
        return
    starts = move_start.tolist()
    if starts != sorted(starts) or starts[0] < 0 or starts[-1] > len(moves):
        raise ValueError(f"move_start is {starts}: expected to ascend within 0..{len(moves)}, the moves")
    first, end = (int(move_start[at]) for at in (0, -1))
    for cache_ in pool:
        if moves.max() >= cache_.num_slots:
            raise ValueError(
                f"moves: slot {moves.max()}, expected below the cache's {cache_.num_slots} slots"
            )
        for array in block_arrays(cache_):
            for source, destination in moves[first:end].tolist():
                if source >= 0 and destination >= 0:
                    array[divmod(destination, cache_.block_size)] = array[divmod(source, cache_.block_size)]


@torch.library.custom_op("kvblocks::gather_kv", mutates_args=())
def gather_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_table: Tensor,
    seq_len: int,
    kv_format: str,
    layout: str = "NHD",
) -> tuple[Tensor, Tensor]:
    """See `calls.gather_kv`; float32 rows."""
    cache_ = _layer_cache(k_cache, v_cache, k_scale, v_scale, kv_format, layout)
    if block_table.is_cuda:
        return calls.gather_kv(cache_, block_table, seq_len)
    k, v = _cpu(kv_format).gather(cache_, _host(block_table), seq_len)
    return _tensor(k), _tensor(v)


@gather_kv.register_fake
def _(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_table: Tensor,
    seq_len: int,
    kv_format: str,
    layout: str = "NHD",
) -> tuple[Tensor, Tensor]:
    num_heads = k_cache.shape[2 if layout == "NHD" else 1]
    k, v = (
        pool.new_empty((seq_len, num_heads, pool.shape[-1]), dtype=torch.float32)
        for pool in (k_cache, v_cache)
    )
    return k, v


@torch.library.custom_op("kvblocks::quantize", mutates_args=())
def quantize(x: Tensor, scale: Tensor | None, kv_format: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `calls.quantize`; returns (codes, scale, amax, num_clipped). scale: None computes it."""
    part = _eight_bits(kv_format)
    if x.is_cuda:
        encoded = calls.quantize(x, kv_format, "amax" if scale is None else scale)
        codes, used, _, amax, clipped = encoded
        # What an operator returns is no argument of it.
        return codes.view(_storage(part)), torch.clone(used) if scale is not None else used, amax, clipped
    encoded = _codec(part).quantize(_host(x), kv_format, "amax" if scale is None else _host(scale))
    codes, used, _, amax, clipped = encoded
    return _tensor(codes, _storage(part)), _tensor(np.array(used)), _tensor(amax), _tensor(clipped)


@quantize.register_fake
def _(x: Tensor, scale: Tensor | None, kv_format: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    part = _eight_bits(kv_format)
    num_tokens, num_heads, dim = x.shape
    shapes = {
        "tensor": (1,),
        "head": (num_heads,),
        "channel": (num_heads, dim),
        "token_head": (num_tokens, num_heads),
    }
    return (
        x.new_empty(x.shape, dtype=_storage(part)),
        x.new_empty(shapes[part.scaling], dtype=torch.float32),
        x.new_empty((num_heads,), dtype=torch.float32),
        x.new_empty((num_heads,), dtype=torch.int64),
    )


@torch.library.custom_op("kvblocks::dequantize", mutates_args=())
def dequantize(codes: Tensor, scale: Tensor, kv_format: str) -> Tensor:
    """See `calls.dequantize`; float32 values."""
    if codes.is_cuda:
        values: Tensor = calls.dequantize(codes, kv_format, scale)
        return values
    return _tensor(_codec(_eight_bits(kv_format)).dequantize(_host(codes), kv_format, _host(scale)))


@dequantize.register_fake
def _(codes: Tensor, scale: Tensor, kv_format: str) -> Tensor:
    return codes.new_empty(codes.shape, dtype=torch.float32)
