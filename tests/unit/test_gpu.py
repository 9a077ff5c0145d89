"""The CuPy launcher without a device: what it hands to the driver, when it loads, and what it says when it cannot."""

import ctypes
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvblocks import gpu
from kvblocks.backends import cupy as cupy_backend
from kvblocks.backends.cupy import CupyBackend, stream_address
from kvblocks.config import CacheConfig
from kvblocks.kernels import nvrtc, params, specs


class FakeArray:
    """As much of a CuPy array as the backend looks at, over host memory."""

    def __init__(self, array: np.ndarray, device: int) -> None:
        self.host = array
        self.data = SimpleNamespace(ptr=array.ctypes.data)
        self.device = SimpleNamespace(id=device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)

    def __len__(self) -> int:
        return len(self.host)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.host[index] = value

    def transpose(self, axes: tuple[int, ...]) -> "FakeArray":
        return FakeArray(self.host.transpose(axes), self.device.id)


class FakeCupy:
    """A device that records launches, and runs none."""

    ndarray = FakeArray

    def __init__(self) -> None:
        self.device, self.streams, self.capturing = 0, [7], False
        self.loaded: list[tuple[int, bytes]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.attributes: list[tuple[int, int, int]] = []
        runtime = SimpleNamespace(
            getDevice=lambda: self.device,
            streamIsCapturing=lambda stream: self.capturing,
            deviceGetAttribute=lambda attribute, device: {1: 132, 2: 232448}[attribute],
            cudaDevAttrMultiProcessorCount=1,
            cudaDevAttrMaxSharedMemoryPerBlockOptin=2,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime,
            Device=self._device,
            ExternalStream=self._stream,
            get_current_stream=lambda: SimpleNamespace(ptr=self.streams[-1]),
            function=SimpleNamespace(Module=lambda: _Module(self)),
        )

    @contextmanager
    def _on_device(self, number: int) -> Iterator[None]:
        before, self.device = self.device, number
        yield
        self.device = before

    def _device(self, number: int) -> Any:
        context = self._on_device(number)
        return SimpleNamespaceContext(context, compute_capability="90")

    @contextmanager
    def _stream(self, address: int) -> Iterator[None]:
        self.streams.append(address)
        yield
        self.streams.pop()

    def array(self, array: np.ndarray) -> FakeArray:
        return FakeArray(array, self.device)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> FakeArray:
        return self.array(np.empty(shape, dtype))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> FakeArray:
        return self.array(np.zeros(shape, dtype))

    def asarray(self, array: np.ndarray) -> FakeArray:
        return self.array(array)

    # The driver's interface.
    def launchKernel(self, function: int, *numbers: int) -> None:  # noqa: N802
        address = ctypes.c_uint64.from_address(numbers[8]).value
        self.launches.append((function, numbers[:3], numbers[3], numbers[6], numbers[7], address))

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:  # noqa: N802
        self.attributes.append((function, attribute, value))

    def funcGetAttribute(self, attribute: int, function: int) -> int:  # noqa: N802
        return {4: 168, 3: 0}[attribute]


class SimpleNamespaceContext:
    """A device: a context, and its compute capability."""

    def __init__(self, context: Any, compute_capability: str) -> None:
        self.context, self.compute_capability = context, compute_capability

    def __enter__(self) -> None:
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)


class _Module:
    def __init__(self, fake: FakeCupy) -> None:
        self.fake = fake

    def load(self, cubin: bytes) -> None:
        self.fake.loaded.append((self.fake.device, cubin))

    def get_function(self, entry: str) -> Any:
        return SimpleNamespace(ptr=1000 + len(self.fake.loaded))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    monkeypatch.setattr(cupy_backend, "load_cubin", lambda instance, arch: f"{instance.name} {arch}".encode())
    return FakeCupy()


@pytest.fixture
def backend(fake: FakeCupy) -> CupyBackend:
    return CupyBackend(cupy=fake, driver=fake)


def test_a_record_reaches_the_driver_as_it_is(fake: FakeCupy, backend: CupyBackend) -> None:
    record = np.zeros((), params.MERGE)
    record["num_rows"], record["dtype"] = 2**40, 3
    function = backend.launcher.load(specs.INSTANCES[0])
    backend.launcher.launch(function, (3, 2, 1), 128, 64, record, 99)
    ((pointer, grid, threads, shared, stream, address),) = fake.launches
    assert (pointer, grid, threads, shared, stream) == (function.pointer, (3, 2, 1), 128, 64, 99)
    assert address == record.ctypes.data
    attributes = backend.launcher.attributes(function)
    assert (attributes.registers, attributes.local_bytes) == (168, 0)


def test_shared_memory_beyond_48_kib_is_asked_for_once(fake: FakeCupy, backend: CupyBackend) -> None:
    record = np.zeros((), params.ATTEND)
    function = backend.launcher.load(specs.INSTANCES[0])
    for shared in (1024, 49_152, 60_000, 60_000, 50_000, 70_000):
        backend.launcher.launch(function, (1, 1, 1), 128, shared, record, 0)
    assert [value for _, _, value in fake.attributes] == [60_000, 70_000]


def write(backend: CupyBackend, fake: FakeCupy) -> None:
    (cache,) = backend.allocate(CacheConfig(1, 2, 64, dtype="float16"), 3)
    k = fake.array(np.ones((4, 2, 64), np.float16))
    backend.write(cache, k, k, fake.array(np.arange(4)))


def test_a_module_is_loaded_once_a_device_and_instance(fake: FakeCupy, backend: CupyBackend) -> None:
    for fake.device in (0, 0, 1, 1, 0):
        write(backend, fake)
    assert fake.loaded == [(device, b"write_kv-F16 sm_90") for device in (0, 1)]
    assert len(fake.launches) == 5
    backend.warmup()
    assert len(fake.loaded) == 1 + len(specs.INSTANCES)


def test_launches_go_to_the_stream_that_was_named(fake: FakeCupy, backend: CupyBackend) -> None:
    write(backend, fake)
    with backend.on(SimpleNamespace(cuda_stream=31)):
        write(backend, fake)
        with backend.on(55):
            write(backend, fake)
    write(backend, fake)
    assert [stream for *_, stream, _ in fake.launches] == [7, 31, 55, 7]


def test_the_device_of_the_arrays_is_made_current(fake: FakeCupy, backend: CupyBackend) -> None:
    fake.device = 1
    (cache,) = backend.allocate(CacheConfig(1, 2, 64, dtype="float16"), 3)
    k = fake.array(np.ones((4, 2, 64), np.float16))
    slots = fake.array(np.arange(4))
    fake.device = 0
    backend.write(cache, k, k, slots)
    assert fake.loaded == [(1, b"write_kv-F16 sm_90")]
    assert fake.device == 0
    with pytest.raises(
        ValueError, match="arrays are on devices 1 and 0: expected all of a call on one device"
    ):
        backend.write(cache, k, fake.array(k.host), slots)
    assert len(fake.launches) == 1


def test_nothing_is_loaded_in_a_capture(fake: FakeCupy, backend: CupyBackend) -> None:
    fake.capturing = True
    with pytest.raises(
        RuntimeError, match=r"write_kv-F16 is not loaded on device 0, and the stream is being captured"
    ):
        write(backend, fake)
    fake.capturing = False
    write(backend, fake)
    fake.capturing = True
    write(backend, fake)
    assert len(fake.loaded) == 1


def test_arrays_of_the_host_are_refused(fake: FakeCupy, backend: CupyBackend) -> None:
    (cache,) = backend.allocate(CacheConfig(1, 2, 64, dtype="float16"), 3)
    k = np.ones((4, 2, 64), np.float16)
    with pytest.raises(TypeError, match="k: ndarray, expected a CuPy array"):
        backend.write(cache, k, k, np.arange(4))
    with pytest.raises(ValueError, match=r"head_dim is 577: supported are 1\.\.576"):
        backend.allocate(CacheConfig(1, 2, 577), 3)
    with pytest.raises(ValueError, match="k_format is 'kivi2': supported are float32, "):
        backend.allocate(CacheConfig(1, 2, 64, block_size=32, kv_format="kivi2"), 3)


def test_what_counts_as_a_stream() -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 77)

    class Newer:
        __cuda_stream__ = (1, 77)

    assert stream_address(5) == 5
    assert stream_address(SimpleNamespace(ptr=6)) == 6
    assert stream_address(SimpleNamespace(cuda_stream=8)) == 8
    assert stream_address(Protocol()) == 77
    with pytest.raises(ValueError, match="version 1 of __cuda_stream__"):
        stream_address(Newer())
    for wrong in (None, "stream", True, 1.5):
        with pytest.raises(TypeError, match=r"stream: .*, expected an address or an object with"):
            stream_address(wrong)


class TestCheck:
    def test_says_how_to_install_what_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing() -> tuple[int, int]:
            raise nvrtc.NvrtcMissingError("NVRTC is not installed: pip install 'nvidia-cuda-nvrtc==13.0.*'")

        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(nvrtc, "version", missing)
        cupy, compiler = gpu.check()
        assert "pip install 'cupy-cuda13x[ctk]'" in cupy
        assert "pip install 'nvidia-cuda-nvrtc==13.0.*'" in compiler

    @pytest.mark.parametrize(
        ("count", "capability", "message"),
        [
            (0, "90", "sees no device: look at CUDA_VISIBLE_DEVICES"),
            (1, "75", "compute capability 75: the kernels need 80 or newer"),
            (1, "90", None),
        ],
    )
    def test_looks_at_the_device(self, count: int, capability: str, message: str | None) -> None:
        runtime = SimpleNamespace(getDeviceCount=lambda: count, CUDARuntimeError=RuntimeError)
        device = SimpleNamespace(compute_capability=capability)
        found = gpu._device_problems(
            SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=lambda: device))
        )
        assert (found == []) if message is None else (message in found[0])

    def test_names_a_missing_driver(self) -> None:
        def refuse() -> int:
            raise RuntimeError("cudaErrorInsufficientDriver")

        runtime = SimpleNamespace(getDeviceCount=refuse, CUDARuntimeError=RuntimeError)
        (found,) = gpu._device_problems(SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
        assert "no usable NVIDIA driver (cudaErrorInsufficientDriver)" in found


def test_a_backend_without_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(cupy_backend.importlib, "import_module", refuse)
    with pytest.raises(ImportError, match=r"the cupy backend needs CuPy: pip install 'cupy-cuda13x\[ctk\]'"):
        CupyBackend()
