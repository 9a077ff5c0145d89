"""`kvblocks replay` as a user meets it."""

import argparse
import csv
import html.parser
import json
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvblocks.cli import main
from kvblocks.replay import command, sizing
from kvblocks.replay.options import _EPILOG
from kvblocks.replay.scenario import Result, run_scenario

TRACE = "arrival,input,output\n0,100,20\n0.1,200,10\n0.2,50,40\n5,300,5\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def replay(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """The JSON of a replay."""
    assert main(["replay", *map(str, arguments), "--json", "-"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_example_of_the_help_works_as_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^  (kvblocks replay .*)$", _EPILOG, re.MULTILINE)
    assert len(examples) == 1
    assert main(shlex.split(examples[0])[1:]) == 0
    printed = capsys.readouterr().out
    assert "500 requests like azure-conv" in printed
    assert len(re.findall(r"^  (?:paged-16|contiguous) +(?:20|40),000 ", printed, re.MULTILINE)) >= 4 * 3


def test_the_commands_of_the_document_are_understood() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "replay.md"
    found = re.findall(r"^kvblocks replay ([^#\n]*)", page.read_text(), re.MULTILINE)
    assert len(found) == 4
    parser = argparse.ArgumentParser()
    command.configure(parser)
    for arguments in found:
        parser.parse_args(shlex.split(arguments))


def test_the_help_explains_units(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["replay", "--help"])
    assert exit_.value.code == 0
    assert "units: lengths in tokens" in capsys.readouterr().out


def test_every_combination_is_replayed(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = replay(
        capsys, trace, "--policy", "oracle,paged", "--block-size", "8,16", "--pool", "500,unbounded"
    )
    found = [(r["policy"], r["block_size_tokens"], r["pool_tokens"]) for r in answer["results"]]
    assert found == [
        *(("oracle", None, 500), ("paged", 8, 496), ("paged", 16, 496)),
        *(("oracle", None, None), ("paged", 8, None), ("paged", 16, None)),
    ]
    assert answer["trace"]["requests"] == 4
    assert {r["completed"] for r in answer["results"]} == {4}
    for result in answer["results"]:
        series = result["series"]
        assert sum(series["duration"]) == pytest.approx(result["duration"])
        mean = sum(a * d for a, d in zip(series["allocated"], series["duration"], strict=True))
        assert mean / result["duration"] == pytest.approx(result["allocated_mean_tokens"])
        assert max(series["peak_slots"]) == result["allocated_peak_tokens"]


def test_formats_of_a_model_share_a_pool_in_bytes(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "llama-3.1-8b", "--kv-format", "bfloat16", "--kv-format", "fp8_e4m3:tensor"]
    answer = replay(capsys, trace, *model, "--pool", "64MiB", "--policy", "paged")
    # 512 and 1024 slots, less the null block; and less the block of which the scales take a part.
    assert [(r["kv_format"], r["pool_tokens"]) for r in answer["results"]] == [
        ("bfloat16", 496),
        ("fp8_e4m3:tensor", 992),
    ]
    swapped = replay(capsys, trace, *model, "--pool", "45MiB", "--policy", "paged", "--preemption", "swap")
    assert swapped["results"][0]["swapped_in_tokens"] > 0


def test_limits_of_context_reject_or_cut(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--policy", "contiguous,paged", "--max-context", "150,250"]
    rejected = replay(capsys, trace, *limits)["results"]
    assert [(r["max_context_tokens"], r["rejected_too_long"], r["completed"]) for r in rejected] == [
        *((150, 2, 2), (150, 2, 2), (250, 1, 3), (250, 1, 3))
    ]
    cut = replay(capsys, trace, *limits, "--over-context", "truncate")["results"]
    assert [r["completed"] for r in cut] == [4, 4, 4, 4]
    assert [r["prefill_tokens"] for r in cut[::2]] == [100 + 141 + 50 + 146, 100 + 200 + 50 + 246]


def test_all_outputs_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = ["buddy", "paged", "prefix"]
    out = tmp_path / "out"
    arguments = [
        "--generate",
        "60",
        "--shared-prefix",
        "300",
        "--lengths",
        "300/200,40/20",
        "--size",
        "--curve",
    ]
    files = [
        "--plots",
        out,
        "--html",
        out / "page.html",
        "--csv",
        out / "rows.csv",
        "--json",
        out / "all.json",
    ]
    assert main(["replay", *arguments, "--policy", ",".join(policies), *map(str, files)]) == 0
    printed = capsys.readouterr().out
    answer = json.loads((out / "all.json").read_text())
    with (out / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == [result["policy"] for result in answer["results"]] == policies
    assert [float(row["waste"]) for row in rows] == [result["waste"] for result in answer["results"]]
    for result in answer["results"]:
        assert f"{100 * result['waste']:.2f}" in printed
    assert sorted(path.name for path in out.glob("*.png")) == [
        *("hit_rate_16.png", "occupancy.png", "pools.png", "running.png", "waste.png")
    ]
    for path in out.glob("*.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    sizes = {(found["policy"], found["found"]): found for found in answer["pool_sizes"]}
    assert len(sizes) == 2 * len(policies)
    for policy in policies:
        smallest, mean = sizes[policy, "smallest"], sizes[policy, "mean"]
        assert smallest["first_oom_time"] is None
        assert mean["first_oom_time"] is not None
        assert smallest["pool_tokens"] > mean["pool_tokens"]
    assert {rate["policy"] for rate in answer["hit_rates"]} == {"lru", "fifo", "lfu", "optimum", "infinite"}


class _References(html.parser.HTMLParser):
    """What a page would load, its tags balanced, and its ids."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.uses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self._look(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._look(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def _look(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            text = value or ""
            if name in ("src", "href", "xlink:href", "data", "action", "srcset"):
                (self.uses if text.startswith("#") else self.loads).append(text.removeprefix("#"))
            self.uses += re.findall(r"url\(#([^)]*)\)", text)
            if name == "id":
                self.ids.append(text)


def test_the_page_needs_nothing_else(tmp_path: Path, trace: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["replay", str(trace), "--html", str(page), "--pool", "500"]) == 0
    text = page.read_text()
    assert "http" not in text
    assert "@import" not in text
    references = _References()
    references.feed(text)
    assert references.loads == references.open == []
    assert len(references.ids) == len(set(references.ids)) > 50
    assert set(references.uses) <= set(references.ids)
    assert text.count("<svg") == 3
    embedded = re.search(r'<script type="application/json" id="data">(.*)</script>', text)
    assert embedded
    assert len(json.loads(embedded[1].replace("<\\/", "</"))["results"]) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a trace file or --generate N, one of the two"),
        (["TRACE", "--generate", "5"], "give a trace file or --generate N, one of the two"),
        (["missing.csv"], "missing.csv: cannot read: No such file"),
        (["TRACE", "--policy", "magic"], "--policy 'magic': 'magic' is none of contiguous, pow2"),
        (["TRACE", "--block-size", "0"], "--block-size '0': '0', expected a whole number from 1"),
        (["TRACE", "--pool", "1e5"], "--pool '1e5': memory size '1e5'"),
        (["TRACE", "--pool", "1GiB"], "--pool in bytes needs --model or --bytes-per-token"),
        (["TRACE", "--pool", "10", "--policy", "paged"], "--pool 10: less than one block of 16 tokens"),
        (
            ["TRACE", "--pool", "1000000000000", "--policy", "prefix", "--block-size", "1000"],
            "prefix-1000: a pool of 1,000,000,000,000 tokens: num_blocks * block_size",
        ),
        (["TRACE", "--max-context", "x"], "--max-context 'x': 'x', expected a whole number"),
        (["TRACE", "--model", "gpt-9"], "gpt-9"),
        (["TRACE", "--curve"], "--curve: trace.csv has no hash ids"),
        (
            ["--generate", "5", "--shared-prefix", "64", "--capacities", "1,x"],
            "--capacities '1,x': 'x', expected",
        ),
        (["TRACE", "--size", "--pool", "500"], "--size: needs arrivals and an unbounded pool"),
        (["TRACE", "--size", "--mode", "saturated"], "--size: needs arrivals and an unbounded pool"),
        (["TRACE", "--preemption", "swap"], "--preemption swap: give --swap-rate, or"),
        (["TRACE", "--json", "no/where.json"], "no/where.json: cannot write: there is no folder no"),
        (["TRACE", "--plots", "TRACE"], "no folder can be made: File exists"),
        (["--generate", "5", "--lengths", "long"], "--lengths 'long': expected azure-conv"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_status_2(
    trace: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *(str(trace) if item == "TRACE" else item for item in arguments)]) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith("kvblocks: ")
    assert message in streams.err
    assert streams.err.count("\n") == 1


@pytest.mark.parametrize(
    "option", ["--generate=0", "--rate=0", "--watermark=1", "--inter-token-ms=nan", "--tp=1.5"]
)
def test_numbers_out_of_range_are_named(trace: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["replay", str(trace), option])
    assert exit_.value.code == 2
    assert option.partition("=")[0] in capsys.readouterr().err


def test_broken_lines_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE + "6,7\n7,0,3\n1,5,3\n")
    assert main(["replay", str(path), "--policy", "paged"]) == 0
    printed = capsys.readouterr().out
    assert "1 requests without a prompt or an output left out" in printed
    assert "1 rows out of order, sorted by time" in printed
    assert "1 broken lines left out" in printed
    assert "trace.csv:6: output: the row has 2 of 3 columns" in printed
    assert main(["replay", str(path), "--strict"]) == 2
    assert "trace.csv:6: output: the row has 2 of 3 columns" in capsys.readouterr().err


def test_times_in_milliseconds(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spans = [
        replay(
            capsys, trace, "--policy", "paged", "--inter-token-ms", "0.001", "--prefill-rate", "1e9", *unit
        )
        for unit in ([], ["--time-unit", "ms"])
    ]
    assert [span["results"][0]["duration"] for span in spans] == pytest.approx([5.0, 0.005], abs=1e-3)


def test_a_trace_without_times_is_saturated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("input,output\n100,20\n200,10\n")
    answer = replay(capsys, path, "--policy", "paged")
    assert (answer["engine"]["mode"], answer["results"][0]["time_unit"]) == ("saturated", "steps")
    assert answer["results"][0]["duration"] == 20
    assert main(["replay", str(path), "--mode", "arrivals"]) == 2
    assert "has no times of arrival" in capsys.readouterr().err


def test_nobody_fits(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ["--html", str(tmp_path / "page.html"), "--csv", str(tmp_path / "rows.csv")]
    answer = replay(capsys, trace, "--max-context", "10", "--size", *outputs)
    assert {(r["completed"], r["rejected_too_long"]) for r in answer["results"]} == {(0, 4)}
    answer = replay(capsys, trace, "--pool", "16", "--policy", "paged,oracle")
    assert {(r["completed"], r["rejected_never_fits"]) for r in answer["results"]} == {(0, 4)}


@pytest.mark.parametrize(("pool", "is_said"), [("400", True), ("4000", False)])
def test_an_engine_that_cannot_keep_up_is_said_so(
    trace: Path, pool: str, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace), "--pool", pool, "--policy", "oracle", "--inter-token-ms", "500"]) == 0
    assert ("the engine cannot keep up" in capsys.readouterr().out) is is_said


def test_interrupted_it_prints_and_writes_what_it_has(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = command.run_scenario
    calls = 0

    def interrupted(*arguments: Any) -> Result:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(command, "run_scenario", interrupted)
    path = tmp_path / "all.json"
    assert main(["replay", str(trace), "--policy", "oracle,paged", "--json", str(path)]) == 130
    printed = capsys.readouterr().out
    assert "interrupted: the tables show what was replayed until then" in printed
    answer = json.loads(path.read_text())
    assert answer["interrupted"] is True
    assert [result["policy"] for result in answer["results"]] == ["oracle"]


def test_a_signal_ends_a_long_replay_with_its_tables() -> None:
    """The first line comes before the work; the signal follows it, and finds the work anywhere."""
    # A shell that runs the tests in the background lets them, and what they start, ignore the signal.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from kvblocks.cli import main; sys.exit(main(sys.argv[1:]))"
    options = ["--generate", "300000", "--policy", "paged", "--lengths", "50,400"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, "replay", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("300000 requests like 50,400")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert err == ""
    assert "interrupted: the tables show what was replayed until then" in out


@pytest.mark.parametrize("interrupted_call", [1, 2, 3])
def test_interrupted_in_a_search_of_sizes_it_ends_there(
    interrupted_call: int,
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever replay is stopped, of the mean, of the peak, of a larger pool, no further one is begun."""
    calls = 0

    def short(*arguments: Any) -> Result:
        nonlocal calls
        calls += 1
        result = replace(run_scenario(*arguments), first_oom_time=1.0)
        return replace(result, interrupted=True) if calls == interrupted_call else result

    monkeypatch.setattr(sizing, "run_scenario", short)
    path = tmp_path / "all.json"
    options = ["--size", "--policy", "oracle,paged", "--json", str(path)]
    assert main(["replay", str(trace), *options]) == 130
    assert calls == interrupted_call
    assert "interrupted: the tables show what was replayed until then" in capsys.readouterr().out
    answer = json.loads(path.read_text())
    assert (answer["interrupted"], answer["pool_sizes"]) == (True, [])


def test_what_is_left_out_is_told_where_results_go_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,input,output\n1,4,2\n0,4,2\n2,0,2\n3,-4,2\n")
    assert main(["replay", str(path), "--policy", "oracle", "--csv", "-"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("policy,")
    assert err.splitlines() == [
        "kvblocks: 1 requests without a prompt or an output left out",
        "kvblocks: 1 rows out of order, sorted by time",
        "kvblocks: 1 broken lines left out",
        f"kvblocks: {path}:5: prompt tokens: -4, expected 0 to 16,777,216",
    ]


def test_what_a_pool_in_bytes_leaves_out_is_told(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--pool", "1GiB", "--policy", "paged", "--block-size", "32", "--model", "gpt-oss-20b"]
    assert main(["replay", str(trace), *options, "--kv-format", "kivi4"]) == 0
    printed = capsys.readouterr().out
    assert "layers look back on a window, and are taken to keep all tokens" in printed
    assert "besides its tokens (states, newest tokens in 16 bit), not counted here" in printed


@pytest.mark.parametrize(
    "option", ["--rate-factor", "--inter-token-ms", "--prefill-rate", "--bytes-per-token"]
)
@pytest.mark.parametrize("number", ["1e308", "1e-300", "-1", "nan"])
def test_a_rate_that_nobody_means_is_refused(
    option: str, number: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["replay", str(trace), f"{option}={number}"])
    assert exit_.value.code == 2
    assert "expected a number from 1e-09 to 1e+12" in capsys.readouterr().err


def test_a_page_holds_no_markup_of_a_file_name(trace: Path, tmp_path: Path) -> None:
    named = trace.rename(tmp_path / "<!--<script>&.csv")
    page = tmp_path / "page.html"
    assert main(["replay", str(named), "--policy", "oracle", "--html", str(page)]) == 0
    text = page.read_text()
    assert "<!--<" not in text
    assert text.count("<script") == 1
    assert json.loads(text.split('id="data">')[1].split("</script>")[0])["trace"]["name"] == named.name
