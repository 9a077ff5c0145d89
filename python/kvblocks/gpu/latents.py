"""Multi-head latent attention (MLA): one latent a token, of which the first elements are V, for all query heads.

Owns `latent_cache`, `write_latents` and `mla_decode`. Imports the direct calls and what runs them.
Invariant: K and V of a cache of latents start at the same address, by which kernels know that they may read them once.
"""

from typing import Any
from weakref import WeakKeyDictionary

from kvblocks.backends.device import DeviceBackend
from kvblocks.backends.foreign import DeviceArray, look_at
from kvblocks.config import as_integer
from kvblocks.formats import KVFormat
from kvblocks.gpu import calls
from kvblocks.gpu.dispatch import dispatcher_for
from kvblocks.layout import Array, LayerCache

# What the latents of a cache are written through: the part that is V, and the rest.
_PARTS: "WeakKeyDictionary[LayerCache, LayerCache]" = WeakKeyDictionary()


def latent_cache(
    latents: Array,
    kv_format: KVFormat | str,
    *,
    head_dim_v: int = 512,
    layout: str = "NHD",
    scale: Array | None = None,
) -> LayerCache:
    """A `LayerCache` over an engine's pool of latents, which it keeps alive.

    latents: [num_blocks, block_size, 576], or with an axis of one head as `layer_cache` has it; the first head_dim_v
    elements of a row are V, the rest is the rotary part of K. scale: of an FP8 or int8 format, for the whole latent.
    Make it once a layer. Raises ValueError for a format whose scale is a token's or a channel's own: the parts of a
    latent are written apart and share one scale.
    """
    parsed = KVFormat.parse(kv_format)
    if parsed.k.scaling in ("token_head", "channel"):
        raise ValueError(f"kv_format is {str(parsed)!r}: expected a dtype, or scales of a tensor or a head")
    whole = _with_head(look_at("latents", latents), layout)
    if as_integer(head_dim_v) is None or not 0 < head_dim_v < whole.shape[-1]:
        raise ValueError(f"head_dim_v is {head_dim_v!r}: expected 1..{whole.shape[-1] - 1}")
    first, rest = _columns(whole, 0, head_dim_v), _columns(whole, head_dim_v, whole.shape[-1])
    scales = {} if scale is None else {"k_scale": scale, "v_scale": scale}
    cache = calls.layer_cache(whole, first, parsed, layout=layout, **scales)
    _PARTS[cache] = calls.layer_cache(first, rest, parsed, layout=layout, **scales)
    return cache


def write_latents(
    cache: LayerCache, compressed: Array, rotary: Array, slot_mapping: Array, *, stream: object = None
) -> None:
    """Store new latents at their slots; see `write_kv`. One launch.

    cache: of `latent_cache`. compressed: [num_tokens, head_dim_v] and rotary: [num_tokens, the rest], or with an axis
    of one head.
    """
    parts = _PARTS.get(cache)
    if parts is None:
        raise ValueError("cache: expected one that latent_cache made")
    rows = [each[:, None] if len(each.shape) == 2 else each for each in (compressed, rotary)]
    calls.write_kv(parts, rows[0], rows[1], slot_mapping, stream=stream)


def _attend(backend: DeviceBackend, cache: LayerCache, *arguments: Any) -> Array:
    if cache.k.ctypes.data != cache.v.ctypes.data:
        raise ValueError("cache: expected latents, of which V is the first part, as latent_cache has them")
    return calls.attend_with(backend, cache, *arguments)


def mla_decode(
    cache: LayerCache,
    q: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start_loc: Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    split_size: int | None = None,
    workspace: Array | None = None,
    stream: object = None,
) -> Array:
    """Attention of absorbed queries over latents; see `paged_attention`. Returns `out` [num_tokens, heads, head_dim_v].

    q: [num_tokens, num_q_heads, 576], the queries times the up-projection of K beside their rotary part. scale: that of
    the model's full heads, which the latents' size does not tell: 192**-0.5 for DeepSeek. A latent is read once for K
    and V, on tensor cores for float16, bfloat16 and FP8 e4m3. One launch, or two where keys are split.
    """
    return dispatcher_for("q", q).run(
        _attend,
        calls.ATTEND_NAMES,
        (q, block_tables, seq_lens, query_start_loc, sinks, None, out, lse),
        (scale, window, soft_cap, split_size),
        cache,
        (),
        stream,
        workspace,
    )


def _with_head(seen: DeviceArray, layout: str) -> DeviceArray:
    """Latents with their axis of one head."""
    if seen.ndim != 3:
        return seen
    (blocks, tokens, dim), (step, token_step, element_step) = seen.shape, seen.strides
    middle = ((tokens, token_step), (1, token_step))
    (a, a_step), (b, b_step) = middle if layout == "NHD" else middle[::-1]
    shape, strides = (blocks, a, b, dim), (step, a_step, b_step, element_step)
    return seen.part(0, shape, strides)


def _columns(seen: DeviceArray, first: int, end: int) -> DeviceArray:
    return seen.part(first * seen.strides[-1], (*seen.shape[:-1], end - first), seen.strides)
