"""How a row of the speed table is timed: a workload of the block manager beside the same in a Python pool.

Owns `Row`, `measure` and `measure_warm`. A sample is a fixed list of cycles and leaves both pools as it found them, so
that each sample measures the same state. Every call is timed by itself: a cycle answers with the nanoseconds of each of
its `parts`, in order, the clock's own cost included.
"""

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

Laps = tuple[int, ...]
now = time.perf_counter_ns


class Row(ABC):
    """One workload on both sides.

    parts: the calls that a cycle times, in order; counted: those that make the row. unit_ns: what the row is given in.
    """

    parts: tuple[str, ...]
    counted: tuple[str, ...]
    cycles = 100
    unit_ns = 1000.0
    unit = "us"

    @abstractmethod
    def kvblocks(self, cycle: int) -> Laps:
        """One cycle of the block manager."""

    @abstractmethod
    def python_pool(self, cycle: int) -> Laps:
        """One cycle of the Python pool."""

    def sample_kvblocks(self) -> list[Laps]:
        """All cycles of the block manager once."""
        return [self.kvblocks(cycle) for cycle in range(self.cycles)]

    def sample_python_pool(self) -> list[Laps]:
        """All cycles of the Python pool once."""
        return [self.python_pool(cycle) for cycle in range(self.cycles)]

    def state(self) -> tuple[object, ...]:
        """What a sample must leave as it was, integrity violations included."""
        return ()


def clock_ns() -> float:
    """What reading the clock twice in a row shows, which every lap holds too."""
    times = [now() for _ in range(2001)]
    return float(np.median(np.diff(times)))


@dataclass(frozen=True)
class Measured:
    """One side of a row: typical cost of each part, without the clock's, in the row's unit.

    Per cycle the median of all samples is taken; a part's cost is the mean over the cycles.
    """

    parts: dict[str, float]

    @classmethod
    def of(cls, row: Row, samples: list[list[Laps]]) -> "Measured":
        """Sum up samples of a row."""
        laps = np.maximum(np.array(samples, np.float64) - clock_ns(), 0) / row.unit_ns
        typical = np.median(laps, axis=0).mean(axis=0)
        return cls(dict(zip(row.parts, typical.tolist(), strict=True)))

    def total(self, row: Row) -> float:
        """Typical cost of the row."""
        return sum(self.parts[part] for part in row.counted)


@contextmanager
def undisturbed(row: Row) -> Iterator[None]:
    """Without the garbage collector; asserts that the state at the end is that at the start."""
    before = row.state()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
    assert row.state() == before, f"{type(row).__name__} left another state than it found"


def measure(row: Row, samples: int, python_samples: int) -> tuple[Measured, Measured]:
    """Both sides in turn, after one sample each that is thrown away if there are to be several.

    Each of our samples finds the caches full of the other side's data, as an engine's step does after the model's.
    """
    ours: list[list[Laps]] = []
    theirs: list[list[Laps]] = []
    with undisturbed(row):
        for number in range(samples):
            ours.append(row.sample_kvblocks())
            if number * python_samples // samples >= len(theirs):
                theirs.append(row.sample_python_pool())
    return (
        Measured.of(row, ours[min(1, samples - 1) :]),
        Measured.of(row, theirs[min(1, python_samples - 1) :]),
    )


def measure_warm(row: Row, samples: int) -> Measured:
    """The block manager's samples one after another, after one that is thrown away: as the floor is measured."""
    with undisturbed(row):
        return Measured.of(row, [row.sample_kvblocks() for _ in range(samples + 1)][1:])
