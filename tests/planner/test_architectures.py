"""How configurations are read, model type by model type."""

from typing import Any

import pytest

from kvblocks.planner.architectures import ARCHITECTURES, describe
from kvblocks.planner.model import Attention, State
from kvblocks.planner.models import BUILT_IN
from kvblocks.report import UserError


def caches(config: dict[str, Any]) -> list[str]:
    """The caches of a configuration: "layers x kind, KV heads x Dk/Dv, span"."""
    lines = []
    for cache, count in describe(config, "config.json").caches:
        if isinstance(cache, Attention):
            span = "" if cache.span is None else f", {cache.span}"
            lines.append(
                f"{count} x {cache.kind}, {cache.num_kv_heads} x {cache.key_dim}/{cache.value_dim}{span}"
            )
        else:
            lines.append(f"{count} x {cache.kind}")
    return lines


def decoder(model_type: str, layers: int = 12, heads: int = 8, **fields: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "torch_dtype": "bfloat16",
    } | fields


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Windows
        (decoder("llama"), ["12 x full attention, 2 x 64/64"]),
        (decoder("mistral", sliding_window=None), ["12 x full attention, 2 x 64/64"]),
        (decoder("mistral"), ["12 x sliding window, 2 x 64/64, 4096"]),
        (decoder("phi3", sliding_window=2047), ["12 x sliding window, 2 x 64/64, 2047"]),
        (decoder("qwen2", use_sliding_window=False, sliding_window=100), ["12 x full attention, 2 x 64/64"]),
        (
            decoder("qwen2", use_sliding_window=True, sliding_window=100, max_window_layers=8),
            ["8 x full attention, 2 x 64/64", "4 x sliding window, 2 x 64/64, 100"],
        ),
        (
            decoder("qwen2_moe", use_sliding_window=True, sliding_window=100, max_window_layers=8),
            ["4 x sliding window, 2 x 64/64, 100", "8 x full attention, 2 x 64/64"],
        ),
        (decoder("qwen3_moe", use_sliding_window=True, sliding_window=9), ["12 x sliding window, 2 x 64/64, 9"]),
        (
            decoder("cohere2", sliding_window=100),
            ["9 x sliding window, 2 x 64/64, 100", "3 x full attention, 2 x 64/64"],
        ),
        (
            decoder("exaone4", sliding_window=100, sliding_window_pattern="LLG"),
            ["8 x sliding window, 2 x 64/64, 100", "4 x full attention, 2 x 64/64"],
        ),
        (
            decoder("gemma3", layers=3, layer_types=[FULL, SLIDING, FULL], sliding_window=7),
            ["2 x full attention, 2 x 256/256", "1 x sliding window, 2 x 256/256, 7"],
        ),
        (
            decoder("gemma3n", num_kv_shared_layers=2, sliding_window=7),
            ["8 x sliding window, 2 x 256/256, 7", "2 x full attention, 2 x 256/256"],
        ),
        (
            decoder("gemma4", num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=7),
            ["10 x sliding window, 2 x 256/256, 7", "2 x full attention, 1 x 512/512"],
        ),
        (
            decoder("gemma4", sliding_window=7, per_layer_config={"05": {"head_dim": 64}, "11": {"head_dim": 96}}),
            [
                "10 x sliding window, 2 x 256/256, 7",
                "1 x full attention, 2 x 64/64",
                "1 x full attention, 2 x 96/96",
            ],
        ),
        (
            decoder(
                "mimo_v2_flash", layers=3, hybrid_layer_pattern=[0, 1, 1], sliding_window_size=128,
                swa_num_key_value_heads=4, swa_head_dim=192, swa_v_head_dim=128,
            ),
            ["1 x full attention, 2 x 192/128", "2 x sliding window, 4 x 192/128, 129"],
        ),
        (
            decoder("llama4", attention_chunk_size=64, head_dim=64),
            ["9 x chunked attention, 2 x 64/64, 64", "3 x full attention, 2 x 64/64"],
        ),
        (
            decoder("llama4", layers=2, no_rope_layers=[0, 1], attention_chunk_size=64),
            ["1 x full attention, 2 x 128/128", "1 x chunked attention, 2 x 128/128, 64"],
        ),
        # Heads
        (decoder("falcon", num_key_value_heads=None, num_kv_heads=4), ["12 x full attention, 1 x 64/64"]),
        (
            decoder("falcon", num_key_value_heads=None, num_kv_heads=4, new_decoder_architecture=True),
            ["12 x full attention, 4 x 64/64"],
        ),
        (
            decoder("falcon", num_key_value_heads=None, num_kv_heads=4, multi_query=False),
            ["12 x full attention, 8 x 64/64"],
        ),
        (
            {"model_type": "gpt_bigcode", "n_layer": 3, "n_head": 4, "n_embd": 256},
            ["3 x full attention, 1 x 64/64"],
        ),
        (
            {"model_type": "mpt", "n_layers": 3, "n_heads": 4, "d_model": 256, "attn_config": {"kv_n_heads": 2}},
            ["3 x full attention, 2 x 64/64"],
        ),
        (
            {"model_type": "chatglm", "num_layers": 3, "num_attention_heads": 4, "hidden_size": 256, "kv_channels": 80,
             "multi_query_attention": True, "multi_query_group_num": 2},
            ["3 x full attention, 2 x 80/80"],
        ),
        (
            decoder("nemotron-nas", layers=3, block_configs=[
                {"attention": {"n_heads_in_group": 8}}, {"attention": {"no_op": True}},
                {"attention": {"n_heads_in_group": 2}},
            ]),
            ["1 x full attention, 1 x 64/64", "1 x full attention, 4 x 64/64"],
        ),
        (decoder("hunyuan", use_cla=True, cla_share_factor=2), ["6 x full attention, 2 x 64/64"]),
        # Latents
        (decoder("deepseek_v2"), ["12 x latent (MLA), 1 x 576/0"]),
        (decoder("longcat_flash", layers=2), ["4 x latent (MLA), 1 x 576/0"]),
        (decoder("deepseek_v32"), ["12 x latent (MLA), 1 x 576/0", "12 x indexer keys, 1 x 128/0"]),
        # States
        (decoder("jamba", layers=8), ["7 x Mamba", "1 x full attention, 2 x 64/64"]),
        (decoder("bamba", attn_layer_indices=[3], mamba_n_heads=8), ["11 x Mamba-2", "1 x full attention, 2 x 64/64"]),
        (decoder("falcon_h1", mamba_n_heads=8), ["12 x Mamba-2", "12 x full attention, 2 x 64/64"]),
        (decoder("nemotron_h", hybrid_override_pattern="M-M*E"), ["2 x Mamba-2", "1 x full attention, 2 x 128/128"]),
        (decoder("zamba2", hybrid_layer_ids=[2, 5]), ["12 x Mamba-2", "2 x full attention, 2 x 128/128"]),
        (decoder("qwen3_next"), ["9 x gated delta network", "3 x full attention, 2 x 256/256"]),
        (decoder("minimax_text_01", layers=3, attn_type_list=[0, 0, 1]),
         ["2 x linear attention", "1 x full attention, 2 x 64/64"]),
        (
            decoder("kimi_linear", layers=4, linear_attn_config={
                "full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 4, "head_dim": 128,
                "short_conv_kernel_size": 4,
            }),
            ["3 x Kimi delta attention", "1 x latent (MLA), 1 x 576/0"],
        ),
        (decoder("lfm2", full_attn_idxs=[0, 5]), ["2 x full attention, 2 x 64/64", "10 x short convolution"]),
        (
            decoder("recurrent_gemma", head_dim=64),
            ["8 x gated linear recurrence", "4 x sliding window, 2 x 64/64, 2048"],
        ),
        # A decoder-decoder: the upper half reads the cache of one layer.
        (
            decoder("phi4flash", layers=32, sliding_window=512),
            ["9 x Mamba", "8 x sliding window, 2 x 64/64, 512", "1 x full attention, 2 x 64/64"],
        ),
    ],
)  # fmt: skip
def test_layers_are_read_by_the_rules_of_the_model_type(config: dict[str, Any], expected: list[str]) -> None:
    assert sorted(caches(config)) == sorted(expected)


@pytest.mark.parametrize(
    ("config", "elements"),
    [
        (decoder("jamba", hidden_size=64), 128 * 3 + 128 * 16),
        (
            decoder("bamba", hidden_size=64, mamba_n_heads=4, mamba_n_groups=2, mamba_d_state=8),
            (128 + 2 * 2 * 8) * 3 + 128 * 8,
        ),
        (decoder("falcon_h1", mamba_d_ssm=96, mamba_n_heads=4, mamba_d_state=8), (96 + 2 * 8) * 3 + 96 * 8),
        (
            decoder("qwen3_next", linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
                    linear_value_head_dim=16),
            (2 * 2 * 8 + 4 * 16) * 3 + 4 * 8 * 16,
        ),
        (decoder("minimax", num_attention_heads=4, head_dim=8), 4 * 8 * 8),
        (decoder("lfm2", full_attn_idxs=[0], hidden_size=64), 64 * 2),
    ],
)  # fmt: skip
def test_states_have_the_documented_sizes(config: dict[str, Any], elements: int) -> None:
    ((state, _),) = describe(config, "config.json").states
    assert state.bytes_per_rank(1) == 2 * elements


def test_a_state_may_have_a_dtype_of_its_own() -> None:
    plain, wide = (
        describe(decoder("bamba", **fields), "x").states[0][0]
        for fields in ({}, {"mamba_ssm_dtype": "float32"})
    )
    assert [part.dtype for part in plain.parts] == ["bfloat16"] * 3
    assert [part.dtype for part in wide.parts] == ["bfloat16", "bfloat16", "float32"]


def test_states_are_shared_out_over_ranks() -> None:
    ((state, _),) = describe(decoder("bamba", mamba_n_heads=8), "config.json").states
    assert isinstance(state, State)
    convolution, groups, heads = state.parts
    assert groups.bytes_per_rank(4) == groups.bytes_per_rank(1)  # one group, replicated
    assert heads.bytes_per_rank(4) == heads.bytes_per_rank(1) // 4
    assert convolution.bytes_per_rank(4) == convolution.bytes_per_rank(1) // 4
    with pytest.raises(UserError, match="--tp 3: 8 state heads neither divide evenly over 3 ranks"):
        heads.bytes_per_rank(3)


def test_defaults_of_the_model_type_are_used_and_told() -> None:
    """What the configurations of small Gemma 3 models leave out."""
    config = {"model_type": "gemma3", "torch_dtype": "bfloat16",
              "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34,
                              "sliding_window": 1024}}  # fmt: skip
    model = describe(config, "config.json")
    assert caches(config) == ["29 x sliding window, 4 x 256/256, 1024", "5 x full attention, 4 x 256/256"]
    assert model.assumed == {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    }
    assert model.max_context == 131072
    assert model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            decoder("nemotron_h", hybrid_override_pattern="M?"),
            r"hybrid_override_pattern is 'M\?': expected letters of",
        ),
        (decoder("nemotron_h", hybrid_override_pattern="-E"), "none of the 2 layers owns a cache or a state"),
        (decoder("nemotron_h"), "no field hybrid_override_pattern or layers_block_type"),
        (decoder("nemotron-nas"), "no field block_configs"),
        (decoder("llama4", no_rope_layers=[1]), "no_rope_layers has 1 items: expected 12"),
        (decoder("bamba", mamba_n_heads=7), "7 Mamba heads do not divide 1024 inner channels"),
        (decoder("bamba", mamba_ssm_dtype="tiny"), "is 'tiny': expected one of float32"),
        (decoder("jamba", attn_layer_period="all"), "attn_layer_period is 'all': expected an integer >= 1"),
        (
            decoder("gemma4", per_layer_config={"99": {}}),
            "per_layer_config has '99': expected layers below 12",
        ),
        (decoder("mpt", attn_config=[]), r"attn_config is \[\]: expected an object"),
        ({"model_type": "t5", "num_layers": 3}, "model_type 't5' is not known"),
    ],
)
def test_what_cannot_be_read_is_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        describe(config, "config.json")


# What a decoder of 40 layers and few fields needs besides, to be of these model types.
MORE: dict[str, dict[str, Any]] = {
    "nemotron_h": {"hybrid_override_pattern": "M*" * 20},
    "nemotron-nas": {"block_configs": [{"attention": {"n_heads_in_group": 4}}] * 40},
}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_model_type_is_read(name: str) -> None:
    model = describe(decoder(name, layers=40, **MORE.get(name, {})), "config.json")
    assert model.caches
    assert model.num_layers == 40


def test_built_in_models_have_known_types() -> None:
    assert {config["model_type"] for config in BUILT_IN.values()} <= set(ARCHITECTURES)
    assert len(ARCHITECTURES) >= 100
