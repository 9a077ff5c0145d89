"""What a device backend asks of the memory that its kernels reach.

Owns the protocol `Memory`. Imports layout.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from kvblocks.layout import Array


class Memory(Protocol):
    """Arrays where the kernels can reach them, and the stream that work is enqueued on."""

    num_multiprocessors: int
    # Dynamic shared memory that a block may have.
    max_shared_bytes: int

    def describe(self, name: str, array: Array) -> NDArray[Any]:
        """A NumPy array of the same address, shape, dtype and strides, which nobody may read.

        Raises TypeError that names the argument for what is no array of this memory.
        """

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """A new array of undefined contents."""

    def scratch(self, shape: Sequence[int], dtype: Any) -> Array:
        """`empty`, for what nobody reads any more once the call's own launches are done."""

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        """A new array of zeros."""

    def upload(self, array: NDArray[Any]) -> Array:
        """A copy of a host array, there for every stream; waits for it to arrive."""

    def download(self, array: Array) -> NDArray[Any]:
        """A copy on the host; waits for all that the device has to do, on whatever stream."""

    def plain(self, array: Array) -> Array:
        """A contiguous, aligned copy."""

    def assign(self, target: Array, source: Array | int) -> None:
        """Set the elements of an array."""

    def convert(self, array: Array, dtype: Any) -> Array:
        """A new array of the same values in another dtype."""

    def device(self) -> int:
        """The number of the device that is current."""

    def stream(self) -> int:
        """The address of the stream that the next launch goes to."""
