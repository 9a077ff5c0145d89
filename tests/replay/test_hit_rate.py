"""Models of caches against the real manager, and the optimum against all there is to choose."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.replay.hit_rate import (
    MODELS,
    HitRate,
    Segments,
    capacities,
    ceiling,
    curve,
    lru_hit_rate,
    model_hit_rate,
)
from kvblocks.traces.trace import Trace

from .helpers import make_trace

# (family, ids shared with it, tokens in the last id) of each request
rows = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 3), st.integers(1, 6)),
    min_size=1,
    max_size=12,
)


def trace_of(rows: list[tuple[int, int, int, int]], tokens_per_id: int, block_size: int) -> Trace:
    """Prompts that share what their chains share; none ends with a block, which a manager would keep twice."""
    fresh = 100
    requests = []
    for number, (family, shared, more, rest) in enumerate(rows):
        chain = [10 * family + at for at in range(shared)] + [fresh + at for at in range(more + 1)]
        fresh += more + 1
        prompt = (len(chain) - 1) * tokens_per_id + min(rest, tokens_per_id)
        if prompt % block_size == 0:
            prompt -= 1
            chain = chain[: -(-prompt // tokens_per_id)]
        if prompt:
            requests.append((float(number), prompt, 1, chain))
    return make_trace(requests or [(0.0, 1, 1, [0])], tokens_per_id)


@given(rows, st.sampled_from([(4, 4), (8, 4), (4, 8), (6, 4), (5, 3)]), st.integers(1, 24))
def test_the_model_of_lru_is_the_manager(
    rows: list[tuple[int, int, int, int]], sizes: tuple[int, int], capacity: int
) -> None:
    trace = trace_of(rows, *sizes)
    real = lru_hit_rate(trace, sizes[1], capacity)
    segments = Segments(trace, sizes[1])
    assert model_hit_rate(segments, capacity, "lru") == real
    optimum, most = model_hit_rate(segments, capacity, "optimum"), ceiling(segments)
    for policy in MODELS:
        assert model_hit_rate(segments, capacity, policy).hit_tokens <= optimum.hit_tokens <= most.hit_tokens
    if optimum.left_out == 0 and capacity > segments.distinct_blocks:
        assert {model_hit_rate(segments, capacity, policy) for policy in MODELS} == {most}


def choices(kept: frozenset[tuple[int, ...]], room: int) -> Iterator[frozenset[tuple[int, ...]]]:
    """All that can be kept of these blocks. A smaller choice is never better."""
    yield from map(frozenset, itertools.combinations(sorted(kept), min(len(kept), max(room, 0))))


def best_hits(trace: Trace, block_size: int, capacity: int) -> int:
    """The most blocks that any way to evict finds: every choice is tried."""
    states: dict[frozenset[tuple[int, ...]], int] = {frozenset(): 0}
    for request in range(len(trace)):
        tokens = trace.tokens(request).tolist()
        full = [tuple(tokens[:end]) for end in range(block_size, len(tokens) + 1, block_size)]
        needed = -(-len(tokens) // block_size)
        if needed > capacity:
            continue
        after: dict[frozenset[tuple[int, ...]], int] = {}
        for cached, hits in states.items():
            found = next((at for at, block in enumerate(full) if block not in cached), len(full))
            found = min(found, (len(tokens) - 1) // block_size)
            for kept in choices(cached - set(full), capacity - needed):
                state = kept | set(full)
                after[state] = max(after.get(state, 0), hits + found)
        states = after
    return max(states.values())


@given(rows, st.sampled_from([(4, 4), (6, 4)]), st.integers(2, 8))
def test_nobody_finds_more_than_the_optimum(
    rows: list[tuple[int, int, int, int]], sizes: tuple[int, int], capacity: int
) -> None:
    trace = trace_of(rows[:6], *sizes)
    optimum = model_hit_rate(Segments(trace, sizes[1]), capacity, "optimum")
    assert optimum.hit_blocks == best_hits(trace, sizes[1], capacity)


def test_the_optimum_keeps_what_comes_back_and_fifo_forgets_what_is_used() -> None:
    a, b, c, d = [1], [2], [3], [4]
    order = [a, b, a, c, a, d, b]
    trace = make_trace([(float(i), 5, 1, [*ids, 100 + i]) for i, ids in enumerate(order)], 4)
    # Four blocks: three full ones and the one that is being filled.
    found = {policy: model_hit_rate(Segments(trace, 4), 4, policy).hit_blocks for policy in MODELS}
    assert found == {"lru": 2, "fifo": 3, "lfu": 2, "optimum": 3}
    found = {policy: model_hit_rate(Segments(trace, 4), 3, policy).hit_blocks for policy in MODELS}
    assert found == {"lru": 2, "fifo": 1, "lfu": 2, "optimum": 2}


def test_lfu_keeps_what_was_used_often() -> None:
    # a is used twice and then not for a while: LRU has lost it by then.
    order = [[1], [1], [2], [3], [4], [1]]
    trace = make_trace([(float(i), 5, 1, [*ids, 100 + i]) for i, ids in enumerate(order)], 4)
    found = {policy: model_hit_rate(Segments(trace, 4), 3, policy).hit_blocks for policy in MODELS}
    assert found == {"lru": 1, "fifo": 1, "lfu": 2, "optimum": 2}


def test_one_token_is_always_computed_and_outputs_are_not_cached() -> None:
    trace = make_trace([(0.0, 8, 100, [1, 2]), (1.0, 8, 100, [1, 2])], 4)
    rate = lru_hit_rate(trace, 4, 100)
    assert (rate.hit_tokens, rate.queried_tokens, rate.hit_blocks, rate.queried_blocks) == (4, 16, 1, 4)
    assert (rate.tokens, rate.blocks) == (0.25, 0.25)
    assert ceiling(Segments(trace, 4)) == rate
    assert HitRate().tokens == HitRate().blocks == 0.0


def test_a_prompt_longer_than_the_cache_is_left_out() -> None:
    trace = make_trace([(0.0, 9, 1, [1, 2, 3]), (1.0, 5, 1, [1, 4])], 4)
    for rate in (lru_hit_rate(trace, 4, 2), model_hit_rate(Segments(trace, 4), 2, "optimum")):
        assert (rate.left_out, rate.queried_tokens) == (1, 5)


def test_blocks_that_no_id_covers_take_room() -> None:
    # The ids cover 8 of 15 tokens: the blocks behind them are the request's own.
    trace = make_trace([(0.0, 15, 1, [1]), (1.0, 15, 1, [1])], 8)
    assert Segments(trace, 4).own_blocks.tolist() == [1, 1]
    assert Segments(trace, 4).distinct_blocks == 4


def test_the_default_curve_reaches_from_few_blocks_to_all() -> None:
    trace = make_trace([(float(i), 40, 1, [i % 7, *range(100 * i, 100 * i + 9)]) for i in range(1, 60)], 4)
    segments = Segments(trace, 4)
    sizes = capacities(segments)
    assert sizes == sorted(set(sizes))
    assert (len(sizes), sizes[0], sizes[-1]) == (6, 10, segments.distinct_blocks)
    rates = [by_policy["lru"].tokens for _, by_policy in curve(segments, sizes)]
    assert np.diff(rates).min() >= 0
    assert rates[-1] == pytest.approx(ceiling(segments).tokens, abs=0.01)
