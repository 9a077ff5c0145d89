"""Area Q: CUDA kernels launched through CuPy, as far as a machine without a device can tell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import kvblocks as kv
from conformance.scene import rows_close
from kernels.emulator import CUDA, emulated_backend
from kvblocks.backends import get_backend
from kvblocks.kernels.source import read_source
from kvblocks.kernels.specs import INSTANCES

COMPILE = """
import ctypes, os, sys
from kvblocks.kernels import nvrtc
from kvblocks.kernels.source import read_source
from kvblocks.kernels.specs import INSTANCES
seen = set()
for instance in INSTANCES:
    if instance.kernel.file not in seen:
        seen.add(instance.kernel.file)
        nvrtc.compile_ptx(read_source(instance.kernel.file, dict(instance.defines)), instance.kernel.file, "compute_90")
print(len(seen))
"""


def test_p130_kernels_include_no_header_of_the_toolkit() -> None:
    files = [path for path in CUDA.rglob("*.cu*") if path.is_file()]
    assert len(files) >= 18
    for path in files:
        for name in re.findall(r"^\s*#\s*include\s*(\S+)", path.read_text(), re.MULTILINE):
            assert re.fullmatch(r'"(kvblocks/)?\w+\.cuh"', name), f"{path.name} includes {name}"
    for instance in INSTANCES:
        text = read_source(instance.kernel.file, dict(instance.defines))
        assert not re.search(r"^\s*#\s*include", text, re.MULTILINE)


@pytest.mark.cuda
def test_p130_kernels_compile_without_a_toolkit(tmp_path: Path) -> None:
    """One instance of each source, with no folder to search and no toolkit named."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "NVCC", "CPATH"))
    }
    environment["HOME"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == len({instance.kernel.file for instance in INSTANCES})


def test_p133_importing_asks_no_device_and_cpu_backends_need_none() -> None:
    code = """
import sys
import kvblocks
assert not {"cupy", "torch"} & set(sys.modules)
from kvblocks.backends import get_backend
cache = kvblocks.PagedKVCache(kvblocks.CacheConfig(1, 1, 8), 4, backend="cpu")
assert not {"cupy", "torch"} & set(sys.modules)
"""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize("name", ["numpy", "cpu", pytest.param("emulated", marks=pytest.mark.cuda)])
def test_p136_bfloat16_is_uint16_and_a_name(name: str) -> None:
    """A pool and rows of bfloat16 as bits, against float32 of the same values; other bits are refused."""
    backend = emulated_backend() if name == "emulated" else get_backend(name)
    rng = np.random.default_rng(0)
    k, v, q = (rng.standard_normal((20, heads, 64)).astype(ml_dtypes.bfloat16) for heads in (2, 2, 4))
    results = []
    for dtype, view in (("bfloat16", np.uint16), ("float32", None)):
        (cache,) = backend.allocate(kv.CacheConfig(1, 2, 64, dtype=dtype), 4)
        assert cache.k.dtype == (view or np.float32)
        rows = [each.view(view) if view else each.astype(np.float32) for each in (k, v, q[:1])]
        backend.write(cache, *rows[:2], np.arange(16, 36))
        out = backend.attend(
            cache, rows[2], np.array([[1, 2]], np.int32), np.array([20], np.int32), np.array([0, 1], np.int32)
        )
        results.append((out.view(ml_dtypes.bfloat16) if view else out).astype(np.float64))
    rows_close(results[0], results[1], 1e-2)
    (cache,) = backend.allocate(kv.CacheConfig(1, 2, 64, dtype="bfloat16"), 4)
    with pytest.raises(TypeError, match="float16"):
        kv.LayerCache(cache.k.view(np.float16), cache.v.view(np.float16), "bfloat16", 16, "NHD")
