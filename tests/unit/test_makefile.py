"""What a newcomer's machine may lack is said in one line, before anything is made."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make(folder: Path, tools: tuple[str, ...], python: str) -> subprocess.CompletedProcess[str]:
    """Dry run of the Makefile where only `tools` are on the path."""
    for tool in ("make", "bash", "find", "sed", *tools):
        found = shutil.which(tool)
        assert found, f"this test needs {tool}"
        (folder / tool).symlink_to(found)
    return subprocess.run(
        ["make", "--dry-run", "test-rust", f"PYTHON={python}"],
        cwd=ROOT,
        env={"PATH": str(folder), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("tools", "python", "message"),
    [
        (
            ("cargo", "cc"),
            "no-python",
            "needs Python 3.10 or newer with venv and pip: 'no-python' is not that",
        ),
        (("cc",), sys.executable, "needs Rust 1.89 or newer: there is no 'cargo'"),
        (("cargo",), sys.executable, "needs a C linker: there is no 'cc'"),
    ],
    ids=["python", "cargo", "linker"],
)
def test_a_missing_tool_is_one_line(
    tools: tuple[str, ...], python: str, message: str, tmp_path: Path
) -> None:
    run = make(tmp_path, tools, python)
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1
    assert message in run.stderr


def test_nothing_is_refused_where_all_tools_are(tmp_path: Path) -> None:
    run = make(tmp_path, ("cargo", "cc"), sys.executable)
    assert run.returncode == 0, run.stderr
    assert "cargo" in run.stdout
