"""Pools in bytes, as the planner and the allocator count them."""

import pytest

from kvblocks.replay.costs import PoolSize, make_costs
from kvblocks.report import UserError


def test_a_token_costs_what_the_format_takes() -> None:
    costs = make_costs("llama-3.1-8b", ["bfloat16", "fp8_e4m3:tensor"], 1, None)
    assert [cost.bytes_per_token(16) for cost in costs] == [131_072, 65_536]
    assert make_costs("llama-3.1-8b", [], 2, None)[0].bytes_per_token(None) == 65_536


def test_a_pool_in_bytes_keeps_a_null_block() -> None:
    (cost,) = make_costs("llama-3.1-8b", [], 1, None)
    pool = PoolSize.parse("1GiB")
    assert pool.slots(cost, None) == 8192
    assert pool.slots(cost, 16) == 8192 - 16
    assert PoolSize.parse("8192").slots(cost, 16) == 8192
    assert PoolSize.parse("unbounded").slots(cost, 16) is None
    assert PoolSize.parse("1KB").slots(make_costs(None, [], 1, 10.0)[0], None) == 100


@pytest.mark.parametrize(
    ("model", "formats", "plain", "pool", "block_size", "message"),
    [
        (None, ["fp8_e4m3"], None, "1", 16, "--kv-format needs --model"),
        ("llama-3.1-8b", [], 3.0, "1", 16, "one of the two"),
        ("llama-3.1-8b", ["fp7"], None, "1", 16, "--kv-format: .*fp7"),
        ("llama-3.1-8b", ["kivi2"], None, "1GiB", 16, "--kv-format kivi2: "),
        ("nowhere/model", [], None, "1", 16, "nowhere/model: no such file, and not one of the built-in"),
        (None, [], None, "1GiB", 16, "--pool in bytes needs --model or --bytes-per-token"),
        (None, [], 1000.0, "20KB", 16, "hold no block beside the null block"),
        (None, [], 1000.0, "20B", None, "hold no token"),
        (None, [], None, "15", 16, "--pool 15: less than one block of 16"),
    ],
)
def test_what_costs_cannot_be_known_is_refused(
    model: str | None,
    formats: list[str],
    plain: float | None,
    pool: str,
    block_size: int | None,
    message: str,
) -> None:
    with pytest.raises(UserError, match=message):
        PoolSize.parse(pool).slots(make_costs(model, formats, 1, plain)[0], block_size)


@pytest.mark.parametrize("text", ["0", "-1", "", "1.5", "5 apples"])
def test_pools_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|memory size"):
        PoolSize.parse(text)


def test_what_slots_leave_out_is_said() -> None:
    (plain,) = make_costs("llama-3.1-8b", [], 1, None)
    assert plain.not_counted() == []
    (windowed,) = make_costs("gpt-oss-20b", [], 1, None)
    assert ["12 of 24 layers look back on a window" in note for note in windowed.not_counted()] == [True]
    (residual,) = make_costs("llama-3.1-8b", ["kivi2"], 1, None)
    # 128 newest tokens and a block of 64 more, in 16 bit: 192 x 131,072 bytes.
    assert ["about 24.00 MiB besides its tokens" in note for note in residual.not_counted()] == [True]


def test_a_model_of_states_alone_has_no_pool_of_bytes() -> None:
    (cost,) = make_costs("mamba-2.8b", [], 1, None)
    with pytest.raises(UserError, match="no layer of --model keeps a row of each token"):
        PoolSize.parse("1GiB").slots(cost, 16)
