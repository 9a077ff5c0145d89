"""What the commands share: tables, files, progress and figures."""

import json
from pathlib import Path

import pytest

from kvblocks import report


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (2**31, "2.00 GiB"),
        (-(2**30), "-1.00 GiB"),
        (5 * 2**50, "5,120.00 TiB"),
    ],
)
def test_sizes_are_in_binary_units(num_bytes: int, expected: str) -> None:
    assert report.format_bytes(num_bytes) == expected


def test_a_table_shows_every_cell_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_table(
        "Pools [a]", ["name", "size\n[GiB]"], [["[bold]x[/]", "1.5"], ["y", "12.0"]], note="a [note]"
    )
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == "Pools [a]"
    assert lines[1].split() == ["size"]
    assert lines[2].split() == ["name", "[GiB]"]
    assert lines[4].split() == ["[bold]x[/]", "1.5"]
    assert lines[5].split() == ["y", "12.0"]
    assert lines[6] == "a [note]"


def test_json_goes_to_a_file_or_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.write_json(tmp_path / "x.json", {"users": 3})
    report.write_json("-", {"users": 4})
    assert json.loads((tmp_path / "x.json").read_text()) == {"users": 3}
    assert json.loads(capsys.readouterr().out) == {"users": 4}
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.write_json("-", float("inf"))


def test_what_cannot_be_written_is_an_error_of_the_user(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(report.UserError, match=r"missing/x.json: cannot write: No such file"):
        report.write_json(missing / "x.json", 1)
    with (
        pytest.raises(report.UserError, match=r"missing/x.png: cannot write: No such file"),
        report.figure(missing / "x.png"),
    ):
        pass
    with (
        pytest.raises(report.UserError, match=r"x.gif: expected a name that ends in .png"),
        report.figure("x.gif"),
    ):
        pass


def test_a_missing_tool_names_the_pip_command() -> None:
    with pytest.raises(report.UserError, match=r"pip install 'kvblocks\[tools\]'"):
        report.require("kvblocks_has_no_such_module")


def test_progress_is_silent_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with report.progress("replaying", 10) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


def test_figures_are_saved_and_series_told_apart(tmp_path: Path) -> None:
    with report.figure(tmp_path / "x.svg", nrows=2) as (above, below):
        above.plot([0, 1], [0, 1], **report.series_style(0))
        below.plot([0, 1], [1, 0], **report.series_style(7))
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")
    assert len({tuple(report.series_style(i).values()) for i in range(28)}) == 28
