"""What a GPU needs and this machine lacks, in plain words.

Owns `check` and `Readiness`. Imports kernels; CuPy when asked.
Invariant: asking changes nothing, compiles nothing and needs nothing to be installed.
"""

import ctypes
import importlib
import os
from dataclasses import dataclass
from typing import Any, Final

from kvblocks.kernels import nvrtc

_OLDEST_CAPABILITY: Final = 80
_EXTRAS: Final = {13: "cupy", 12: "cupy-cuda12"}


@dataclass(frozen=True)
class Readiness:
    """found: what is there. problems: what is missing or does not fit, each with what mends it; none: ready."""

    found: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        """Whether the kernels can run."""
        return not self.problems

    def __str__(self) -> str:
        """Everything, a line each."""
        lines = [f"found: {line}" for line in self.found] + [f"missing: {line}" for line in self.problems]
        return "\n".join([*lines, "ready" if self.is_ready else "not ready"])


def check() -> Readiness:
    """Look for the driver, a GPU, CuPy and the compiler. Half a second, which is CuPy's import."""
    found: list[str] = []
    problems: list[str] = []
    driver = _driver(found, problems)
    _cupy(driver, found, problems)
    _compiler(driver, found, problems)
    found.append("headers: none are needed, the kernels include no header of CUDA")
    return Readiness(tuple(found), tuple(problems))


def _driver(found: list[str], problems: list[str]) -> int | None:
    """The newest CUDA that the driver speaks, such as 13000, or None."""
    library = _load_driver()
    if library is None:
        problems.append(
            "there is no NVIDIA driver (libcuda.so.1): install the one of your system for this GPU; pip cannot"
        )
        return None
    version = ctypes.c_int()
    status = library.cuInit(0)
    if status != 0:
        problems.append(f"the NVIDIA driver finds no GPU (cuInit gives {status}): see what nvidia-smi says")
        return None
    library.cuDriverGetVersion(ctypes.byref(version))
    found.append(f"driver: CUDA {_spell(version.value)}")
    return version.value


def _cupy(driver: int | None, found: list[str], problems: list[str]) -> None:
    major = (driver or 13000) // 1000
    extra = _EXTRAS.get(min(major, 13), "cupy-cuda12")
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError as error:
        problems.append(f"CuPy is not installed ({error}): pip install 'kvblocks[{extra}]'")
        return
    built = cupy.cuda.runtime.runtimeGetVersion()
    found.append(f"CuPy {cupy.__version__} for CUDA {_spell(built)}")
    if driver is None:
        return
    if built // 1000 > driver // 1000:
        problems.append(
            f"CuPy is for CUDA {_spell(built)}, the driver speaks CUDA {_spell(driver)}: "
            f"pip uninstall cupy-cuda{built // 1000}x && pip install 'kvblocks[{extra}]', or a newer driver"
        )
        return
    for device in range(cupy.cuda.runtime.getDeviceCount()):
        capability = cupy.cuda.Device(device).compute_capability
        found.append(f"device {device}: sm_{capability}")
        if int(capability) < _OLDEST_CAPABILITY:
            problems.append(
                f"device {device} is sm_{capability}: the kernels need sm_{_OLDEST_CAPABILITY} (Ampere) or newer"
            )


def _compiler(driver: int | None, found: list[str], problems: list[str]) -> None:
    major = min((driver or 13000) // 1000, 13)
    package = "'nvidia-cuda-nvrtc==13.0.*'" if major >= 13 else "'nvidia-cuda-nvrtc-cu12>=12.8'"
    try:
        version = nvrtc.version()
    except nvrtc.NvrtcMissingError:
        if os.environ.get("KVBLOCKS_CUBINS"):
            found.append("NVRTC: none, KVBLOCKS_CUBINS names prebuilt kernels")
        else:
            problems.append(f"NVRTC, which compiles the kernels, is not installed: pip install {package}")
        return
    found.append(f"NVRTC {version[0]}.{version[1]}")
    if driver is not None and version[0] > driver // 1000:
        problems.append(
            f"NVRTC is of CUDA {version[0]}, the driver speaks CUDA {_spell(driver)}: pip install {package}"
        )


def _load_driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _spell(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
