"""What is asked of the engine and what comes back.

Owns: requests, events, and the choice of a token from logits. May import: NumPy.
Invariant: the tokens of a sample depend on its request and its index alone, not on what else is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray


class RequestError(ValueError):
    """A request that the engine can never serve; the message says what would have to change."""


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it: `num_samples` times, by at most `max_new_tokens` tokens each.

    temperature 0 is greedy; top_k 0 considers the whole vocabulary. A token in `stop_ids` ends a sample.
    """

    id: str
    prompt: Sequence[int]
    max_new_tokens: int
    num_samples: int = 1
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Token:
    """One sampled token."""

    request_id: str
    sample: int
    token: int


@dataclass(frozen=True)
class Finished:
    """The end of one sample; `tokens` are all that were sampled, the stop token included."""

    request_id: str
    sample: int
    reason: Literal["stop", "length"]
    tokens: list[int]


@dataclass(frozen=True)
class Failed:
    """The end of one sample that could not go on; nothing else is affected."""

    request_id: str
    sample: int
    message: str


Event: TypeAlias = Token | Finished | Failed


def choose(logits: NDArray[np.float32], request: Request, rng: np.random.Generator) -> int:
    """The next token, from logits [vocab_size], as the request asks for it."""
    if request.temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / request.temperature
    if 0 < request.top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -request.top_k)[-request.top_k]] = -np.inf
    weights = np.exp(scaled - scaled.max())
    return int(rng.choice(len(weights), p=weights / weights.sum()))
