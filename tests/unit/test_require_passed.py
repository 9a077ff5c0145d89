"""`--require-passed`: a suite that was skipped as a whole is a failure."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
SUITE = """
import pytest
def test_passes(): assert True
@pytest.mark.skip(reason="to see that it does not count")
def test_skipped(): assert True
"""


@pytest.mark.parametrize(("required", "status"), [(0, 0), (1, 0), (2, 1)])
def test_skipped_tests_do_not_count(required: int, status: int, tmp_path: Path) -> None:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_suite.py").write_text(SUITE)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", f"--require-passed={required}", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == status, run.stdout
    assert ("at least 2 required" in run.stdout) == (status == 1)
