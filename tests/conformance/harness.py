"""What differs between backends under test: how to make one, and how its arrays reach the host.

To bind another backend to the contract, add its harness to HARNESSES; nothing else in the suite names one.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kernels.emulator import emulated_backend
from kvblocks._core import cpu_simd
from kvblocks.backends import Backend, get_backend
from kvblocks.backends.cpu import CpuBackend


@dataclass(frozen=True)
class Harness:
    """A backend under test."""

    name: str
    # Host array -> the backend's array, and back. Identity for backends that work on host memory.
    to_device: Callable[[np.ndarray], Any] = lambda array: array
    to_host: Callable[[Any], np.ndarray] = lambda array: array
    # None: the backend of that name.
    make: Callable[[], Backend] | None = None
    # A marker of pytest: for backends whose whole suite takes minutes.
    marker: str | None = None
    # Races are looked for with that many times fewer calls, where a call takes that much longer.
    slowness: int = 1

    @property
    def backend(self) -> Backend:
        return get_backend(self.name) if self.make is None else self.make()

    def rounds(self, count: int) -> int:
        """How often a test repeats what would take `count` times elsewhere."""
        return max(1, count // self.slowness)

    @property
    def checks_values(self) -> bool:
        """Values of index arrays are checked by the call itself; device backends report them later."""
        return self.backend.supported().checks_values


def _cpu(simd: str) -> Harness:
    """The kernels of one instruction set, on more threads than this machine may have cores."""
    return Harness(f"cpu-{simd}", make=lambda: CpuBackend(num_threads=3, simd=simd))


def _to_device(array: np.ndarray) -> Any:
    return importlib.import_module("cupy").asarray(array)


def _to_host(array: Any) -> np.ndarray:
    return importlib.import_module("cupy").asnumpy(array)


HARNESSES = [
    Harness("numpy"),
    *map(_cpu, cpu_simd()),
    # The CUDA kernels, run on the host.
    Harness("emulated", make=emulated_backend, marker="cuda", slowness=10),
    Harness("cupy", _to_device, _to_host, marker="gpu"),
]

# The same as parameters of a test, each with its marker.
PARAMS = [
    pytest.param(
        harness, id=harness.name, marks=[getattr(pytest.mark, harness.marker)] if harness.marker else []
    )
    for harness in HARNESSES
]
