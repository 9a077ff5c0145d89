"""Choosing a backend, what the NumPy backend promises beyond the contract, and which calls wait for which."""

import os
import pickle
import threading
import weakref
from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest

from kvblocks._core import cpu_simd
from kvblocks.backends import BACKENDS, calls, get_backend
from kvblocks.backends.calls import holding
from kvblocks.backends.cpu import CpuBackend
from kvblocks.config import CacheConfig
from kvblocks.layout import LayerCache


def test_by_name_by_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBLOCKS_BACKEND", raising=False)
    assert get_backend().name == get_backend(None).name == "cpu"
    assert get_backend("numpy").name == "numpy"
    monkeypatch.setenv("KVBLOCKS_BACKEND", "numpy")
    assert get_backend().name == "numpy"
    monkeypatch.setenv("KVBLOCKS_BACKEND", "")
    assert get_backend().name == "cpu"


@pytest.mark.parametrize("name", ["cuda", "", "NumPy"])
def test_unknown_names_are_refused_with_the_list(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    names = ", ".join(map(repr, BACKENDS))
    with pytest.raises(ValueError, match=f"^backend is {name!r}: expected one of {names}$"):
        get_backend(name)
    monkeypatch.setenv("KVBLOCKS_BACKEND", name or "cuda")
    with pytest.raises(
        ValueError, match=f"^KVBLOCKS_BACKEND is {name or 'cuda'!r}: expected one of {names}$"
    ):
        get_backend()


def test_a_value_is_seen_by_the_queries_that_may_see_it_only() -> None:
    """A NaN in a chunk must not reach the queries before it, nor those whose window leaves it out."""
    backend = get_backend("numpy")
    (cache,) = backend.allocate(CacheConfig(1, 1, 4), 2)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 12, 1, 4)).astype(np.float32)
    q = rng.standard_normal((12, 2, 4)).astype(np.float32)
    arguments = (np.array([[1]], np.int32), np.array([12], np.int32), np.array([0, 12], np.int32))
    backend.write(cache, k, v, np.arange(16, 28))
    clean = backend.attend(cache, q, *arguments, window=3)
    for array in (cache.k, cache.v):
        array[1, 5] = np.nan
        dirty = backend.attend(cache, q, *arguments, window=3)
        seen = np.isnan(dirty).all(axis=(1, 2))
        assert np.flatnonzero(seen).tolist() == [5, 6, 7]
        np.testing.assert_array_equal(dirty[~seen], clean[~seen])


def test_numpy_rounds_once_from_float64() -> None:
    """A float32 row agrees with exact arithmetic to half a unit in the last place, cancellation and all."""
    backend = get_backend("numpy")
    (cache,) = backend.allocate(CacheConfig(1, 1, 1, 1), 2)
    k, v = np.zeros((3, 1, 1), np.float32), np.array([1e8, 1, -1e8], np.float32).reshape(3, 1, 1)
    backend.write(cache, k, v, np.arange(3))
    arguments = (np.array([[0]], np.int32), np.array([3], np.int32), np.array([0, 1], np.int32))
    out = backend.attend(cache, np.zeros((1, 1, 1), np.float32), *arguments)
    assert out.item() == pytest.approx(1 / 3, rel=1e-7)


class TestCpu:
    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KVBLOCKS_CPU_SIMD", raising=False)
        monkeypatch.delenv("KVBLOCKS_CPU_THREADS", raising=False)

    def test_by_name(self) -> None:
        backend = get_backend("cpu")
        assert backend.name == "cpu"
        assert backend.simd == cpu_simd()[0]
        assert backend.num_threads >= 1

    def test_portable_kernels_are_always_there(self) -> None:
        assert cpu_simd()[-1] == "portable"
        assert set(cpu_simd()) <= {"avx512bf16", "avx512", "avx2", "portable"}

    def test_arguments_win_over_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVBLOCKS_CPU_SIMD", "portable")
        monkeypatch.setenv("KVBLOCKS_CPU_THREADS", "3")
        assert (CpuBackend().simd, CpuBackend().num_threads) == ("portable", 3)
        best = cpu_simd()[0]
        backend = CpuBackend(simd=best, num_threads=2)
        assert (backend.simd, backend.num_threads) == (best, 2)
        monkeypatch.setenv("KVBLOCKS_CPU_SIMD", "")
        monkeypatch.setenv("KVBLOCKS_CPU_THREADS", "")
        assert CpuBackend().simd == best

    @pytest.mark.parametrize("value", ["sse9", "AVX2", "portable "])
    def test_unknown_instructions_are_refused(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        with pytest.raises(ValueError, match=f"^simd is {value!r}: this processor has .*'portable'"):
            CpuBackend(simd=value)
        monkeypatch.setenv("KVBLOCKS_CPU_SIMD", value)
        with pytest.raises(ValueError, match=f"^KVBLOCKS_CPU_SIMD is {value!r}: this processor has "):
            CpuBackend()

    @pytest.mark.parametrize("value", [0, -1, 1025, 2.0, True, "2"])
    def test_numbers_of_threads_out_of_range_are_refused(self, value: object) -> None:
        with pytest.raises(
            ValueError, match=rf"^num_threads is {value!r}: expected an integer in 1\.\.1024$"
        ):
            CpuBackend(num_threads=value)  # type: ignore[arg-type]

    @pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "²"])
    def test_so_they_are_from_the_environment(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("KVBLOCKS_CPU_THREADS", value)
        with pytest.raises(ValueError, match=f"^KVBLOCKS_CPU_THREADS is {value!r}: expected "):
            CpuBackend()

    def test_large_pools_are_aligned_and_empty_ones_cost_nothing(self) -> None:
        """An attention kernel loads 64 bytes at a time: a row that straddles two lines costs two loads."""
        (cache,) = CpuBackend().allocate(CacheConfig(1, 8, 128), 1 << 16)
        for array in (cache.k, cache.v):
            assert array.ctypes.data % (2 << 20) == 0
            assert array.flags.writeable
            assert not array[-1].any()

    @pytest.mark.parametrize("num_queries", [1, 3, 64])
    def test_the_number_of_threads_changes_no_bit(self, num_queries: int) -> None:
        rng = np.random.default_rng(0)
        (cache,) = CpuBackend().allocate(CacheConfig(1, 2, 40, dtype="bfloat16"), 200)
        k, v = rng.standard_normal((2, 200 * 16, 2, 40)).astype(np.float32)
        CpuBackend().write(cache, k, v, np.arange(200 * 16))
        tables = rng.permutation(np.arange(200, dtype=np.int32)).reshape(2, 100)
        lens, starts = np.array([1600, 77], np.int32), np.array([0, num_queries, num_queries + 1], np.int32)
        q = rng.standard_normal((num_queries + 1, 8, 40)).astype(np.float32)
        for simd in cpu_simd():
            first, *others = (
                CpuBackend(num_threads=threads, simd=simd).attend(cache, q, tables, lens, starts)
                for threads in (1, 2, 4)
            )
            for other in others:
                np.testing.assert_array_equal(other, first)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads
    def test_a_forked_child_starts_threads_of_its_own(self) -> None:
        backend = CpuBackend(num_threads=2)
        (cache,) = backend.allocate(CacheConfig(1, 2, 16), 100)
        cache.k[...] = cache.v[...] = 1
        q = np.ones((4, 2, 16), np.float32)
        step = (
            np.arange(100, dtype=np.int32).reshape(4, 25),
            np.full(4, 400, np.int32),
            np.arange(5, dtype=np.int32),
        )
        assert (backend.attend(cache, q, *step) == 1).all()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if (backend.attend(cache, q, *step) == 1).all() else 1)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("name", list(BACKENDS)[:2])
class TestWhatIsRememberedOfACache:
    """Backends look at a cache once, and see whatever may change of it later all the same."""

    step = (np.array([[0]], np.int32), np.array([1], np.int32), np.array([0, 1], np.int32))
    q = np.ones((1, 2, 8), np.float32)

    def make(self, name: str, kv_format: str = "float32") -> LayerCache:
        (cache,) = get_backend(name).allocate(CacheConfig(1, 2, 8, kv_format=kv_format), 2)
        for array in (cache.k_scale, cache.v_scale):
            if array is not None:
                array[...] = 1 / 64
        get_backend(name).write(cache, self.q, self.q, np.array([0]))
        return cache

    def test_whether_it_can_be_written(self, name: str) -> None:
        cache, backend = self.make(name), get_backend(name)
        for array in (cache.k, cache.v):
            array.flags.writeable = False
        cache = LayerCache(cache.k, cache.v, "float32", 16, "NHD")
        assert (backend.attend(cache, self.q, *self.step) == 1).all()
        with pytest.raises(ValueError, match=r"^cache\.k: the array is read-only"):
            backend.write(cache, self.q, 2 * self.q, np.array([0]))
        for array in (cache.k, cache.v):
            array.flags.writeable = True
        backend.write(cache, self.q, 2 * self.q, np.array([0]))
        assert (backend.attend(cache, self.q, *self.step) == 2).all()
        cache.v.flags.writeable = False
        with pytest.raises(ValueError, match=r"^cache\.v: the array is read-only"):
            backend.copy_blocks([cache], np.array([[0, 1]], np.int32))

    def test_static_scales(self, name: str) -> None:
        for scaling in ("tensor", "head"):
            cache, backend = self.make(name, f"fp8_e4m3:{scaling}"), get_backend(name)
            assert (backend.attend(cache, self.q, *self.step) == 1).all()
            assert cache.v_scale is not None
            cache.v_scale[...] = 1 / 32
            assert (backend.attend(cache, self.q, *self.step) == 2).all()

    @pytest.mark.parametrize("copy", [deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
    def test_a_copy_has_memory_of_its_own(self, name: str, copy: Callable[[LayerCache], LayerCache]) -> None:
        cache, backend = self.make(name, "int8"), get_backend(name)
        other = copy(cache)
        backend.write(other, 2 * self.q, 2 * self.q, np.array([0]))
        assert (backend.attend(cache, self.q, *self.step) == 1).all()
        assert (backend.attend(other, self.q, *self.step) == 2).all()
        assert [array is getattr(other, name) for name, array in other.named_arrays] == [True] * 4

    def test_it_goes_with_its_last_user(self, name: str) -> None:
        cache = self.make(name, "int8")
        array = weakref.ref(cache.k)
        del cache
        assert array() is None


class TestHolding:
    pool = np.zeros((4, 2, 8))
    even, odd, rest = pool[:2:2], pool[1:2], pool[2:]

    def test_what_does_not_collide_does_not_wait(self) -> None:
        with (
            holding(reads=[self.even], writes=[self.rest, None]),
            holding(reads=[self.even], writes=[self.odd]),
            holding(reads=[], writes=[np.zeros(3)]),
        ):
            pass

    @pytest.mark.parametrize(
        ("first", "second"), [("reads", "writes"), ("writes", "reads"), ("writes", "writes")]
    )
    def test_what_collides_waits(self, first: str, second: str) -> None:
        order: list[str] = []

        def call() -> None:
            with holding(**{"reads": [], "writes": []} | {second: [self.pool]}):
                order.append("second")

        thread = threading.Thread(target=call)
        with holding(**{"reads": [], "writes": []} | {first: [self.rest]}):
            thread.start()
            while len(calls._calls) < 2:
                pass
            order.append("first")
        thread.join()
        assert order == ["first", "second"]

    def test_an_error_lets_the_next_one_in(self) -> None:
        for _ in range(2):
            with pytest.raises(KeyError), holding(reads=[], writes=[self.pool]):
                raise KeyError

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads
    def test_a_forked_child_does_not_wait_for_its_parents_threads(self) -> None:
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with holding(reads=[], writes=[self.pool]):
                entered.set()
                leave.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        assert entered.wait(60)
        pid = os.fork()
        if pid == 0:
            with holding(reads=[], writes=[self.pool]):
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        leave.set()
        thread.join()
        assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("name", list(BACKENDS)[:2])
def test_a_pool_beyond_memory_is_a_memory_error(name: str) -> None:
    config = CacheConfig(1, 64, 256, block_size=64)
    with pytest.raises(MemoryError):
        get_backend(name).allocate(config, 2**25)
    with pytest.raises(ValueError, match="array is too big"):
        get_backend(name).allocate(CacheConfig(1, 64, 256, block_size=2**20), 2**31 - 1)
