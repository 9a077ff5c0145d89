"""What runs a kernel: the interface behind which CuPy, and a host that emulates the device, are alike.

Owns the protocol `Launcher` and `Launch`. Imports the list of kernels.
Invariant: a launcher knows instances, addresses and streams; it knows nothing of caches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvblocks.kernels.specs import Instance

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Attributes:
    """What a compiled kernel takes: registers of a thread, bytes of local memory of a thread (spills)."""

    registers: int
    local_bytes: int


class Launch(NamedTuple):
    """What a launcher is given, but for the stream."""

    function: Any
    grid: Grid
    threads: int
    shared_bytes: int
    params: NDArray[np.void]


class Launcher(Protocol):
    """Loads an instance for the current device, launches it, and tells what it takes."""

    def load(self, instance: Instance) -> Any:
        """The function of an instance, compiled if it is not yet; the same one for every later call."""

    def launch(
        self,
        function: Any,
        grid: Grid,
        threads: int,
        shared_bytes: int,
        params: NDArray[np.void],
        stream: int,
    ) -> None:
        """Enqueue a grid on a stream (its address; 0 is the null stream).

        params: a record of the kernel's struct, 0-dimensional; its bytes are copied before the call returns.
        """

    def bind(self, launches: Sequence[Launch]) -> Callable[[int], None]:
        """`launch` for later: called with a stream, it launches all with what their records hold at that moment."""

    def attributes(self, function: Any) -> Attributes:
        """What the function takes."""
