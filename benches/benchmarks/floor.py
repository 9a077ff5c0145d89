"""What a row costs a bare loop in Rust on this machine: `rust/kvblocks-core/examples/floor.rs`, built and run.

The loop does the row's work and nothing else, so it is what ratios to "the machine's limit" are stated to.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from .row import Row
from .rows import Trace

CHECKOUT = Path(__file__).parents[2]
PROGRAM = CHECKOUT / "target" / "release" / "examples" / "floor"


def build() -> bool:
    """Build the program; False where there is no cargo. Raises CalledProcessError if it does not build."""
    cargo = shutil.which("cargo") or shutil.which("cargo", path=str(Path.home() / ".cargo" / "bin"))
    if cargo is None:
        return False
    command = [
        cargo,
        "build",
        "--quiet",
        "--release",
        "--locked",
        "-p",
        "kvblocks-core",
        "--example",
        "floor",
    ]
    subprocess.run(command, cwd=CHECKOUT, check=True)
    return True


def floor(name: str, row: Row, samples: int) -> dict[str, float] | None:
    """Typical cost of each part, in the row's unit; None for a row without a floor."""
    if name in ("W7 sha256", "W8 build"):
        return None
    command = [str(PROGRAM), name, str(samples)]
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(row, Trace):
            path = Path(folder, "trace.bin")
            write_trace(row, path)
            command.append(str(path))
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {part: float(cost) / row.unit_ns for part, cost in map(str.split, lines)}


def write_trace(row: Trace, path: Path) -> None:
    """The prompts of a row as the program reads them: their number; tokens, number of ids and ids of each."""
    prompts = [row.trace.rows[at] for at in row.order]
    numbers = [np.array([len(prompts)], np.int32)]
    for ids, num_tokens in prompts:
        numbers += [np.array([num_tokens, len(ids)], np.int32), ids]
    np.concatenate(numbers).astype("<i4").tofile(path)
