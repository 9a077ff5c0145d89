"""The script for a card, as far as no card is needed: arithmetic of the table, deadlines, what a failure leaves."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benches.gpu import run as module
from benches.gpu.cases import CASES, REFERENCE_COPY, Case, Goal, markdown, verdict

FLOORS = [499.7, 250.0, 257.8, 8.1, 11.7, 975.4]


def test_floors() -> None:
    assert [round(case.floor_us(REFERENCE_COPY), 1) for case in CASES] == pytest.approx(FLOORS, abs=0.11)


@pytest.mark.parametrize(
    ("took", "copy", "expected"),
    [
        (554, 4.3e12, "must"),
        (556, 4.3e12, "missed"),
        (539, 4.3e12, "stretch"),
        (1109, 2.15e12, "must"),  # half the bandwidth, twice the time
        (1111, 2.15e12, "missed"),
    ],
)
def test_a_goal_in_microseconds_goes_with_the_cards_own_copy(took: float, copy: float, expected: str) -> None:
    assert verdict(CASES[0], {CASES[0].name: took}, copy)[1] == expected


def test_goals_that_compare() -> None:
    bf16, e4m3, *_, write, _ = CASES
    assert verdict(e4m3, {bf16.name: 500, e4m3.name: 310}, 4.3e12) == ("1.61x", "must")
    assert verdict(e4m3, {bf16.name: 500, e4m3.name: 320}, 4.3e12)[1] == "missed"
    assert verdict(e4m3, {e4m3.name: 310}, 4.3e12) == ("-", "-")
    assert verdict(write, {write.name: write.floor_us(4.3e12) / 0.85}, 4.3e12) == ("85% of copy", "must")
    assert verdict(write, {}, 4.3e12) == ("-", "-")


def test_a_windowless_case_counts_what_it_moves() -> None:
    case = Case("one", "decode", "int8", 2, 17, Goal("us", 1, 1))
    kv = 2 * 17 * (8 * 256 + 2 * 8 * 4)
    assert case.num_bytes == kv + 2 * 32 * 256 * 2 + 2 * 2 * 4


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fake_device(clock: Clock) -> SimpleNamespace:
    def case(case: Case) -> float:
        clock.now += 10
        if case.call == "copy":
            raise RuntimeError("out of memory")
        return 2 * case.floor_us(4.3e12)

    return SimpleNamespace(
        ceilings=lambda: {"copy_bytes_per_s": 4.3e12, "read_bytes_per_s": 4.5e12},
        graph_check=lambda: "ok",
        is_alive=lambda: True,
        host_us=lambda: {"direct": 7.0, "operator": 12.0},
        run_case=case,
        others=lambda case: {"torch SDPA, contiguous": 1.0} if case is CASES[0] else {},
    )


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    device = fake_device(clock)
    monkeypatch.setattr(module, "machine", lambda: {"device": "a card that is not there"})
    monkeypatch.setattr(module.importlib, "import_module", lambda name: device)
    monkeypatch.setattr(module, "run_tests", lambda seconds: "7 passed in 1s")
    monkeypatch.setattr(module.shutil, "which", lambda tool: None)
    return clock


def test_a_part_that_fails_is_named_and_stops_nothing(no_card: Clock, tmp_path: Path) -> None:
    report = module.Report(tmp_path, 1000, no_card)
    module.measure(report, with_tests=True)
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["failures"] == {
        CASES[-1].name: "RuntimeError: out of memory",
        "ncu": "RuntimeError: ncu is not installed",
    }
    assert len(saved["cases_us"]) == len(CASES) - 1
    assert saved["tests"] == "7 passed in 1s"
    page = (tmp_path / "result.md").read_text()
    assert (
        f"| {CASES[0].name} | 499.7 | 999.4 | 999.4 us of 555.0 | missed | torch SDPA, contiguous 1.0 |"
        in page
    )
    assert f"| {CASES[-1].name} | 975.4 | - | - | - | - |" in page
    assert f"- {CASES[-1].name}: RuntimeError: out of memory" in page


def test_a_fault_that_takes_the_device(
    no_card: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that goes on does not try again what failed, and loses nothing of what was found."""
    device = module.importlib.import_module("device")
    device.is_alive = lambda: no_card.now < 25
    report = module.Report(tmp_path, 1000, no_card)
    run_case = device.run_case
    faulty = CASES[2].name

    def run(case: Case) -> float:
        took = run_case(case)
        if case.name == faulty:
            raise RuntimeError("an illegal memory access was encountered")
        return took

    device.run_case = run
    assert not module.measure(report, with_tests=True)
    assert set(report.results["cases_us"]) == {case.name for case in CASES[:2]}
    anew = module.Report(tmp_path, 1000, no_card)
    anew.resume()
    device.is_alive = lambda: True
    assert module.measure(anew, with_tests=True)
    assert set(anew.results["cases_us"]) == {case.name for case in CASES[:-1]} - {faulty}
    assert "illegal memory access" in anew.results["failures"][faulty]
    assert anew.results["copy_bytes_per_s"] == 4.3e12


def test_what_finds_no_time_is_named(no_card: Clock, tmp_path: Path) -> None:
    report = module.Report(tmp_path, 25, no_card)
    module.measure(report, with_tests=True)
    failures = report.results["failures"]
    assert set(report.results["cases_us"]) == {case.name for case in CASES[:3]}
    assert all(failures[case.name] == "no time was left" for case in CASES[3:])
    assert failures["tests"] == "no time was left"


def test_a_machine_without_a_card_says_what_is_missing(tmp_path: Path) -> None:
    from kvblocks import gpu

    if gpu.check().is_ready:
        pytest.skip("there is a card")
    run = subprocess.run(
        [sys.executable, "-m", "benches.gpu.run", "--output", tmp_path],
        cwd=module.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "- machine: RuntimeError: there is no NVIDIA driver" in run.stdout


def test_dry_run() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benches.gpu.run", "--dry-run"],
        cwd=module.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = run.stdout.splitlines()
    assert len(lines) == len(CASES)
    assert lines[0].split() == [
        "decode",
        "bf16,",
        "64",
        "x",
        "8k",
        "2148.7",
        "MB",
        "499.7",
        "us",
        "at",
        "4.3",
        "TB/s",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("...\n==== 3 passed, 2 skipped in 1.2s ====\n", "3 passed, 2 skipped in 1.2s"),
        ("1 failed, 3 passed in 2s\n", "1 failed, 3 passed in 2s"),
        ("nothing", ""),
    ],
)
def test_closing_line(text: str, line: str) -> None:
    assert module.closing_line(text) == line


def test_failing_tests_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: Any, **options: Any) -> SimpleNamespace:
        assert options["timeout"] >= 1
        return SimpleNamespace(returncode=code, stdout=f"{text}\n", stderr="")

    monkeypatch.setattr(module.subprocess, "run", run)
    code, text = 0, "5 passed, 1 skipped in 3s"
    assert module.run_tests(0.1) == text
    for code, text in ((1, "1 failed, 4 passed in 3s"), (0, "9 skipped in 1s"), (5, "")):  # noqa: B007
        with pytest.raises(RuntimeError, match=text or "no summary"):
            module.run_tests(9)


def test_a_page_without_results() -> None:
    assert markdown({"failures": {"machine": "no driver"}}).splitlines()[-1] == "- machine: no driver"
