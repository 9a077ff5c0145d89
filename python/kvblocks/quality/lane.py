"""One format's run of a batch: sequences read a chunk at a time out of a paged cache, as a server computes them.

Owns `Variant` and `Lane`. Imports cache and model.
Invariant: all lanes compute the same tokens in the same steps, so that what differs between them is what the cache
gives back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvblocks._core import Allocated
from kvblocks.backends import Backend, Supported, get_backend
from kvblocks.backends.checks import check_config
from kvblocks.batch import Step
from kvblocks.cache import PagedKVCache
from kvblocks.calibration import Calibration
from kvblocks.config import CacheConfig
from kvblocks.layout import Array
from kvblocks.quality.model import F32, IDS, Forward

# (layer, k [num_tokens, num_kv_heads, head_dim], v) -> the K and V that are stored instead.
Codec = Callable[[int, Array, Array], tuple[Array, Array]]


@dataclass(frozen=True)
class Variant:
    """What is compared with the reference: a cache format, or a codec whose result a plain cache stores.

    codec: quantises and restores K and V before they are written, to try an idea before there is a format of it; it
    sees the tokens of one step. bits: what it would store per element, where it is known. calibration: where static
    scales come from, for formats that have some; percent of a head's elements are not clipped.
    """

    name: str
    config: CacheConfig
    codec: Codec | None = None
    bits: float | None = None
    calibration: Calibration | None = None
    percent: float = 100


class Lane:
    """A variant's cache, with room for `num_seqs` sequences of `num_tokens` tokens at a time.

    chunk_tokens: tokens of each sequence that a step computes. With a format that keeps the newest tokens in 16 bit, a
    token sees those of its own chunk in 16 bit too: chunks of a block are what decoding token by token would see, to
    within a block.
    """

    def __init__(
        self,
        forward: Forward,
        variant: Variant,
        *,
        num_seqs: int,
        num_tokens: int,
        chunk_tokens: int,
        backend: Backend,
    ) -> None:
        blocks = num_seqs * -(-num_tokens // variant.config.block_size)
        self.variant = variant
        # A cache's arrays of a step are as long as the longest one.
        self.chunk_tokens = min(chunk_tokens, num_tokens)
        self._forward = forward
        self._cache = PagedKVCache(
            variant.config,
            num_blocks=blocks + 1,
            backend=backend,
            enable_prefix_cache=False,
            max_seqs=num_seqs,
            max_tokens=num_seqs * self.chunk_tokens,
        )
        if variant.calibration is not None:
            self._cache.apply_scales(variant.calibration, variant.percent)
        self._view = _View(self._cache, variant.codec)

    def run(
        self, tokens: IDS, first_row: int, progress: Callable[[int], None] = lambda _: None
    ) -> Iterator[tuple[int, F32]]:
        """Compute sequences [num_seqs, num_tokens] of equal length, a chunk a step; progress is told the tokens.

        Yields for each step the position of its first row and the logits float32 [num_seqs, num_rows, vocab_size] of
        the positions from `first_row` on; the last position's included. Steps before it yield no rows.
        """
        manager, cache = self._cache.manager, self._cache
        num_seqs, num_tokens = tokens.shape
        handles: list[int] = []
        try:
            for row in tokens:
                answer = manager.allocate(manager.prepare(row))
                if not isinstance(answer, Allocated):
                    raise RuntimeError(f"the pool of a lane is too small: {answer}")
                handles.append(answer.handle)
            for start in range(0, num_tokens, self.chunk_tokens):
                stop = min(start + self.chunk_tokens, num_tokens)
                counts = [stop - start] * num_seqs
                scheduled = cache.schedule(handles, counts)
                if not scheduled:
                    raise RuntimeError(f"the pool of a lane is too small: {scheduled.refusal}")
                first = min(max(start, first_row), stop)
                rows = np.arange(num_seqs)[:, None] * (stop - start) + np.arange(first - start, stop - start)
                self._view.attended.clear()
                logits = self._forward(self._view, tokens[:, start:stop].reshape(-1), rows.reshape(-1))
                # A model that goes past its cache would be the same over any format.
                if len(self._view.attended) != self.variant.config.num_layers:
                    raise ValueError(
                        f"the model attended to {len(self._view.attended)} layers of the cache in a step, "
                        f"its config has {self.variant.config.num_layers}"
                    )
                if logits.ndim != 2 or len(logits) != rows.size:
                    raise ValueError(
                        f"the model returned logits of shape {logits.shape} for {rows.size} rows: "
                        f"expected ({rows.size}, vocab_size)"
                    )
                manager.commit(handles, counts)
                progress(sum(counts))
                yield first, logits.reshape(num_seqs, stop - first, logits.shape[-1])
        finally:
            manager.free(handles)


class _View:
    """A cache, with a codec before every write if there is one; it knows the layers that were attended to."""

    def __init__(self, cache: PagedKVCache, codec: Codec | None) -> None:
        self._cache, self._codec = cache, codec
        self.attended: set[int] = set()

    @property
    def step(self) -> Step:
        return self._cache.step

    def write(self, layer: int, k: Array, v: Array) -> None:
        self._cache.write(layer, *((k, v) if self._codec is None else self._codec(layer, k, v)))

    def attend(self, layer: int, q: Array, **options: Any) -> Array:
        self.attended.add(layer)
        return self._cache.attend(layer, q, **options)


def choose_backend(config: CacheConfig, wanted: str | Backend | None) -> Backend:
    """The backend that was asked for; else the default one or, where it has no kernels for a format, the specification.

    Raises ValueError for an unknown name.
    """
    if wanted is not None and not isinstance(wanted, str):
        return wanted
    backend = get_backend(wanted)
    if wanted is None and not _can(backend.supported(), config):
        return get_backend("numpy")
    return backend


def _can(supported: Supported, config: CacheConfig) -> bool:
    try:
        check_config(supported, config, 1)
    except ValueError:
        return False
    return not config.has_residual or "tail" in supported.features


def with_format(config: CacheConfig, kv_format: str, calibration: Calibration | None = None) -> Variant:
    """The variant that stores `config`'s model in a format of the library's list; ValueError as CacheConfig's."""
    changed = dataclasses.replace(config, kv_format=kv_format)
    return Variant(kv_format, changed, calibration=calibration)
