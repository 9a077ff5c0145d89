"""What each layer of a model caches, read from the fields of its configuration: one reader for each rule.

Owns the readers and the names that fields go by. A reader gives, for each decoder layer, the caches that the layer
owns; a layer that reads the cache of another owns none.
"""

from collections.abc import Callable, Sequence
from typing import Final

from kvblocks.planner import recurrent
from kvblocks.planner.fields import Fields
from kvblocks.planner.model import Attention, Cache, State

Layers = Sequence[tuple[Cache, ...]]

NUM_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
NUM_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
NUM_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
HEAD_DIM: Final = ("head_dim", "attention_head_dim", "kv_channels")

_MOST_LAYERS: Final = 10_000

# Names of layer types, in configurations of all ages.
_FULL: Final = ("full_attention", "attention", "global_attention", "indexed_attention")
_SLIDING: Final = ("sliding_attention", "local_attention")
_CHUNKED: Final = ("chunked_attention",)
_RECURRENT: Final = ("linear_attention", "mamba", "recurrent", "conv")
_BOTH: Final = ("hybrid",)
_NOTHING: Final = ("mlp", "moe")


def num_layers(fields: Fields) -> int:
    """Decoder layers."""
    number = fields.integer(*NUM_LAYERS)
    if number > _MOST_LAYERS:
        raise fields.error(f"{NUM_LAYERS[0]} is {number}: expected at most {_MOST_LAYERS}")
    return number


def num_query_heads(fields: Fields) -> int:
    """Query heads; 1 for a model that has no attention at all."""
    return fields.optional_integer(*NUM_HEADS) or 1


def head_dim(fields: Fields) -> int:
    """Elements of a row of K: as the configuration says, else hidden size / query heads."""
    explicit = fields.optional_integer(*HEAD_DIM)
    if explicit is not None:
        return explicit
    hidden, heads = fields.integer(*HIDDEN), fields.integer(*NUM_HEADS)
    if hidden % heads:
        raise fields.error(f"no field head_dim, and hidden size {hidden} does not divide by {heads} heads")
    return hidden // heads


def attention(fields: Fields, num_kv_heads: int | None = None) -> Attention:
    """Full attention: MHA, GQA or MQA, where absent KV heads mean as many as query heads."""
    heads = fields.integer(*NUM_HEADS)
    kv_heads = num_kv_heads or fields.optional_integer(*NUM_KV_HEADS) or heads
    if heads % kv_heads:
        raise fields.error(f"num_key_value_heads is {kv_heads}: expected a divisor of {heads} query heads")
    key_dim = head_dim(fields)
    return Attention(kv_heads, key_dim, fields.optional_integer("v_head_dim") or key_dim)


def sliding(full: Attention, window: int | None) -> Attention:
    """The same rows, of which only those of the last `window` tokens are needed; None: of all."""
    if window is None:
        return full
    return Attention(full.num_kv_heads, full.key_dim, full.value_dim, window, "sliding window")


def window(fields: Fields) -> int | None:
    """Tokens of the sliding window, the newest included; None where it is switched off."""
    if fields.flag("use_sliding_window", True) is False:
        return None
    return fields.optional_integer("sliding_window", "attention_window_size")


def latent(fields: Fields) -> Attention:
    """Multi-head latent attention: one row of latent and rotary part, from which K and V of all heads are made."""
    rank, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    return Attention(1, rank + rope, 0, kind="latent (MLA)", is_latent=True)


def layer_kinds(fields: Fields, default: Callable[[int], str]) -> list[str]:
    """The type of each layer: the list in the configuration, else by the model type's rule for layer i."""
    count = num_layers(fields)
    for name in ("layer_types", "layers_block_type"):
        kinds = fields.items(name, str, count)
        if kinds is not None:
            return kinds
    return [default(index) for index in range(count)]


def by_kind(
    fields: Fields,
    kinds: Sequence[str],
    *,
    state: State | None = None,
    full: Attention | None = None,
    local: Attention | None = None,
) -> Layers:
    """What layers of these kinds own; the last `num_kv_shared_layers` read the cache of an earlier one."""
    full = full or attention(fields)
    local = local or sliding(full, window(fields))
    owned: dict[str, tuple[Cache, ...]] = dict.fromkeys(_FULL, (full,)) | dict.fromkeys(_NOTHING, ())
    owned |= dict.fromkeys(_SLIDING, (local,))
    if any(kind in _CHUNKED for kind in kinds):
        chunk = fields.integer("attention_chunk_size")
        chunked = Attention(full.num_kv_heads, full.key_dim, full.value_dim, chunk, "chunked attention")
        owned |= dict.fromkeys(_CHUNKED, (chunked,))
    if state is not None:
        owned |= dict.fromkeys(_RECURRENT, (state,)) | dict.fromkeys(_BOTH, (state, full))
    unknown = next((index for index, kind in enumerate(kinds) if kind not in owned), None)
    if unknown is not None:
        raise fields.error(
            f"layer {unknown} is {kinds[unknown]!r}: expected one of {', '.join(sorted(owned))}"
        )
    shared = fields.optional_integer("num_kv_shared_layers", minimum=0) or 0
    if shared >= len(kinds):
        raise fields.error(f"num_kv_shared_layers is {shared}: expected fewer than the {len(kinds)} layers")
    owners = len(kinds) - shared
    return [owned[kind] if index < owners else () for index, kind in enumerate(kinds)]


def _every(step: int, kind: str, other: str, *, first: int | None = None) -> Callable[[int], str]:
    """Layer `step` - 1 of every `step` layers (or layer `first`) is of a kind, the others of the other."""
    position = step - 1 if first is None else first
    return lambda index: kind if index % step == position else other


def uniform(fields: Fields) -> Layers:
    """Full attention in every layer, unless `layer_types` says otherwise."""
    return by_kind(fields, layer_kinds(fields, lambda _: "full_attention"))


def windowed(fields: Fields) -> Layers:
    """The sliding window in every layer, where there is one."""
    kind = "full_attention" if window(fields) is None else "sliding_attention"
    return by_kind(fields, layer_kinds(fields, lambda _: kind))


def upper_windowed(fields: Fields) -> Layers:
    """The sliding window from layer `max_window_layers` on."""
    first = num_layers(fields)
    if window(fields) is not None:
        first = fields.integer("max_window_layers", minimum=0)
    return by_kind(
        fields, layer_kinds(fields, lambda i: "sliding_attention" if i >= first else "full_attention")
    )


def lower_windowed(fields: Fields) -> Layers:
    """The sliding window in the even layers below `max_window_layers`."""
    end = fields.integer("max_window_layers", minimum=0) if window(fields) is not None else 0
    return by_kind(
        fields,
        layer_kinds(fields, lambda i: "sliding_attention" if i % 2 == 0 and i < end else "full_attention"),
    )


def alternating(fields: Fields) -> Layers:
    """The sliding window in all but every n-th layer; a pattern in letters, such as LLLG, gives its length."""
    step = fields.find("sliding_window_pattern", "global_attn_every_n_layers")
    if isinstance(step, str):
        step = len(step)
    elif step is not None:
        step = fields.integer("sliding_window_pattern", "global_attn_every_n_layers")
    if window(fields) is None or not step:
        return uniform(fields)
    return by_kind(fields, layer_kinds(fields, _every(step, "full_attention", "sliding_attention")))


def first_of_four_full(fields: Fields) -> Layers:
    """Full attention in the first of every four layers, the sliding window in the others."""
    return by_kind(fields, layer_kinds(fields, _every(4, "full_attention", "sliding_attention", first=0)))


def gemma4(fields: Fields) -> Layers:
    """Full layers have heads of their own, wider and fewer; where K and V are equal, both are still stored."""
    local = attention(fields)
    kv_heads = (
        fields.optional_integer("num_global_key_value_heads")
        if fields.flag("attention_k_eq_v", False)
        else None
    )
    # Where layers have fields of their own, the head dimension of full layers is one of those.
    by_layer = fields.find("per_layer_config") is not None
    wide = local.key_dim if by_layer else fields.optional_integer("global_head_dim") or local.key_dim
    full = Attention(kv_heads or local.num_kv_heads, wide, wide)
    kinds = layer_kinds(fields, _every(6, "full_attention", "sliding_attention"))
    return by_kind(fields, [*kinds[:-1], "full_attention"], full=full, local=sliding(local, window(fields)))


def mimo(fields: Fields) -> Layers:
    """Sliding layers have heads of their own; the pattern marks them with 1.

    `sliding_window_size` counts the tokens before the newest one, which `sliding_window` includes.
    """
    full = attention(fields)
    narrow = Attention(
        fields.optional_integer("swa_num_key_value_heads") or full.num_kv_heads,
        fields.optional_integer("swa_head_dim") or full.key_dim,
        fields.optional_integer("swa_v_head_dim") or full.value_dim,
    )
    pattern = fields.items("hybrid_layer_pattern", int, num_layers(fields))
    kinds = layer_kinds(
        fields,
        lambda i: ("full_attention", "sliding_attention")[bool(pattern[i] if pattern else i and (i + 1) % 6)],
    )
    before = fields.optional_integer("sliding_window_size")
    span = fields.integer("sliding_window") if before is None else before + 1
    return by_kind(fields, kinds, full=full, local=sliding(narrow, span))


def llama4(fields: Fields) -> Layers:
    """Chunked attention in the layers with rotary positions: all but every fourth, or as `no_rope_layers` says."""
    if fields.find("attention_chunk_size") is None:
        return uniform(fields)
    rotary = fields.items("no_rope_layers", int)
    if not rotary:
        step = fields.integer("no_rope_layer_interval")
        rotary = [int((index + 1) % step != 0) for index in range(num_layers(fields))]
    if len(rotary) != num_layers(fields):
        raise fields.error(f"no_rope_layers has {len(rotary)} items: expected {num_layers(fields)}")
    return by_kind(
        fields,
        layer_kinds(fields, lambda i: "chunked_attention" if rotary[i] else "full_attention"),
    )


def falcon(fields: Fields) -> Layers:
    """The new decoder has `num_kv_heads`; the old one has a single KV head with `multi_query`, whatever else stands."""
    if fields.flag("new_decoder_architecture", False):
        rows = attention(fields)
    elif fields.flag("multi_query", True):
        rows = attention(fields, 1)
    else:
        rows = attention(fields, fields.integer(*NUM_HEADS))
    return [(rows,)] * num_layers(fields)


def multi_query(fields: Fields) -> Layers:
    """A single KV head with `multi_query`, else as many as query heads."""
    rows = attention(fields, 1 if fields.flag("multi_query", True) else fields.integer(*NUM_HEADS))
    return [(rows,)] * num_layers(fields)


def chatglm(fields: Fields) -> Layers:
    """`multi_query_group_num` KV heads with `multi_query_attention`, else as many as query heads."""
    grouped = fields.flag("multi_query_attention", False)
    return [(attention(fields, None if grouped else fields.integer(*NUM_HEADS)),)] * num_layers(fields)


def attn_config(fields: Fields) -> Layers:
    """KV heads in `attn_config`; multi-query has one."""
    inner = Fields({}, fields.source) if fields.find("attn_config") is None else fields.nested("attn_config")
    single = inner.find("attn_type") == "multiquery_attention"
    kv_heads = 1 if single else inner.optional_integer("kv_n_heads")
    return [(attention(fields, kv_heads),)] * num_layers(fields)


def searched(fields: Fields) -> Layers:
    """Layers found by a search: `block_configs` has the query heads of a group, or no attention, for each of them."""
    blocks = fields.items("block_configs", dict, num_layers(fields))
    if blocks is None:
        raise fields.error("no field block_configs: expected an object for each layer")
    layers: list[tuple[Cache, ...]] = []
    for index, block in enumerate(blocks):
        inner = Fields(block, f"{fields.source}: block_configs[{index}]").nested("attention")
        if inner.flag("no_op", False) or inner.flag("replace_with_linear", False):
            layers.append(())
        else:
            group = inner.integer("n_heads_in_group")
            layers.append((attention(fields, num_query_heads(fields) // group),))
    return layers


def cross_layer(fields: Fields) -> Layers:
    """Cross-layer attention: of every `cla_share_factor` layers the first owns the cache."""
    step = fields.integer("cla_share_factor") if fields.flag("use_cla", False) else 1
    rows = attention(fields)
    return [(rows,) if index % step == 0 else () for index in range(num_layers(fields))]


def mla(fields: Fields) -> Layers:
    """Latent attention in every layer."""
    return [(latent(fields),)] * num_layers(fields)


def double_mla(fields: Fields) -> Layers:
    """Two latent attentions in every layer."""
    return [(latent(fields), latent(fields))] * num_layers(fields)


def sparse_mla(fields: Fields) -> Layers:
    """Latent rows, and the indexer's keys: float8 with one float32 scale a row."""
    dim = fields.integer("index_head_dim")
    keys = Attention(1, dim, 0, kind="indexer keys", is_latent=True, bytes_per_token=dim + 4)
    return [(latent(fields), keys)] * num_layers(fields)


def jamba(fields: Fields) -> Layers:
    """Attention at an offset in every period of layers, Mamba in the others."""
    period, offset = fields.integer("attn_layer_period"), fields.integer("attn_layer_offset", minimum=0)
    kinds = layer_kinds(fields, _every(period, "attention", "mamba", first=offset))
    return by_kind(fields, kinds, state=recurrent.mamba(fields))


def bamba(fields: Fields) -> Layers:
    """Attention in the layers that `attn_layer_indices` lists, Mamba-2 in the others."""
    full = fields.items("attn_layer_indices", int) or []
    kinds = layer_kinds(fields, lambda i: "attention" if i in full else "mamba")
    return by_kind(fields, kinds, state=recurrent.mamba2(fields))


def granite_hybrid(fields: Fields) -> Layers:
    """Attention and Mamba-2 as `layer_types` says; Mamba-2 alone without it."""
    return by_kind(fields, layer_kinds(fields, lambda _: "mamba"), state=recurrent.mamba2(fields))


def parallel_hybrid(fields: Fields) -> Layers:
    """Attention and Mamba-2 side by side in every layer."""
    return by_kind(fields, ["hybrid"] * num_layers(fields), state=recurrent.mamba2(fields))


def nemotron_h(fields: Fields) -> Layers:
    """A pattern in letters: M Mamba-2, * attention, - and E layers without a cache."""
    pattern = fields.find("hybrid_override_pattern")
    letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    if pattern is None:
        kinds = fields.items("layers_block_type", str) or fields.items("layer_types", str)
        if kinds is None:
            raise fields.error("no field hybrid_override_pattern or layers_block_type: expected the layers")
    elif isinstance(pattern, str) and set(pattern) <= set(letters):
        kinds = [letters[letter] for letter in pattern]
    else:
        raise fields.error(f"hybrid_override_pattern is {pattern!r}: expected letters of {''.join(letters)}")
    return by_kind(fields, kinds, state=recurrent.mamba2(fields))


def zamba2(fields: Fields) -> Layers:
    """Shared attention blocks read the hidden state and the embedding side by side: heads twice as wide."""
    heads = fields.integer(*NUM_HEADS)
    dim = 2 * fields.integer("hidden_size") // heads
    full = Attention(fields.optional_integer(*NUM_KV_HEADS) or heads, dim, dim)
    ids = fields.items("hybrid_layer_ids", int) or []
    kinds = layer_kinds(fields, lambda i: "hybrid" if i in ids else "mamba")
    return by_kind(fields, kinds, state=recurrent.mamba2(fields), full=full)


def delta_hybrid(fields: Fields) -> Layers:
    """Full attention in the last of every few layers, a gated delta network in the others."""
    kinds = layer_kinds(
        fields, _every(fields.integer("full_attention_interval"), "full_attention", "linear_attention")
    )
    return by_kind(fields, kinds, state=recurrent.gated_delta_net(fields))


def minimax(fields: Fields) -> Layers:
    """`attn_type_list` marks attention with 1 and linear attention with 0."""
    marks = fields.items("attn_type_list", int, num_layers(fields))
    kinds = layer_kinds(
        fields, lambda i: "full_attention" if (marks[i] if marks else i % 2 == 0) else "linear_attention"
    )
    return by_kind(fields, kinds, state=recurrent.lightning(fields))


def kimi_linear(fields: Fields) -> Layers:
    """Layers with latent attention are numbered from 1."""
    count = num_layers(fields)
    if fields.find("linear_attn_config") is not None:
        full = fields.nested("linear_attn_config").items("full_attn_layers", int) or []
        kinds = ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]
    else:
        kinds = layer_kinds(fields, _every(4, "full_attention", "linear_attention"))
    return by_kind(fields, kinds, state=recurrent.kimi_delta(fields), full=latent(fields))


def short_convolutions(fields: Fields) -> Layers:
    """Attention in the layers that `full_attn_idxs` lists, short convolutions in the others."""
    full = fields.items("full_attn_idxs", int)
    kinds = layer_kinds(fields, lambda i: "full_attention" if full is None or i in full else "conv")
    return by_kind(fields, kinds, state=recurrent.short_convolution(fields))


def recurrent_gemma(fields: Fields) -> Layers:
    """A repeated pattern of gated recurrences and attention in a sliding window."""
    pattern = fields.items("block_types", str) or ["recurrent", "recurrent", "attention"]
    kinds = [pattern[index % len(pattern)] for index in range(num_layers(fields))]
    names = ["sliding_attention" if kind == "attention" else kind for kind in kinds]
    return by_kind(fields, names, state=recurrent.gated_recurrence(fields))


def decoder_decoder(fields: Fields) -> Layers:
    """Half Mamba and sliding windows in turn, then one Mamba and one full layer, whose cache the rest reads."""
    half = num_layers(fields) // 2
    full, state = attention(fields), recurrent.mamba(fields)
    span = fields.find("sliding_window")
    if isinstance(span, list):
        span = next((item for item in span if type(item) is int), None)
        fields = Fields({**fields.values, "sliding_window": span}, fields.source, fields.defaults)
    local = sliding(full, window(fields))
    lower = [(state,) if index % 2 == 0 else (local,) for index in range(half)]
    return [*lower, (state,), (full,), *[()] * (num_layers(fields) - half - 2)]


def only_state(state: Callable[[Fields], State]) -> Callable[[Fields], Layers]:
    """A state of one kind in every layer, and no attention."""
    return lambda fields: [(state(fields),)] * num_layers(fields)
