"""Choosing a backend, and what the NumPy backend promises beyond the contract."""

import numpy as np
import pytest

from kvblocks.backends import BACKENDS, get_backend
from kvblocks.config import CacheConfig


def test_by_name_by_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBLOCKS_BACKEND", raising=False)
    assert get_backend().name == get_backend(None).name == "cpu"
    assert get_backend("numpy").name == "numpy"
    monkeypatch.setenv("KVBLOCKS_BACKEND", "numpy")
    assert get_backend().name == "numpy"


@pytest.mark.parametrize("name", ["cuda", "", "NumPy"])
def test_unknown_names_are_refused_with_the_list(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    names = ", ".join(map(repr, BACKENDS))
    with pytest.raises(ValueError, match=f"^backend is {name!r}: expected one of {names}$"):
        get_backend(name)
    monkeypatch.setenv("KVBLOCKS_BACKEND", name)
    with pytest.raises(ValueError, match=f"^KVBLOCKS_BACKEND is {name!r}: expected one of {names}$"):
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
    def test_by_name(self) -> None:
        assert get_backend("cpu").name == "cpu"
