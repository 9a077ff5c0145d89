"""The quality tool on SmolLM2: it tells formats apart, on text and on the needle grid."""

import numpy as np
import pytest

from kvblocks.quality import Grid, Score, Text, evaluate, with_format
from kvblocks.quality.controls import control
from kvblocks.quality.needle import exact_match
from kvblocks.quality.text import cut, own_text
from smollm2.model import Llama
from smollm2.quality import as_model
from smollm2.tokenizer import Tokenizer

pytestmark = pytest.mark.model


def test_formats_keep_their_order_on_text_and_the_control_loses_every_needle(
    smollm2: Llama, tokenizer: Tokenizer
) -> None:
    model = as_model("SmolLM2", smollm2, tokenizer)
    names = ("bfloat16", "int8", "fp8_e4m3", "int4", "kivi2")
    variants = [*(with_format(model.config, name) for name in names), control("naive_int2", model.config)]
    ids = np.array(model.encode(own_text()))
    result = evaluate(
        model,
        variants,
        text=Text(cut(ids, 2, 512)[0], 256),
        grid=Grid((512,), (0.0, 0.5), 1),
        backend="numpy",
    )
    scores: dict[str, Score] = {score.variant.name: score for score in result.scores}
    kls = [score.text.kl_mean for score in result.scores if score.text]
    assert kls == sorted(kls)
    # A few times the figures of docs/quality.md, which are over more text.
    assert kls[0] < 1e-4
    assert kls[1] < 2e-3
    assert kls[-1] > 1
    needles = {name: exact_match(score.needle) for name, score in scores.items() if score.needle}
    assert exact_match(result.reference.needle or []) == 1
    assert needles["int8"] == needles["fp8_e4m3"] == 1
    assert needles["naive_int2"] == 0


def test_two_bits_lose_a_key_in_a_long_context_that_others_keep(smollm2: Llama, tokenizer: Tokenizer) -> None:
    model = as_model("SmolLM2", smollm2, tokenizer)
    names = ("int8", "fp8_e4m3", "kivi4", "kivi2")
    variants = [with_format(model.config, name) for name in names]
    result = evaluate(model, variants, grid=Grid((1536,), (0.5,), 1))
    kept = {
        score.variant.name: exact_match(score.needle or []) for score in (result.reference, *result.scores)
    }
    assert kept == {"reference": 1, "int8": 1, "fp8_e4m3": 1, "kivi4": 1, "kivi2": 0}
