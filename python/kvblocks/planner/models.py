"""Models that can be named instead of given as a file: the fields of their config.json, and nothing computed.

Owns `BUILT_IN` and `find_config`. The fields are those that say what is cached and how many parameters there are.
"""

from pathlib import Path
from typing import Any, Final

from kvblocks.planner.fields import read_config
from kvblocks.report import UserError


def _config(model_type: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, "torch_dtype": "bfloat16", **fields}


def _decoder(
    model_type: str,
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    **fields: Any,
) -> dict[str, Any]:
    return _config(
        model_type,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        **fields,
    )


BUILT_IN: Final[dict[str, dict[str, Any]]] = {
    "command-r-35b": _decoder(
        "cohere", 40, 8192, 22528, 64, 64, 256000, max_position_embeddings=8192, torch_dtype="float16"
    ),
    "deepseek-v3": _decoder(
        "deepseek_v3", 61, 7168, 18432, 128, 128, 129280,
        kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=256, n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3,
        moe_layer_freq=1, topk_method="noaux_tc", max_position_embeddings=163840,
        quantization_config={"quant_method": "fp8"},
    ),
    "falcon-7b": _config(
        "falcon", num_hidden_layers=32, hidden_size=4544, num_attention_heads=71, num_kv_heads=71, vocab_size=65024,
        multi_query=True, new_decoder_architecture=False, max_position_embeddings=2048,
    ),
    "gemma-2-9b": _decoder(
        "gemma2", 42, 3584, 14336, 16, 8, 256000, head_dim=256, sliding_window=4096, max_position_embeddings=8192
    ),
    "gemma-3-27b": _decoder(
        "gemma3", 62, 5376, 21504, 32, 16, 262208, head_dim=128, sliding_window=1024, sliding_window_pattern=6,
        max_position_embeddings=131072,
    ),
    "gemma-3n-e4b": _decoder(
        "gemma3n", 35, 2048, 16384, 8, 2, 262400, head_dim=256, sliding_window=512, num_kv_shared_layers=15,
        max_position_embeddings=32768,
    ),
    "gpt-oss-20b": _decoder(
        "gpt_oss", 24, 2880, 2880, 64, 8, 201088, head_dim=64, sliding_window=128, num_local_experts=32,
        attention_bias=True, max_position_embeddings=131072, quantization_config={"quant_method": "mxfp4"},
    ),
    "gpt2": _config(
        "gpt2", n_layer=12, n_head=12, n_embd=768, n_positions=1024, vocab_size=50257, torch_dtype="float16"
    ),
    "granite-4-h-small": _decoder(
        "granitemoehybrid", 40, 4096, 768, 32, 8, 100352,
        layer_types=[("mamba", "attention")[index % 10 == 5] for index in range(40)],
        mamba_n_heads=128, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128, mamba_d_conv=4, mamba_expand=2,
        max_position_embeddings=131072,
    ),
    "jamba-v0.1": _decoder(
        "jamba", 32, 4096, 14336, 32, 8, 65536, attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16,
        mamba_d_conv=4, mamba_expand=2, max_position_embeddings=262144,
    ),
    "llama-2-7b": _decoder(
        "llama", 32, 4096, 11008, 32, 32, 32000, max_position_embeddings=4096, torch_dtype="float16"
    ),
    "llama-3-8b": _decoder("llama", 32, 4096, 14336, 32, 8, 128256, max_position_embeddings=8192),
    "llama-3.1-8b": _decoder("llama", 32, 4096, 14336, 32, 8, 128256, max_position_embeddings=131072),
    "llama-3.1-70b": _decoder("llama", 80, 8192, 28672, 64, 8, 128256, max_position_embeddings=131072),
    "llama-4-scout": _decoder(
        "llama4", 48, 5120, 8192, 40, 8, 202048, head_dim=128, attention_chunk_size=8192,
        max_position_embeddings=10485760,
    ),
    "mamba-2.8b": _config(
        "mamba", num_hidden_layers=64, hidden_size=2560, intermediate_size=5120, state_size=16, conv_kernel=4,
        expand=2, vocab_size=50280, torch_dtype="float32",
    ),
    "mistral-7b-v0.1": _decoder(
        "mistral", 32, 4096, 14336, 32, 8, 32000, sliding_window=4096, max_position_embeddings=32768
    ),
    "mixtral-8x7b": _decoder(
        "mixtral", 32, 4096, 14336, 32, 8, 32000, sliding_window=None, num_local_experts=8,
        max_position_embeddings=32768,
    ),
    "phi-3-mini": _decoder(
        "phi3", 32, 3072, 8192, 32, 32, 32064, sliding_window=2047, max_position_embeddings=4096
    ),
    "qwen2.5-7b": _decoder(
        "qwen2", 28, 3584, 18944, 28, 4, 152064, use_sliding_window=False, sliding_window=131072,
        max_window_layers=28, max_position_embeddings=32768,
    ),
    "qwen3-32b": _decoder(
        "qwen3", 64, 5120, 25600, 64, 8, 151936, head_dim=128, use_sliding_window=False, max_window_layers=64,
        max_position_embeddings=40960,
    ),
    "qwen3-next-80b": _decoder(
        "qwen3_next", 48, 2048, 5120, 16, 2, 151936, head_dim=256, full_attention_interval=4,
        linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_value_head_dim=128, max_position_embeddings=262144,
    ),
    "smollm2-135m": _decoder(
        "llama", 30, 576, 1536, 9, 3, 49152, tie_word_embeddings=True, max_position_embeddings=8192
    ),
}  # fmt: skip


def find_config(name: str) -> dict[str, Any]:
    """The fields of a config.json, of a folder that holds one, or of a built-in model; a UserError for neither."""
    if name in BUILT_IN:
        return dict(BUILT_IN[name])
    path = Path(name)
    if not path.exists():
        raise UserError(f"{name}: no such file, and not one of the built-in models: {', '.join(BUILT_IN)}")
    return read_config(path)
