"""A run that is interrupted: what had been measured is told, for all lanes alike, and nothing else is."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvblocks.cli import main
from kvblocks.quality import Grid, Model, Text, evaluate, with_format
from kvblocks.quality.model import F32, IDS, CacheView

from . import tiny

RNG = np.random.default_rng(4)
TEXT = Text(RNG.integers(0, tiny.CONFIG.vocab_size, (3, 40)), first_scored=9)
GRID = Grid((400,), (0.0, 1.0), 1)
# Two lanes, windows one by one in steps of 8: 5 steps a window, 10 calls of the model; 50 steps a key.
SIZES = {"batch_size": 1, "chunk_tokens": 8}


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """A shell that runs the tests in the background lets them ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(call: int) -> Model:
    """The tiny model; a signal comes in its given call."""
    model, calls = tiny.model(), 0

    def forward(cache: CacheView, ids: IDS, rows: IDS) -> F32:
        nonlocal calls
        calls += 1
        if calls == call:
            signal.raise_signal(signal.SIGINT)
        return model.forward(cache, ids, rows)

    return dataclasses.replace(model, forward=forward)


@pytest.mark.parametrize("call", [11, 12, 17, 18, 30])
def test_the_text_so_far_is_scored_for_all_lanes_alike(call: int) -> None:
    model = interrupted(call)
    variants = [with_format(model.config, "int8")]
    result = evaluate(model, variants, text=TEXT, grid=GRID, **SIZES)
    assert result.interrupted
    # Steps that both lanes have ended: the first of a window scores nothing, the last one a token less.
    steps = (call - 1) // 2
    scored = sum(((0, 8, 8, 8, 7)[step % 5]) for step in range(steps))
    for score in (result.reference, *result.scores):
        assert score.text is not None
        assert score.text.num_tokens == scored
        assert score.needle is None
    whole = Text(TEXT.windows[:1], TEXT.first_scored)
    if call in (11, 12):
        assert result.scores[0].text == evaluate(tiny.model(), variants, text=whole, **SIZES).scores[0].text


def test_keys_that_were_asked_for_are_told() -> None:
    model = interrupted(30 + 100 + 1)
    result = evaluate(model, [with_format(model.config, "int8")], text=TEXT, grid=GRID, **SIZES)
    assert result.interrupted
    for score in (result.reference, *result.scores):
        assert score.text is not None
        assert score.text.num_tokens == 3 * 31
        assert [(cell.depth, cell.num_trials) for cell in score.needle or []] == [(0.0, 1)]


def test_threads_end_their_step_and_no_lane_is_ahead() -> None:
    model = dataclasses.replace(interrupted(18), thread_safe=True)
    variants = [with_format(model.config, name) for name in ("int8", "bfloat16")]
    result = evaluate(model, variants, text=TEXT, num_threads=3, **SIZES)
    assert result.interrupted
    counts = {score.text.num_tokens for score in (result.reference, *result.scores) if score.text}
    assert len(counts) == 1
    assert 0 < counts.pop() < 3 * 31


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_before_anything_was_measured_the_interrupt_is_passed_on(call: int) -> None:
    model = interrupted(call)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, [with_format(model.config, "int8")], text=TEXT, **SIZES)


def test_a_run_that_is_not_interrupted_says_so() -> None:
    assert not evaluate(tiny.model(), [], text=TEXT).interrupted


def in_a_window() -> Model:
    return interrupted(25)


def in_the_grid() -> Model:
    return interrupted(2 * 3 * 6 + 2 * 2 * 25 + 5)


def at_once() -> Model:
    return interrupted(1)


def quality(model: str, *options: str) -> int:
    sizes = [
        "--windows",
        "3",
        "--window-tokens",
        "48",
        "--scored-after",
        "16",
        "--chunk",
        "8",
        "--batch",
        "1",
    ]
    sizes += ["--lengths", "400", "--depths", "0", "100", "--formats", "bfloat16"]
    return main(["quality", "--model", f"{__name__}:{model}", *sizes, *options])


def test_the_command_prints_writes_and_draws_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "result.json", tmp_path / "grid.png"
    assert quality("in_the_grid", "--json", str(file), "--plot", str(picture), "--max-kl", "0") == 130
    captured = capsys.readouterr()
    assert "tiny, 96 scored tokens" in captured.out
    assert captured.out.endswith("interrupted: the table shows what was measured until then\n")
    assert captured.err == ""
    content = json.loads(file.read_text())
    assert content["interrupted"] is True
    assert [cell["depth"] for cell in content["formats"][1]["needle"]["cells"]] == [0]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_no_key_is_said_not_to_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "grid.png"
    assert quality("in_a_window", "--plot", str(picture)) == 130
    captured = capsys.readouterr()
    assert "interrupted: the table shows what was measured until then" in captured.out
    assert f"{picture}: not drawn" in captured.err
    assert not picture.exists()


def test_interrupted_at_once_it_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert quality("at_once") == 130
    assert capsys.readouterr() == ("", "")


def announced() -> Model:
    """The tiny model, which says on standard error that a few steps have been scored."""
    model, calls = tiny.model(), 0

    def forward(cache: CacheView, ids: IDS, rows: IDS) -> F32:
        nonlocal calls
        calls += 1
        if calls == 20:
            sys.stderr.write("measuring\n")
        return model.forward(cache, ids, rows)

    return dataclasses.replace(model, forward=forward, thread_safe=True)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_signal_ends_a_long_run_with_its_table(threads: int) -> None:
    """The signal finds the work anywhere: in a layer, between two lanes, in the sums."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from kvblocks.cli import main; sys.exit(main(sys.argv[1:]))"
    options = [
        "--model",
        f"{__name__}:announced",
        "--windows",
        "4000",
        "--window-tokens",
        "40",
        "--batch",
        "1",
    ]
    options += ["--scored-after", "8", "--chunk", "8", "--formats", "kivi2", "int8", "--no-needle"]
    options += ["--threads", str(threads)]
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, "quality", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "measuring\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert err == ""
    assert out.endswith("interrupted: the table shows what was measured until then\n")
