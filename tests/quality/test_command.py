"""The command as a user calls it, on a tiny model: what it prints, writes, answers and refuses."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from kvblocks.cli import main
from kvblocks.quality.command import configure
from kvblocks.quality.text import own_text

MODEL = f"{__package__}.tiny:model"
SIZES = [
    "--windows",
    "2",
    "--window-tokens",
    "48",
    "--scored-after",
    "16",
    "--lengths",
    "400",
    "--batch",
    "3",
]
SIZES += ["--depths", "0", "100"]


def quality(*options: str) -> int:
    return main(["quality", "--model", MODEL, *SIZES, *options])


def test_a_run_prints_a_table_and_writes_all_figures_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file, picture = tmp_path / "result.json", tmp_path / "grid.png"
    formats = ["--formats", "bfloat16", "naive_int2"]
    assert quality(*formats, "--json", str(json_file), "--plot", str(picture)) == 0

    printed = capsys.readouterr().out
    assert "tiny, 64 scored tokens" in printed
    assert "naive_int2 fails: KL" in printed
    assert "the reference repeats no key" in printed  # as a random model does not
    assert picture.read_bytes().startswith(b"\x89PNG")

    content = json.loads(json_file.read_text())
    assert content["settings"]["windows"] == 2
    assert content["settings"]["model"] == "tiny"
    reference, half, naive = content["formats"]
    assert [entry["format"] for entry in content["formats"]] == ["reference", "bfloat16", "naive_int2"]
    assert (reference["is_reference"], reference["bits_per_element"], reference["text"]["kl_mean"]) == (
        True,
        32,
        0,
    )
    assert (half["bits_per_element"], half["capacity_ratio"]) == (16, 2)
    assert half["tokens_per_gib"] == 2**30 // (2 * 2 * 2 * 16 * 2)
    assert naive["bits_per_element"] == 4
    assert not naive["passes"]
    assert {cell["depth"] for cell in half["needle"]["cells"]} == {0, 1}
    assert f"{half['text']['kl_mean']:.5f}" in printed


def test_json_on_standard_output_is_all_that_stands_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert quality("--formats", "float16", "--no-needle", "--json", "-") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["formats"][1]["needle"] is None


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (("--formats", "float16", "--max-kl", "0.5"), 0),
        (("--formats", "float16", "naive_int2", "--max-kl", "0.001"), 1),
        (("--formats", "naive_int2", "--max-kl", "1000"), 0),  # only the threshold that was given counts
        (("--formats", "naive_int2"), 0),
    ],
)
def test_the_exit_status_is_the_verdict_by_the_thresholds_that_were_given(
    options: tuple[str, ...], status: int
) -> None:
    assert quality("--no-needle", *options) == status


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--formats", "int7"], "--formats: k_format is 'int7': expected one of"),
        (["--formats", "kivi2", "--block-size", "24"], "--formats: block_size is 24: k_format kivi2"),
        (["--reference", "int8"], "--reference, --block-size or --residual: dtype is 'int8'"),
        (["--windows", "90000"], "the text has"),
        (["--window-tokens", "16"], "--scored-after: first_scored is 16: expected 1..15"),
        (["--lengths", "20"], "a context of 20 tokens is too short"),
        (["--lengths", "4096"], "4096 tokens, the model's context 1024"),
        (["--text", "no-such-file"], "no-such-file: No such file"),
        (["--no-needle", "--windows", "0"], "nothing to measure"),
        (["--no-needle", "--plot", "grid.png"], "leave --no-needle out"),
        (
            ["--no-needle", "--min-needle", "0.9"],
            "--min-needle is a threshold of what --no-needle leaves out",
        ),
        (["--windows", "0", "--max-kl", "1"], "--max-kl is a threshold of what --windows 0 leaves out"),
        (["--json", "no-such-folder/result.json"], "there is no folder no-such-folder"),
        (["--json", "."], ".: is a folder, expected the name of a file"),
        (["--plot", "grid.txt"], "grid.txt: expected a name that ends in .png"),
        (["--backend", "abacus"], "abacus"),
        (["--model", "smollm2"], "expected package.module:function"),
        (["--model", "no_such_module:f"], "there is no module no_such_module"),
        (["--model", f"{__package__}.tiny:nobody"], "has no function nobody"),
        (
            ["--model", f"{__package__}.tiny:past_its_cache"],
            "attended to 0 layers of the cache in a step, its config has 2",
        ),
        (["--model", f"{__package__}.tiny:not_a_model"], "returned str, expected a kvblocks.quality.Model"),
    ],
)
def test_bad_input_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert quality("--formats", "float16", *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    "options", [["--max-kl", "-1"], ["--depths", "101"], ["--windows", "x"], ["--trials", "0"]]
)
def test_options_out_of_range_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        quality(*options)
    assert options[0] in capsys.readouterr().err


def test_a_step_is_as_long_as_a_window_at_most(tmp_path: Path) -> None:
    found = []
    for chunk in ("48", "1000000000000"):
        json_file = tmp_path / f"{chunk}.json"
        assert quality("--formats", "kivi2", "--no-needle", "--chunk", chunk, "--json", str(json_file)) == 0
        found.append(json.loads(json_file.read_text())["formats"])
    assert found[0] == found[1]


def test_sizes_that_no_memory_holds_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(*_args: object, **_options: object) -> None:
        raise MemoryError("Unable to allocate 477. GiB for an array")

    monkeypatch.setattr("kvblocks.quality.command.evaluate", evaluate)
    assert quality("--formats", "kivi2@999999999") == 2
    assert capsys.readouterr().err == "kvblocks: kvblocks quality: Unable to allocate 477. GiB for an array\n"


def test_a_text_that_is_not_utf8_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("gr\u00fc\u00dfe ".encode("latin-1") * 100)
    assert quality("--text", str(file)) == 2
    assert f"{file}: is no UTF-8 text" in capsys.readouterr().err


def test_the_project_has_text_enough_for_twenty_thousand_scored_tokens() -> None:
    text = own_text()
    assert text.isascii()
    assert len(text.split()) >= 27 * 1024 * 0.8


def test_the_commands_of_the_page_can_be_pasted() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "quality.md"
    lines = re.findall(r"^ *(?:kvblocks quality|make quality ARGS=)(.*)$", page.read_text(), re.MULTILINE)
    assert len(lines) >= 5
    parser = argparse.ArgumentParser()
    configure(parser)
    for line in lines:
        parser.parse_args(shlex.split(" ".join(shlex.split(line, comments=True))))
