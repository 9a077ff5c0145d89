"""Sizes that are known of public models: bytes per token, parameters, users."""

from fractions import Fraction
from typing import Any

import pytest

from kvblocks.formats import KVFormat
from kvblocks.planner.architectures import describe
from kvblocks.planner.lengths import fixed
from kvblocks.planner.memory import Budget
from kvblocks.planner.models import BUILT_IN
from kvblocks.planner.parameters import count_parameters
from kvblocks.planner.plan import Scenario
from kvblocks.planner.summary import Question, readings
from kvblocks.planner.weights import Weights
from kvblocks.report import UserError

from .helpers import model_footprint, scenario

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "per_token", "beyond_windows"),
    [
        ("command-r-35b", 1_310_720, 1_310_720),
        ("deepseek-v3", 70_272, 70_272),
        ("falcon-7b", 8_192, 8_192),
        ("gemma-2-9b", 344_064, 172_032),
        ("gemma-3-27b", 507_904, 81_920),
        ("gemma-3n-e4b", 40_960, 8_192),
        ("gpt-oss-20b", 49_152, 24_576),
        ("gpt2", 36_864, 36_864),
        ("jamba-v0.1", 16_384, 16_384),
        ("llama-2-7b", 524_288, 524_288),
        ("llama-3-8b", 131_072, 131_072),
        ("llama-3.1-70b", 327_680, 327_680),
        ("llama-4-scout", 196_608, 49_152),
        ("mamba-2.8b", 0, 0),
        ("mistral-7b-v0.1", 131_072, 0),
        ("phi-3-mini", 393_216, 0),
        ("qwen2.5-7b", 57_344, 57_344),
        ("qwen3-32b", 262_144, 262_144),
        ("qwen3-next-80b", 24_576, 24_576),
        ("smollm2-135m", 23_040, 23_040),
    ],
)
def test_bytes_per_token(name: str, per_token: int, beyond_windows: int) -> None:
    sizes = model_footprint(BUILT_IN[name])
    assert sizes.bytes_per_token(0) == per_token
    assert sizes.bytes_per_token() == beyond_windows


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("command-r-35b", 34_980_831_232),
        ("deepseek-v3", 671_026_419_200),
        ("gemma-2-9b", 9_241_705_984),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt2", 124_439_808),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("phi-3-mini", 3_821_079_552),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-32b", 32_762_123_264),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_parameters_are_those_of_the_published_weights(name: str, num_parameters: int) -> None:
    assert count_parameters(describe(BUILT_IN[name], name), name) == num_parameters


def test_parameters_of_other_families_are_not_guessed() -> None:
    assert count_parameters(describe(BUILT_IN["jamba-v0.1"], "jamba"), "jamba") is None


def test_llama_2_7b_on_a_card_of_80_gb_in_five_arithmetics() -> None:
    model = describe(BUILT_IN["llama-2-7b"], "llama-2-7b")
    budget = Budget(80 * 10**9, Fraction(1), 14 * 10**9)
    case = Scenario(model, budget, KVFormat.parse("float16"), fixed(4096))
    assert case.footprint.token_bytes(4096) == 2 * GIB
    answers = readings(Question(case, Weights(14 * 10**9, "as given"), nominal_gb=Fraction(80)))
    assert {answer["reading"]: answer["users"] for answer in answers} == {
        "all in GB, a GiB taken for a GB: (80 - 14) / 2": 33,
        "bytes, a card of 80 GB": 30,
        "bytes, a card of 80 GiB": 33,
        "bytes, 90 % of 80 GB": 27,
        "bytes, 90 % of 80 GiB": 29,
    }


@pytest.mark.parametrize(
    ("total", "utilisation", "users"),
    [
        (80 * 10**9, Fraction(1), 30),
        (80 * GIB, Fraction(1), 33),
        (80 * 10**9, Fraction(9, 10), 27),
        (80 * GIB, Fraction(9, 10), 29),
    ],
)
def test_the_planner_itself_gives_the_same_users_in_blocks(
    total: int, utilisation: Fraction, users: int
) -> None:
    model = describe(BUILT_IN["llama-2-7b"], "llama-2-7b")
    budget = Budget(total, utilisation, 14 * 10**9)
    assert Scenario(model, budget, KVFormat.parse("float16"), fixed(4096)).users(4096) == users


def test_a_long_context_outgrows_the_weights() -> None:
    sizes = model_footprint(BUILT_IN["llama-3-8b"])
    assert sizes.token_bytes(128 * 1024) == 17_179_869_184 > 2 * 8_030_261_248
    model = describe(BUILT_IN["llama-3-8b"], "llama-3-8b")
    budget = Budget(80 * GIB, Fraction(1), 2 * 8_030_261_248)
    case = Scenario(model, budget, KVFormat.parse("bfloat16"), fixed(8192))
    first = case.context_beyond_weights()
    assert first is not None
    assert sizes.token_bytes(first - 1) <= budget.weights_bytes < sizes.token_bytes(first)


def test_128_requests_of_llama_70b_take_more_than_its_weights() -> None:
    sizes = model_footprint(BUILT_IN["llama-3.1-70b"])
    assert 128 * sizes.token_bytes(4096) == 160 * GIB > 2 * 70_553_706_496


def test_a_window_caps_what_a_sequence_takes() -> None:
    sizes = model_footprint(BUILT_IN["mistral-7b-v0.1"])
    assert sizes.token_bytes(4096) == sizes.token_bytes(32768) == 512 << 20
    assert sizes.token_bytes(4095) == 4095 * 131_072
    assert sizes.sequence_total(4096) == 256 * 16 * 131_072
    assert sizes.sequence_total(4097) == sizes.sequence_total(32768) == 257 * 16 * 131_072


@pytest.mark.parametrize(
    ("name", "bytes_per_sequence"),
    [
        # Layers x (convolution channels x (width - 1) + channels x state) x 2 B.
        ("jamba-v0.1", 28 * (8192 * 3 + 8192 * 16) * 2),
        ("mamba-2.8b", 64 * (5120 * 3 + 5120 * 16) * 4),
        # Layers x (convolution of Q, K, V + a matrix for each V head) x 2 B.
        ("qwen3-next-80b", 36 * ((2 * 16 * 128 + 32 * 128) * 3 + 32 * 128 * 128) * 2),
        ("granite-4-h-small", 36 * ((8192 + 2 * 128) * 3 + 128 * 64 * 128) * 2),
    ],
)
def test_recurrent_layers_keep_a_state_of_fixed_size(name: str, bytes_per_sequence: int) -> None:
    sizes = model_footprint(BUILT_IN[name])
    assert sizes.sequence_bytes == bytes_per_sequence
    assert sizes.token_bytes(1) - bytes_per_sequence == sizes.bytes_per_token(0)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "no field model_type"),
        ({"model_type": "t5", "num_layers": 24, "d_model": 1024}, r"'t5' is not known.*num_hidden_layers 24"),
        ({"model_type": "llama"}, "no field num_hidden_layers or n_layer"),
        ({"model_type": "llama", "num_hidden_layers": 2}, "no field num_attention_heads"),
        (
            {"model_type": "llama", "num_hidden_layers": True},
            "num_hidden_layers.* is True: expected an integer >= 1",
        ),
        ({"model_type": "llama", "num_hidden_layers": "2"}, "is '2': expected an integer >= 1"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "is 0: expected an integer >= 1"),
    ],
)
def test_what_is_missing_or_unknown_is_named(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        describe(config, "config.json")


def test_users_double_with_half_the_context() -> None:
    case = scenario("llama-2-7b", cache_bytes=66 * 10**9)
    assert case.users(4096) == 30
    assert case.users(2048) == 61
