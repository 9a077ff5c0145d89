"""The planner and the allocator agree to the block: what fits is allocated, one more is refused."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvblocks as kv
from every_format import EVERY_FORMAT
from kvblocks.formats import FORMATS
from kvblocks.planner.architectures import describe
from kvblocks.planner.footprint import Pool
from kvblocks.planner.lengths import fixed, log_normal
from kvblocks.planner.levers import levers
from kvblocks.planner.models import BUILT_IN

from .helpers import model_footprint, scenario


def admit(manager: kv.BlockManager, user: int, num_tokens: int, prefix: int) -> Any:
    """Reserve a whole context whose first `prefix` tokens all users have in common."""
    tokens = np.arange(num_tokens, dtype=np.int64)
    tokens[prefix:] += (user + 1) * 10_000_000
    prompt = manager.prepare(tokens)
    answer = manager.allocate(prompt)
    if isinstance(answer, kv.Allocated) and manager.sequence(answer.handle).num_computed < num_tokens:
        left = num_tokens - manager.sequence(answer.handle).num_computed
        step = kv.Step(manager, max_seqs=1, max_tokens=num_tokens, max_blocks_per_seq=manager.capacity_blocks)
        assert step.schedule(answer.handle, left)
        manager.commit(answer.handle, left)
    return answer


@given(
    cache_blocks=st.integers(2, 300),
    slack=st.integers(0, 30_000),
    num_tokens=st.integers(1, 400),
    prefix=st.integers(0, 400),
    block_size=st.sampled_from([1, 7, 16, 32]),
)
def test_what_fits_is_allocated_and_one_more_is_not(
    cache_blocks: int, slack: int, num_tokens: int, prefix: int, block_size: int
) -> None:
    block_bytes = block_size * 23_040
    case = scenario(
        "smollm2-135m",
        cache_bytes=cache_blocks * block_bytes + slack % block_bytes,
        lengths=fixed(num_tokens),
        block_size=block_size,
        shared_prefix=prefix,
    )
    users = case.users(num_tokens)
    (num_blocks,) = case.pool_blocks(users, num_tokens)
    assert num_blocks == cache_blocks
    manager = kv.BlockManager(num_blocks, block_size)
    for user in range(users):
        assert isinstance(admit(manager, user, num_tokens, prefix), kv.Allocated)
    assert isinstance(admit(manager, users, num_tokens, prefix), kv.Later | kv.Never)


@given(
    span=st.integers(1, 70),
    block_size=st.integers(1, 20),
    num_tokens=st.integers(1, 200),
    slides=st.booleans(),
)
def test_a_span_never_holds_more_blocks_than_planned(
    span: int, block_size: int, num_tokens: int, slides: bool
) -> None:
    pool = Pool(span, 1, 1, block_size, slides)
    manager = kv.BlockManager(1 + pool.blocks(num_tokens), block_size, enable_prefix_cache=False)
    step = kv.Step(manager, max_seqs=1, max_tokens=1, max_blocks_per_seq=num_tokens)
    answer = manager.allocate(manager.prepare([0]), 1)
    assert isinstance(answer, kv.Allocated)
    most = 0
    for length in range(1, num_tokens + 1):
        start = max(0, length - span) if slides else (length - 1) // span * span
        manager.drop_range(answer.handle, 0, start)
        assert step.schedule(answer.handle, 1)
        manager.commit(answer.handle, 1, [] if length == 1 else [1])
        most = max(most, manager.stats().live_blocks)
    # Exact once a window has moved over a whole block, an upper bound before.
    assert most <= pool.blocks(num_tokens)
    if slides and num_tokens >= span + block_size:
        assert most == pool.blocks(num_tokens)


def test_pools_of_several_spans_hold_exactly_the_users_that_fit() -> None:
    case = scenario("gemma-2-9b", cache_bytes=20 << 30, lengths=fixed(6000))
    users = case.users(6000)
    sizes = case.pool_blocks(users, 6000)
    pools = case.footprint.pools
    taken = sum(size * pool.bytes_per_block for size, pool in zip(sizes, pools, strict=True))
    assert taken == case.bytes_for(users, 6000) <= 20 << 30
    assert case.bytes_for(users + 1, 6000) > 20 << 30
    for size, pool in zip(sizes, pools, strict=True):
        manager = kv.BlockManager(size, 16, enable_prefix_cache=False)
        held = pool.blocks(6000) * 16
        answers = [manager.allocate(manager.prepare(np.arange(held))) for _ in range(users + 1)]
        assert [isinstance(answer, kv.Allocated) for answer in answers] == [True] * users + [False]


def test_the_context_that_fits_for_some_users_is_the_longest() -> None:
    case = scenario("llama-3-8b", cache_bytes=30 << 30)
    for users in (1, 7, 100):
        context = case.context(users)
        assert context is not None
        assert case.users(context) >= users > case.users(context + 1)
    assert case.context(10**6) == 0
    assert scenario("mamba-2.8b", cache_bytes=1 << 30).context(2) is None


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_one_user_more_never_fits(name: str) -> None:
    case = scenario(name, cache_bytes=24 << 30, lengths=fixed(5000), kv_format="bfloat16", shared_prefix=100)
    users = case.users(5000)
    assert users > 0
    assert case.bytes_for(users, 5000) <= 24 << 30 < case.bytes_for(users + 1, 5000)
    assert describe(BUILT_IN[name], name) == case.model


def test_users_by_chance_overflow_as_rarely_as_said() -> None:
    case = scenario("llama-3-8b", cache_bytes=40 << 30, lengths=log_normal(500, 4000, 8000))
    users = case.users_by_chance(0.99)
    assert users < case.users(case.lengths.mean_tokens)
    rng = np.random.default_rng(0)
    sizes = np.array([case.bytes_per_user(tokens) for tokens in case.lengths.sample])
    room = case.budget.cache_bytes - case.fixed_bytes(8000)
    overflows = np.mean(rng.choice(sizes, (4000, users)).sum(axis=1) > room)
    assert 0.003 < overflows < 0.02
    fixed_lengths = scenario("llama-3-8b", cache_bytes=40 << 30, lengths=fixed(1000))
    assert fixed_lengths.users_by_chance(0.99) == fixed_lengths.users(1000)


@pytest.mark.parametrize("kv_format", [*EVERY_FORMAT, "kivi2,int8:head"])
def test_the_library_allocates_what_is_planned(kv_format: str) -> None:
    """To the byte: blocks, static scales and residuals of a pool, by the planner's formulas and in its arrays."""
    config = kv.CacheConfig(30, 3, 64, dtype="bfloat16", kv_format=kv_format, block_size=32)
    cache = kv.PagedKVCache(config, 5, backend="numpy", residual_seqs=3)
    held = sum(array.nbytes for layer in cache.layers for _, array in layer.named_arrays)
    held += 0 if cache.residual is None else cache.residual.nbytes
    planned = model_footprint(BUILT_IN["smollm2-135m"], kv_format, block_size=32, residual_tokens=128)
    assert planned.pools[0].bytes_per_block == config.bytes_per_block
    assert held == 5 * planned.pools[0].bytes_per_block + planned.static_bytes + 3 * planned.sequence_bytes


@given(
    name=st.sampled_from(sorted(BUILT_IN)),
    kv_format=st.sampled_from(sorted(FORMATS)),
    ranks=st.sampled_from([1, 2, 4, 8]),
    cache_bytes=st.integers(-(1 << 30), 1 << 40),
    num_tokens=st.integers(1, 1 << 20),
    prefix=st.integers(0, 1 << 20),
)
def test_levers_and_answers_hold_for_any_scenario(
    name: str, kv_format: str, ranks: int, cache_bytes: int, num_tokens: int, prefix: int
) -> None:
    lengths = log_normal(-(-num_tokens // 10), -(-num_tokens // 2), num_tokens)
    options = {"num_ranks": ranks, "num_gpus": 2 * ranks, "shared_prefix": prefix, "block_size": 32}
    if describe(BUILT_IN[name], name).num_query_heads % ranks:
        return
    case = scenario(name, cache_bytes=cache_bytes, lengths=lengths, kv_format=kv_format, **options)
    pulled = list(levers(case, growth=Fraction(2)))
    assert pulled[0].scenario == case
    for lever in pulled:
        users = [lever.scenario.users(tokens) for _, tokens in lever.scenario.lengths.rows()]
        assert users == sorted(users)
        assert users[-1] % 2 == 0
        one_more = users[-1] // 2 + 1
        mean = lever.scenario.lengths.mean_tokens
        assert lever.scenario.bytes_for(one_more, mean) > lever.scenario.budget.cache_bytes
    assert 0 <= case.users_by_chance(0.99) <= case.users_by_chance(0.5)
