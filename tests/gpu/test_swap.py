"""Blocks that leave for the host and come back: contents, order of streams, refusals."""

from typing import Any

import numpy as np
import pytest

from gpu.host import HostLibrary, Queue
from kvblocks.backends import get_backend
from kvblocks.config import CacheConfig
from kvblocks.gpu.swap import Swapper, pinned_pool

pytestmark = pytest.mark.cuda

FORMATS = ["float16", "int8", "fp8_e4m3:head", "int8:channel,int8"]


def config(kv_format: str = "int8", **changes: Any) -> CacheConfig:
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "block_size": 4} | changes
    return CacheConfig(kv_format=kv_format, dtype="float16", **sizes)


def device_pool(settings: CacheConfig, num_blocks: int) -> Any:
    pool = get_backend("numpy").allocate(settings, num_blocks)
    rng = np.random.default_rng(0)
    for cache in pool:
        for _, array in cache.named_arrays:
            array.view(np.uint8)[...] = rng.integers(0, 256, array.view(np.uint8).shape, np.uint8)
    return pool


def make(kv_format: str = "int8") -> tuple[Queue, Any, Any, Swapper]:
    queue, settings = Queue(), config(kv_format)
    ours, theirs = device_pool(settings, 9), pinned_pool(settings, 5, transport=queue)
    return queue, ours, theirs, Swapper(ours, theirs, transport=queue, using=HostLibrary())


def pairs(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, np.int32).reshape(-1, 2)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_blocks_come_back_as_they_went(kv_format: str) -> None:
    queue, ours, _, swapper = make(kv_format)
    before = [[array.copy() for array in cache.block_arrays] for cache in ours]
    swapper.swap_out(pairs((7, 0), (2, 4), (3, 2))).synchronize()
    for cache in ours:
        for array in cache.block_arrays:
            array[[2, 3, 7]] = 0
    swapper.swap_in(pairs((5, 0), (2, 4), (8, 2))).synchronize()
    for cache, arrays in zip(ours, before, strict=True):
        for array, old in zip(cache.block_arrays, arrays, strict=True):
            np.testing.assert_array_equal(array[[5, 2, 8]].view(np.uint8), old[[7, 2, 3]].view(np.uint8))
            np.testing.assert_array_equal(
                array[[0, 1, 4, 6]].view(np.uint8), old[[0, 1, 4, 6]].view(np.uint8)
            )
    assert queue.num_waits == 2


def test_copies_begin_behind_the_callers_stream_and_hold_up_who_waits_only() -> None:
    queue, _, _, swapper = make("float16")
    transfer = swapper.swap_out(pairs((1, 1)), stream=0xBEEF)
    own = swapper._stream
    assert queue.order == [("record", 0xBEEF), ("wait", own), *[("copy", own)] * 4, ("record", own)]
    assert own != 0
    assert not transfer.is_done
    transfer.wait(0xCAFE)
    assert queue.order[-1] == ("wait", 0xCAFE)
    assert not transfer.is_done
    transfer.wait()
    assert queue.order[-1] == ("wait", 0x5EED)
    transfer.synchronize()
    assert transfer.is_done


def test_neighbours_go_in_one_copy() -> None:
    queue, ours, theirs, swapper = make("float16")
    swapper.swap_out(pairs((3, 1), (2, 0), (4, 2), (6, 3), (7, 4)))
    assert sum(kind == "copy" for kind, _ in queue.order) == 2 * 4
    queue.run()
    np.testing.assert_array_equal(theirs[1].k[:3].view(np.uint8), ours[1].k[2:5].view(np.uint8))
    np.testing.assert_array_equal(theirs[1].v[3:].view(np.uint8), ours[1].v[6:8].view(np.uint8))


def test_nothing_to_swap() -> None:
    queue, _, _, swapper = make()
    assert swapper.swap_in(pairs()).is_done
    assert not queue.work


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pairs((1, 0), (9, 1)), "row 1 is block 9 of the device, whose pool has 9"),
        (pairs((1, 5)), "row 0 is block 5 of the host, whose pool has 5"),
        (pairs((-1, 0)), "row 0 is block -1 of the device"),
        (pairs((1, 2), (3, 2)), "the destination of row 1 is that of an earlier row too"),
    ],
)
def test_wrong_blocks_are_refused_before_anything_moves(rows: np.ndarray, message: str) -> None:
    queue, _, _, swapper = make()
    with pytest.raises(ValueError, match=f"^blocks: {message}"):
        swapper.swap_out(rows)
    assert queue.order == []
    with pytest.raises(TypeError, match="blocks: dtype int64, expected int32"):
        swapper.swap_out(rows.astype(np.int64))


def test_a_source_may_be_named_twice() -> None:
    _, _, theirs, swapper = make()
    swapper.swap_out(pairs((3, 1), (3, 4))).synchronize()
    np.testing.assert_array_equal(theirs[0].k[1], theirs[0].k[4])


def test_pools_that_do_not_fit_are_refused() -> None:
    queue = Queue()
    ours = device_pool(config(), 3)

    def swapper(theirs: Any) -> Swapper:
        return Swapper(ours, theirs, transport=queue, using=HostLibrary())

    with pytest.raises(ValueError, match="host_pool: 1 layers, device_pool has 2"):
        swapper(pinned_pool(config(num_layers=1), 3, transport=queue))
    with pytest.raises(
        ValueError, match="layer 0: float16 blocks of 4 in NHD on the host, int8 of 4 in NHD on"
    ):
        swapper(pinned_pool(config("float16"), 3, transport=queue))
    with pytest.raises(
        ValueError, match=r"layer 0: blocks of shape \(4, 2, 8\) on the host, \(4, 2, 16\) on the"
    ):
        swapper(pinned_pool(config(head_dim=8), 3, transport=queue))
    queue.is_pinned = lambda address: False  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=r"layer 0: the host's memory is not pinned; kvblocks.gpu.pinned_pool"
    ):
        swapper(pinned_pool(config(), 3, transport=queue))
