"""A model with windows: its pass over a paged cache, and what the tool makes of it."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from gemma3.model import Gemma, GemmaConfig
from gemma3.quality import as_model
from gemma3.tokenizer import Tokenizer, merges
from gemma3.weights import PACKAGE, Vocabulary, find_gguf
from kvblocks import PagedKVCache
from kvblocks.cli import main
from kvblocks.quality import CacheView, Grid, Model, Text, evaluate, with_format
from kvblocks.quality.model import IDS
from smollm2.model import F32, random_tensors

CONFIG = GemmaConfig(
    num_layers=7,
    num_heads=4,
    num_kv_heads=1,
    head_dim=16,
    hidden_dim=32,
    ffn_dim=48,
    vocab_size=97,
    context_length=1024,
    window_tokens=20,
    rope_theta=1e6,
    norm_eps=1e-6,
)
RNG = np.random.default_rng(2)
WINDOWS = RNG.integers(0, CONFIG.vocab_size, (2, 70))


def characters(text: str) -> list[int]:
    return [ord(character) % CONFIG.vocab_size for character in text]


def model() -> Model:
    return as_model("windowed", Gemma(CONFIG, random_tensors(CONFIG, seed=1)), characters, start=(0,))


def attend(window: int | None, q: F32, k: F32, v: F32) -> F32:
    """Causal attention over the last `window` keys, in float64 and one matrix."""
    q64, k64, v64 = (x.astype(np.float64) for x in (q, k, v))
    repeated = q.shape[1] // k.shape[1]
    logits = np.einsum("qhd,khd->hqk", q64, np.repeat(k64, repeated, axis=1)) / np.sqrt(q.shape[2])
    distance = np.arange(len(q))[:, None] - np.arange(len(q))
    logits[:, (distance < 0) | (distance >= (window or len(q)))] = -np.inf
    weights: NDArray[np.float64] = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, np.repeat(v64, repeated, axis=1)).astype(np.float32)


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("kv_format", ["float32", "kivi2"])
def test_a_paged_cache_gives_the_logits_of_one_matrix(backend: str, kv_format: str) -> None:
    """The residual is as long as the sequence, so that kivi2 is as good as 16 bit."""
    gemma, made = Gemma(CONFIG, random_tensors(CONFIG, seed=1)), model()
    ids = WINDOWS[0]
    hidden = gemma.forward(ids, np.arange(len(ids)), lambda layer, window, q, k, v: attend(window, q, k, v))
    want = gemma.logits(hidden)
    config = dataclasses.replace(made.config, kv_format=kv_format, residual_tokens=96)
    cache = PagedKVCache(config, 8, backend=backend)
    answer = cache.manager.allocate(cache.manager.prepare(ids))
    assert answer
    tolerance = 1e-4 if kv_format == "float32" else 0.05
    for start in range(0, len(ids), 16):
        count = min(16, len(ids) - start)
        assert cache.schedule([answer.handle], count)
        got = made.forward(cache, ids[start : start + count], np.arange(count))
        np.testing.assert_allclose(got, want[start : start + count], atol=tolerance * np.abs(want).max())
        cache.manager.commit([answer.handle], count)


def test_layers_see_a_window_but_for_every_sixth() -> None:
    assert [CONFIG.window(layer) for layer in range(CONFIG.num_layers)] == [20] * 5 + [None, 20]


def test_formats_keep_their_order_with_windows() -> None:
    made = model()
    names = ("bfloat16", "int8", "int4")
    result = evaluate(made, [with_format(made.config, name) for name in names], text=Text(WINDOWS, 30))
    kls = [score.text.kl_mean for score in result.scores if score.text]
    assert kls == sorted(kls)
    assert 0 < kls[0] < kls[1] < kls[2] / 10


def recording() -> Model:
    """The model, which notes the ids that its sequences begin with."""
    made = model()

    def forward(cache: CacheView, ids: IDS, rows: IDS) -> F32:
        BEGUN.update(ids[cache.step.positions == 0].tolist())
        return made.forward(cache, ids, rows)

    return dataclasses.replace(made, forward=forward, thread_safe=False)


BEGUN: set[int] = set()


def test_every_sequence_begins_as_the_model_says(tmp_path: Path) -> None:
    """Of the text, of the grid and of the calibration; no character of the text has this id."""
    BEGUN.clear()
    sizes = [
        "--windows",
        "2",
        "--window-tokens",
        "48",
        "--scored-after",
        "16",
        "--lengths",
        "400",
        "--depths",
        "0",
    ]
    options = ["--formats", "int8:channel,int8", "--json", str(tmp_path / "result.json")]
    assert main(["quality", "--model", f"{__name__}:recording", *sizes, *options]) == 0
    assert {0} == BEGUN
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["formats"][1]["text"]["num_tokens"] == 2 * 32
    assert evaluate(recording(), [], grid=Grid((400,), (0.0, 1.0), 1)).reference.needle
    assert {0} == BEGUN


def pieces(**scores: float) -> Vocabulary:
    """A vocabulary of the bytes, of given pieces with their scores, and of a run of line breaks."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *scores, "\n\n"]
    return Vocabulary(
        tokens=tokens,
        scores=[0.0] * 257 + [*scores.values(), 0.0],
        types=[2] + [6] * 256 + [1] * len(scores) + [4],
        bos=0,
    )


def test_pairs_are_merged_by_the_score_of_what_they_make() -> None:
    letters = dict.fromkeys("abc", -100.0) | {"\u2581": -100.0}
    vocabulary = pieces(**letters, ab=-2.0, bc=-1.0, abc=-3.0, **{"\u2581a": -4.0})
    assert merges(vocabulary) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c"), ("\u2581", "a")]
    tokenizer = Tokenizer(vocabulary)

    def spelled(text: str) -> list[str]:
        return [vocabulary.tokens[i] for i in tokenizer.encode(text)]

    assert spelled("abc") == ["abc"]
    assert spelled("ab") == ["ab"]
    assert spelled("aab a") == ["a", "ab", "\u2581a"]
    assert spelled("a\n\nb\n") == ["a", "\n\n", "b", "<0x0A>"]
    assert spelled("\u00e9") == ["<0xC3>", "<0xA9>"]


WHOLE = b"whole"


def assemble(path: Path, overwrite: bool = False, interrupted: bool = False) -> Path:
    """As the model's package has it: a file that is there has to be right, unless it may be overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not overwrite:
        if path.read_bytes() != WHOLE:
            raise FileExistsError(f"{path} already exists with an unexpected sha256")
        return path
    path.write_bytes(WHOLE[:2] if interrupted else WHOLE)
    if interrupted:
        raise KeyboardInterrupt
    return path


def test_a_model_file_appears_whole_and_is_made_anew_where_it_is_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVBLOCKS_CACHE", str(tmp_path / "cache"))

    def interrupted(path: Path) -> Path:
        return assemble(path, interrupted=True)

    monkeypatch.setitem(sys.modules, PACKAGE, SimpleNamespace(assemble=interrupted))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        find_gguf()
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setitem(sys.modules, PACKAGE, SimpleNamespace(assemble=assemble))  # type: ignore[arg-type]
    path = find_gguf()
    assert list((tmp_path / "cache").iterdir()) == [path]
    assert path.read_bytes() == WHOLE
    path.write_bytes(WHOLE[:3])
    assert find_gguf().read_bytes() == WHOLE
    assert list((tmp_path / "cache").iterdir()) == [path]
