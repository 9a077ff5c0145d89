"""Static scales: where they come from, that they are used, and when they pay."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvblocks.calibration import Calibration
from kvblocks.cli import main
from kvblocks.quality import Model, Text, evaluate, with_format
from kvblocks.quality.calibrate import calibrate, outliers
from smollm2.contiguous import ContiguousCache
from smollm2.model import F32, Llama, random_tensors
from smollm2.quality import as_model

from . import tiny

RNG = np.random.default_rng(8)
WINDOWS = RNG.integers(0, tiny.CONFIG.vocab_size, (2, 60))
CHANNEL = "int8:channel,int8"


def uneven(factor: float) -> Model:
    """A model whose K has two channels `factor` times as large, and Q as much smaller: it predicts the same."""
    config, tensors = tiny.CONFIG, random_tensors(tiny.CONFIG, seed=3)
    for layer in range(config.num_layers):
        heads = tensors[f"{layer}.attn_qkv"].reshape(config.hidden_dim, -1, config.head_dim)
        # Both channels of a pair that is rotated by position.
        heads[:, : config.num_heads, :2] /= np.float32(factor)
        heads[:, config.num_heads : config.num_heads + config.num_kv_heads, :2] *= np.float32(factor)
    return as_model("uneven", Llama(config, tensors), tiny.Characters())  # type: ignore[arg-type]


def test_the_largest_magnitudes_are_those_of_a_plain_run() -> None:
    calibration = calibrate(tiny.model(), WINDOWS)
    seen: list[F32] = []
    for window in WINDOWS:
        cache = ContiguousCache(tiny.llama(), len(window))
        cache.extend(window.tolist())
        seen.append(cache._keys)
    want = np.abs(np.concatenate(seen, axis=1)).max(axis=1)
    np.testing.assert_allclose(calibration.k_amax, want, rtol=1e-5)
    assert calibration.is_frozen
    assert calibration.num_tokens.tolist() == [WINDOWS.size] * tiny.CONFIG.num_layers


def test_a_scale_per_channel_pays_where_channels_are_uneven() -> None:
    kls = {}
    for factor in (1.0, 64.0):
        model = uneven(factor)
        variants = [
            with_format(model.config, "int8"),
            with_format(model.config, CHANNEL, calibrate(model, WINDOWS)),
        ]
        result = evaluate(model, variants, text=Text(WINDOWS, 10))
        kls[factor] = [score.text.kl_mean for score in result.scores if score.text]
    even, rough = kls[1.0], kls[64.0]
    assert rough[0] > 20 * even[0]  # a scale per token pays for the largest channel
    assert rough[1] < 3 * even[1]  # a scale per channel does not notice
    assert rough[1] < rough[0] / 20


def test_outliers_name_the_most_uneven_head() -> None:
    found = outliers(calibrate(uneven(64.0), WINDOWS))
    assert found["tokens"] == WINDOWS.size
    assert 64 < found["largest_k_outlier_ratio"] < 400
    assert outliers(calibrate(tiny.model(), WINDOWS))["largest_k_outlier_ratio"] < 10


def test_without_a_calibration_a_static_format_cannot_be_measured() -> None:
    model = tiny.model()
    with pytest.raises(ValueError, match="scale"):
        evaluate(model, [with_format(model.config, CHANNEL)], text=Text(WINDOWS, 10))


def quality(*options: str) -> int:
    sizes = [
        "--windows",
        "2",
        "--window-tokens",
        "40",
        "--scored-after",
        "8",
        "--no-needle",
        "--backend",
        "numpy",
    ]
    return main(["quality", "--model", f"{__package__}.tiny:model", *sizes, "--formats", CHANNEL, *options])


def test_a_calibration_that_was_written_gives_the_same_figures_when_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, results = tmp_path / "scales.json", [tmp_path / "made.json", tmp_path / "read.json"]
    assert quality("--calibrate", str(file), "--json", str(results[0])) == 0
    assert "calibrated on 160 tokens" in capsys.readouterr().out
    assert quality("--scales", str(file), "--json", str(results[1])) == 0
    made, read = (json.loads(path.read_text()) for path in results)
    assert made == read
    assert made["settings"]["calibration"]["tokens"] == 160
    assert Calibration.load(file, tiny.model().config).num_tokens.tolist() == [160, 160]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scales", "a.json", "--calibrate", "b.json"], "give one of the two"),
        (["--scales", "no-such-file.json"], "no-such-file.json"),
        (["--calibrate", "no-such-folder/scales.json"], "there is no folder no-such-folder"),
        (["--calibration-windows", "90000"], "the rest of the text, to calibrate on, has"),
    ],
)
def test_a_calibration_that_cannot_be_had_is_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quality(*options) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_percentage_clips_what_lies_beyond_it(tmp_path: Path) -> None:
    kls = {}
    for percent in ("100", "60"):
        result = tmp_path / f"{percent}.json"
        assert quality("--formats", "fp8_e4m3:head", "--percent", percent, "--json", str(result)) == 0
        kls[percent] = json.loads(result.read_text())["formats"][1]["text"]["kl_mean"]
    assert kls["60"] > 3 * kls["100"]
