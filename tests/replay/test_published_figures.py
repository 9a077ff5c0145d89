"""Figures that were computed independently from the recorded traces."""

import pytest

from kvblocks.replay.hit_rate import MODELS, Segments, ceiling, lru_hit_rate, model_hit_rate
from kvblocks.replay.scenario import Options, Result, Scenario, run_scenario
from kvblocks.replay.simulate import Engine
from kvblocks.traces.readers import read_trace
from kvblocks.traces.trace import Trace

from .helpers import full_trace


def saturated(trace: Trace, policy: str, block_size: int | None, max_context: int) -> Result:
    """All requests at once: each is resident for as many steps as it has tokens of output."""
    return run_scenario(trace, Scenario(policy, block_size, None, max_context), Engine(), Options())


@pytest.mark.parametrize(
    ("policy", "block_size", "waste", "tolerance"),
    [("contiguous", None, 0.7215, 1e-4), ("paged", 16, 0.00653, 6.5e-5), ("paged", 64, 0.02688, 2.7e-4)],
)
def test_waste_of_azure_conversation(
    policy: str, block_size: int | None, waste: float, tolerance: float
) -> None:
    trace = read_trace(full_trace("azure_2023_conv.csv.gz"))
    result = saturated(trace, policy, block_size, 4096)
    assert (result.requests, result.rejected_too_long, result.completed) == (19_366, 1611, 17_755)
    assert result.waste == pytest.approx(waste, abs=tolerance)


@pytest.mark.parametrize(
    ("policy", "block_size", "waste", "tolerance"),
    [("contiguous", None, 0.7399, 1e-4), ("paged", 16, 0.00350, 3.5e-5)],
)
def test_waste_of_azure_code(policy: str, block_size: int | None, waste: float, tolerance: float) -> None:
    trace = read_trace(full_trace("azure_2023_code.csv.gz"))
    result = saturated(trace, policy, block_size, 8192)
    assert (result.requests, result.rejected_too_long) == (8819, 0)
    assert result.waste == pytest.approx(waste, abs=tolerance)


def test_prefix_hit_rates_of_mooncake() -> None:
    trace = read_trace(full_trace("mooncake_fast25_conversation.jsonl.gz"))
    assert (len(trace), trace.tokens_per_id) == (12_031, 512)
    segments = Segments(trace, 512)
    expected = {1000: 0.0460, 5000: 0.1209, 20_000: 0.2995, 50_000: 0.3632}
    for capacity, rate in expected.items():
        assert lru_hit_rate(trace, 512, capacity).tokens == pytest.approx(rate, abs=1e-4)
    # What docs/replay.md says of the models.
    found = {policy: model_hit_rate(segments, 5000, policy).tokens for policy in MODELS}
    assert found == pytest.approx({"lru": 0.1209, "fifo": 0.1155, "lfu": 0.0945, "optimum": 0.3462}, abs=1e-4)
    assert ceiling(segments).tokens == pytest.approx(0.3734, abs=1e-4)


def test_an_agents_turns_share_what_they_repeat() -> None:
    trace = read_trace(full_trace("lmcache_agent_miniswe_bs16.jsonl.gz"))
    assert (len(trace), trace.tokens_per_id) == (402, 16)
    assert trace.session is not None
    assert len(set(trace.session.tolist())) == 20
    plain = run_scenario(trace, Scenario("prefix", 16, None, 2**24), Engine(mode="arrivals"), Options())
    decoded = run_scenario(
        trace, Scenario("prefix", 16, None, 2**24), Engine(mode="arrivals"), Options(decoded=True)
    )
    assert plain.completed == decoded.completed == 402
    assert plain.token_hit_rate == pytest.approx(ceiling(Segments(trace, 16)).tokens, abs=0.02)
    assert decoded.token_hit_rate > plain.token_hit_rate
