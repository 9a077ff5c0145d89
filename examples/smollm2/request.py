"""What is asked of the engine and what comes back.

Owns: requests and what their fields may hold, events, the choice of a token from logits, and counted nouns.
May import: NumPy.
Invariant: the tokens of a sample depend on its request and its index alone, not on what else is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray


class RequestError(ValueError):
    """A request that the engine can never serve; the message says what would have to change."""


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it: `num_samples` times, by at most `max_new_tokens` tokens each.

    `id` names the request in its events. The prompt's ids stand in a list or an integer array. temperature 0 is
    greedy; top_k 0 considers the whole vocabulary. A token in `stop_ids` ends a sample.
    """

    id: str
    prompt: Sequence[int] | NDArray[np.integer]
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


def check(request: Request, vocab_size: int) -> list[int]:
    """The prompt's ids, if every field can be meant. Raises RequestError."""

    def refuse(problem: str) -> RequestError:
        return RequestError(f"request {request.id}: {problem}")

    for name, least in (("max_new_tokens", 1), ("num_samples", 1), ("top_k", 0), ("seed", 0)):
        value: Any = getattr(request, name)
        if not isinstance(value, (int, np.integer)) or value < least:
            raise refuse(f"{name} is {value!r}, expected a whole number from {least}")
    temperature: Any = request.temperature
    if not isinstance(temperature, (int, float, np.integer, np.floating)) or not 0 <= temperature < inf:
        raise refuse(f"temperature is {temperature!r}, expected a number from 0")
    stop_ids: Any = request.stop_ids
    if not isinstance(stop_ids, (frozenset, set)):
        raise refuse(f"stop_ids is {stop_ids!r}, expected a set of token ids")
    try:
        ids = np.asarray(request.prompt)
    except (TypeError, ValueError) as error:  # such as lists of unequal lengths
        raise refuse(f"the prompt is no list of token ids: {error}") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise refuse("the prompt is no list of token ids")
    if not ids.size:
        raise refuse("the prompt is empty")
    if ids.min() < 0 or ids.max() >= vocab_size:
        stranger = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise refuse(f"the prompt holds the id {stranger}, the model's vocabulary 0 to {vocab_size - 1}")
    tokens: list[int] = ids.tolist()
    return tokens


def choose(logits: NDArray[np.float32], request: Request, rng: np.random.Generator) -> int:
    """The next token, from logits [vocab_size], as the request asks for it."""
    if request.temperature == 0:
        return int(logits.argmax())
    behind = logits.astype(np.float64) - logits.max()
    if 0 < request.top_k < len(behind):
        behind[behind < np.partition(behind, -request.top_k)[-request.top_k]] = -np.inf
    # A tiny temperature puts all but the best infinitely far behind, which is greedy again.
    with np.errstate(over="ignore"):
        weights = np.exp(behind / request.temperature)
    return int(rng.choice(len(weights), p=weights / weights.sum()))


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 token", "2,048 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
