"""Calls from several threads: none fails, and each sees a cache as whole calls left it."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from conformance.harness import Harness
from kvblocks.config import CacheConfig
from kvblocks.layout import LayerCache

NUM_THREADS = 4
BLOCK_SIZE = 16


@pytest.fixture(autouse=True)
def eager_switches() -> Iterator[None]:
    """Let the interpreter change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_together(*work: Callable[[], None]) -> None:
    """Run every function in its own thread; raises what one of them raised."""
    with ThreadPoolExecutor(len(work)) as pool:
        for done in [pool.submit(each) for each in work]:
            done.result()


def use(harness: Harness, cache: LayerCache, table: np.ndarray, num_rounds: int) -> None:
    """Write, read and copy in three blocks that nobody else uses, and look at every result."""
    backend, device, host = harness.backend, harness.to_device, harness.to_host
    num_tokens = 2 * BLOCK_SIZE
    slots = (table[:2, None].astype(np.int64) * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()
    step = [table[None, :2], np.array([num_tokens], np.int32), np.array([0, num_tokens], np.int32)]
    q = np.ones((num_tokens, cache.num_kv_heads, cache.head_dim), np.float32)
    copied = table[[2, 1]]
    for value in range(num_rounds):
        k, v = np.full((2, num_tokens, cache.num_kv_heads, cache.head_dim), value, np.float32)
        backend.write(cache, device(k), device(v), device(slots))
        out = host(backend.attend(cache, device(q), *map(device, step), window=1))
        np.testing.assert_array_equal(out, v)
        backend.copy_blocks([cache], device(table[[[0, 2]]]))
        for array in backend.gather(cache, device(copied), num_tokens):
            np.testing.assert_array_equal(host(array), value)


def tables() -> list[np.ndarray]:
    """Three blocks for each thread, block 0 left alone."""
    ids = np.random.default_rng(0).permutation(np.arange(1, 1 + 3 * NUM_THREADS, dtype=np.int32))
    return list(ids.reshape(NUM_THREADS, 3))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_on_one_layer(harness: Harness, layout: str) -> None:
    config = CacheConfig(1, 2, 64, block_size=BLOCK_SIZE, layout=layout)
    (cache,) = harness.backend.allocate(config, 1 + 3 * NUM_THREADS)
    run_together(*(lambda table=table: use(harness, cache, table, harness.rounds(250)) for table in tables()))


def test_on_layers_that_are_views_of_one_pool(harness: Harness) -> None:
    """The memory between the blocks of one layer is that of the others."""
    pool = harness.to_device(np.zeros((1 + 3 * NUM_THREADS, NUM_THREADS, 2, BLOCK_SIZE, 2, 64), np.float32))
    layers = [
        LayerCache(pool[:, layer, 0], pool[:, layer, 1], "float32", BLOCK_SIZE, "NHD")
        for layer in range(NUM_THREADS)
    ]
    run_together(
        *(
            lambda cache=cache, table=table: use(harness, cache, table, harness.rounds(50))
            for cache, table in zip(layers, tables(), strict=True)
        )
    )


def test_on_the_same_slots(harness: Harness) -> None:
    """K and V of one write stay together, for reads and for copies."""
    backend, device, host = harness.backend, harness.to_device, harness.to_host
    (cache,) = backend.allocate(CacheConfig(1, 2, 64, block_size=BLOCK_SIZE), 3)
    cache.k[...] = cache.v[...] = 0
    slots = device(np.arange(BLOCK_SIZE))

    def write(value: int) -> None:
        k, v = np.full((2, BLOCK_SIZE, 2, 64), value, np.float32)
        for _ in range(harness.rounds(500)):
            backend.write(cache, device(k), device(v), slots)

    def copy() -> None:
        for _ in range(harness.rounds(500)):
            backend.copy_blocks([cache], device(np.array([[0, 1]], np.int32)))

    def read(block: int) -> None:
        for _ in range(harness.rounds(500)):
            k, v = map(host, backend.gather(cache, device(np.array([block], np.int32)), BLOCK_SIZE))
            assert {*np.unique(k), *np.unique(v)} in ({0}, {1}, {2})

    run_together(lambda: write(1), lambda: write(2), copy, lambda: read(0), lambda: read(1))


def test_on_shared_arguments(harness: Harness) -> None:
    """Another call's output as an input: nobody says in which order, but neither call fails."""
    (cache,) = harness.backend.allocate(CacheConfig(1, 1, 8, block_size=BLOCK_SIZE), 2)
    cache.k[...] = cache.v[...] = 1
    shared, other = (harness.to_device(np.ones((BLOCK_SIZE, 1, 8), np.float32)) for _ in range(2))
    step = [np.array([[1]], np.int32), np.array([BLOCK_SIZE], np.int32), np.array([0, BLOCK_SIZE], np.int32)]

    def attend(q: object, out: object) -> None:
        for _ in range(harness.rounds(500)):
            harness.backend.attend(cache, q, *map(harness.to_device, step), out=out)

    run_together(lambda: attend(shared, other), lambda: attend(other, shared))
    np.testing.assert_allclose(harness.to_host(shared), 1, rtol=1e-6)
