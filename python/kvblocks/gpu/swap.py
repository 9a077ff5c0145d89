"""Blocks between a device's pool and a host's pinned one, on a stream of their own.

Owns `Swapper`, `Transfer` and `pinned_pool`. Imports transfers, libraries and layout.
Invariant: a copy begins behind what the caller's stream holds when it is asked for, and nobody but who waits for its
event is held up by it. Which blocks they are, and that they stay untouched until the event, is the caller's business:
`BlockManager.begin_transfer` holds them meanwhile.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends.expect import expect_dtype, expect_shape
from kvblocks.backends.foreign import stream_address
from kvblocks.backends.numpy import NumpyBackend
from kvblocks.config import CacheConfig
from kvblocks.gpu.libraries import Library, library_named
from kvblocks.gpu.transfers import CupyTransport, Event, Transport
from kvblocks.layout import LayerCache

_SIDES: Final = ("device", "host")


class Transfer:
    """Copies that were enqueued. Whoever reads what they write, or writes what they read, waits for it first."""

    def __init__(self, swapper: "Swapper", event: Event) -> None:
        self._swapper = swapper
        self._event = event

    @property
    def is_done(self) -> bool:
        """Whether all bytes have arrived; does not wait."""
        return self._event.is_done()

    def wait(self, stream: object = None) -> None:
        """Let what is enqueued on a stream from now on wait for the copies; the host does not."""
        self._swapper.transport.wait(self._swapper.stream_of(stream), self._event)

    def synchronize(self) -> None:
        """Wait until all bytes have arrived."""
        self._event.synchronize()


class Swapper:
    """Copies whole blocks, scales included, between the caches of a device and those of a host, layer by layer.

    device_pool, host_pool: one cache a layer each, alike but for num_blocks; the blocks of the host's are pinned (see
    `pinned_pool`). library: "torch" or "cupy", whose current stream a copy is ordered with. Raises ValueError that
    names the layer for pools that differ, for blocks that are not contiguous, and for host memory that is not pinned,
    from which copies would wait for the host.
    """

    def __init__(
        self,
        device_pool: Sequence[LayerCache],
        host_pool: Sequence[LayerCache],
        *,
        library: str = "torch",
        device: int = 0,
        transport: Transport | None = None,
        using: Library | None = None,
    ) -> None:
        if len(device_pool) != len(host_pool):
            raise ValueError(f"host_pool: {len(host_pool)} layers, device_pool has {len(device_pool)}")
        self.transport = transport or CupyTransport(device)
        self._library = using or library_named(library)
        self._device = device
        self._pools = tuple(device_pool), tuple(host_pool)
        self.num_blocks = tuple(min(cache.num_blocks for cache in pool) for pool in self._pools)
        # (address on the device, address on the host, bytes of a block) of every array.
        self._arrays: list[tuple[int, int, int]] = []
        for layer, (ours, theirs) in enumerate(zip(device_pool, host_pool, strict=True)):
            self._add(layer, ours, theirs)
        self._stream = self.transport.new_stream()

    def _add(self, layer: int, ours: LayerCache, theirs: LayerCache) -> None:
        if (ours.format, ours.block_size, ours.layout) != (theirs.format, theirs.block_size, theirs.layout):
            raise ValueError(
                f"layer {layer}: {theirs.format} blocks of {theirs.block_size} in {theirs.layout} on the host, "
                f"{ours.format} of {ours.block_size} in {ours.layout} on the device"
            )
        for there, here in zip(ours.block_arrays, theirs.block_arrays, strict=True):
            views = (
                self._library.describe(f"layer {layer}", there, self._device),
                here if isinstance(here, np.ndarray) else np.asarray(here),
            )
            sizes = []
            for side, view in zip(_SIDES, views, strict=True):
                block = math.prod(view.shape[1:]) * view.itemsize
                if not view[0].flags.c_contiguous or (view.shape[0] > 1 and view.strides[0] != block):
                    raise ValueError(f"layer {layer}: a block on the {side} is not contiguous")
                sizes.append(block)
            if views[0].shape[1:] != views[1].shape[1:]:
                raise ValueError(
                    f"layer {layer}: blocks of shape {views[1].shape[1:]} on the host, "
                    f"{views[0].shape[1:]} on the device"
                )
            if not self.transport.is_pinned(views[1].ctypes.data):
                raise ValueError(
                    f"layer {layer}: the host's memory is not pinned; kvblocks.gpu.pinned_pool makes a pool that is"
                )
            self._arrays.append((views[0].ctypes.data, views[1].ctypes.data, sizes[0]))

    def stream_of(self, stream: object) -> int:
        """The address of a stream; None is the library's current one."""
        return self._library.current_stream(self._device) if stream is None else stream_address(stream)

    def swap_out(self, blocks: NDArray[np.int32], *, stream: object = None) -> Transfer:
        """Copy blocks from the device to the host; blocks: host int32 [n, 2] of (device's, host's).

        stream: behind which the copies begin; they do not hold it up. Blocks that are neighbours on both sides go in
        one copy. Raises ValueError for a block outside of its pool and for a destination that is named twice.
        O(n * layers).
        """
        return self._swap(blocks, stream, to_host=True)

    def swap_in(self, blocks: NDArray[np.int32], *, stream: object = None) -> Transfer:
        """Copy blocks from the host to the device; blocks: host int32 [n, 2] of (device's, host's). See `swap_out`."""
        return self._swap(blocks, stream, to_host=False)

    def _swap(self, blocks: NDArray[np.int32], stream: object, *, to_host: bool) -> Transfer:
        expect_dtype("blocks", blocks, np.int32)
        expect_shape("blocks", blocks, (("num_blocks", None), ("device, host", 2)))
        for side, column, num_blocks in zip(_SIDES, blocks.T, self.num_blocks, strict=True):
            bad = (column < 0) | (column >= num_blocks)
            if bad.any():
                row = int(bad.argmax())
                raise ValueError(
                    f"blocks: row {row} is block {column[row]} of the {side}, whose pool has {num_blocks}"
                )
        written, first = np.unique(blocks[:, 1 if to_host else 0], return_index=True)
        if len(written) < len(blocks):
            twice = int(np.setdiff1d(np.arange(len(blocks)), first)[0])
            raise ValueError(f"blocks: the destination of row {twice} is that of an earlier row too")
        transport, own = self.transport, self._stream
        transport.wait(own, transport.record(self.stream_of(stream)))
        ordered = blocks[np.argsort(blocks[:, 0], kind="stable")].astype(np.int64)
        breaks = np.flatnonzero((np.diff(ordered, axis=0) != 1).any(axis=1)) + 1
        starts = np.concatenate([[0], breaks]) if len(ordered) else np.zeros(0, np.int64)
        counts = np.diff(np.append(starts, len(ordered)))
        runs = [
            (*ordered[start].tolist(), count) for start, count in zip(starts, counts.tolist(), strict=True)
        ]
        for on_device, on_host, num_bytes in self._arrays:
            for device_block, host_block, count in runs:
                here, there = on_device + device_block * num_bytes, on_host + host_block * num_bytes
                to, source = (there, here) if to_host else (here, there)
                transport.copy(to, source, count * num_bytes, own)
        return Transfer(self, transport.record(own))


def pinned_pool(
    config: CacheConfig, num_blocks: int, *, device: int = 0, transport: Transport | None = None
) -> list[LayerCache]:
    """One cache a layer in pinned host memory, of undefined contents, for `Swapper`; the caches own it."""
    transport = transport or CupyTransport(device)

    def pinned(array: NDArray[Any] | None) -> NDArray[Any] | None:
        return None if array is None else transport.pinned(array.shape, array.dtype)

    # The untouched storage of a host backend says which arrays there are; its pages are never made.
    return [
        LayerCache(
            format=cache.format,
            block_size=cache.block_size,
            layout=cache.layout,
            **{name: pinned(array) for name, array in cache.named_arrays},
        )
        for cache in NumpyBackend().allocate(config, num_blocks)
    ]
