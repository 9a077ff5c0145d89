"""Area T: the memory planner."""

from fractions import Fraction
from typing import Any

import pytest

import kvblocks as kv
from kvblocks.cli import main
from kvblocks.formats import KVFormat
from kvblocks.planner.architectures import describe
from kvblocks.planner.footprint import Footprint, footprint
from kvblocks.planner.lengths import fixed
from kvblocks.planner.memory import Budget
from kvblocks.planner.plan import Scenario
from kvblocks.report import UserError

GIB = 1 << 30


def llama(
    layers: int, kv_heads: int | None, heads: int = 32, hidden: int = 4096, **fields: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "torch_dtype": "bfloat16",
        **fields,
    }


def sizes(config: dict[str, Any], kv_format: str = "bfloat16", **options: Any) -> Footprint:
    return footprint(
        describe(config, "config.json"), KVFormat.parse(kv_format), **{"block_size": 16} | options
    )


@pytest.mark.parametrize(
    ("layers", "kv_heads", "per_token"),
    [(32, 8, 131_072), (80, 8, 327_680), (28, 4, 57_344), (28, 2, 28_672)],
)
def test_p143_kv_heads_count_not_query_heads(layers: int, kv_heads: int, per_token: int) -> None:
    footprint_ = sizes(llama(layers, kv_heads))
    assert footprint_.bytes_per_token() == per_token
    if layers == 80:
        assert footprint_.token_bytes(32_768) == 10 * GIB


def test_p144_head_dim_comes_from_the_configuration() -> None:
    qwen3 = llama(64, 8, 64, 5120, model_type="qwen3", head_dim=128, use_sliding_window=False)
    assert sizes(qwen3).bytes_per_token() == 262_144
    assert sizes(llama(2, None)).bytes_per_token() == sizes(llama(2, 32)).bytes_per_token()
    nested = {"model_type": "llava", "text_config": llama(2, 8)}
    assert sizes(nested).bytes_per_token() == sizes(llama(2, 8)).bytes_per_token()


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_p145_a_latent_cache_is_on_every_rank(ranks: int) -> None:
    config = llama(61, 128, 128, 7168, model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)
    assert sizes(config, num_ranks=ranks).bytes_per_token() == 70_272


def test_p145_fewer_kv_heads_than_ranks_are_replicated() -> None:
    one_head = sizes(llama(32, 1)).bytes_per_token()
    assert sizes(llama(32, 2), num_ranks=4).bytes_per_token() == one_head
    with pytest.raises(UserError, match="--tp 3: 8 KV heads neither divide evenly over 3 ranks"):
        sizes(llama(32, 8), num_ranks=3)


def test_p148_layers_that_share_another_layers_cache_are_not_counted() -> None:
    naive = sizes(llama(35, 8)).bytes_per_token()
    assert sizes(llama(35, 8, num_kv_shared_layers=20)).bytes_per_token() == naive * 15 / 35


def scenario(num_blocks: int, num_tokens: int, prefix: int = 0) -> Scenario:
    config = llama(1, 8)
    block_bytes = 16 * 4096
    budget = Budget(num_blocks * block_bytes, Fraction(1), 0)
    model = describe(config, "config.json")
    return Scenario(model, budget, KVFormat.parse("bfloat16"), fixed(num_tokens), shared_prefix=prefix)


def test_p149_lengths_are_rounded_up_to_blocks() -> None:
    case = scenario(1 + 1000, 1000)
    assert case.footprint.pools[0].blocks(1000) == 63
    assert case.users(1000) == 15
    assert scenario(1 + 1000, 1000, prefix=512).users(1000) == 31


def test_p150_the_budget_has_every_term() -> None:
    budget = Budget(80 * GIB, Fraction(9, 10), 15 * GIB, 2 * GIB, 1 * GIB, 1 * GIB, free_bytes=70 * GIB)
    assert budget.cache_bytes == 51 * GIB
    free = Budget(80 * GIB, Fraction(9, 10), 25 * GIB, free_bytes=20 * GIB)
    assert free.cache_bytes == -5 * GIB


def test_p150_a_negative_budget_says_what_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan llama-2-7b --memory 80GiB --free 20GiB --weights 25GiB --activations 0 --graphs 0"
    assert main(command.split()) == 1
    assert "short by 5.00 GiB (5,368,709,120 bytes) on each GPU" in capsys.readouterr().out


def test_p151_quantised_sizes_include_scales_and_residual() -> None:
    config = llama(32, 8)
    plain = sizes(config).bytes_per_token()
    assert sizes(config, "int8").bytes_per_token() / plain == Fraction(132, 256)
    assert sizes(config, "fp8_e4m3:tensor").bytes_per_token() / plain == Fraction(1, 2)
    kivi = sizes(config, "kivi2", block_size=32, residual_tokens=128)
    assert kivi.bytes_per_token() / plain == Fraction(3, 16)
    assert kivi.sequence_bytes == (128 + 32) * plain


def test_the_planner_counts_the_null_block() -> None:
    case = scenario(1000, 16)
    assert case.users(16) == 999
    assert kv.BlockManager(1000, 16).capacity_blocks == 999
