"""The example's Gemma 3, against that of Hugging Face transformers with the same weights."""

from __future__ import annotations

import numpy as np
import pytest

from gemma3.model import Gemma, GemmaConfig
from gemma3.quality import as_model
from kvblocks import PagedKVCache
from smollm2.model import F32, random_tensors

torch = pytest.importorskip("torch", reason="`make test-hf` installs torch")
pytest.importorskip("transformers", reason="`make test-hf` installs transformers")

pytestmark = pytest.mark.hf

# Seven layers, so that the sixth sees all, and sequences that are longer than the window of the others.
CONFIG = GemmaConfig(
    num_layers=7,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    hidden_dim=48,
    ffn_dim=96,
    vocab_size=101,
    context_length=256,
    window_tokens=24,
    rope_theta=1e6,
    norm_eps=1e-6,
)


def transformers_gemma(config: GemmaConfig, tensors: dict[str, F32]):  # type: ignore[no-untyped-def]
    """A float32 Gemma3ForCausalLM with our weights; its norms add 1 to theirs."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    theirs = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context_length,
            rms_norm_eps=config.norm_eps,
            sliding_window=config.window_tokens,
            query_pre_attn_scalar=config.head_dim,
            layer_types=[
                "full_attention" if config.window(layer) is None else "sliding_attention"
                for layer in range(config.num_layers)
            ],
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": config.rope_theta},
                "sliding_attention": {"rope_type": "default", "rope_theta": config.window_rope_theta},
            },
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
    ).eval()
    names = {
        "attn_norm": "input_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn_output": "self_attn.o_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {
        "model.embed_tokens.weight": tensors["token_embd"],
        "lm_head.weight": tensors["token_embd"],
        "model.norm.weight": tensors["output_norm"] - 1,
    }
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for layer in range(config.num_layers):
        ours, prefix = f"{layer}.", f"model.layers.{layer}."
        for name, theirs_name in names.items():
            weight = tensors[ours + name]
            state[f"{prefix}{theirs_name}.weight"] = weight - 1 if weight.ndim == 1 else weight.T
        qkv = np.split(tensors[ours + "attn_qkv"].T, [heads, heads + kv_heads])
        for name, weight in zip(("q_proj", "k_proj", "v_proj"), qkv, strict=True):
            state[f"{prefix}self_attn.{name}.weight"] = weight
        for name, weight in zip(
            ("gate_proj", "up_proj"), np.split(tensors[ours + "ffn_gate_up"].T, 2), strict=True
        ):
            state[f"{prefix}mlp.{name}.weight"] = weight
    theirs.load_state_dict({name: torch.from_numpy(np.array(weight)) for name, weight in state.items()})
    return theirs


def test_logits_are_those_of_transformers() -> None:
    tensors = random_tensors(CONFIG, seed=5)
    model = as_model("random", Gemma(CONFIG, tensors), list)  # type: ignore[arg-type]
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 70)
    with torch.no_grad():
        want = transformers_gemma(CONFIG, tensors)(torch.from_numpy(ids)[None]).logits[0].numpy()
    cache = PagedKVCache(model.config, 8, backend="numpy")
    answer = cache.manager.allocate(cache.manager.prepare(ids))
    assert answer
    for start in range(0, len(ids), 20):
        count = min(20, len(ids) - start)
        assert cache.schedule([answer.handle], count)
        got = model.forward(cache, ids[start : start + count], np.arange(count))
        np.testing.assert_allclose(got, want[start : start + count], atol=2e-4)
        cache.manager.commit([answer.handle], count)
