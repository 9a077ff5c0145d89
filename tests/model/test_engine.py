"""The example engine: admission, preemption, failure, sampling; on the tiny random model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from smollm2.engine import Engine
from smollm2.request import Failed, Finished, Request, RequestError, Token, choose

from .harness import NUM_TOKENS, Scene, check_home, make_cache, serve


def _requests(scene: Scene) -> list[Request]:
    return [Request(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(scene.prompts)]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("block_size", [1, 7, 16, 24])
def test_pool_of_one_sequence_serves_all(tiny: Scene, block_size: int, prefix_cache: bool) -> None:
    longest = max(len(prompt) for prompt in tiny.prompts) + NUM_TOKENS - 1
    cache = make_cache(tiny.model, block_size, num_tokens=longest, prefix_cache=prefix_cache)
    assert serve(Engine(tiny.model, cache), _requests(tiny)) == tiny.expected()


@pytest.mark.parametrize(("max_seqs", "max_tokens"), [(1, 1), (3, 3), (16, 16), (16, 256)])
def test_limits_of_a_step_change_no_token(tiny: Scene, max_seqs: int, max_tokens: int) -> None:
    engine = Engine(
        tiny.model, make_cache(tiny.model, 16, num_tokens=600), max_seqs=max_seqs, max_tokens=max_tokens
    )
    assert serve(engine, _requests(tiny)) == tiny.expected()
    assert engine.metrics.peak_seqs <= max_seqs
    assert engine.metrics.computed_tokens <= engine.metrics.steps * max_tokens


def test_watermark_saves_preemptions(tiny: Scene) -> None:
    preemptions = []
    for watermark_blocks in (0, 4):
        cache = make_cache(tiny.model, 16, num_tokens=450, watermark_blocks=watermark_blocks)
        assert serve(Engine(tiny.model, cache), _requests(tiny)) == tiny.expected()
        preemptions.append(cache.manager.stats().preemptions)
    assert preemptions[0] > preemptions[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_new_tokens": 129}, "need 12 blocks of 16 tokens, but the pool has 11"),
        ({"max_new_tokens": 470}, "exceed the model's context of 512 tokens"),
        ({"max_new_tokens": 0}, "needs a prompt and max_new_tokens >= 1"),
        ({"prompt": []}, "needs a prompt"),
        ({"num_samples": 17}, "17 samples, but this engine runs 1 to 16 at once"),
    ],
)
def test_impossible_request_is_refused_alone(tiny: Scene, change: dict, words: str) -> None:  # type: ignore[type-arg]
    cache = make_cache(tiny.model, 16, num_tokens=11 * 16)
    engine = Engine(tiny.model, cache)
    good = Request("0", tiny.prompts[0][:53], NUM_TOKENS)
    engine.add(good)
    with pytest.raises(RequestError, match=words):
        engine.add(replace(good, id="bad", **change))
    assert serve(engine, []).keys() == {("0", 0)}


def test_largest_possible_request_is_served(tiny: Scene) -> None:
    cache = make_cache(tiny.model, 16, num_tokens=11 * 16)
    request = Request("0", tiny.prompts[0][:49], 11 * 16 - 49 + 1)
    assert len(serve(Engine(tiny.model, cache), [request])["0", 0]) == 128
    assert cache.manager.stats().peak_live_blocks == 11


def test_blocks_held_by_others_fail_a_request_instead_of_hanging(tiny: Scene) -> None:
    cache = make_cache(tiny.model, 16, num_tokens=11 * 16)
    manager, engine = cache.manager, Engine(tiny.model, cache)
    foreign = manager.allocate(manager.prepare(list(range(64))))
    assert foreign

    # Seven blocks are left: not enough for this prompt, nor for that growth, but for a third request.
    engine.add(Request("waits", [*range(101), *range(20)], 8, num_samples=2))
    engine.add(Request("grows", tiny.prompts[0][:40], 100))
    engine.add(Request("fits", tiny.prompts[1], 20))
    ends = [event for event in engine.run() if not isinstance(event, Token)]
    failures = {(event.request_id, event.sample) for event in ends if isinstance(event, Failed)}
    assert failures == {("waits", 0), ("waits", 1), ("grows", 0)}
    assert all("held outside the engine" in event.message for event in ends if isinstance(event, Failed))
    [finished] = [event for event in ends if isinstance(event, Finished)]
    assert finished.tokens == tiny.expected()["1", 0][:20]

    manager.free([foreign.handle])
    check_home(cache)


def test_events_come_in_order(tiny: Scene) -> None:
    engine = Engine(tiny.model, make_cache(tiny.model, 16, num_tokens=600))
    for request in _requests(tiny)[:3]:
        engine.add(request)
    tokens: dict[str, list[int]] = {}
    finished = []
    for event in engine.run():
        assert event.request_id not in finished
        if isinstance(event, Token):
            tokens.setdefault(event.request_id, []).append(event.token)
        elif isinstance(event, Finished):
            finished.append(event.request_id)
            assert event.tokens == tokens[event.request_id]
    assert sorted(finished) == ["0", "1", "2"]


def test_stop_token_ends_a_sample(tiny: Scene) -> None:
    tokens = tiny.expected()["3", 0]
    stop = tokens[20]
    request = Request("3", tiny.prompts[3], NUM_TOKENS, stop_ids=frozenset([stop]))
    found = serve(Engine(tiny.model, make_cache(tiny.model, 16, num_tokens=600)), [request])
    assert found["3", 0] == tokens[: tokens.index(stop) + 1]


def test_close_gives_every_block_back(tiny: Scene) -> None:
    cache = make_cache(tiny.model, 16, num_tokens=300)
    engine = Engine(tiny.model, cache)
    for request in _requests(tiny):
        engine.add(replace(request, num_samples=2))
    for _ in range(30):
        engine.step()
    assert cache.manager.stats().live_blocks > 0
    assert cache.manager.stats().preemptions > 0
    engine.close()
    assert engine.idle
    check_home(cache)


def test_samples_depend_on_their_request_alone(tiny: Scene) -> None:
    sampled = Request("s", tiny.prompts[0], 40, num_samples=4, temperature=0.9, top_k=20, seed=5)
    alone = serve(Engine(tiny.model, make_cache(tiny.model, 16, num_tokens=1600)), [sampled])
    crowded = make_cache(tiny.model, 16, num_tokens=300)
    among = serve(Engine(tiny.model, crowded), [*_requests(tiny)[:3], sampled, *_requests(tiny)[3:]])
    assert crowded.manager.stats().preemptions > 0
    assert {key: tokens for key, tokens in among.items() if key[0] == "s"} == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 4

    other_seed = replace(sampled, seed=6)
    assert serve(Engine(tiny.model, make_cache(tiny.model, 16, num_tokens=1600)), [other_seed]) != alone


def test_shared_prefix_is_computed_once(tiny: Scene) -> None:
    cache = make_cache(tiny.model, 16, num_tokens=1600)
    # So few tokens a step that nothing else is admitted before the common 50 tokens, three blocks, are there.
    engine = Engine(tiny.model, cache, max_tokens=50)
    serve(engine, _requests(tiny))
    assert cache.manager.stats().hit_tokens == (len(tiny.prompts) - 1) * 48
    num_prompt_tokens = sum(len(prompt) for prompt in tiny.prompts)
    decoded = len(tiny.prompts) * (NUM_TOKENS - 1)
    assert engine.metrics.computed_tokens == num_prompt_tokens + decoded - cache.manager.stats().hit_tokens


def test_choose_keeps_to_the_top_k() -> None:
    logits = np.array([0.0, 3.0, 2.9, 1.0, -1.0], np.float32)
    request, rng = Request("r", [1], 1, temperature=1.0, top_k=2), np.random.default_rng(0)
    assert {choose(logits, request, rng) for _ in range(200)} == {1, 2}
    assert choose(logits, replace(request, temperature=0.0), rng) == 1
    assert {choose(logits, replace(request, top_k=0, temperature=100.0), rng) for _ in range(200)} == set(
        range(5)
    )


@pytest.mark.parametrize(("max_seqs", "max_tokens"), [(0, 8), (9, 8)])
def test_engine_refuses_limits_that_could_starve(tiny: Scene, max_seqs: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match="1 <= max_seqs <= max_tokens"):
        Engine(
            tiny.model, make_cache(tiny.model, 16, num_tokens=64), max_seqs=max_seqs, max_tokens=max_tokens
        )
