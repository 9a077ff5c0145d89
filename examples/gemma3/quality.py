"""Gemma 3 270M as `kvblocks quality` measures it: a model with a window on most layers.

Owns: the bridge between the model and the tool. May import: kvblocks, model, tokenizer, weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gemma3.model import Gemma
from gemma3.tokenizer import Tokenizer
from gemma3.weights import load
from kvblocks import CacheConfig
from kvblocks.quality import CacheView, Model
from kvblocks.quality.model import IDS
from kvblocks.report import UserError
from smollm2.model import F32
from smollm2.weights import ModelError


def gemma3() -> Model:
    """Gemma 3 270M (base) with a float32 cache; UserError where it cannot be loaded."""
    try:
        checkpoint = load()
        tokenizer = Tokenizer(checkpoint.vocabulary)
    except ModelError as error:
        raise UserError(str(error)) from error
    gemma = Gemma(checkpoint.config, checkpoint.tensors)
    return as_model("Gemma 3 270M", gemma, tokenizer.encode, start=(tokenizer.bos,))


def as_model(
    name: str, gemma: Gemma, encode: Callable[[str], Sequence[int]], start: tuple[int, ...] = ()
) -> Model:
    """A Gemma as the tool takes it."""

    def forward(cache: CacheView, ids: IDS, rows: IDS) -> F32:
        def attention(layer: int, window: int | None, q: F32, k: F32, v: F32) -> F32:
            # Write first: a token attends to itself and to the tokens of its chunk before it.
            cache.write(layer, k, v)
            return np.asarray(cache.attend(layer, q, window=window))

        hidden = gemma.forward(ids, cache.step.positions, attention)
        return gemma.logits(hidden[rows])

    c = gemma.config
    config = CacheConfig(c.num_layers, c.num_kv_heads, c.head_dim, block_size=32)
    return Model(name, forward, config, c.context_length, encode, start, thread_safe=True)
