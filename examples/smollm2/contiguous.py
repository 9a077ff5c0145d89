"""The plain way: one sequence, one contiguous K/V array, float32. What the paged engine must agree with.

Owns: the reference generation of the tests and of the golden tokens. May import: NumPy, model.
Invariant: nothing here knows about blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from smollm2.model import F32, Llama


@dataclass
class Generation:
    """Greedy tokens and, for each, how far its logit was above the runner-up's.

    A gap near zero is a tie that the last bits of a matrix product may decide; comparisons of two
    implementations must keep away from those.
    """

    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class ContiguousCache:
    """K and V of one sequence, [num_layers, max_tokens, num_kv_heads, head_dim] each."""

    def __init__(self, model: Llama, max_tokens: int) -> None:
        c = model.config
        self._keys = np.zeros((c.num_layers, max_tokens, c.num_kv_heads, c.head_dim), np.float32)
        self._values = np.zeros_like(self._keys)
        self._group = c.num_heads // c.num_kv_heads
        self.model = model
        self.length = 0

    def extend(self, ids: Sequence[int]) -> F32:
        """Run the next tokens; the logits [vocab_size] after the last of them."""
        positions = np.arange(self.length, self.length + len(ids))
        hidden = self.model.forward(ids, positions, self._attend)
        self.length += len(ids)
        return np.asarray(self.model.logits(hidden[-1:])[0])

    def _attend(self, layer: int, q: F32, k: F32, v: F32) -> F32:
        start, end = self.length, self.length + len(q)
        self._keys[layer, start:end], self._values[layer, start:end] = k, v
        keys = np.repeat(self._keys[layer, :end], self._group, axis=1).transpose(1, 2, 0)  # [h, d, n]
        values = np.repeat(self._values[layer, :end], self._group, axis=1).transpose(1, 0, 2)  # [h, n, d]
        scores = q.transpose(1, 0, 2) @ keys / np.float32(np.sqrt(q.shape[-1]))  # [h, t, n]
        future = np.arange(end)[None, :] > np.arange(start, end)[:, None]
        scores = np.where(future, np.float32(-np.inf), scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.asarray((weights @ values).transpose(1, 0, 2))


def generate(model: Llama, prompt: Sequence[int], num_tokens: int, forced: Sequence[int] = ()) -> Generation:
    """Greedy continuation of a prompt by `num_tokens` tokens, the first of them forced to `forced`."""
    cache = ContiguousCache(model, len(prompt) + num_tokens)
    result = Generation()
    logits = cache.extend(prompt)
    for i in range(num_tokens):
        runner_up, best = np.partition(logits, -2)[-2:]
        token = forced[i] if i < len(forced) else int(logits.argmax())
        result.tokens.append(token)
        result.gaps.append(float(best - runner_up) if i >= len(forced) else np.inf)
        if i + 1 < num_tokens:
            logits = cache.extend([token])
    return result
