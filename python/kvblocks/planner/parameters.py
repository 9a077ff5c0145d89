"""How many parameters a language model has, counted from its configuration.

Owns the count for the families whose layers are spelled out here; it is exact for them, which the tests check against
published sizes. Other families have none: whoever asks gives the size of the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvblocks.planner import readers
from kvblocks.planner.architectures import ARCHITECTURES
from kvblocks.planner.fields import Fields
from kvblocks.planner.model import Model


@dataclass(frozen=True)
class Family:
    """What distinguishes a decoder with a gated MLP from Llama's.

    num_norms: vectors of hidden size in a layer; head_norms: norms of Q and K over head_dim; qkv_bias: always there,
    else with the field `attention_bias`; is_tied: whether the output reads the embedding where no field says so.
    """

    num_norms: int = 2
    head_norms: bool = False
    qkv_bias: bool = False
    is_tied: bool = False
    has_sinks: bool = False


FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "phi3": Family(),
    "granite": Family(),
    "smollm3": Family(is_tied=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(head_norms=True),
    "qwen3_moe": Family(head_norms=True),
    "gemma": Family(is_tied=True),
    "gemma2": Family(num_norms=4, is_tied=True),
    "gemma3": Family(num_norms=4, head_norms=True, is_tied=True),
    "cohere": Family(num_norms=1, is_tied=True),
    "gpt_oss": Family(has_sinks=True),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(),
}


def count_parameters(model: Model, source: str) -> int | None:
    """Parameters of the language model, its embeddings included; None for a family that is not spelled out."""
    name = model.model_type.removesuffix("_text")
    architecture = ARCHITECTURES.get(name)
    fields = Fields(model.fields, source, architecture.defaults if architecture else None)
    if name == "gpt2":
        return _gpt2(fields)
    family = FAMILIES.get(name)
    if family is None:
        return None
    hidden, layers = fields.integer("hidden_size"), readers.num_layers(fields)
    embedding = fields.integer("vocab_size") * hidden
    total = embedding * (1 if fields.flag("tie_word_embeddings", family.is_tied) else 2) + hidden
    attention = _latent_attention(fields) if fields.find("kv_lora_rank") else _attention(fields, family)
    mlps = sum(_mlp(fields, layer) for layer in range(layers))
    return total + layers * (attention + family.num_norms * hidden) + mlps


def _attention(fields: Fields, family: Family) -> int:
    hidden, heads, dim = (
        fields.integer("hidden_size"),
        readers.num_query_heads(fields),
        readers.head_dim(fields),
    )
    kv_rows = readers.attention(fields).num_kv_heads * dim
    rows = heads * dim
    count = 2 * hidden * (rows + kv_rows)
    biased = fields.flag("attention_bias", False)
    if family.qkv_bias or biased:
        count += rows + 2 * kv_rows
    if biased:
        count += hidden
    if family.head_norms:
        count += 2 * dim
    if fields.flag("use_qk_norm", False):
        count += rows + kv_rows
    return count + (heads if family.has_sinks else 0)


def _latent_attention(fields: Fields) -> int:
    hidden, heads, rank = (
        fields.integer("hidden_size"),
        readers.num_query_heads(fields),
        fields.integer("kv_lora_rank"),
    )
    rope, nope = fields.integer("qk_rope_head_dim"), fields.integer("qk_nope_head_dim")
    value = fields.integer("v_head_dim")
    query = fields.optional_integer("q_lora_rank")
    rows = heads * (nope + rope)
    count = hidden * rows if query is None else hidden * query + query + query * rows
    return count + hidden * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * hidden


def _mlp(fields: Fields, layer: int) -> int:
    hidden = fields.integer("hidden_size")
    experts = fields.optional_integer("n_routed_experts", "num_local_experts", "num_experts")
    sparse = layer % (fields.optional_integer("decoder_sparse_step", "moe_layer_freq") or 1) == 0
    dense_first = fields.optional_integer("first_k_dense_replace", minimum=0) or 0
    if experts is None or layer < dense_first or not sparse:
        return 3 * hidden * fields.integer("intermediate_size")
    inner = fields.integer("moe_intermediate_size", "intermediate_size")
    count = experts * 3 * hidden * inner + experts * hidden
    count += 3 * hidden * inner * (fields.optional_integer("n_shared_experts", minimum=0) or 0)
    if fields.find("topk_method") == "noaux_tc":
        count += experts
    if fields.find("model_type") == "gpt_oss":
        count += experts * (2 * inner + hidden) + experts
    return count


def _gpt2(fields: Fields) -> int:
    """Learned positions, biases everywhere, an MLP four times as wide without a gate, two parameters a norm."""
    hidden = fields.integer("n_embd")
    embeddings = (fields.integer("vocab_size") + fields.integer("n_positions")) * hidden
    layer = 12 * hidden * hidden + 13 * hidden
    return embeddings + fields.integer("n_layer") * layer + 2 * hidden
