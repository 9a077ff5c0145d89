"""Copies between a host's pinned memory and a device, and the events that say when they are done.

Owns `Transport` and `CupyTransport`. Imports foreign; CuPy when one is made.
Invariant: memory handed to a copy is neither written nor freed before its event; who asks for that waits or holds on.
"""

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends.foreign import cupy_stream


class Event(Protocol):
    """A point of a stream."""

    def is_done(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Transport(Protocol):
    """What moves bytes and orders streams on one device."""

    def pinned(self, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        """A new array in pinned host memory."""

    def is_pinned(self, address: int) -> bool:
        """Whether an address is of pinned host memory."""

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy; either address may be the host's."""

    def record(self, stream: int) -> Event:
        """An event at the present end of a stream."""

    def wait(self, stream: int, event: Event) -> None:
        """Let what is enqueued on a stream from now on wait for an event; the host does not."""

    def new_stream(self) -> int:
        """The address of a stream of its own, which the null stream does not wait for."""


class _CupyEvent:
    def __init__(self, event: Any) -> None:
        self.event = event

    def is_done(self) -> bool:
        return bool(self.event.done)

    def synchronize(self) -> None:
        self.event.synchronize()


class CupyTransport:
    """`Transport` by CuPy. device: the index of the GPU."""

    def __init__(self, device: int) -> None:
        self._cuda: Any = importlib.import_module("cupy").cuda
        self._device = device
        self._streams: list[Any] = []

    def pinned(self, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        """See `Transport.pinned`."""
        with self._cuda.Device(self._device):
            array: NDArray[Any] = importlib.import_module("cupyx").empty_pinned(tuple(shape), np.dtype(dtype))
        return array

    def is_pinned(self, address: int) -> bool:
        """See `Transport.is_pinned`."""
        runtime = self._cuda.runtime
        return bool(runtime.pointerGetAttributes(address).type == runtime.memoryTypeHost)

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        """See `Transport.copy`."""
        runtime = self._cuda.runtime
        with self._cuda.Device(self._device):
            runtime.memcpyAsync(destination, source, num_bytes, runtime.memcpyDefault, stream)

    def record(self, stream: int) -> Event:
        """See `Transport.record`."""
        with self._cuda.Device(self._device):
            event = self._cuda.Event(disable_timing=True)
            event.record(cupy_stream(self._cuda, stream, self._device))
        return _CupyEvent(event)

    def wait(self, stream: int, event: Event) -> None:
        """See `Transport.wait`."""
        assert isinstance(event, _CupyEvent)
        with self._cuda.Device(self._device):
            cupy_stream(self._cuda, stream, self._device).wait_event(event.event)

    def new_stream(self) -> int:
        """See `Transport.new_stream`."""
        with self._cuda.Device(self._device):
            self._streams.append(self._cuda.Stream(non_blocking=True))
        return int(self._streams[-1].ptr)
