"""Area S: benchmarks measure the same state in every sample. That two runs agree (P142) is for a quiet machine."""

import importlib
import inspect
import itertools
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvblocks as kv

BENCHES = Path(__file__).resolve().parents[2] / "benches"
sys.path.insert(0, str(BENCHES))

# Parameters of which the smaller ones say the same: a whole trace, a large batch.
SLOW = ("W6", "1024")


def timed() -> Iterator[tuple[str, type, str, tuple[Any, ...]]]:
    """Name, class, method and parameters of each benchmark that asv times."""
    for module in pkgutil.iter_modules([str(BENCHES / "benchmarks")], "benchmarks."):
        for name, suite in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            methods = [method for method in dir(suite) if method.startswith("time_")]
            if suite.__module__ == module.name and not name.startswith("_"):
                for params, method in itertools.product(itertools.product(*axes(suite)), methods):
                    if not any(slow in str(param) for slow in SLOW for param in params):
                        yield ".".join([name, method, *map(str, params)]), suite, method, params


def axes(suite: type) -> list[Any]:
    """The values of each parameter."""
    params = getattr(suite, "params", ())
    return list(params) if params and isinstance(params[0], (list, tuple)) else [params] if params else []


def state_of(benchmark: Any) -> list[Any]:
    """What is used of the managers that a benchmark has, each found to be sound, and what its parts say themselves."""
    found: list[Any] = []
    for owner in vars(benchmark).values():
        if callable(getattr(owner, "state", None)):
            found.append(owner.state())
        manager = getattr(owner, "manager", owner)
        if isinstance(manager, kv.BlockManager):
            assert manager.check_integrity() == []
            stats = manager.stats()
            found.append((stats.live_blocks, stats.held_blocks, stats.logical_blocks, stats.num_seqs))
    return found


BENCHMARKS = list(timed())


def test_p141_there_are_benchmarks() -> None:
    assert len(BENCHMARKS) >= 6


@pytest.mark.parametrize(
    ("suite", "method", "params"),
    [pytest.param(*rest, id=name) for name, *rest in BENCHMARKS],
)
def test_p141_a_benchmark_leaves_the_state_as_it_found_it(
    suite: Any, method: str, params: tuple[Any, ...]
) -> None:
    benchmark = suite()
    try:
        benchmark.setup(*params)
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    before = state_of(benchmark)
    for _ in range(2):
        getattr(benchmark, method)(*params)
        assert state_of(benchmark) == before
    benchmark.teardown(*params)
