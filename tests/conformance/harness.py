"""What differs between backends under test: how to make one, and how its arrays reach the host.

To bind another backend to the contract, add its harness to HARNESSES; nothing else in the suite names one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

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
    # Values of index arrays are checked by the call itself; device backends report them later.
    checks_values: bool = True

    # None: the backend of that name.
    make: Callable[[], Backend] | None = None

    @property
    def backend(self) -> Backend:
        return get_backend(self.name) if self.make is None else self.make()


def _cpu(simd: str) -> Harness:
    """The kernels of one instruction set, on more threads than this machine may have cores."""
    return Harness(f"cpu-{simd}", make=lambda: CpuBackend(num_threads=3, simd=simd))


HARNESSES = [
    Harness("numpy"),
    *map(_cpu, cpu_simd()),
]
