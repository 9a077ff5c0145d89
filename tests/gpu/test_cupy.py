"""The CuPy launcher and its memory against a stand-in for the driver: what reaches it, on which stream and device."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpu.fake import NULL_STREAM, SOME_STREAM, FakeCupy, fake_cubins
from kernels.emulator import emulated_backend
from kvblocks.backends import cupy as module
from kvblocks.backends import get_backend
from kvblocks.backends.cupy import CaptureError, CupyLauncher, CupyMemory, instances_for
from kvblocks.backends.device import DeviceBackend
from kvblocks.backends.foreign import look_at, stream_address
from kvblocks.config import CacheConfig
from kvblocks.kernels import specs
from kvblocks.kernels.launcher import Launch

WRITE = specs.write_kv("float32")
MMA = specs.attention_mma("bfloat16", 128, 128, 1)


@pytest.fixture
def cupy() -> FakeCupy:
    return FakeCupy()


@pytest.fixture
def launcher(cupy: FakeCupy, tmp_path: Path) -> CupyLauncher:
    return CupyLauncher(cubins=fake_cubins(tmp_path), cupy=cupy)


@pytest.fixture
def backend(cupy: FakeCupy, launcher: CupyLauncher) -> DeviceBackend:
    return DeviceBackend("fake", launcher, CupyMemory(launcher, cupy=cupy))


class TestLauncher:
    def test_an_instance_is_loaded_once_a_device(self, cupy: FakeCupy, tmp_path: Path) -> None:
        cubins = fake_cubins(tmp_path)
        first, second = (CupyLauncher(device, cubins=cubins, cupy=cupy) for device in (0, 1))
        assert first.load(WRITE) is first.load(WRITE)
        assert cupy.num_modules == 1
        assert second.load(WRITE) is not first.load(WRITE)
        assert cupy.num_modules == 2
        assert cubins.num_compiled == 1

    def test_nothing_happens_before_the_first_load(self, cupy: FakeCupy, tmp_path: Path) -> None:
        cubins = fake_cubins(tmp_path)
        CupyLauncher(cubins=cubins, cupy=cupy)
        assert (cubins.num_compiled, cupy.num_modules, cupy.attributes) == (0, 0, [])

    def test_shared_memory_is_asked_for_as_a_kernel_is_loaded(
        self, cupy: FakeCupy, launcher: CupyLauncher
    ) -> None:
        launcher.load(WRITE)
        assert cupy.attributes == []
        function = launcher.load(MMA)
        assert cupy.attributes == [(function.ptr, 8, 227 * 1024), (function.ptr, 9, 100)]

    def test_a_launch_goes_to_the_device_of_its_launcher(self, cupy: FakeCupy, tmp_path: Path) -> None:
        cupy.is_run = False
        launcher = CupyLauncher(1, cubins=fake_cubins(tmp_path), cupy=cupy)
        params = np.zeros((), WRITE.kernel.params)
        launcher.launch(launcher.load(WRITE), (3, 2, 1), 256, 64, params, SOME_STREAM)
        (launch,) = cupy.launches
        assert (launch.device, launch.grid, launch.threads) == (1, (3, 2, 1), 256)
        assert (launch.shared_bytes, launch.stream) == (64, SOME_STREAM)
        assert cupy.current_device == 0

    def test_a_bound_launch_takes_what_the_record_holds_then(
        self, cupy: FakeCupy, launcher: CupyLauncher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []
        monkeypatch.setattr(
            cupy._emulator, "launch", lambda *arguments: seen.append(int(arguments[4]["num_slots"]))
        )
        params = np.zeros((), WRITE.kernel.params)
        fire = launcher.bind([Launch(launcher.load(WRITE), (1, 1, 1), 256, 0, params)])
        for number in (5, 7):
            params["num_slots"] = number
            fire(SOME_STREAM)
        assert seen == [5, 7]

    def test_a_capture_loads_nothing(self, cupy: FakeCupy, launcher: CupyLauncher) -> None:
        cupy.current_stream, cupy.capturing = SOME_STREAM, {SOME_STREAM}
        with pytest.raises(
            CaptureError, match="kernel write_kv-F32 is not loaded on device 0: call kvblocks"
        ):
            launcher.load(WRITE)
        assert launcher.cubins.num_compiled == 0
        cupy.capturing = set()
        function = launcher.load(WRITE)
        cupy.capturing = {SOME_STREAM}
        assert launcher.load(WRITE) is function

    def test_warmup_loads_what_a_cache_may_launch(self, cupy: FakeCupy, launcher: CupyLauncher) -> None:
        config = CacheConfig(1, 8, 128, kv_format="fp8_e4m3", dtype="bfloat16")
        wanted = instances_for(config)
        assert launcher.warmup(wanted) == len(wanted)
        assert launcher.warmup(wanted) == 0
        names = {instance.name for instance in wanted}
        assert {"write_kv-E4M3", "paged_attention_mma-E4M3-128-128-1", "copy_blocks"} <= names
        assert not any("BF16" in name or "-64-" in name for name in names)
        assert len(names) <= 14

    def test_attributes(self, launcher: CupyLauncher) -> None:
        found = launcher.attributes(launcher.load(WRITE))
        assert (found.registers, found.local_bytes) == (40, 0)


class TestMemory:
    def test_an_array_of_another_device_is_refused_by_name(
        self, cupy: FakeCupy, launcher: CupyLauncher
    ) -> None:
        memory = CupyMemory(launcher, cupy=cupy)
        other = SimpleNamespace(
            __cuda_array_interface__={
                "data": (4096, False),
                "shape": (2,),
                "strides": None,
                "typestr": "<f4",
            },
            device=SimpleNamespace(id=1),
        )
        with pytest.raises(ValueError, match=r"^k: on device 1, the call runs on device 0$"):
            memory.describe("k", other)

    def test_host_arrays_and_strangers_are_refused_by_name(
        self, cupy: FakeCupy, launcher: CupyLauncher
    ) -> None:
        memory = CupyMemory(launcher, cupy=cupy)
        with pytest.raises(TypeError, match=r"^k: ndarray, expected a torch tensor on a GPU, a CuPy array"):
            memory.describe("k", np.zeros(3, np.float32))
        with pytest.raises(TypeError, match=r"^q: list, expected"):
            memory.describe("q", [1, 2])
        interface = np.zeros(3, np.uint8).__array_interface__
        with pytest.raises(TypeError, match=r"^q: dtype float7, expected one of float32"):
            memory.describe("q", SimpleNamespace(__cuda_array_interface__=interface, dtype="float7"))

    def test_an_array_without_elements_may_have_no_address(self) -> None:
        empty = SimpleNamespace(
            __cuda_array_interface__={"data": (0, False), "shape": (0, 2), "strides": None, "typestr": "<i4"}
        )
        seen = look_at("copies", empty).described()
        assert seen.shape == (0, 2)
        assert seen.strides == (8, 4)

    @pytest.mark.parametrize("call", ["empty", "zeros", "upload", "download", "plain"])
    def test_a_capture_allocates_and_waits_for_nothing(
        self, cupy: FakeCupy, launcher: CupyLauncher, call: str
    ) -> None:
        memory = CupyMemory(launcher, cupy=cupy)
        arguments: tuple[Any, ...] = ((2,), np.float32) if call in ("empty", "zeros") else (np.zeros(2),)
        cupy.current_stream, cupy.capturing = SOME_STREAM, {SOME_STREAM}
        with pytest.raises(CaptureError, match="inside a capture"):
            getattr(memory, call)(*arguments)


@pytest.mark.cuda
class TestBackend:
    """The path to the driver as a whole: the emulator reads what the driver would be given."""

    def step(self, make: Any) -> tuple[Any, ...]:
        rng = np.random.default_rng(0)
        k, v = rng.standard_normal((2, 9, 2, 16)).astype(np.float32)
        q = rng.standard_normal((9, 4, 16)).astype(np.float32)
        slots = np.arange(8, 17)
        table, lens, starts = (
            np.array([[2, 3, 4]], np.int32),
            np.array([9], np.int32),
            np.array([0, 9], np.int32),
        )
        return tuple(map(make, (k, v, slots, q, table, lens, starts)))

    def test_a_step_agrees_with_the_same_kernels_without_cupy(
        self, cupy: FakeCupy, backend: DeviceBackend
    ) -> None:
        outs = []
        for each, make in ((backend, cupy.asarray), (emulated_backend(), np.asarray)):
            (cache,) = each.allocate(CacheConfig(1, 2, 16, block_size=4), 6)
            k, v, slots, q, *index = self.step(make)
            each.write(cache, k, v, slots)
            outs.append(np.array(each.attend(cache, q, *index)))
        np.testing.assert_array_equal(outs[0], outs[1])

    def test_every_launch_goes_to_the_current_stream(self, cupy: FakeCupy, backend: DeviceBackend) -> None:
        (cache,) = backend.allocate(CacheConfig(1, 2, 16, block_size=4), 6)
        cupy.current_stream = SOME_STREAM
        k, v, slots, q, *index = self.step(cupy.asarray)
        backend.write(cache, k, v, slots)
        backend.attend(cache, q, *index)
        backend.copy_blocks([cache], cupy.asarray(np.array([[2, 5]], np.int32)))
        backend.gather(cache, index[0][0], 5)
        backend.quantize(k, "int8", "amax")
        assert len(cupy.launches) >= 5
        assert {launch.stream for launch in cupy.launches} == {SOME_STREAM}
        assert NULL_STREAM not in {launch.stream for launch in cupy.launches}

    def test_what_was_run_before_can_be_captured(self, cupy: FakeCupy, backend: DeviceBackend) -> None:
        (cache,) = backend.allocate(CacheConfig(1, 2, 16, block_size=4), 6)
        k, v, slots, q, *index = self.step(cupy.asarray)
        out = cupy.empty(q.shape, q.dtype)
        copies = cupy.asarray(np.array([[2, 5]], np.int32))

        def step() -> None:
            backend.write(cache, k, v, slots)
            backend.attend(cache, q, *index, out=out)
            backend.copy_blocks([cache], copies)

        step()
        num_launches = len(cupy.launches)
        cupy.current_stream, cupy.capturing = SOME_STREAM, {SOME_STREAM}
        step()
        assert len(cupy.launches) == 2 * num_launches

    def test_a_table_is_there_before_another_stream_meets_it(
        self, cupy: FakeCupy, backend: DeviceBackend
    ) -> None:
        (cache,) = backend.allocate(CacheConfig(1, 2, 16, block_size=4), 6)
        cupy.current_stream = SOME_STREAM
        for copies in ([[2, 5]], [[1, 4]]):
            backend.copy_blocks([cache], cupy.asarray(np.array(copies, np.int32)))
        assert cupy.synchronised == [SOME_STREAM] * 2  # the report of errors, and the table

    def test_wrong_values_are_read_on_request(self, cupy: FakeCupy, backend: DeviceBackend) -> None:
        (cache,) = backend.allocate(CacheConfig(1, 2, 16, block_size=4), 6)
        k, v, slots, *_ = self.step(cupy.asarray)
        slots[3] = 24
        backend.write(cache, k, v, slots)
        assert (
            backend.first_error()
            == "a slot of slot_mapping that the cache does not have: row 3, column 0, value 24"
        )
        assert backend.first_error() is None


class TestStreamAddress:
    def test_what_says_where_it_is(self) -> None:
        assert stream_address(77) == 77
        assert stream_address(SimpleNamespace(ptr=78)) == 78
        assert stream_address(SimpleNamespace(cuda_stream=79)) == 79
        assert stream_address(SimpleNamespace(__cuda_stream__=lambda: (0, 80), ptr=1)) == 80
        assert stream_address(SimpleNamespace(__cuda_stream__=(0, 81))) == 81

    @pytest.mark.parametrize("stream", ["0", None, True, object()])
    def test_what_does_not(self, stream: object) -> None:
        with pytest.raises(TypeError, match=r"^stream: .*expected None, an address, or an object with"):
            stream_address(stream)


class TestWithoutDevice:
    def test_no_cupy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cupy", None)
        with pytest.raises(RuntimeError, match=r"needs CuPy \(.*\): pip install 'kvblocks\[cupy\]'$"):
            get_backend("cupy")

    def test_no_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class CUDARuntimeError(RuntimeError):
            pass

        def fail() -> int:
            raise CUDARuntimeError("cudaErrorInsufficientDriver: no driver")

        fake = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDevice=fail)))
        monkeypatch.setitem(sys.modules, "cupy", fake)
        with pytest.raises(RuntimeError, match="needs a GPU and its driver: cudaErrorInsufficientDriver"):
            module.launcher_of()

    @pytest.mark.cuda
    def test_the_real_cupy_on_this_machine(self) -> None:
        cupy = pytest.importorskip("cupy")
        if cupy.cuda.is_available():
            assert get_backend("cupy").name == "cupy"
        else:
            with pytest.raises(RuntimeError, match="needs a GPU and its driver"):
                get_backend("cupy")

    @pytest.mark.cuda
    def test_the_real_cupy_has_what_the_launcher_uses(self) -> None:
        """The stand-in answers to these names; so must the real one, which imports without a device."""
        cupy = pytest.importorskip("cupy")
        fake = FakeCupy()
        for part in ("runtime", "driver"):
            names = vars(getattr(fake.cuda, part))
            assert len(names) >= 6
            for name in names:
                assert hasattr(getattr(cupy.cuda, part), name), f"{part}.{name}"
        for name in ("Module", "Device", "get_current_stream"):
            assert hasattr(cupy.cuda, name)
        assert cupy.cuda.driver.launchKernel.__doc__.startswith(
            "launchKernel(intptr_t f, unsigned int grid_dim_x, unsigned int grid_dim_y, unsigned int grid_dim_z, "
            "unsigned int block_dim_x, unsigned int block_dim_y, unsigned int block_dim_z, "
            "unsigned int shared_mem_bytes, intptr_t stream, intptr_t kernel_params, intptr_t extra)"
        )
        assert (
            cupy.cuda.driver.funcSetAttribute.__doc__
            == "funcSetAttribute(intptr_t f, int attribute, int value)"
        )
        assert (
            cupy.cuda.driver.funcGetAttribute.__doc__ == "funcGetAttribute(int attribute, intptr_t f) -> int"
        )
