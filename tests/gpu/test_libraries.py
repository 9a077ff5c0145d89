"""Direct calls with arrays of CuPy and of libraries that it can read: streams, captures, devices, owners."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest

from gpu.fake import NULL_STREAM, SOME_STREAM, FakeArray, FakeCupy, fake_cubins
from gpu.fake_torch import FakeTorch, Tensor
from kvblocks import gpu
from kvblocks.backends import cupy as backend_module
from kvblocks.backends.cupy import CupyLauncher
from kvblocks.backends.foreign import cupy_stream
from kvblocks.config import CacheConfig
from kvblocks.gpu import calls, dispatch, libraries

pytestmark = pytest.mark.cuda


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeCupy]:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(dispatch, "_DISPATCHERS", {})
    monkeypatch.setattr(libraries, "_LIBRARIES", {})
    for made in (libraries._cupy, libraries._torch):
        made.cache_clear()
    launchers = {index: CupyLauncher(index, cubins=fake_cubins(tmp_path), cupy=fake) for index in (0, 1)}
    for module in (libraries, backend_module, calls):
        monkeypatch.setattr(module, "launcher_of", lambda device=None: launchers[device or 0])
    yield fake
    for made in (libraries._cupy, libraries._torch):
        made.cache_clear()


@pytest.fixture
def torch(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch(cupy)
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setitem(sys.modules, "torch._C", fake._C)
    return fake


def arrays(cupy: FakeCupy) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 9, 2, 16)).astype(np.float32)
    q = rng.standard_normal((9, 4, 16)).astype(np.float32)
    table, lens, starts = np.array([[2, 3, 4]], np.int32), np.array([9], np.int32), np.array([0, 9], np.int32)
    return tuple(map(cupy.asarray, (k, v, np.arange(8, 17), q, table, lens, starts)))


def pool(cupy: FakeCupy) -> Any:
    return gpu.layer_cache(*(cupy.empty((6, 4, 2, 16), np.float32) for _ in "kv"), "float32")


def test_an_engines_own_pool(cupy: FakeCupy) -> None:
    """Nothing of it is copied, and nothing of it is freed."""
    k, v, slots, q, *index = arrays(cupy)
    k_pool, v_pool = (cupy.empty((6, 4, 2, 16), np.float32) for _ in "kv")
    cache = gpu.layer_cache(k_pool, v_pool, "float32")
    assert cache.block_size == 4
    gpu.write_kv(cache, k, v, slots)
    np.testing.assert_array_equal(np.asarray(k_pool).reshape(24, 2, 16)[8:17], k)
    out = gpu.paged_attention(cache, q, *index)
    assert isinstance(out, FakeArray)
    np.testing.assert_allclose(np.asarray(out)[0, 0], np.asarray(v)[0, 0], rtol=1e-6)
    owner = ref(k_pool)
    del k_pool
    gc.collect()
    assert owner() is not None
    del cache
    gc.collect()
    assert owner() is None


def test_calls_go_to_cupys_stream_or_to_the_named_one(cupy: FakeCupy) -> None:
    k, v, slots, *_ = arrays(cupy)
    cache = pool(cupy)
    cupy.current_stream = SOME_STREAM
    gpu.write_kv(cache, k, v, slots)
    gpu.write_kv(cache, k, v, slots, stream=SimpleNamespace(ptr=0xBEEF))
    gpu.write_kv(cache, k, v, slots, stream=SimpleNamespace(__cuda_stream__=lambda: (0, 0xCAFE)))
    assert [launch.stream for launch in cupy.launches] == [SOME_STREAM, 0xBEEF, 0xCAFE]
    assert NULL_STREAM not in [launch.stream for launch in cupy.launches]
    assert cupy.current_stream == SOME_STREAM


def test_a_capture_of_what_was_run_before(cupy: FakeCupy) -> None:
    k, v, slots, q, *index = arrays(cupy)
    cache, out = pool(cupy), cupy.empty(q.shape, q.dtype)
    cupy.current_stream, cupy.capturing = SOME_STREAM, {SOME_STREAM}
    with pytest.raises(gpu.CaptureError, match=r"inside a capture|is not loaded"):
        gpu.write_kv(cache, k, v, slots)
    cupy.capturing = set()
    gpu.write_kv(cache, k, v, slots)
    gpu.paged_attention(cache, q, *index, out=out)
    num_launches = len(cupy.launches)
    cupy.capturing = {SOME_STREAM}
    gpu.write_kv(cache, k, v, slots)
    gpu.paged_attention(cache, q, *index, out=out)
    assert len(cupy.launches) == 2 * num_launches
    with pytest.raises(gpu.CaptureError, match=r"an array of shape \(9, 4, 16\) would be allocated"):
        gpu.paged_attention(cache, q, *index)


def test_an_array_of_another_device_is_refused_by_name(cupy: FakeCupy) -> None:
    k, v, slots, *_ = arrays(cupy)
    other = SimpleNamespace(
        __cuda_array_interface__=v.__cuda_array_interface__, device=SimpleNamespace(id=1), dtype=v.dtype
    )
    with pytest.raises(ValueError, match=r"^v: on device 1, the call runs on device 0$"):
        gpu.write_kv(pool(cupy), k, other, slots)
    assert cupy.launches == []


def test_a_call_waits_for_the_stream_that_an_arrays_owner_names(cupy: FakeCupy) -> None:
    k, v, slots, *_ = arrays(cupy)
    made_elsewhere = SimpleNamespace(
        __cuda_array_interface__=k.__cuda_array_interface__ | {"stream": 0xF00}, dtype=k.dtype
    )
    cupy.current_stream = SOME_STREAM
    cache = pool(cupy)
    gpu.write_kv(cache, k, v, slots)
    assert cupy.waits == []
    gpu.write_kv(cache, made_elsewhere, v, slots)
    assert cupy.waits[:2] == [(0xF00, None), (SOME_STREAM, 0xE)]
    cupy.waits.clear()
    gpu.write_kv(cache, made_elsewhere, v, slots, stream=0xBEEF)
    assert cupy.waits == [
        (0xF00, None),
        (0xBEEF, 0xE),
    ]  # the stream that the work goes to is the one that waits


def test_an_array_is_taken_for_what_it_is(cupy: FakeCupy) -> None:
    """What no kernel may write, and bytes in another order, also where arrays of that shape were planned for."""
    k, v, slots, q, *index = arrays(cupy)

    def seen(array: np.ndarray, is_readonly: bool = False, device: int = 0) -> SimpleNamespace:
        array = np.asarray(array)
        interface = array.__array_interface__ | {"data": (array.ctypes.data, is_readonly)}
        return SimpleNamespace(
            __cuda_array_interface__=interface,
            dtype=array.dtype,
            device=SimpleNamespace(id=device),
            owner=array,
        )

    cache = pool(cupy)
    out, workspace = np.zeros_like(q), np.zeros(1 << 16, np.uint8)
    gpu.write_kv(cache, seen(k), v, slots)
    gpu.paged_attention(cache, q, *index, out=seen(out))
    num_launches = len(cupy.launches)
    with pytest.raises(TypeError, match=r"^k: dtype >f4"):
        gpu.write_kv(cache, seen(k.astype(">f4")), v, slots)
    with pytest.raises(ValueError, match=r"^out: the array is read-only"):
        gpu.paged_attention(cache, q, *index, out=seen(out, is_readonly=True))
    with pytest.raises(ValueError, match=r"^cache\.k: the array is read-only"):
        gpu.write_kv(gpu.layer_cache(seen(cache.k.owner, True), cache.v, "float32"), k, v, slots)
    wide = cupy.asarray(np.full((1, 32), 2, np.int32))
    with pytest.raises(ValueError, match=r"^workspace: on device 1, the call runs on device 0"):
        gpu.paged_attention(cache, q, wide, *index[1:], split_size=64, workspace=seen(workspace, device=1))
    assert len(cupy.launches) == num_launches


def test_host_arrays_are_refused(cupy: FakeCupy) -> None:
    k, v, slots, *_ = arrays(cupy)
    with pytest.raises(TypeError, match=r"^k: ndarray, expected a torch tensor on a GPU, a CuPy array"):
        gpu.write_kv(pool(cupy), np.asarray(k).view(np.ndarray), v, slots)
    with pytest.raises(TypeError, match=r"^k: ndarray, expected a torch tensor on a GPU"):
        gpu.layer_cache(np.zeros((6, 4, 2, 16)), v, "float32")


@pytest.mark.parametrize(("address", "expected"), [(0, "default of 1"), (0xBEEF, "external 48879 of 1")])
def test_the_null_stream_is_torchs_default_one(
    monkeypatch: pytest.MonkeyPatch, address: int, expected: str
) -> None:
    """An external stream of address 0 is one of torch's pool, on which nothing would be ordered with the call."""
    cuda = SimpleNamespace(
        ExternalStream=lambda stream, device: f"external {stream} of {device}",
        default_stream=lambda device: f"default of {device}",
        stream=lambda stream: stream,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, Tensor=Tensor))
    monkeypatch.setitem(sys.modules, "torch._C", SimpleNamespace())
    assert libraries.TorchLibrary().on(address, 1) == expected


class TestTensors:
    """The same with torch's tensors, whose allocator may be asked inside of a capture."""

    def step(self, num_blocks: int = 3) -> tuple[Any, ...]:
        """k, v, slots; q, tables, lens, starts; the pool. One sequence of 9 tokens in a table of num_blocks."""
        rng = np.random.default_rng(0)
        k, v = rng.standard_normal((2, 9, 2, 16)).astype(np.float32)
        q = rng.standard_normal((1, 4, 16)).astype(np.float32)
        table = np.zeros((1, num_blocks), np.int32)
        table[0, :3] = 2, 3, 4
        index = table, np.array([9], np.int32), np.array([0, 1], np.int32)
        return tuple(map(Tensor, (k, v, np.arange(8, 17), q, *index)))

    def pool(self) -> Any:
        pools = (np.zeros((6, 4, 2, 16), np.float32) for _ in "kv")
        return gpu.layer_cache(*map(Tensor, pools), "float32")

    def test_a_first_call_inside_a_capture_names_warmup(self, torch: FakeTorch, cupy: FakeCupy) -> None:
        k, v, slots, *_ = self.step()
        cache = self.pool()
        cupy.current_stream, cupy.capturing = SOME_STREAM, {SOME_STREAM}
        with pytest.raises(gpu.CaptureError, match=r"call kvblocks\.gpu\.warmup"):
            gpu.write_kv(cache, k, v, slots)
        cupy.current_stream, cupy.capturing = SOME_STREAM, {0xBEEF}
        with pytest.raises(gpu.CaptureError, match=r"call kvblocks\.gpu\.warmup"):
            gpu.write_kv(cache, k, v, slots, stream=0xBEEF)
        assert cupy.launches == []

    def test_after_warmup_the_first_call_can_be_captured(self, torch: FakeTorch, cupy: FakeCupy) -> None:
        k, v, slots, q, *index = self.step()
        cache = self.pool()
        gpu.warmup(CacheConfig(1, 2, 16))
        cupy.current_stream, cupy.capturing = SOME_STREAM, {SOME_STREAM}
        gpu.write_kv(cache, k, v, slots)
        out = gpu.paged_attention(cache, q, *index)
        assert isinstance(out, Tensor)
        assert len(cupy.launches) == 2
        with pytest.raises(gpu.CaptureError, match=r"call kvblocks\.gpu\.warmup, and run the call once"):
            gpu.copy_blocks([cache], Tensor(np.array([[2, 5]], np.int32)))

    def test_a_kernel_that_is_not_loaded(self, torch: FakeTorch, cupy: FakeCupy) -> None:
        k, v, slots, q, *index = self.step()
        cache = self.pool()
        gpu.write_kv(cache, k, v, slots)
        cupy.current_stream, cupy.capturing = SOME_STREAM, {SOME_STREAM}
        with pytest.raises(
            gpu.CaptureError, match=r"paged_attention_\S+ is not loaded .* kvblocks\.gpu\.warmup"
        ):
            gpu.paged_attention(cache, q, *index)

    def test_partial_results_have_memory_of_their_stream(self, torch: FakeTorch, cupy: FakeCupy) -> None:
        """Kept from call to call; a captured call, whose graph may run beside others, has memory of its own."""
        k, v, slots, q, *index = self.step(num_blocks=256)
        cache = self.pool()
        gpu.write_kv(cache, k, v, slots)
        out = Tensor(np.empty_like(q.array))
        seen = []
        for stream in (SOME_STREAM, SOME_STREAM, 0xBEEF, SOME_STREAM):
            before = torch.num_allocated
            gpu.paged_attention(cache, q, *index, out=out, stream=stream)
            seen.append(torch.num_allocated - before)
        assert seen == [1, 0, 1, 0]
        assert cupy.launches[-1].instance.name == "combine_splits"
        wanted = out.array.copy()
        before = torch.num_allocated
        cupy.current_stream, cupy.capturing = SOME_STREAM, {SOME_STREAM}
        for _ in range(2):
            gpu.paged_attention(cache, q, *index, out=out)
        assert torch.num_allocated - before == 2
        np.testing.assert_array_equal(out.array, wanted)

    def test_errors_that_waited_for_every_stream(self, torch: FakeTorch, cupy: FakeCupy) -> None:
        k, v, slots, *_ = self.step()
        slots.array[2] = 24
        gpu.write_kv(self.pool(), k, v, slots, stream=0xBEEF)
        cupy.waited.clear()
        assert "row 2, column 0, value 24" in (gpu.first_error(k) or "")
        assert cupy.waited[0] == 0
        assert gpu.first_error(k) is None

    def test_one_report_whatever_the_split_size(self, torch: FakeTorch, cupy: FakeCupy) -> None:
        _, _, _, q, tables, lens, starts = self.step()
        lens.array[0] = 99
        gpu.paged_attention(self.pool(), q, tables, lens, starts, split_size=64)
        assert "a length in seq_lens beyond the row's table" in (gpu.first_error(q) or "")

    def test_a_stranger_among_tensors_is_named(self, torch: FakeTorch, cupy: FakeCupy) -> None:
        k, v, slots, *_ = self.step()
        with pytest.raises(TypeError, match=r"^v: ndarray, expected a torch tensor on a GPU"):
            gpu.write_kv(self.pool(), k, v.array, slots)


def test_a_captured_table_outlives_its_plan(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads the table of a pool's addresses for as long as it exists."""
    monkeypatch.setattr(dispatch, "_MOST_PLANS", 1)
    caches = [pool(cupy), pool(cupy)]
    copies = cupy.asarray(np.array([[2, 5]], np.int32))
    gpu.copy_blocks(caches, copies)
    (plan,) = dispatch.dispatcher_for("copies", copies)._plans.values()
    table = ref(plan.kept[0])
    cupy.current_stream, cupy.capturing = SOME_STREAM, {SOME_STREAM}
    gpu.copy_blocks(caches, copies)
    cupy.capturing = set()
    del plan, caches
    gpu.copy_blocks([pool(cupy)], copies)
    gc.collect()
    assert table() is not None


def test_tables_are_kept_with_their_pool(cupy: FakeCupy) -> None:
    """Twenty subsets of a pool are twenty tables, all there while the pool is, and none after it."""
    caches = [pool(cupy) for _ in range(20)]
    copies = cupy.asarray(np.array([[2, 5]], np.int32))
    for count in range(1, 21):
        gpu.copy_blocks(caches[:count], copies)
    tables = dispatch.dispatcher_for("copies", copies).planner(0)._backend._tables
    assert len(tables) == 20
    del caches
    gc.collect()
    assert len(tables) == 0


def test_warmup(cupy: FakeCupy) -> None:
    assert gpu.warmup(CacheConfig(1, 2, 16)) >= 8
    assert gpu.warmup(CacheConfig(1, 2, 16)) == 0


def test_a_stream_is_named_to_cupy_as_its_version_wants_it(cupy: FakeCupy) -> None:
    """CuPy 14 warns of ExternalStream, and takes the device that is current."""
    assert cupy_stream(cupy.cuda, 0xBEEF, 1).ptr == 0xBEEF
    made = lambda stream: (stream.__cuda_stream__(), cupy.current_device)  # noqa: E731
    cupy.cuda.Stream = SimpleNamespace(from_external=made)
    assert cupy_stream(cupy.cuda, 0xBEEF, 1) == ((0, 0xBEEF), 1)
