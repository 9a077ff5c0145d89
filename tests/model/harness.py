"""What the generation tests share: caches of a given size in tokens, and two ways to generate from them.

`serve` goes through the example engine; `decode_forks` is a bare loop over `PagedKVCache`, so that a fault of the
engine cannot hide one of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from kvblocks import Allocated, LayerCache, PagedKVCache
from kvblocks.backends.numpy import NumpyBackend
from kvblocks.config import CacheConfig
from smollm2.contiguous import Generation, generate
from smollm2.engine import Engine
from smollm2.model import F32, Llama
from smollm2.request import Failed, Finished, Request

BLOCK_SIZES = (1, 16, 24)
NUM_TOKENS = 64
NUM_CHILDREN = 3

Samples = dict[tuple[str, int], list[int]]


@dataclass(frozen=True)
class ForkCase:
    """A parent that decodes `before` tokens, and children forced to other tokens than the parent's next.

    expected: what follows the fork, [1 + NUM_CHILDREN] lines of NUM_TOKENS tokens, the parent's first.
    """

    prompt: list[int]
    before: int
    forced: list[int]
    expected: list[list[int]]


class Scene:
    """A model, prompts with a common beginning, and what it generates from them with a contiguous cache.

    least_gap: how far a token's logit must lead for two ways of adding the same float32 numbers to agree on it,
    many times what they differ by; prompts that come closer to a tie are no fair test.
    """

    def __init__(self, model: Llama, prompts: list[list[int]], *, least_gap: float) -> None:
        self.model, self.prompts, self._least_gap = model, prompts, least_gap
        self._references = [generate(model, prompt, NUM_TOKENS) for prompt in prompts]
        assert all(self._is_fair(reference) for reference in self._references)
        self._fork_cases: dict[tuple[int, int], ForkCase] = {}

    def expected(self) -> Samples:
        """The tokens of each prompt, keyed as the engine's samples are."""
        return {(str(i), 0): reference.tokens for i, reference in enumerate(self._references)}

    def fork_case(self, index: int, before: int) -> ForkCase:
        """A fork of prompt `index` after `before` tokens; computed once."""
        key = index, before
        if key not in self._fork_cases:
            self._fork_cases[key] = self._make_fork_case(*key)
        return self._fork_cases[key]

    def _make_fork_case(self, index: int, before: int) -> ForkCase:
        prompt, tokens = self.prompts[index], self._references[index].tokens
        parent = generate(self.model, prompt, before + NUM_TOKENS)
        assert self._is_fair(parent)
        forced, expected = [], [parent.tokens[before:]]
        # Other tokens of the same text are plausible continuations; near ties are passed over.
        for token in dict.fromkeys(tokens):
            if token != tokens[before] and len(forced) < NUM_CHILDREN:
                child = generate(self.model, prompt, before + NUM_TOKENS, forced=[*tokens[:before], token])
                if self._is_fair(child):
                    forced.append(token)
                    expected.append(child.tokens[before:])
        assert len(forced) == NUM_CHILDREN
        return ForkCase(prompt, before, forced, expected)

    def _is_fair(self, generation: Generation) -> bool:
        return min(generation.gaps) > self._least_gap


def make_cache(
    model: Llama,
    block_size: int,
    *,
    num_tokens: int,
    prefix_cache: bool = True,
    watermark_blocks: int = 0,
    backend: str = "numpy",
) -> PagedKVCache:
    """A cache with room for `num_tokens` tokens, rounded up to blocks, and the null block."""
    c = model.config
    return PagedKVCache(
        CacheConfig(c.num_layers, c.num_kv_heads, c.head_dim, block_size=block_size),
        num_blocks=-(-num_tokens // block_size) + 1,
        enable_prefix_cache=prefix_cache,
        watermark_blocks=watermark_blocks,
        max_seqs=16,
        max_tokens=256,
        backend=backend,
    )


def serve(engine: Engine, requests: Sequence[Request], *, max_steps: int = 5000) -> Samples:
    """The tokens of every sample; the engine must end by itself, without a failure, and give every block back."""
    for request in requests:
        engine.add(request)
    samples: Samples = {}
    for _ in range(max_steps):
        if engine.idle:
            break
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Finished):
                samples[event.request_id, event.sample] = event.tokens
    assert engine.idle, f"not done after {max_steps} steps"
    check_home(engine.cache)
    return samples


def check_home(cache: PagedKVCache) -> None:
    """No block is in use, and the manager's own books agree."""
    stats = cache.manager.stats()
    assert stats.live_blocks == 0
    assert stats.num_seqs == 0
    assert stats.free_blocks + stats.cached_blocks == stats.capacity_blocks
    assert cache.manager.check_integrity() == []


def decode_forks(model: Llama, cache: PagedKVCache, case: ForkCase) -> list[list[int]]:
    """Decode the parent, fork the children, decode all of them greedily; what follows the fork."""
    manager = cache.manager
    admitted = manager.allocate(manager.prepare(case.prompt))
    assert isinstance(admitted, Allocated)
    parent = admitted.handle
    rows = advance(model, cache, [parent], [case.prompt[admitted.num_cached_tokens :]], known=True)
    for _ in range(case.before):
        rows = advance(model, cache, [parent], [[int(rows[0].argmax())]])
    handles = [parent, *(int(child) for child in manager.fork([parent], len(case.forced)))]
    lines = [[int(rows[0].argmax())], *([token] for token in case.forced)]
    for _ in range(NUM_TOKENS - 1):
        rows = advance(model, cache, handles, [line[-1:] for line in lines])
        for line, row in zip(lines, rows, strict=True):
            line.append(int(row.argmax()))
    manager.free(handles)
    check_home(cache)
    return lines


def advance(
    model: Llama, cache: PagedKVCache, handles: list[int], ids: list[list[int]], *, known: bool = False
) -> F32:
    """One step: compute `ids` of each sequence; the logits [num_seqs, vocab_size] after each one's last token."""

    def attention(layer: int, q: F32, k: F32, v: F32) -> F32:
        cache.write(layer, k, v)
        out: F32 = cache.attend(layer, q)
        return out

    counts, flat = [len(part) for part in ids], [token for part in ids for token in part]
    assert cache.schedule(handles, counts)
    hidden = model.forward(flat, cache.step.positions, attention)
    cache.manager.commit(handles, counts, None if known else flat)
    return model.logits(hidden[np.cumsum(counts) - 1])


@contextmanager
def without_copies() -> Iterator[None]:
    """A cache whose copy-on-write gives a new, zeroed block but forgets to copy the old one into it."""

    def copy_blocks(self: NumpyBackend, caches: Sequence[LayerCache], copies: NDArray[np.int32]) -> None:
        for cache in caches:
            cache.k[copies[:, 1]] = cache.v[copies[:, 1]] = 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NumpyBackend, "copy_blocks", copy_blocks)
        yield


@contextmanager
def without_copy_on_write() -> Iterator[None]:
    """A cache that goes on writing into the block that is shared, as if nothing had been copied."""
    shared: dict[int, int] = {}
    resolve = np.vectorize(lambda block: shared.get(block, block), otypes=[np.int64])
    write, attend = NumpyBackend.write, NumpyBackend.attend

    def copy_blocks(self: NumpyBackend, caches: object, copies: NDArray[np.int32]) -> None:
        shared.update({int(dst): shared.get(int(src), int(src)) for src, dst in copies})

    def write_shared(self: NumpyBackend, cache, k, v, slots) -> None:  # type: ignore[no-untyped-def]
        block, offset = np.divmod(slots, cache.block_size)
        shared_slots = resolve(block) * cache.block_size + offset
        # One by one: the backend refuses two tokens for one slot, and the last of them shall win.
        for row in range(len(slots)):
            write(self, cache, k[row : row + 1], v[row : row + 1], shared_slots[row : row + 1])

    def attend_shared(self: NumpyBackend, cache, q, tables, *rest, **options):  # type: ignore[no-untyped-def]
        return attend(self, cache, q, resolve(tables).astype(np.int32), *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NumpyBackend, "copy_blocks", copy_blocks)
        patch.setattr(NumpyBackend, "write", write_shared)
        patch.setattr(NumpyBackend, "attend", attend_shared)
        yield


def forcing(tokens: dict[tuple[str, int], int]) -> Callable[..., int]:
    """A greedy sampler whose first token of a sample is forced where `tokens` has one."""

    def sampler(logits: F32, seq) -> int:  # type: ignore[no-untyped-def]
        is_first = len(seq.tokens) == len(seq.request.prompt)
        forced = tokens.get((seq.request.id, seq.sample)) if is_first else None
        return int(logits.argmax()) if forced is None else forced

    return sampler
