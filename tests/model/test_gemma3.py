"""Gemma 3 270M from its GGUF file, where its package is installed: what transformers makes of the same file."""

import importlib.util

import numpy as np
import pytest

from gemma3.model import F32
from gemma3.quality import gemma3
from gemma3.weights import INSTALL_MODEL, PACKAGE
from kvblocks import PagedKVCache
from kvblocks.quality import Model
from kvblocks.quality.text import own_text

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None, reason=f"the model is not installed; run: {INSTALL_MODEL}"
    ),
]
# Of transformers 5.24: the ids of TEXT, and the likeliest tokens after some of the first 701 of the project's text.
TEXT = "a  b   c\n\n\nd\t1234,56 \u00e9\u6f22\u5b57\U0001f999 <b>x</b>"
IDS = [
    *(
        236746,
        138,
        236763,
        139,
        236755,
        109,
        236753,
        255968,
        236770,
        236778,
        236800,
        236812,
        236764,
        236810,
        236825,
    ),
    *(1559, 201637, 478, 397, 404, 391, 236743, 200, 236781, 209),
]
LIKELIEST = {0: 184, 5: 3640, 100: 1388, 511: 506, 512: 236764, 513: 529, 600: 42368, 700: 506}


@pytest.fixture(scope="module")
def model() -> Model:
    return gemma3()


def test_ids_are_those_of_transformers(model: Model) -> None:
    assert list(model.encode(TEXT)) == IDS


def test_the_likeliest_tokens_are_those_of_transformers(model: Model) -> None:
    """Past the window of 512 tokens, too."""
    ids = np.array([*model.start, *list(model.encode(own_text()))[:700]])
    cache = PagedKVCache(model.config, 24)
    answer = cache.manager.allocate(cache.manager.prepare(ids))
    assert answer
    logits: list[F32] = []
    for part in np.array_split(ids, 5):
        assert cache.schedule([answer.handle], len(part))
        logits.append(model.forward(cache, part, np.arange(len(part))))
        cache.manager.commit([answer.handle], len(part))
    likeliest = np.concatenate([rows.argmax(axis=-1) for rows in logits])
    assert {row: int(likeliest[row]) for row in LIKELIEST} == LIKELIEST
