"""A short run of the soak in `benches`, so that it works when somebody wants the long one."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_short_soak_is_sound() -> None:
    run = subprocess.run(
        [sys.executable, "benches/soak.py", "20000", "--seed", "3", "--check-every", "300"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    last = run.stdout.splitlines()[-1]
    assert " 0 violations" in last
    assert int(last.split()[0].replace(",", "")) >= 20_000
