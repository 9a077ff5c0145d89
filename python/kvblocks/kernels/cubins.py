"""The machine code of kernels: prebuilt in a folder, kept from an earlier compilation, or compiled now.

Owns `Cubins` and `prebuild`. Imports kernels and the standard library only.
Invariant: code is named by a digest of all that it was made from (text, architecture, options, version of the
compiler), so that a changed source, or another compiler, never meets old code.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kvblocks.kernels import nvrtc
from kvblocks.kernels.source import read_source
from kvblocks.kernels.specs import INSTANCES, Instance

# Denormal numbers are numbers and divisions are exact: scales and codes are the same bits on every backend. Registers
# and spills come with the log.
OPTIONS: Final = ("--ftz=false", "--prec-div=true", "--ptxas-options=-v")
MANIFEST: Final = "manifest.json"

Compile = Callable[[str, str, str, Sequence[str]], tuple[bytes, str]]


class Cubins:
    """Where the code of instances comes from; every thread may ask.

    prebuilt: a folder that `prebuild` made; by default what KVBLOCKS_CUBINS names. cache: where compiled code is kept
    for the next process; by default CuPy's folder for the same purpose, CUPY_CACHE_DIR or ~/.cupy/kernel_cache. A cache
    that cannot be written is done without. Raises FileNotFoundError for a prebuilt folder without a manifest.
    """

    def __init__(
        self,
        prebuilt: Path | None = None,
        cache: Path | None = None,
        *,
        compile_cubin: Compile = nvrtc.compile_cubin,
        version: Callable[[], tuple[int, int]] = nvrtc.version,
    ) -> None:
        if prebuilt is None and os.environ.get("KVBLOCKS_CUBINS"):
            prebuilt = Path(os.environ["KVBLOCKS_CUBINS"])
        self.num_compiled = 0
        self._prebuilt = prebuilt
        self._manifest: dict[str, Any] = {} if prebuilt is None else read_manifest(prebuilt)
        self._cache = cache or _default_cache()
        self._compile = compile_cubin
        self._version = version

    def get(self, instance: Instance, arch: str) -> bytes:
        """The cubin of an instance for an architecture such as "sm_90".

        Raises nvrtc.CompileError and nvrtc.NvrtcMissingError. Milliseconds, or seconds where it is compiled.
        """
        text = read_source(instance.kernel.file, dict(instance.defines))
        if self._prebuilt is not None:
            built = self._prebuilt / f"{cubin_key(text, arch, tuple(self._manifest['nvrtc']))}.cubin"
            if built.exists():
                return built.read_bytes()
        kept = self._cache / f"{cubin_key(text, arch, self._version())}.cubin"
        with suppress(OSError):
            return kept.read_bytes()
        cubin, _ = self._compile(text, instance.kernel.file, arch, OPTIONS)
        self.num_compiled += 1
        with suppress(OSError):
            _write_whole(kept, cubin)
        return cubin


def cubin_key(text: str, arch: str, version: tuple[int, ...]) -> str:
    """The name of the code of a text: 32 hexadecimal digits."""
    made_from = "\0".join([text, arch, *OPTIONS, *map(str, version)])
    return hashlib.sha256(made_from.encode()).hexdigest()[:32]


def prebuild(
    folder: Path, arch: str, instances: Iterable[Instance] = INSTANCES, *, num_threads: int | None = None
) -> dict[str, Any]:
    """Compile instances into a folder that `Cubins(prebuilt=...)` reads, and write its manifest, which is returned.

    Code that is there already is kept. Seconds an instance of CPU time, on any machine; num_threads at once, by
    default as many as there are cores.
    """
    folder.mkdir(parents=True, exist_ok=True)
    version = nvrtc.version()

    def build(instance: Instance) -> tuple[str, dict[str, Any]]:
        text = read_source(instance.kernel.file, dict(instance.defines))
        key = cubin_key(text, arch, version)
        path, log_path = folder / f"{key}.cubin", folder / f"{key}.log"
        if not (path.exists() and log_path.exists()):
            cubin, log = nvrtc.compile_cubin(text, instance.kernel.file, arch, OPTIONS)
            log_path.write_text(log, encoding="utf-8")
            _write_whole(path, cubin)
        used = re.search(r"Used (\d+) registers", log_path.read_text(encoding="utf-8"))
        return instance.name, {"key": key, "registers": int(used[1]) if used else None}

    with ThreadPoolExecutor(num_threads or os.cpu_count()) as pool:
        kernels = dict(pool.map(build, instances))
    manifest = {"arch": arch, "nvrtc": list(version), "kernels": kernels}
    _write_whole(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `prebuild` wrote of a folder. Raises FileNotFoundError where it wrote nothing."""
    path = folder / MANIFEST
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} has no {MANIFEST}: expected a folder that kvblocks.gpu.prebuild made"
        )
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return manifest


def _default_cache() -> Path:
    folder = os.environ.get("CUPY_CACHE_DIR")
    return (Path(folder) if folder else Path.home() / ".cupy" / "kernel_cache") / "kvblocks"


def _write_whole(path: Path, data: bytes) -> None:
    """Processes may write the same file at once: each reader sees a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
