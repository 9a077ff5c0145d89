"""Compiled kernels: from the cache on disk, or compiled and put there.

Owns `load_cubin`, `build_all` and where the cache is. Imports source, specs and nvrtc.
Invariant: the name of a cubin says what it is made of (text, architecture, options) and not by which compiler, so that
a second process compiles nothing, nor does a machine without a compiler to which cubins were carried.
"""

import argparse
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvblocks.kernels import nvrtc
from kvblocks.kernels.source import read_source
from kvblocks.kernels.specs import INSTANCES, Instance

# Denormal numbers are numbers, and divisions are exact: scales and codes are the same bits on every backend.
OPTIONS: Final = ("--ftz=false", "--prec-div=true")
# Cubins that were compiled by this process, for whoever counts.
num_compiled = 0


def cache_folder() -> Path:
    """Where cubins are kept: beside CuPy's own kernels, in CUPY_CACHE_DIR where that is set."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache") / "kvblocks"


def load_cubin(instance: Instance, arch: str, folder: Path | None = None) -> bytes:
    """The cubin of an instance for an architecture such as "sm_90"; folder: another cache.

    Seconds where it has to be compiled. A cache that cannot be written is done without. Raises `CompileError` and
    `NvrtcMissingError`.
    """
    global num_compiled
    folder = folder or cache_folder()
    text = read_source(instance.kernel.file, dict(instance.defines))
    stem = f"{instance.name}-{arch}-{_digest(text, arch)}"
    path = folder / f"{stem}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass  # not there, or not to be read: compile
    cubin, _ = nvrtc.compile_cubin(text, instance.kernel.file, arch, OPTIONS)
    num_compiled += 1
    unfinished = folder / f"{stem}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(cubin)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
    return cubin


def build_all(archs: Sequence[str], folder: Path, threads: int | None = None) -> int:
    """Compile every instance for some architectures into a folder, several at once; how many there are."""
    work = [(instance, arch) for arch in archs for instance in INSTANCES]
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        for _ in pool.map(lambda each: load_cubin(each[0], each[1], folder), work):
            pass
    return len(work)


def _digest(text: str, arch: str) -> str:
    """What a cubin is made of, in 96 bits."""
    return hashlib.sha256("\0".join([text, arch, *OPTIONS]).encode()).hexdigest()[:24]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Compile all kernels into a folder that CUPY_CACHE_DIR may name."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", action="append", required=True, help="such as sm_90; may be repeated")
    arguments = parser.parse_args()
    build_all(arguments.arch, arguments.folder / "kvblocks")
