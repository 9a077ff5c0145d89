"""Area S: benchmarks measure the same state in every sample; whether two runs agree is for an idle machine to say."""

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
sys.path[:0] = [str(BENCHES), str(BENCHES.parent)]

NOISE = ("noise", "benchmarks.rows", "benchmarks.row")

# Parameters of which the smaller ones say the same: a whole trace, a large batch.
SLOW = ("W6", "1024")

# Each sample makes its manager anew: there is no state to leave.
STATELESS = ("benchmarks.replay",)


def timed() -> Iterator[tuple[str, type, str, tuple[Any, ...]]]:
    """Name, class, method and parameters of each benchmark that asv times."""
    for module in pkgutil.iter_modules([str(BENCHES / "benchmarks")], "benchmarks."):
        if module.name in STATELESS:
            continue
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


@pytest.mark.parametrize(("slower", "noisy"), [(0, False), (4, False), (6, True), (-6, True)])
def test_p142_a_row_whose_two_runs_differ_by_5_percent_is_marked(
    slower: int, noisy: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noise, rows, row = (importlib.import_module(f"benches.{name}") for name in NOISE)
    # A clock that stands still, and calls that say what they cost: 100 us in the first run; a slow first sample of each
    # run, in which everything is cold, does not count.
    monkeypatch.setattr(row, "clock_ns", lambda: 0.0)
    costs = itertools.chain([9e9, *[100e3] * 4], [9e9, *[(100 + slower) * 1e3] * 4])

    class Fake(row.Row):  # type: ignore[misc, name-defined]
        parts, counted, cycles = ("call",), ("call",), 1

        def kvblocks(self, cycle: int) -> tuple[float]:
            return (next(costs),)

        def python_pool(self, cycle: int) -> tuple[float]:
            return (1.0,)

    monkeypatch.setattr(noise, "ROWS", {"fake": rows.Entry(Fake, 1, 5)})
    monkeypatch.setattr(sys, "argv", ["noise"])
    noise.main()
    (_, line) = capsys.readouterr().out.splitlines()
    assert line.split()[:4] == ["fake", "us", "100.00", f"{100 + slower}.00"]
    assert line.endswith("noisy") == noisy
