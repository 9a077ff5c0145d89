"""The passkey test: whether a number that was told once is still known a long text later.

Owns the prompts, their answers and `Cell`. Imports NumPy only.
Invariant: a prompt has exactly as many tokens as asked for, the answer included, and depends on nothing but the
haystack, its length, depth and trial.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvblocks.quality.likelihood import F32, F64, log_softmax

# The wording of Mohtashami and Jaggi, Landmark Attention, 2023 (arXiv:2305.16300). Their filler repeats five short
# sentences; in prose, which has names and numbers of its own, a key is harder to keep.
_INTRODUCTION = "There is an important piece of information hidden in this text. Find it and memorize it.\n\n"
_NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
_QUESTION = "\n\nWhat is the pass key? The pass key is"

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Prompt:
    """Token ids, whose last `num_answer` are the answer."""

    ids: list[int]
    num_answer: int


@dataclass(frozen=True)
class Cell:
    """One context length (tokens) and depth (0: first, 1: last) of a grid, over `num_trials` keys.

    exact: fraction of the keys that greedy decoding repeats exactly. nll: negative log-likelihood of the answer in
    nats a token.
    """

    length: int
    depth: float
    num_trials: int
    exact: float
    nll: float


@dataclass(frozen=True)
class Answer:
    """What became of one key; see `Cell`."""

    length: int
    depth: float
    exact: bool
    nll: float


def judge(length: int, depth: float, logits: F32, answer: NDArray[np.int64]) -> Answer:
    """The answer of one prompt: the logits [num_answer, vocab_size] that predict its true tokens [num_answer].

    The true answer was fed in, and where every token of it is the likeliest, decoding greedily gives the same.
    """
    own = log_softmax(logits)
    nll: F64 = -own[np.arange(len(answer)), answer].astype(np.float64)
    return Answer(length, depth, bool((own.argmax(-1) == answer).all()), float(nll.mean()))


def cells(answers: Iterable[Answer]) -> list[Cell]:
    """The cells of the grid, by length, then depth."""
    by_place: dict[tuple[int, float], list[Answer]] = {}
    for answer in answers:
        by_place.setdefault((answer.length, answer.depth), []).append(answer)
    return [
        Cell(
            length,
            depth,
            len(those),
            float(np.mean([answer.exact for answer in those])),
            float(np.mean([answer.nll for answer in those])),
        )
        for (length, depth), those in sorted(by_place.items())
    ]


def exact_match(cells: Sequence[Cell]) -> float:
    """Fraction of all keys of a grid that were repeated exactly."""
    return sum(cell.exact * cell.num_trials for cell in cells) / sum(cell.num_trials for cell in cells)


def make_prompt(
    encode: Encode,
    haystack: Sequence[int],
    length: int,
    depth: float,
    trial: int,
    *,
    start: Sequence[int] = (),
) -> Prompt:
    """The prompt of `length` tokens whose key stands at `depth` of the haystack, ids that are repeated if need be.

    It begins with `start`. Each trial has another key and another part of the haystack. Raises ValueError for a length
    that holds none of it.
    """
    key = random.Random(f"{length} {depth} {trial}").randrange(10_000, 100_000)
    introduction, needle = (list(encode(text.format(key=key))) for text in (_INTRODUCTION, _NEEDLE))
    introduction = [*start, *introduction]
    question, num_answer = _question(encode, key)
    num_hay = length - len(introduction) - len(needle) - len(question)
    if num_hay < 1:
        raise ValueError(
            f"a context of {length} tokens is too short for the prompt: expected at least {length + 1 - num_hay}"
        )
    hay = [haystack[(trial * num_hay + i) % len(haystack)] for i in range(num_hay)]
    before = round(depth * num_hay)
    return Prompt([*introduction, *hay[:before], *needle, *hay[before:], *question], num_answer)


def _question(encode: Encode, key: int) -> tuple[list[int], int]:
    """The ids of the question with its answer, and how many of them belong to the answer.

    These begin where the ids for another key differ: whether a space is a token of its own is the tokenizer's affair.
    """
    other = 10_000 + (key + 40_000) % 90_000  # begins with another digit
    ids, others = (list(encode(f"{_QUESTION} {number}")) for number in (key, other))
    common = next(i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    return ids, len(ids) - common
