"""From a config.json to what a model caches, by the rules of its model type.

Owns the table of model types. Defaults are those of the model type's configuration class in Hugging Face transformers
5, and are recorded where they are used. A model type that is not in the table is refused, never guessed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvblocks.planner import readers, recurrent
from kvblocks.planner.fields import Fields, language_model
from kvblocks.planner.model import Model, collect
from kvblocks.report import UserError

_CONTEXT: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "seq_length")


@dataclass(frozen=True)
class Architecture:
    """How a model type is read: a function from its fields to what each layer owns, and the defaults of fields."""

    read: Callable[[Fields], readers.Layers]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def describe(config: Mapping[str, Any], source: str, model_type: str | None = None) -> Model:
    """What a model caches, from its configuration; `source` names that in errors.

    model_type: read it as this type instead of its own. Raises UserError for a type that is not known, and for
    fields that are missing or make no sense.
    """
    fields = language_model(config, source)
    name = model_type or fields.find("model_type")
    if not isinstance(name, str):
        raise fields.error("no field model_type: expected the name of an architecture (--as gives it)")
    architecture = ARCHITECTURES.get(name) or ARCHITECTURES.get(name.removesuffix("_text"))
    if architecture is None:
        raise UserError(_unknown(fields, name))
    fields.defaults.update(architecture.defaults)
    layers = _read(architecture, fields)
    if not any(layers):
        raise fields.error(f"none of the {len(layers)} layers owns a cache or a state")
    return Model(
        name=source,
        model_type=name,
        num_layers=len(layers),
        num_owners=sum(bool(owned) for owned in layers),
        num_query_heads=readers.num_query_heads(fields),
        caches=collect(layers),
        max_context=fields.optional_integer(*_CONTEXT),
        dtype=recurrent.model_dtype(fields),
        fields=fields.values,
        assumed=dict(fields.assumed),
    )


_QWEN: Final = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA3: Final = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
    "sliding_window_pattern": 6, "max_position_embeddings": 131072,
}  # fmt: skip
_DELTA: Final = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "head_dim": 256,
}
_LATENT: Final = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_MAMBA2: Final = {"mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2}

ARCHITECTURES: Final[dict[str, Architecture]] = {
    **dict.fromkeys(
        # Full attention in every layer, unless layer_types says otherwise.
        (
            "apertus", "arcee", "baichuan", "bitnet", "bloom", "codegen", "cohere", "ernie4_5_moe",
            "exaone", "flex_olmo", "glm4_moe", "glm4v_moe", "gpt2", "gpt_neox", "gptj", "granite",
            "granitemoe", "granitemoeshared", "internlm", "internlm2", "llama", "minicpm",
            "minimax_m2", "nemotron", "olmo", "olmo2", "olmoe", "opt", "orion", "persimmon", "phi", "qwen", "smollm3",
            "stablelm", "xverse",
        ),
        Architecture(readers.uniform),
    ),
    "gemma": Architecture(readers.uniform, {"head_dim": 256}),
    **dict.fromkeys(
        ("ernie4_5", "glm", "glm4", "glm4v", "helium", "internlm3", "seed_oss", "solar_open"),
        Architecture(readers.uniform, {"head_dim": 128}),
    ),
    **dict.fromkeys(("mistral", "ministral"), Architecture(readers.windowed, {"sliding_window": 4096})),
    **dict.fromkeys(
        ("ministral3", "mixtral", "phi3", "phi4_multimodal", "phi4mm", "phimoe", "starcoder2"),
        Architecture(readers.windowed),
    ),
    **dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni"), Architecture(readers.upper_windowed, _QWEN)),
    "qwen3": Architecture(readers.upper_windowed, _QWEN | {"head_dim": 128}),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), Architecture(readers.uniform, {"head_dim": 128})),
    # A window switched on holds for all layers.
    **dict.fromkeys(
        ("qwen3_moe", "qwen3_omni_moe"), Architecture(readers.windowed, {"use_sliding_window": False})
    ),
    "qwen2_moe": Architecture(readers.lower_windowed, _QWEN),
    "gemma2": Architecture(
        readers.alternating, {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2}
    ),
    "gemma3": Architecture(readers.alternating, _GEMMA3),
    "gemma3n": Architecture(
        readers.alternating,
        {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
         "sliding_window_pattern": 5, "num_kv_shared_layers": 15},
    ),
    "gemma4": Architecture(
        readers.gemma4, {"num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512}
    ),
    "gpt_oss": Architecture(
        readers.alternating, {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2}
    ),
    "cohere2": Architecture(readers.alternating, {"sliding_window": 4096, "sliding_window_pattern": 4}),
    "exaone4": Architecture(readers.alternating, {"sliding_window": 4096, "sliding_window_pattern": 4}),
    "olmo3": Architecture(readers.alternating, {"sliding_window": 4096, "sliding_window_pattern": 4}),
    "afmoe": Architecture(
        readers.alternating, {"head_dim": 128, "sliding_window": 1024, "global_attn_every_n_layers": 4}
    ),
    "cwm": Architecture(readers.first_of_four_full, {"head_dim": 128, "sliding_window": 8192}),
    **dict.fromkeys(
        ("mimo_v2_flash", "mimo_v2"),
        Architecture(
            readers.mimo, {"head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 4, "sliding_window": 129}
        ),
    ),
    "llama4": Architecture(
        readers.llama4,
        {"head_dim": 128, "num_key_value_heads": 8, "attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    ),
    "falcon": Architecture(readers.falcon),
    "gpt_bigcode": Architecture(readers.multi_query),
    "chatglm": Architecture(readers.chatglm),
    "mpt": Architecture(readers.attn_config),
    "dbrx": Architecture(readers.attn_config),
    "nemotron-nas": Architecture(readers.searched),
    **dict.fromkeys(("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe"), Architecture(readers.cross_layer)),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "axk1", "youtu", "glm4_moe_lite"), Architecture(readers.mla, _LATENT)
    ),
    "minicpm3": Architecture(readers.mla, {"kv_lora_rank": 256, "qk_rope_head_dim": 32}),
    "longcat_flash": Architecture(readers.double_mla, _LATENT),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"), Architecture(readers.sparse_mla, _LATENT | {"index_head_dim": 128})
    ),
    "jamba": Architecture(
        readers.jamba,
        {"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    ),
    "bamba": Architecture(readers.bamba, _MAMBA2 | {"mamba_d_state": 256, "mamba_n_heads": 128}),
    "granitemoehybrid": Architecture(readers.granite_hybrid, _MAMBA2 | {"mamba_d_state": 256, "mamba_n_heads": 128}),
    "falcon_h1": Architecture(
        readers.parallel_hybrid, _MAMBA2 | {"mamba_d_state": 256, "mamba_n_heads": 128, "mamba_d_ssm": 1024}
    ),
    "nemotron_h": Architecture(
        readers.nemotron_h,
        {"head_dim": 128, "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
         "conv_kernel": 4, "mamba_ssm_cache_dtype": "float32"},
    ),
    "zamba2": Architecture(
        readers.zamba2,
        {"mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 8},
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), Architecture(readers.delta_hybrid, _DELTA)),
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m1"), Architecture(readers.minimax)),
    "kimi_linear": Architecture(
        readers.kimi_linear, _LATENT | {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), Architecture(readers.short_convolutions, {"conv_L_cache": 3})),
    "recurrent_gemma": Architecture(readers.recurrent_gemma, {"conv1d_width": 4, "attention_window_size": 2048}),
    "phi4flash": Architecture(
        readers.decoder_decoder,
        {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "sliding_window": 2047},
    ),
    **dict.fromkeys(
        ("mamba", "falcon_mamba"),
        Architecture(readers.only_state(recurrent.mamba), {"state_size": 16, "conv_kernel": 4, "expand": 2}),
    ),
    "mamba2": Architecture(
        readers.only_state(recurrent.mamba2),
        {"num_heads": 128, "head_dim": 64, "state_size": 128, "conv_kernel": 4, "n_groups": 8, "expand": 2},
    ),
}  # fmt: skip


def _read(architecture: Architecture, fields: Fields) -> readers.Layers:
    """Each layer as read, with its own fields in force where `per_layer_config` has some for it."""
    layers = list(architecture.read(fields))
    overrides = fields.nested("per_layer_config").values if fields.find("per_layer_config") else {}
    for key, values in overrides.items():
        index = int(key) if key.isascii() and key.isdigit() else len(layers)
        if index >= len(layers) or not isinstance(values, Mapping):
            raise fields.error(
                f"per_layer_config has {key!r}: expected layers below {len(layers)} with fields"
            )
        own = Fields({**fields.values, **values}, f"{fields.source}: layer {index}", fields.defaults)
        layers[index] = architecture.read(own)[index]
    return layers


def _unknown(fields: Fields, name: str) -> str:
    """The refusal of a model type that is not in the table: what it is, what was looked for, what to do."""
    looked_for = (
        readers.NUM_LAYERS,
        readers.NUM_HEADS,
        readers.NUM_KV_HEADS,
        readers.HEAD_DIM,
        readers.HIDDEN,
    )
    found = ", ".join(
        f"{names[0]} {next((fields.values[n] for n in names if fields.values.get(n) is not None), 'absent')}"
        for names in looked_for
    )
    return (
        f"{fields.source}: model_type {name!r} is not known, so its cache is not guessed. Looked for: {found}, "
        f"sliding_window {fields.values.get('sliding_window', 'absent')}, "
        f"layer_types {'present' if fields.values.get('layer_types') else 'absent'}, "
        f"kv_lora_rank {fields.values.get('kv_lora_rank', 'absent')}. "
        f"--as TYPE reads it by the rules of a known type, such as --as llama; --list names those."
    )
