"""The example engine: admission, preemption, failure, sampling; on the tiny random model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from smollm2.engine import Engine, Seq
from smollm2.model import F32
from smollm2.request import Failed, Finished, Request, RequestError, Token, choose, counted

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
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected a whole number from 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5, expected a whole number from 1"),
        ({"num_samples": 0}, "num_samples is 0, expected a whole number from 1"),
        ({"num_samples": 17}, "17 samples, but this engine runs 1 to 16 at once"),
        ({"top_k": -1}, "top_k is -1, expected a whole number from 0"),
        ({"seed": -1}, "seed is -1, expected a whole number from 0"),
        ({"seed": None}, "seed is None, expected a whole number from 0"),
        ({"temperature": -0.5}, "temperature is -0.5, expected a number from 0"),
        ({"temperature": float("nan")}, "temperature is nan, expected a number from 0"),
        ({"temperature": float("inf")}, "temperature is inf, expected a number from 0"),
        ({"temperature": "1"}, "temperature is '1', expected a number from 0"),
        ({"stop_ids": None}, "stop_ids is None, expected a set of token ids"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": "text"}, "the prompt is no list of token ids"),
        ({"prompt": None}, "the prompt is no list of token ids"),
        ({"prompt": [1, 2.0]}, "the prompt is no list of token ids"),
        ({"prompt": [[1], [2, 3]]}, "the prompt is no list of token ids"),
        ({"prompt": np.ones((2, 2), np.int64)}, "the prompt is no list of token ids"),
        ({"prompt": [1, 101]}, "the prompt holds the id 101, the model's vocabulary 0 to 100"),
        ({"prompt": [-1, 1]}, "the prompt holds the id -1, the model's vocabulary 0 to 100"),
        ({"prompt": [2**64 - 1]}, "the prompt holds the id 18446744073709551615, the model's vocabulary"),
        ({"id": "0"}, "request 0: a request of this id has not ended yet"),
    ],
)
def test_impossible_request_is_refused_alone(tiny: Scene, change: dict, words: str) -> None:  # type: ignore[type-arg]
    cache = make_cache(tiny.model, 16, num_tokens=11 * 16)
    engine = Engine(tiny.model, cache)
    good = Request("0", tiny.prompts[0][:53], NUM_TOKENS)
    engine.add(good)
    with pytest.raises(RequestError, match=words):
        engine.add(replace(good, **{"id": "bad"} | change))
    assert serve(engine, []).keys() == {("0", 0)}


def test_ids_of_ended_requests_and_numpy_prompts_are_taken(tiny: Scene) -> None:
    engine = Engine(tiny.model, make_cache(tiny.model, 16, num_tokens=300))
    for dtype in (np.int64, np.int32, np.uint16):
        request = Request("3", np.array(tiny.prompts[3], dtype), NUM_TOKENS)
        assert serve(engine, [request])["3", 0] == tiny.expected()["3", 0]


def _raise(row: F32, seq: Seq) -> int:
    raise ZeroDivisionError("no luck")


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (_raise, "no luck"),
        (lambda row, seq: 101, "101 is no token id"),
        (lambda row, seq: -1, "-1 is no token id"),
        (lambda row, seq: None, "no token could be sampled: TypeError"),
    ],
)
def test_sampler_that_fails_ends_that_sample_alone(
    tiny: Scene, sample: Callable[[F32, Seq], Any], words: str
) -> None:
    def sampler(row: F32, seq: Seq) -> int:
        bad = seq.request.id == "bad" and seq.sample == 1 and len(seq.tokens) == len(tiny.prompts[1]) + 5
        return sample(row, seq) if bad else int(row.argmax())

    cache = make_cache(tiny.model, 16, num_tokens=1600)
    engine = Engine(tiny.model, cache, sampler=sampler)
    engine.add(Request("0", tiny.prompts[0], NUM_TOKENS))
    engine.add(Request("bad", tiny.prompts[1], 20, num_samples=3))
    ends = [event for event in engine.run() if not isinstance(event, Token)]
    [failed] = [event for event in ends if isinstance(event, Failed)]
    assert (failed.request_id, failed.sample) == ("bad", 1)
    assert words in failed.message
    finished = {(e.request_id, e.sample): e.tokens for e in ends if isinstance(e, Finished)}
    assert finished.keys() == {("0", 0), ("bad", 0), ("bad", 2)}
    assert finished["0", 0] == tiny.expected()["0", 0]
    assert finished["bad", 2] == tiny.expected()["1", 0][:20]
    check_home(cache)


@pytest.mark.parametrize("method", ["forward", "logits"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("goes_on", [True, False])
def test_step_that_raises_can_be_gone_on_from(
    tiny: Scene, monkeypatch: pytest.MonkeyPatch, method: str, error: type[BaseException], goes_on: bool
) -> None:
    cache = make_cache(tiny.model, 16, num_tokens=300)
    engine = Engine(tiny.model, cache)
    original, calls, raised = getattr(tiny.model, method), itertools.count(), []

    def sometimes(*arguments: Any) -> F32:
        result: F32 = original(*arguments)
        if next(calls) % 5 == 4:
            raised.append(True)
            raise error
        return result

    monkeypatch.setattr(tiny.model, method, sometimes)
    for request in _requests(tiny):
        engine.add(replace(request, num_samples=2, temperature=1e-308))
    finished = {}
    while not engine.idle and (goes_on or len(raised) < 3):
        with suppress(error):
            for event in engine.step():
                if isinstance(event, Finished):
                    finished[event.request_id, event.sample] = event.tokens
        assert cache.manager.check_integrity() == []
    if goes_on:
        assert len(raised) > 10
        expected = {key[0]: tokens for key, tokens in tiny.expected().items()}
        assert finished == {(name, i): tokens for name, tokens in expected.items() for i in range(2)}
    engine.close()
    assert engine.idle
    check_home(cache)


def test_events_before_a_step_that_raises_are_told_later(
    tiny: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tiny.model, 16, num_tokens=11 * 16)
    engine = Engine(tiny.model, cache)
    foreign = cache.manager.allocate(cache.manager.prepare(list(range(64))))
    assert foreign
    engine.add(Request("refused", [*range(101), *range(20)], 8))
    engine.add(Request("1", tiny.prompts[1], 1))
    with monkeypatch.context() as patch:
        patch.setattr(tiny.model, "forward", _raise)
        with pytest.raises(TypeError):
            engine.step()
    kinds = [(type(event), event.request_id) for event in engine.run()]
    assert kinds == [(Failed, "refused"), (Token, "1"), (Finished, "1")]
    cache.manager.free([foreign.handle])
    check_home(cache)


def test_peaks_are_of_steps_that_ran(tiny: Scene) -> None:
    cache = make_cache(tiny.model, 256, num_tokens=256)
    engine = Engine(tiny.model, cache)
    serve(engine, [Request("0", tiny.prompts[0], 8, num_samples=4, temperature=0.9)])
    assert engine.metrics.peak_seqs == 1
    assert engine.metrics.peak_saved_blocks == 0


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


@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 1e-308, 5e-324, 1e300, np.float32(0.5)])
@pytest.mark.parametrize("top_k", [0, 3])
def test_choose_takes_every_temperature(temperature: float, top_k: int) -> None:
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 30
    request, rng = Request("r", [1], 1, temperature=temperature, top_k=top_k), np.random.default_rng(0)
    chosen = {choose(logits, request, rng) for _ in range(50)}
    if temperature <= 1e-3:
        assert chosen == {int(logits.argmax())}


@pytest.mark.parametrize(("number", "text"), [(0, "0 tokens"), (1, "1 token"), (2048, "2,048 tokens")])
def test_nouns_agree_with_their_number(number: int, text: str) -> None:
    assert counted(number, "token") == text


@pytest.mark.parametrize(("max_seqs", "max_tokens"), [(0, 8), (9, 8)])
def test_engine_refuses_limits_that_could_starve(tiny: Scene, max_seqs: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match="1 <= max_seqs <= max_tokens"):
        Engine(
            tiny.model, make_cache(tiny.model, 16, num_tokens=64), max_seqs=max_seqs, max_tokens=max_tokens
        )
