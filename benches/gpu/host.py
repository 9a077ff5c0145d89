"""What a repeated call costs the host before the driver is asked, without a device.

    python -m benches.gpu.host          # in an environment with torch

torch's tensors lie on the host and stand for a device's. All of a call is real but for the driver: its launch, and the
questions which device and which stream are current, are functions of Python that do nothing. Beside each figure: how
many times an operation of torch that does next to nothing. What the driver adds is measured on a card.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Final

import torch

from kvblocks import gpu
from kvblocks.backends.cupy import CupyLauncher
from kvblocks.backends.foreign import DeviceArray
from kvblocks.gpu import libraries
from kvblocks.gpu.libraries import TorchLibrary, TorchMemory
from kvblocks.kernels.launcher import Launcher

from .cases import BLOCK_SIZE, HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS

_STREAM: Final = 0x5EED
_DEVICE: Final = -1  # what get_device() says of a tensor on the host
_SHARED_BYTES: Final = 227 * 1024
_NUM_SEQS, _NUM_BLOCKS = 4, 128


def _nothing(*_: object) -> int:
    return 0


def _cupy() -> SimpleNamespace:
    """The parts of `cupy` that a launcher asks, of a device on which nothing runs."""
    module = SimpleNamespace(load=_nothing, get_function=lambda entry: SimpleNamespace(ptr=1))
    runtime = SimpleNamespace(
        cudaDevAttrMaxSharedMemoryPerBlockOptin=97,
        deviceGetAttribute=lambda attribute, device: _SHARED_BYTES,
        getDevice=lambda: _DEVICE,
        free=_nothing,
        streamIsCapturing=_nothing,
    )
    driver = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=9,
        launchKernel=_nothing,
        funcSetAttribute=_nothing,
    )
    cuda = SimpleNamespace(
        runtime=runtime,
        driver=driver,
        Module=lambda: module,
        Device=lambda device: SimpleNamespace(compute_capability="90"),
        get_current_stream=lambda device: SimpleNamespace(ptr=_STREAM),
    )
    return SimpleNamespace(cuda=cuda)


class _HostMemory(TorchMemory):
    def describe(self, name: str, array: Any) -> Any:
        return _described(array)

    def device(self) -> int:
        return _DEVICE

    def stream(self) -> int:
        return _STREAM

    def download(self, array: Any) -> Any:
        return array.numpy()


class _HostTensors(TorchLibrary):
    """torch's tensors on the host, as if they were on a device."""

    def __init__(self) -> None:
        super().__init__()
        cubins: Any = SimpleNamespace(get=lambda instance, arch: b"", num_compiled=0)
        self._launcher = CupyLauncher(_DEVICE, cubins=cubins, cupy=_cupy())
        self._raw_stream = lambda device: _STREAM

    def describe(self, name: str, array: Any, device: int) -> Any:
        return _described(array)

    def device_of(self, name: str, array: Any) -> int:
        return _DEVICE

    def planning_on(self, stream: int, device: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def is_capturing(self, stream: int, device: int) -> bool:
        return self._launcher.is_capturing(stream)

    def launcher(self, device: int) -> Launcher:
        return self._launcher

    def memory(self, device: int) -> TorchMemory:
        return _HostMemory(torch.device("cpu"), 132, _SHARED_BYTES, self._launcher.is_capturing)


def _described(array: Any) -> Any:
    if isinstance(array, DeviceArray):
        return array.described()
    return (array.view(torch.uint16) if array.dtype == torch.bfloat16 else array).numpy()


def _pool(shape: Sequence[int]) -> DeviceArray:
    owner = torch.zeros(tuple(shape), dtype=torch.bfloat16)
    seen = _described(owner)
    return DeviceArray(owner, owner.data_ptr(), seen.shape, seen.strides, seen.dtype, _DEVICE)


def _calls() -> dict[str, Callable[[], object]]:
    """What is measured: a decode whose keys are split, so that each attention is two launches."""
    shape = _NUM_SEQS * _NUM_BLOCKS + 1, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM
    cache = gpu.layer_cache(_pool(shape), _pool(shape), "bfloat16")
    q = torch.zeros(_NUM_SEQS, NUM_Q_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    tables = torch.zeros(_NUM_SEQS, _NUM_BLOCKS, dtype=torch.int32)
    lens = torch.zeros(_NUM_SEQS, dtype=torch.int32)
    starts = torch.arange(_NUM_SEQS + 1, dtype=torch.int32)
    new = torch.zeros(_NUM_SEQS, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    slots = torch.zeros(_NUM_SEQS, dtype=torch.int64)
    one = torch.zeros(1)
    return {
        "torch.add of one element, out=": lambda: torch.add(one, one, out=one),
        "paged_attention, out=": lambda: gpu.paged_attention(cache, q, tables, lens, starts, out=out),
        "paged_attention": lambda: gpu.paged_attention(cache, q, tables, lens, starts),
        "write_kv": lambda: gpu.write_kv(cache, new, new, slots),
    }


def measure(rounds: int = 41, repeats: int = 200) -> dict[str, float]:
    """Median microseconds of each call; the calls take turns, so that what slows one slows all."""
    libraries._LIBRARIES[torch.Tensor] = _HostTensors()  # noqa: SLF001  as a test would
    calls = _calls()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            times[name].append((time.perf_counter() - start) / repeats * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """Print the figures, each beside the first."""
    costs = measure()
    first = next(iter(costs.values()))
    for name, cost in costs.items():
        print(f"{name:<34}{cost:7.2f} us{cost / first:7.2f} x")


if __name__ == "__main__":
    main()
