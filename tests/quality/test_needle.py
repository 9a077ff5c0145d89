"""Prompts of exact length, and what counts as an answer."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.quality import Cell, Grid, evaluate
from kvblocks.quality.model import F32, IDS, CacheView
from kvblocks.quality.needle import Answer, cells, exact_match, judge, make_prompt
from kvblocks.quality.text import own_text

from . import tiny


def characters(text: str) -> list[int]:
    return [ord(character) for character in text]


def words(text: str) -> list[int]:
    """A tokenizer that takes a space and the word after it as one token; the ids are places in a list of all."""
    return [VOCABULARY.setdefault(word, len(VOCABULARY)) for word in re.findall(r"\s?\S+|\s+", text)]


VOCABULARY: dict[str, int] = {}
HAYSTACK = characters(own_text()[:2500])


@given(st.integers(400, 3000), st.floats(0, 1), st.integers(0, 5))
def test_a_prompt_has_exactly_its_length_and_ends_with_the_key(length: int, depth: float, trial: int) -> None:
    prompt = make_prompt(characters, HAYSTACK, length, depth, trial)
    text = "".join(map(chr, prompt.ids))
    assert len(prompt.ids) == length
    [key] = re.findall(r"The pass key is (\d{5})\. Remember it\. \1 is the pass key\.\n\n", text)
    assert prompt.num_answer == 5
    assert text.endswith(f"\n\nWhat is the pass key? The pass key is {key}")
    assert text.startswith("There is an important piece of information")
    place = text.index(f"The pass key is {key}. ") / length
    assert abs(place - depth) < 250 / length
    assert make_prompt(characters, HAYSTACK, length, depth, trial) == prompt
    assert make_prompt(characters, HAYSTACK, length, depth, trial + 1).ids != prompt.ids


def test_a_key_that_is_one_token_with_its_space_is_one_token_of_answer() -> None:
    prompt = make_prompt(words, words(own_text()[:500]), 300, 0.5, 0)
    assert prompt.num_answer == 1
    assert len(prompt.ids) == 300


@pytest.mark.parametrize(("wrong_at", "exact"), [(None, 1.0), (0, 0.0), (4, 0.0)])
def test_an_answer_is_exact_if_all_of_its_tokens_are_likeliest(wrong_at: int | None, exact: float) -> None:
    answer = np.array([3, 1, 4, 1, 5])
    logits = np.full((5, 10), np.log(0.1 / 9), np.float32)
    logits[np.arange(5), answer] = np.log(0.9)
    if wrong_at is not None:
        logits[wrong_at] = np.roll(logits[wrong_at], 1)
    found = judge(128, 0.5, logits, answer)
    assert found.exact == exact
    nll = -np.log(0.9) if wrong_at is None else -(4 * np.log(0.9) + np.log(0.1 / 9)) / 5
    assert found.nll == pytest.approx(nll, rel=1e-5)


def test_cells_are_in_order_and_count_their_keys() -> None:
    answers = [Answer(256, 0.0, True, 0.5), Answer(128, 1.0, True, 1.0), Answer(128, 0.0, False, 2.0)]
    answers += [Answer(128, 1.0, False, 3.0)]
    assert cells(answers) == [
        Cell(128, 0.0, 1, 0.0, 2.0),
        Cell(128, 1.0, 2, 0.5, 2.0),
        Cell(256, 0.0, 1, 1.0, 0.5),
    ]


def test_the_summary_weighs_cells_by_their_keys() -> None:
    assert exact_match([Cell(128, 0.0, 3, 1.0, 0.1), Cell(128, 1.0, 1, 0.0, 9.0)]) == 0.75


def test_the_grid_reads_the_rows_that_predict_the_answer() -> None:
    # Remembers each sequence's ids and, after "is ", repeats the digits that followed "key is " before.
    seen: dict[int, list[int]] = {}

    def forward(cache: CacheView, ids: IDS, rows: IDS) -> F32:
        starts = cache.step.query_start_loc
        logits = np.zeros((len(ids), 128), np.float32)
        for i in range(len(starts) - 1):
            first = int(cache.step.positions[starts[i]])
            line = seen.setdefault(i, [])
            del line[first:]
            for j in range(starts[i], starts[i + 1]):
                line.append(int(ids[j]))
                text = "".join(map(chr, line))
                told = re.search(r"The pass key is (\d{5})\. Remember", text)
                asked = re.search(r"What is the pass key\? The pass key is (\d*)$", text)
                if told and asked and len(asked[1]) < 5:
                    logits[j, ord(told[1][len(asked[1])])] = 20
        return logits[rows]

    model = tiny.fake(forward)
    [*found] = (
        evaluate(model, [], grid=Grid((420, 512), (0.0, 0.4, 1.0), 2), batch_size=4).reference.needle or []
    )
    assert [(cell.length, cell.depth, cell.num_trials) for cell in found] == [
        (length, depth, 2) for length in (420, 512) for depth in (0.0, 0.4, 1.0)
    ]
    assert all(cell.exact == 1 and cell.nll < 1e-4 for cell in found)
