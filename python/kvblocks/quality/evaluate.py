"""The measurement: a reference and its variants over the same text and the same needle prompts.

Owns `evaluate` and its results. Imports the other modules of the package; prints nothing.
Invariant: every figure of a variant is taken beside the reference's in the same run, on the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from kvblocks.backends import Backend
from kvblocks.quality.lane import Lane, Variant, choose_backend
from kvblocks.quality.likelihood import Rows, TextScore, compare, log_softmax, summary
from kvblocks.quality.model import F32, IDS, Model
from kvblocks.quality.needle import Answer, Cell, Prompt, cells, exact_match, judge, make_prompt
from kvblocks.quality.text import own_text
from kvblocks.quality.verdict import Thresholds, failures


@dataclass(frozen=True)
class Text:
    """What perplexity and divergence are measured on.

    windows: token ids [num_windows, num_tokens], each read from an empty cache, `Model.start` at its beginning;
    predictions of the tokens from `first_scored` (>= 1) on count.
    """

    windows: IDS
    first_scored: int

    def __post_init__(self) -> None:
        if self.windows.ndim != 2 or not len(self.windows):
            raise ValueError(f"windows has shape {self.windows.shape}: expected [num_windows, num_tokens]")
        if not 1 <= self.first_scored < self.windows.shape[1]:
            raise ValueError(
                f"first_scored is {self.first_scored}: expected 1..{self.windows.shape[1] - 1}, "
                f"as a window has {self.windows.shape[1]} tokens"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return int(self.windows.size)


@dataclass(frozen=True)
class Grid:
    """The needle prompts: every context length (tokens) with every depth (0..1), `num_trials` keys each.

    haystack: the text in which the keys are hidden, the project's own by default.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    num_trials: int
    haystack: str = field(default_factory=own_text, repr=False)

    def __post_init__(self) -> None:
        if not self.lengths or not self.depths or self.num_trials < 1:
            raise ValueError(
                f"a grid of {len(self.lengths)} lengths, {len(self.depths)} depths and {self.num_trials} trials: "
                "expected at least one of each"
            )
        if not self.haystack:
            raise ValueError("the haystack is empty")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths are {self.depths}: expected fractions from 0 to 1")

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return sum(self.lengths) * len(self.depths) * self.num_trials


@dataclass(frozen=True)
class Score:
    """What a variant did, computed by `backend`; `failures` names each threshold that it fails, with both numbers."""

    variant: Variant
    backend: str
    text: TextScore | None
    needle: list[Cell] | None
    failures: list[str]

    @property
    def passes(self) -> bool:
        """Whether it fails no threshold."""
        return not self.failures


@dataclass(frozen=True)
class Result:
    """Of one run: the reference's score, then each variant's in the order given.

    interrupted: whether it ended before its end; every figure is then of what had been measured for all alike.
    """

    reference: Score
    scores: list[Score]
    interrupted: bool = False


def evaluate(
    model: Model,
    variants: Sequence[Variant],
    *,
    text: Text | None = None,
    grid: Grid | None = None,
    thresholds: Thresholds | None = None,
    backend: str | Backend | None = None,
    batch_size: int = 8,
    chunk_tokens: int = 16,
    num_threads: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> Result:
    """Measure `variants` against the model's own cache, on text, on a needle grid, or on both.

    batch_size: sequences that are computed together, chunk_tokens: tokens of each in a step (see `Lane`). num_threads:
    variants that are computed at once, of a model that is thread-safe; it changes no figure. progress is told, by any
    thread, the tokens that are done, (text.num_tokens + grid.num_tokens) * (1 + len(variants)) in all. Raises
    ValueError for sizes out of range and sequences beyond the model's context. A KeyboardInterrupt ends the run, and
    the result says so; before anything was measured it is passed on. Time: one forward pass a lane; memory: a cache of
    batch_size sequences and a step's logits a lane.
    """
    if text is None and grid is None:
        raise ValueError("nothing to measure: give a text, a grid, or both")
    if batch_size < 1 or chunk_tokens < 1 or num_threads < 1:
        raise ValueError(
            f"batch_size is {batch_size}, chunk_tokens {chunk_tokens}, num_threads {num_threads}: expected at least 1"
        )
    if num_threads > 1 and not model.thread_safe:
        raise ValueError(
            f"num_threads is {num_threads}: {model.name} is not said to be thread-safe, expected 1"
        )
    longest = max([*(grid.lengths if grid else ()), text.windows.shape[1] if text else 0])
    if longest > model.context_tokens:
        raise ValueError(f"a sequence has {longest} tokens, the model's context {model.context_tokens}")
    everyone = [Variant("reference", model.config), *variants]
    backends = [choose_backend(variant.config, backend) for variant in everyone]
    interrupted = False
    with ThreadPoolExecutor(num_threads) as threads:
        each = threads.map if num_threads > 1 else map
        run = _Run(model, everyone, backends, batch_size, chunk_tokens, each, progress)
        try:
            if text:
                run.text(text)
            if grid:
                run.needle(grid)
        except KeyboardInterrupt:
            if not run.steps and not run.answers:
                raise
            interrupted = True
    found = [(run.text_score(lane), run.grid_score(lane)) for lane in range(len(everyone))]
    measured = [(score, exact_match(places) if places else None) for score, places in found]
    scores = [
        Score(variant, chosen.name, *own, failures(thresholds or Thresholds(), measured[0], figures))
        for variant, chosen, own, figures in zip(everyone, backends, found, measured, strict=True)
    ]
    return Result(scores[0], scores[1:], interrupted)


class _Run:
    """The reference and the variants side by side: in every step each lane computes the same tokens.

    steps: for each step that was scored, the figures of every lane. answers: for each batch of keys, those of every
    lane. Both grow by all lanes at once, so that wherever the run ends none is ahead of another.
    """

    def __init__(
        self,
        model: Model,
        variants: Sequence[Variant],
        backends: Sequence[Backend],
        batch_size: int,
        chunk_tokens: int,
        each: Callable[..., Iterator[Any]],
        progress: Callable[[int], None],
    ) -> None:
        self._model, self._variants, self._backends = model, variants, backends
        self._batch_size, self._chunk_tokens, self._progress = batch_size, chunk_tokens, progress
        self._map = each
        self.steps: list[list[Rows]] = []
        self.answers: list[list[list[Answer]]] = []

    def text(self, text: Text) -> None:
        num_tokens = text.windows.shape[1]
        lanes = self._lanes(num_tokens)
        for windows in _batches(text.windows, self._batch_size):
            for first, step in self._steps(lanes, windows, text.first_scored - 1):
                # The last position of a window predicts a token that nobody knows.
                rows = [_flat(logits[:, : num_tokens - 1 - first]) for logits in step]
                if not len(rows[0]):
                    continue
                targets = windows[:, first + 1 : first + 1 + len(rows[0]) // len(windows)].reshape(-1)
                reference = log_softmax(rows[0])
                self.steps.append(list(self._map(partial(compare, reference, targets), rows)))

    def needle(self, grid: Grid) -> None:
        haystack = self._model.encode(grid.haystack)
        for length in grid.lengths:
            prompts: list[tuple[float, Prompt]] = [
                (
                    depth,
                    make_prompt(self._model.encode, haystack, length, depth, trial, start=self._model.start),
                )
                for depth in grid.depths
                for trial in range(grid.num_trials)
            ]
            lanes = self._lanes(length)
            # The row before a token predicts it.
            first = length - max(prompt.num_answer for _, prompt in prompts) - 1
            for batch in _batches(prompts, self._batch_size):
                tokens = np.array([prompt.ids for _, prompt in batch], np.int64)
                steps = [step for _, step in self._steps(lanes, tokens, first)]
                lanes_rows = [np.concatenate(parts, axis=1) for parts in zip(*steps, strict=True)]
                self.answers.append([_judge_batch(length, batch, rows) for rows in lanes_rows])

    def text_score(self, lane: int) -> TextScore | None:
        return summary([step[lane] for step in self.steps]) if self.steps else None

    def grid_score(self, lane: int) -> list[Cell] | None:
        return cells(chain.from_iterable(batch[lane] for batch in self.answers)) if self.answers else None

    def _lanes(self, num_tokens: int) -> list[Lane]:
        return [
            Lane(
                self._model.forward,
                variant,
                num_seqs=self._batch_size,
                num_tokens=num_tokens,
                chunk_tokens=self._chunk_tokens,
                backend=backend,
            )
            for variant, backend in zip(self._variants, self._backends, strict=True)
        ]

    def _steps(self, lanes: Sequence[Lane], tokens: IDS, first_row: int) -> Iterator[tuple[int, list[F32]]]:
        """For each step the position of its first row, and the logits of every lane."""
        runs = [lane.run(tokens, first_row, self._progress) for lane in lanes]
        while step := [made for made in self._map(_next, runs) if made is not None]:
            yield step[0][0], [logits for _, logits in step]


def _judge_batch(length: int, batch: Sequence[tuple[float, Prompt]], rows: F32) -> list[Answer]:
    """The answers of prompts of `length` tokens; rows [num_prompts, num_rows, vocab_size] end with the last token's."""
    return [
        judge(length, depth, own[-prompt.num_answer - 1 : -1], np.array(prompt.ids[-prompt.num_answer :]))
        for (depth, prompt), own in zip(batch, rows, strict=True)
    ]


def _next(run: Iterator[tuple[int, F32]]) -> tuple[int, F32] | None:
    return next(run, None)


def _flat(rows: F32) -> F32:
    return rows.reshape(-1, rows.shape[-1])


def _batches(items: Any, size: int) -> Iterator[Any]:
    return (items[start : start + size] for start in range(0, len(items), size))
