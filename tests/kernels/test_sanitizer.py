"""The kernels under AddressSanitizer: a read or write beyond an array stops at the line that does it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.emulator import ROOT

pytestmark = pytest.mark.cuda

CLEAN = """
import numpy as np
from conformance.harness import Harness
from conformance.scene import make_scene
from kernels.emulator import EmulatedLauncher, HostMemory
from kvblocks.backends.device import DeviceBackend

launcher = EmulatedLauncher("greedy", flags=("-fsanitize=address", "-g"))
backend = DeviceBackend("sanitized", launcher, HostMemory())
harness = Harness("sanitized", make=lambda: backend)
for config in (
    {"dtype": "float16", "dims": (64, 64), "seq_lens": (70, 0, 33)},
    {"dtype": "bfloat16", "dims": (64, 64), "seq_lens": (70, 33), "query_lens": (40, 9), "block_size": 3},
    {"dtype": "float32", "dims": (20, 7), "seq_lens": (70, 0, 33), "layout": "HND"},
):
    scene = make_scene(harness, **config)
    scene.check()
    scene.check(window=9, sinks=np.zeros(6, np.float32))
"""

BEYOND = (
    CLEAN
    + """
scene.block_tables = scene.block_tables[:, :1].copy()
# A description that claims more columns than there are.
backend.memory.describe = lambda name, array, describe=backend.memory.describe: (
    np.lib.stride_tricks.as_strided(array, (3, 400), (4, 4)) if name == "block_tables" else describe(name, array)
)
scene.seq_lens[:] = 4000
scene.attend()
"""
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, as the sanitizer must be there before anything else."""
    library = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = os.environ | {
        "LD_PRELOAD": str(Path(library).resolve()),
        # Python itself leaks, and Rust's extension has an allocator of its own.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:exitcode=99",
        "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'python'}",
        "PYTHONMALLOC": "malloc",
    }
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )


def test_kernels_touch_nothing_beyond_their_arrays() -> None:
    done = run(CLEAN)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_read_beyond_an_array_is_found_at_its_line() -> None:
    done = run(BEYOND)
    assert done.returncode == 99, done.stderr[-3000:]
    assert "heap-buffer-overflow" in done.stderr
    assert "attention.cuh:" in done.stderr
