"""Area I: metrics."""

import random

import pytest

from .helpers import Engine


def test_p078_a_request_that_comes_back_does_not_raise_the_hit_rate() -> None:
    engine = Engine(16, 16)
    source = random.Random(3)
    for _ in range(50):
        handle = engine.serve([source.randrange(2**20) for _ in range(50)])
        (prompt,) = engine.manager.preempt(handle)
        assert engine.manager.allocate(prompt)
        engine.compute(handle)
        engine.manager.free(handle)
    stats = engine.manager.stats()
    assert (stats.queried_requests, stats.queried_tokens) == (50, 2_500)
    assert (stats.hit_requests, stats.hit_blocks, stats.hit_tokens) == (0, 0, 0)
    assert (stats.readmit_requests, stats.readmit_hit_requests) == (50, 50)
    assert (stats.readmit_queried_tokens, stats.readmit_hit_tokens) == (2_500, 50 * 48)


def test_p080_live_cached_free_and_held_are_told_apart() -> None:
    engine = Engine(10, 16)
    engine.cache(range(48))
    handle = engine.serve(range(100, 120))
    assert engine.pool() == (5, 2, 3, 0)
    stats = engine.manager.stats()
    assert (stats.used_slots, stats.allocated_slots) == (20, 32)
    assert stats.internal_fragmentation == pytest.approx(0.375)
    assert (stats.logical_blocks, stats.sharing) == (2, 1.0)
    transfer = engine.manager.begin_transfer(handle)
    engine.manager.free(handle)
    assert engine.pool() == (5, 0, 3, 2)
    assert engine.manager.stats().internal_fragmentation == 0.0
    engine.manager.fail_transfer(transfer)
    assert engine.pool() == (6, 0, 4, 0)


def test_p080_shared_blocks_are_counted_once() -> None:
    engine = Engine(10, 16)
    parent = engine.serve(range(40))
    engine.manager.fork(parent, 3)
    stats = engine.manager.stats()
    assert (stats.live_blocks, stats.logical_blocks, stats.used_slots) == (3, 12, 40)
    assert (stats.sharing, stats.internal_fragmentation) == (4.0, pytest.approx(8 / 48))
    assert (stats.peak_live_blocks, stats.peak_logical_blocks) == (3, 12)
    engine.manager.free(parent)
    engine.manager.reset_peaks()
    assert engine.manager.stats().peak_logical_blocks == 9


def test_p080_a_bounded_series_of_samples() -> None:
    engine = Engine(10, 4, series_every=2, series_len=3)
    handle = engine.admit([1])
    for _ in range(9):
        engine.step.schedule(handle, 1)
        engine.manager.commit(handle, 1, [] if engine.manager.stats().num_steps == 1 else [1])
    samples = engine.manager.series()
    assert samples[:, 0].tolist() == [4, 6, 8]
    assert samples[:, 1].tolist() == [1, 2, 2]  # live, before the commit of that step
    assert (samples[:, 1:5].sum(axis=1) == 10).all()
    assert Engine(10, 4).manager.series().shape == (0, 7)


def test_p080_the_runs_of_free_ids() -> None:
    engine = Engine(9, 4)
    handles = [engine.admit([n]) for n in range(9)]
    engine.manager.free([handles[i] for i in (0, 2, 3, 5, 6, 7)])
    found = engine.manager.fragmentation()
    assert (found.free_blocks, found.num_runs, found.longest_run_blocks) == (6, 3, 3)
    assert found.run_histogram.tolist() == [1, 2]  # one of 1 block; two of 2 to 3


def test_p081_counters_carry_their_unit() -> None:
    engine = Engine(80, 16)
    engine.manager.free(engine.serve(range(16), use_cache=False))  # not a query
    for length, cached in [(32, 16), (32, 0), (1000, 0)]:
        prompt = range(length) if cached else range(5_000 + length, 5_000 + 2 * length)
        answer = engine.ask(prompt)
        assert answer.num_cached_tokens == cached
        engine.manager.free(answer.handle)
    stats = engine.manager.stats()
    assert stats.hit_requests / stats.queried_requests == pytest.approx(1 / 3)
    assert stats.hit_tokens / stats.queried_tokens == pytest.approx(16 / 1064)
    assert (stats.hit_blocks, stats.queried_blocks) == (1, 2 + 2 + 62)
