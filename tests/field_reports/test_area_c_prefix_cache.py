"""Area C: stale or wrong hits of the prefix cache."""

import gc
import itertools
from pathlib import Path

import numpy as np
import pytest

import kvblocks as kv

from .helpers import Engine, state


def hashes(tokens: list[int], block_size: int = 4, **keys: object) -> tuple[str, ...]:
    """Digests of the full blocks under seed 0, as hex."""
    digests = kv.block_hashes(tokens, block_size, seed=0, **keys)
    return tuple(bytes(digest).hex() for digest in digests)


def test_p022_a_recycled_block_is_not_found_under_its_old_content() -> None:
    engine = Engine(1, 4)
    engine.cache([1, 2, 3, 4])
    assert engine.hits([1, 2, 3, 4, 9]) == 4
    assert engine.pool() == (0, 0, 1, 0)
    handle = engine.admit([5, 6, 7, 8])
    assert engine.hits([1, 2, 3, 4, 9]) == 0
    assert engine.pool() == (0, 1, 0, 0)
    engine.compute(handle)
    engine.manager.free(handle)
    assert engine.hits([1, 2, 3, 4, 9]) == 0
    assert engine.hits([5, 6, 7, 8, 9]) == 4
    assert engine.pool() == (0, 0, 1, 0)


def test_p023_the_index_is_bounded_by_the_pool() -> None:
    engine = Engine(128, 16)
    step, manager = engine.step, engine.manager
    statm = Path("/proc/self/statm")
    pages: list[int] = []
    prompt = np.zeros(16, np.int32)
    for number in range(200_000):
        # Every 50th prompt is the same one, twice at a time: both copies are published.
        prompt[:2] = (number % 50000, 1 + number // 50000) if number % 50 else (0, 0)
        handles = [manager.allocate(manager.prepare(prompt)).handle for _ in range(1 if number % 50 else 2)]
        assert step.schedule(handles, 16)
        manager.commit(handles, 16)
        manager.free(handles)
        if number % 20_000 == 19_999:
            assert manager.stats().cached_blocks <= 128
            assert manager.check_integrity() == []
            gc.collect()
            pages += [int(statm.read_text().split()[1])] if statm.exists() else []
    # 1 MB; 90 bytes a request would be 16.
    assert not pages or max(pages[1:]) - pages[1] < 256
    assert manager.stats().evicted_blocks > 190_000


def test_p024_a_request_does_not_evict_its_own_hits() -> None:
    engine = Engine(4, 4)
    a = engine.cache(range(8))
    b = engine.cache(range(100, 108))
    assert engine.pool() == (0, 0, 4, 0)
    answer = engine.ask([*range(8), *range(50, 58)])
    assert answer.num_cached_tokens == 8
    table = engine.table(answer.handle)
    assert table[:2] == a
    assert set(table[2:]) == set(b)
    assert engine.manager.stats().evicted_blocks == 2
    assert engine.hits([*range(100, 108), 0]) == 0
    engine.pool()


def test_p025_allocate_says_how_many_tokens_it_found() -> None:
    engine = Engine(8, 16)
    handle = engine.serve(range(48))
    (prompt,) = engine.manager.preempt(handle)
    answer = engine.manager.allocate(prompt)
    assert isinstance(answer, kv.Allocated)
    assert (answer.num_cached_tokens, answer.num_new_tokens) == (32, 16)
    assert engine.manager.sequence(handle).num_computed == 32


def test_p026_without_the_cache_nothing_is_hashed_found_or_kept() -> None:
    engine = Engine(32, 16, enable_prefix_cache=False)
    prompt = engine.manager.prepare(range(129))
    assert prompt.block_hashes.shape == (0, 16)
    for _ in range(2_000):
        answer = engine.manager.allocate(prompt)
        assert isinstance(answer, kv.Allocated)
        assert answer.num_cached_tokens == 0
        engine.compute(answer.handle)
        engine.manager.free(answer.handle)
    stats = engine.manager.stats()
    assert (stats.cached_blocks, stats.evicted_blocks, stats.queried_tokens, stats.hit_tokens) == (0, 0, 0, 0)
    assert engine.manager.match_prefix(prompt) == 0
    assert engine.manager.reset_prefix_cache() == 0
    assert engine.pool() == (32, 0, 0, 0)


@pytest.mark.parametrize("first_lives", [True, False])
def test_p029_a_published_block_is_never_written(first_lives: bool) -> None:
    engine = Engine(8, 16)
    first = engine.serve(range(32))
    blocks = engine.table(first)
    if not first_lives:
        engine.manager.free(first)
    second = engine.admit([*range(32), 77])
    assert engine.table(second)[:2] == blocks
    engine.manager.truncate(second, 20)
    assert engine.step.schedule(second, 1)
    ((src, dst),) = engine.step.copies.tolist()
    assert src == blocks[1]
    assert engine.step.slot_mapping.tolist() == [dst * 16 + 4]
    engine.manager.commit(second, 1, [99])
    assert engine.manager.tokens(second).tolist() == [*range(20), 99]
    assert engine.hits([*range(32), 0]) == 32  # what was published still is
    if first_lives:
        assert engine.table(first) == blocks
        assert engine.manager.tokens(first).tolist() == list(range(32))
    engine.pool()


def test_p030_adapters_do_not_share_and_can_be_dropped() -> None:
    engine = Engine(16, 16)
    prompt = [*range(32), 0]
    engine.cache(prompt, adapter="a1")
    assert [engine.hits(prompt, adapter=name) for name in ("a1", "a2", None)] == [32, 0, 0]
    engine.cache(prompt, adapter="a2")
    engine.cache(prompt)
    assert engine.manager.drop_namespace(adapter="a1") == 2
    assert [engine.hits(prompt, adapter=name) for name in ("a1", "a2", None)] == [0, 32, 32]
    assert engine.pool() == (12, 0, 4, 0)


def test_p030_what_runs_under_a_dropped_adapter_is_not_published() -> None:
    engine = Engine(16, 4)
    prompt = list(range(16))
    running = engine.admit(prompt, adapter="a1")
    engine.compute(running, 8)
    assert engine.manager.drop_namespace(adapter="a1") == 2
    engine.compute(running)
    engine.manager.free(running)
    assert engine.hits([*prompt, 0], adapter="a1") == 0
    assert engine.pool() == (16, 0, 0, 0)
    engine.cache(prompt, adapter="a1")  # the weights loaded anew under the same name
    assert engine.hits([*prompt, 0], adapter="a1") == 16


def test_p030_a_namespace_may_be_chosen_by_salt_by_adapter_or_by_both() -> None:
    engine = Engine(16, 4)
    pairs = list(itertools.product((None, "a", "b"), (None, "s", "t")))

    def found() -> set[tuple[str | None, str | None]]:
        return {pair for pair in pairs if engine.hits(range(5), adapter=pair[0], salt=pair[1])}

    for adapter, salt in pairs:
        engine.cache(range(4), adapter=adapter, salt=salt)
    assert found() == set(pairs)
    assert engine.manager.drop_namespace(adapter="a", salt="s") == 1
    assert engine.manager.drop_namespace(salt="s") == 2
    assert engine.manager.drop_namespace(adapter="b") == 2
    assert found() == {(None, None), (None, "t"), ("a", None), ("a", "t")}
    with pytest.raises(ValueError, match="an adapter, a salt, or both"):
        engine.manager.drop_namespace()


def test_p031_placeholders_of_different_images_are_different() -> None:
    tokens = [7] * 16
    one, other = b"A" * 32, b"A" * 31 + b"B"
    engine = Engine(16, 4)
    engine.cache(tokens, media=[(one, 0, 16)])
    assert engine.hits([*tokens, 7], media=[(one, 0, 16)]) == 16
    assert engine.hits([*tokens, 7], media=[(other, 0, 16)]) == 0
    assert engine.hits([*tokens, 7]) == 0
    # The offset within the item counts: the same block of tokens at another place of the picture.
    assert hashes(tokens, media=[(one, 0, 16)])[1] != hashes(tokens[4:], media=[(one, 0, 12)])[0]
    assert engine.hits([*tokens, 7], media=[(one, 1, 15)]) == 0
    assert (
        engine.hits([*tokens, 7], media=[(one, 0, 15)])
        == engine.hits([*tokens, 7], media=[(one, 0, 17)])
        == 0
    )


def test_p031_blocks_without_media_are_shared_as_ever() -> None:
    engine = Engine(16, 4)
    prompt = [1, 2, 3, 4, 7, 7, 7, 7, 5, 6, 7, 8]
    engine.cache(prompt, media=[(b"one", 5, 3)])
    assert engine.hits([*prompt, 0], media=[(b"one", 5, 3)]) == 12
    assert engine.hits([*prompt, 0], media=[(b"two", 5, 3)]) == 4
    assert engine.hits([*prompt, 0]) == 4


def test_p032_keys_are_framed() -> None:
    keys: list[dict[str, object]] = [
        {"adapter": "ab", "salt": "c"},
        {"adapter": "a", "salt": "bc"},
        {"adapter": "abc"},
        {"adapter": b"abc"},
        {"adapter": 1},
        {"adapter": "1"},
        {"adapter": True},
        {"adapter": b"\x01"},
        {"adapter": 1, "salt": 2},
        {"media": [("ab", 0, 4), ("c", 0, 4)]},
        {"media": [("a", 0, 4), ("bc", 0, 4)]},
        {"media": [("abc", 0, 4)]},
        {"media": [(b"abc", 0, 4)]},
        {"media": [(1, 0, 4)]},
        {"media": [(True, 0, 4)]},
        {},
    ]
    assert len({hashes([1, 2, 3, 4], **key) for key in keys}) == len(keys)
    engine = Engine(32, 4)
    for key in keys:
        assert engine.hits(range(5), **key) == 0
        engine.cache(range(4), **key)
    assert [engine.hits(range(5), **key) for key in keys] == [4] * len(keys)


def test_p033_keys_are_typed_and_their_order_does_not_matter() -> None:
    tokens = [1, 2, 3, 4]
    assert len({hashes(tokens, salt="x"), hashes(tokens, adapter="x"), hashes(tokens)}) == 3
    assert hashes(tokens, salt="x", adapter="y") == hashes(tokens, adapter="y", salt="x")
    assert hashes(tokens, salt="x", adapter="y") != hashes(tokens, adapter="x", salt="y")
    media = [("x", 0, 2), ("y", 2, 2), ("z", 0, 4)]
    assert len({hashes(tokens, media=list(order)) for order in itertools.permutations(media)}) == 1


def test_p034_a_request_may_pass_the_cache_by() -> None:
    engine = Engine(8, 16)
    old = engine.cache(range(32))
    answer = engine.ask(range(32), use_cache=False)
    assert answer.num_cached_tokens == 0
    assert set(engine.table(answer.handle)).isdisjoint(old)
    assert engine.pool() == (4, 2, 2, 0)
    assert engine.manager.stats().queried_requests == 1  # the first one's: nothing was looked up
    engine.compute(answer.handle)
    engine.manager.free(answer.handle)
    assert engine.pool() == (4, 0, 4, 0)  # published all the same
    engine.manager.reset_prefix_cache()
    engine.manager.free(engine.serve(range(32), use_cache=False))
    assert engine.hits(range(33)) == 32


def test_p038_a_chunk_publishes_the_blocks_that_it_filled() -> None:
    engine = Engine(8, 16)
    handle = engine.admit(range(40), reserve=20)
    assert len(engine.table(handle)) == 2
    assert engine.step.schedule(handle, 20)
    assert engine.hits(range(40)) == 0  # scheduled is not computed
    engine.manager.commit(handle, 20)
    assert engine.hits(range(40)) == 16
    engine.compute(handle)
    assert engine.hits(range(40)) == 32
    engine.manager.free(handle)
    assert engine.pool() == (6, 0, 2, 0)


def test_p038_published_on_schedule_a_later_row_of_the_step_hits_it_and_abort_takes_it_back() -> None:
    engine = Engine(8, 16, publish="schedule")
    handle = engine.admit(range(40), reserve=20)
    before = state(engine.manager, [handle])
    assert engine.step.schedule(handle, 20)
    assert engine.hits(range(40)) == 16
    engine.manager.abort_step(handle)
    assert engine.hits(range(40)) == 0
    after = state(engine.manager, [handle])
    assert after[1:] == before[1:]  # all but the counter of steps and the peak
    assert engine.step.schedule(handle, 20)
    other = engine.admit(range(40))
    assert engine.table(other)[0] == engine.table(handle)[0]
    with pytest.raises(ValueError, match="nobody has hit"):
        engine.manager.abort_step(handle)
    engine.manager.free(other)
    engine.manager.commit(handle, 20)
    engine.pool()


def test_p038_rows_appended_to_a_step_hit_what_its_earlier_rows_publish() -> None:
    engine = Engine(10, 16, publish="schedule", max_seqs=4, max_tokens=48)
    one = engine.admit(range(40))
    assert engine.step.schedule(one, 40)
    answer = engine.ask([*range(32), 98, 99])
    assert (answer.num_cached_tokens, answer.num_new_tokens) == (32, 2)
    two = answer.handle
    whole = engine.step.schedule(two, 2, append=True, pad_seqs=4, pad_tokens=48)
    assert (whole.num_seqs, whole.num_tokens, whole.max_blocks, whole.num_copies) == (2, 42, 3, 0)
    assert engine.table(one)[:2] == engine.table(two)[:2]
    assert engine.step.block_tables.tolist() == [engine.table(one), engine.table(two), [0] * 3, [0] * 3]
    assert engine.step.query_start_loc.tolist() == [0, 40, 42, 42, 42]
    assert engine.step.seq_lens.tolist() == [40, 34, 0, 0]
    assert engine.step.positions[:42].tolist() == [*range(40), 32, 33]
    first = engine.table(two)[2] * 16
    assert engine.step.slot_mapping[40:].tolist() == [first, first + 1, *[-1] * 6]
    assert engine.step.changes.tolist() == [[0, 0, 3], [1, 0, 3]]
    assert engine.manager.stats().num_steps == 1
    # Taken back in turn: the later row first, with the blocks that it has hit.
    with pytest.raises(ValueError, match="nobody has hit"):
        engine.manager.abort_step(one)
    engine.manager.abort_step(two)
    engine.manager.free(two)
    engine.manager.abort_step(one)
    assert engine.hits(range(40)) == 0
    engine.manager.free(one)
    assert engine.pool() == (10, 0, 0, 0)


def test_p038_a_row_is_appended_if_it_fits_and_copies_nothing() -> None:
    engine = Engine(10, 4, publish="schedule", max_seqs=3, max_tokens=16)
    one, tail = engine.admit(range(8)), engine.serve(range(50, 56))
    (child,) = engine.manager.fork(tail).tolist()
    assert engine.step.schedule(one, 8)
    before, arrays = state(engine.manager, [one, tail, child]), engine.step.pack()
    later = engine.step.schedule(child, 1, append=True)  # it would copy the tail that it shares
    assert (later.num_seqs, later.num_tokens, later.refusal.num_blocks) == (1, 8, 0)
    assert state(engine.manager, [one, tail, child]) == before
    others = [engine.admit([100 + n] * 4) for n in range(3)]
    with pytest.raises(ValueError, match="at most 2"):
        engine.step.schedule(others, 4, append=True)
    assert engine.step.pack() == arrays
    fitted = engine.step.schedule([others[0], child, others[1]], [4, 1, 4], append=True, policy="fit")
    assert (fitted.num_seqs, fitted.num_tokens, fitted.refusal.num_blocks) == (2, 12, 0)
    fitted = engine.step.schedule([others[1], others[2]], 4, append=True, policy="fit", pad_tokens=16)
    assert (fitted.num_seqs, fitted.num_tokens, fitted.refusal.num_blocks) == (3, 16, 0)
    assert engine.step.seq_lens.tolist() == [8, 4, 4]
    assert engine.step.schedule(tail, 0, pad_seqs=2)
    with pytest.raises(ValueError, match="append finds a padded step"):
        engine.step.schedule(others[2], 4, append=True)
    engine.pool()
