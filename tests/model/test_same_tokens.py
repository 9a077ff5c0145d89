"""Same tokens: whatever the cache does (share, page, copy, evict, preempt), the tokens are the contiguous ones."""

from __future__ import annotations

from typing import Any

import pytest

from smollm2.engine import Engine
from smollm2.model import Llama
from smollm2.request import Request

from .harness import (
    BLOCK_SIZES,
    NUM_CHILDREN,
    NUM_TOKENS,
    Scene,
    decode_forks,
    forcing,
    make_cache,
    serve,
    without_copies,
    without_copy_on_write,
)

AMPLE, SCARCE = 1600, 450  # tokens of a pool in which all prompts fit at once, and of one in which a few do


@pytest.fixture(params=["tiny", pytest.param("real", marks=pytest.mark.model)])
def scene(request: pytest.FixtureRequest) -> Scene:
    found: Scene = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["numpy", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("num_pool_tokens", [AMPLE, SCARCE])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_engine_equals_contiguous(
    scene: Scene, block_size: int, prefix_cache: bool, num_pool_tokens: int
) -> None:
    _check_engine(scene, block_size, prefix_cache, num_pool_tokens, "numpy")


@pytest.mark.parametrize("num_pool_tokens", [AMPLE, SCARCE])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_engine_equals_contiguous_on_the_cpu_backend(
    tiny: Scene, block_size: int, num_pool_tokens: int
) -> None:
    _check_engine(tiny, block_size, True, num_pool_tokens, "cpu")


def _check_engine(
    scene: Scene, block_size: int, prefix_cache: bool, num_pool_tokens: int, backend: str
) -> None:
    cache = make_cache(
        scene.model, block_size, num_tokens=num_pool_tokens, prefix_cache=prefix_cache, backend=backend
    )
    engine = Engine(scene.model, cache)
    requests = [Request(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(scene.prompts)]

    assert serve(engine, requests) == scene.expected()

    stats = cache.manager.stats()
    assert (stats.preemptions > 0) == (num_pool_tokens == SCARCE)
    assert (stats.hit_tokens > 0) == prefix_cache
    assert engine.metrics.peak_seqs == len(requests) or num_pool_tokens == SCARCE


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_forks_equal_contiguous(scene: Scene, block_size: int) -> None:
    case = scene.fork_case(0, before=5)
    cache = make_cache(scene.model, block_size, num_tokens=AMPLE)
    assert decode_forks(scene.model, cache, case) == case.expected
    # All four go on writing into the same half-filled block; the last of its owners writes in place.
    ends_inside = (len(case.prompt) + case.before) % block_size != 0
    assert ends_inside == (block_size > 1)
    assert cache.manager.stats().copied_blocks == (NUM_CHILDREN if ends_inside else 0)


@pytest.mark.parametrize("mutant", [without_copies, without_copy_on_write])
def test_forks_without_copy_on_write_are_noticed(scene: Scene, mutant: Any) -> None:
    case = scene.fork_case(0, before=5)
    with mutant():
        found = decode_forks(scene.model, make_cache(scene.model, 16, num_tokens=AMPLE), case)
    assert found != case.expected


@pytest.mark.parametrize("num_pool_tokens", [AMPLE, SCARCE])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_forked_group_equals_contiguous(
    tiny: Scene, block_size: int, num_pool_tokens: int, backend: str
) -> None:
    _check_forked_group(tiny, block_size, num_pool_tokens, backend)


@pytest.mark.model
def test_forked_group_of_the_real_model_equals_contiguous(real: Scene) -> None:
    _check_forked_group(real, 16, SCARCE, "cpu")


def _check_forked_group(scene: Scene, block_size: int, num_pool_tokens: int, backend: str) -> None:
    """A request sampled four ways between two others; in the scarce pool its samples are preempted and resume."""
    case = scene.fork_case(0, before=0)
    forced = {("0", sample): token for sample, token in enumerate(case.forced, start=1)}
    cache = make_cache(scene.model, block_size, num_tokens=num_pool_tokens, backend=backend)
    engine = Engine(scene.model, cache, sampler=forcing(forced))
    group = Request("0", case.prompt, NUM_TOKENS, num_samples=NUM_CHILDREN + 1)
    before, after = (Request(str(i), scene.prompts[i], NUM_TOKENS) for i in (1, 2))

    found = serve(engine, [before, group, after])

    assert [found["0", sample] for sample in range(NUM_CHILDREN + 1)] == case.expected
    assert found["1", 0] == scene.expected()["1", 0]
    assert found["2", 0] == scene.expected()["2", 0]
    assert (cache.manager.stats().preemptions > 0) == (num_pool_tokens == SCARCE)


def test_golden_tokens(smollm2: Llama, golden: dict[str, Any], tokenizer: Any, backend: str) -> None:
    """The quick look at the real model: text to ids to the tokens that transformers generated."""
    requests, expected = [], {}
    for i, entry in enumerate(golden["prompts"]):
        system, user = golden["system"], entry["prompt"]
        ids = tokenizer.encode_chat(
            [{"role": "system", "content": system}, {"role": "user", "content": user}]
        )
        assert ids == entry["prompt_ids"]
        requests.append(Request(str(i), ids, len(entry["tokens"])))
        expected[str(i), 0] = entry["tokens"]
    cache = make_cache(smollm2, 16, num_tokens=400, backend=backend)
    assert serve(Engine(smollm2, cache), requests) == expected
