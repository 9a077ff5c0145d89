"""The figures against plain arithmetic, and what must not change them."""

import dataclasses
import json
import math
import threading

import numpy as np
import pytest

from kvblocks.backends import BACKENDS, Supported
from kvblocks.backends.numpy import NumpyBackend
from kvblocks.calibration import Calibration
from kvblocks.quality import Grid, Text, Thresholds, Variant, evaluate, with_format
from kvblocks.quality.controls import control
from kvblocks.quality.lane import choose_backend
from kvblocks.quality.likelihood import TextScore, divergence, log_softmax
from kvblocks.quality.model import F32, IDS, CacheView
from kvblocks.quality.render import as_json, bits_per_element
from kvblocks.quality.verdict import failures
from smollm2.contiguous import ContiguousCache

from . import tiny

RNG = np.random.default_rng(5)
WINDOWS = RNG.integers(0, tiny.CONFIG.vocab_size, (3, 70))
TEXT = Text(WINDOWS, first_scored=20)


def test_a_model_known_by_heart_has_the_perplexity_that_it_states() -> None:
    windows = (np.arange(50)[None] + np.array([[0], [3]])) % 10
    result = evaluate(tiny.counting(0.75), [], text=Text(windows, 7), batch_size=2, chunk_tokens=8)
    text = result.reference.text
    assert text is not None
    assert text.num_tokens == 2 * 43
    assert text.perplexity == pytest.approx(1 / 0.75)
    assert (text.kl_mean, text.kl_max, text.top1) == (0, 0, 1)


def test_perplexity_is_that_of_a_contiguous_cache() -> None:
    nll = []
    for window in WINDOWS:
        cache = ContiguousCache(tiny.llama(), len(window))
        logits = [cache.extend([token]).astype(np.float64) for token in window[:-1].tolist()]
        for row, target in zip(logits[19:], window[20:], strict=True):
            nll.append(np.log(np.exp(row).sum()) - row[target])
    text = evaluate(tiny.model(), [], text=TEXT).reference.text
    assert text is not None
    assert text.num_tokens == len(nll)
    assert text.perplexity == pytest.approx(math.exp(np.mean(nll)), rel=1e-5)


@pytest.mark.parametrize(("batch_size", "chunk_tokens"), [(1, 70), (2, 7), (3, 1)])
def test_batches_and_chunks_change_no_figure(batch_size: int, chunk_tokens: int) -> None:
    model = tiny.model()
    variants = [Variant("bfloat16", dataclasses.replace(model.config, dtype="bfloat16"))]
    want = evaluate(model, variants, text=TEXT, batch_size=3, chunk_tokens=32)
    got = evaluate(model, variants, text=TEXT, batch_size=batch_size, chunk_tokens=chunk_tokens)
    for one, other in zip([want.reference, *want.scores], [got.reference, *got.scores], strict=True):
        assert one.text is not None
        assert other.text is not None
        assert other.text.num_tokens == one.text.num_tokens
        assert other.text.perplexity == pytest.approx(one.text.perplexity, rel=1e-5)
        assert other.text.kl_mean == pytest.approx(one.text.kl_mean, rel=1e-2, abs=1e-7)


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_change_no_figure(num_threads: int) -> None:
    """Four lanes, each in the order of its steps: bit for bit the same on any number of threads."""
    model = dataclasses.replace(tiny.model(), thread_safe=True)
    variants = [with_format(model.config, name) for name in ("bfloat16", "int8", "kivi2")]
    grid = Grid((400,), (0.0, 1.0), 1)
    want, got = (
        evaluate(model, variants, text=TEXT, grid=grid, batch_size=2, num_threads=threads)
        for threads in (1, num_threads)
    )
    assert got == want


def test_formats_are_computed_at_once_by_the_threads() -> None:
    """Both lanes have to be in the model before either goes on."""
    model, both = tiny.model(), threading.Barrier(2, timeout=60)

    def forward(cache: CacheView, ids: IDS, rows: IDS) -> F32:
        both.wait()
        return model.forward(cache, ids, rows)

    meeting = dataclasses.replace(model, forward=forward, thread_safe=True)
    assert evaluate(meeting, [Variant("same", model.config)], text=TEXT, num_threads=2).scores[0].text


def test_an_error_of_one_lane_ends_the_run() -> None:
    model = dataclasses.replace(tiny.model(), thread_safe=True)
    broken = Variant("broken", model.config, lambda layer, k, v: (k[:1], v))
    with pytest.raises(ValueError, match=r"^k: axis 0"):
        evaluate(model, [Variant("same", model.config), broken], text=TEXT, num_threads=2)


def test_coarser_storage_diverges_more() -> None:
    model = tiny.model()
    same = Variant("same", model.config)
    half = with_format(model.config, "float16")
    brain = with_format(model.config, "bfloat16")
    result = evaluate(model, [same, half, brain, control("naive_int2", model.config)], text=TEXT)
    kls = [score.text.kl_mean for score in result.scores if score.text]
    assert kls[0] == 0
    assert 0 < kls[1] < kls[2] / 10
    assert kls[2] < kls[3] / 100
    assert [score.passes for score in result.scores] == [True, True, True, False]


def test_progress_adds_up_to_the_tokens_of_all_lanes() -> None:
    model, done = tiny.model(), []
    grid = Grid((400,), (0.0, 1.0), 2)
    evaluate(model, [Variant("same", model.config)], text=TEXT, grid=grid, progress=done.append)
    assert sum(done) == 2 * (TEXT.num_tokens + grid.num_tokens)
    assert grid.num_tokens == 1600


def test_divergence_is_the_textbook_sum() -> None:
    logits = RNG.normal(0, 3, (5, 40)).astype(np.float32)
    others = logits + RNG.normal(0, 0.1, logits.shape).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    q = np.exp(others.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    q /= q.sum(-1, keepdims=True)
    want = (p * np.log(p / q)).sum(-1)
    np.testing.assert_allclose(divergence(log_softmax(logits), log_softmax(others)), want, rtol=1e-3)


def test_a_token_that_the_model_rules_out_has_no_part_in_the_divergence() -> None:
    logits = np.array([[0.0, 1.0, -np.inf]], np.float32)
    assert divergence(log_softmax(logits), log_softmax(logits)) == [0.0]


def test_a_format_that_rules_out_what_the_model_allows_diverges_without_bound() -> None:
    one, other = (np.array([[0.0, x]], np.float32) for x in (1.0, -np.inf))
    assert divergence(log_softmax(one), log_softmax(other)) == [np.inf]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing to measure"),
        ({"text": TEXT, "batch_size": 0}, "batch_size is 0"),
        ({"text": TEXT, "num_threads": 0}, "num_threads 0: expected at least 1"),
        ({"text": TEXT, "num_threads": 2}, "num_threads is 2: tiny is not said to be thread-safe"),
        ({"grid": Grid((2048,), (0.5,), 1)}, "2048 tokens, the model's context 1024"),
        ({"grid": Grid((30,), (0.5,), 1)}, "30 tokens is too short for the prompt: expected at least"),
    ],
)
def test_impossible_measurements_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(tiny.model(), [], **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("first_scored", [0, 70])
def test_windows_that_score_nothing_are_refused(first_scored: int) -> None:
    with pytest.raises(ValueError, match=rf"first_scored is {first_scored}: expected 1..69"):
        Text(WINDOWS, first_scored)


def test_thresholds_name_what_fails_with_both_numbers() -> None:
    model = tiny.model()
    limits = Thresholds(max_kl=1e-9, max_perplexity_increase=None, min_top1=1.0, min_needle=None)
    bad = control("naive_int2", model.config)
    [score] = evaluate(model, [bad], text=TEXT, thresholds=limits).scores
    assert not score.passes
    assert [failure.split()[0] for failure in score.failures] == ["KL", "top-1"]
    assert all("1e-09" in failure or "100.0%" in failure for failure in score.failures)


def test_a_failure_has_as_many_digits_as_tell_its_numbers_apart() -> None:
    reference = TextScore(64, perplexity=20, kl_mean=0, kl_stderr=0, kl_max=0, top1=1)
    own = TextScore(64, perplexity=20.401, kl_mean=0.010004, kl_stderr=0, kl_max=1, top1=0.9299)
    assert failures(Thresholds(), (reference, None), (own, None)) == [
        "KL 0.010004 > 0.01",
        "perplexity +2.005% > +2.000%",
        "top-1 92.99% < 93.00%",
    ]


def test_a_model_that_returns_other_rows_than_asked_for_is_named() -> None:
    model = tiny.fake(lambda cache, ids, rows: np.zeros((len(ids) + 1, 9), np.float32))
    with pytest.raises(
        ValueError, match=r"returned logits of shape \(49, 9\) for 0 rows: expected \(0, vocab_size\)"
    ):
        evaluate(model, [], text=TEXT)


def test_what_is_no_number_fails_and_is_null_in_json() -> None:
    model = tiny.model()
    broken = Variant("broken", model.config, lambda layer, k, v: (k, v * np.float32(np.nan)))
    limits = Thresholds()
    result = evaluate(model, [broken], text=TEXT, thresholds=limits)
    assert len(result.scores[0].failures) == 3
    content = json.loads(json.dumps(as_json(result, {}, limits), allow_nan=False))
    assert content["formats"][1]["text"]["kl_mean"] is None
    assert content["formats"][1]["text"]["top1"] == 0


class Plain(NumpyBackend):
    """A backend without kernels for quantised formats."""

    name = "plain"

    def supported(self) -> Supported:
        return dataclasses.replace(super().supported(), k_formats=("float32",), v_formats=("float32",))


def test_a_format_that_the_default_backend_cannot_do_is_computed_by_the_specification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(BACKENDS, "plain", (__name__, "Plain"))
    monkeypatch.setenv("KVBLOCKS_BACKEND", "plain")
    config = tiny.model().config
    quantised = [dataclasses.replace(config, kv_format=name) for name in ("int8", "kivi2")]
    assert [choose_backend(each, None).name for each in (config, *quantised)] == ["plain", "numpy", "numpy"]
    assert choose_backend(quantised[0], "plain").name == "plain"  # asked for: it refuses by itself


def test_fp8_without_a_scale_is_the_static_format_at_a_scale_of_1() -> None:
    """The control's codec, and the format of the list with every scale set to 1."""
    model = tiny.model()
    one = Calibration(model.config)
    one.k_amax[:], one.v_amax[:], one.num_tokens[:] = 448, 448, 1
    one.freeze()
    variants = [control("naive_fp8", model.config), with_format(model.config, "fp8_e4m3:tensor", one)]
    naive, static = evaluate(model, variants, text=TEXT, backend="numpy").scores
    assert naive.text is not None
    assert static.text is not None
    assert naive.text.kl_mean > 1e-4
    assert naive.text.kl_mean == pytest.approx(static.text.kl_mean, rel=1e-3)
    assert bits_per_element(naive.variant) == bits_per_element(static.variant) == 8
