"""The block manager beside a pool in plain Python, row by row of the speed table, in the same run.

Guards: a decode step costs little beside the model's, admission costs per block and not per call, an eviction is O(1).
The rows are in `rows`: each says which calls it holds. asv times samples, not calls: a sample runs all cycles of a row,
with everything that is not the row off the clock, and leaves the pools as it found them, which teardown asserts (P141);
warming up and rounds are fixed (P142). The `track_ratio_` benchmarks let both sides take turns: typical time of
kvblocks / typical time of the Python pool.
"""

import functools

import numpy as np

from .row import Laps, Row, measure
from .rows import ROWS, UnavailableError

TRACE_ROWS = tuple(name for name in ROWS if name.startswith("W6"))


@functools.cache
def prepared(name: str, whole: bool = True) -> Row:
    """A row, made once per process: asv calls `setup` before each sample."""
    entry = ROWS[name]
    try:
        return entry.make() if whole or entry.quick is None else entry.quick()
    except UnavailableError as reason:
        raise NotImplementedError(str(reason)) from None


class SampleClock:
    """Seconds that stand still but for the samples added."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """What asv reads."""
        return self.seconds

    def add(self, row: Row, sample: list[Laps]) -> None:
        """Go on by the mean of what the cycles of a sample spent in the counted parts."""
        counted = [part in row.counted for part in row.parts]
        self.seconds += float(np.array(sample)[:, counted].sum(axis=1).mean()) * 1e-9


class _Rows:
    """Seconds per cycle of the block manager."""

    params: tuple[str, ...] = ()
    param_names = ("row",)
    timer = SampleClock()
    number = 1
    warmup_time = 0
    rounds = 1
    repeat = (3, 15, 20.0)
    timeout = 600
    whole = True

    def setup(self, name: str) -> None:
        """The row, whose pools have been used as a whole once, and what is to be found again."""
        self.row = prepared(name, self.whole)
        self.before = self.row.state()

    def teardown(self, name: str) -> None:
        """All blocks must be where they were."""
        assert self.row.state() == self.before

    def time_kvblocks(self, name: str) -> None:
        """The block manager."""
        self.timer.add(self.row, self.row.sample_kvblocks())


class _Both(_Rows):
    """The same of the Python pool, and how they compare."""

    def time_python_pool(self, name: str) -> None:
        """The Python pool."""
        self.timer.add(self.row, self.row.sample_python_pool())

    def track_ratio_to_python(self, name: str) -> float:
        """Time of kvblocks / time of the Python pool."""
        entry = ROWS[name]
        ours, theirs = measure(self.row, min(entry.samples, 9), min(entry.python_samples, 5))
        return ours.total(self.row) / theirs.total(self.row)

    track_ratio_to_python.unit = "kvblocks / Python"  # type: ignore[attr-defined]


class Speed(_Both):
    """A decode step (W1), a request (W2-W4), a fork (W5), 32,768 tokens (W7), a pool (W8)."""

    params = tuple(name for name in ROWS if name not in TRACE_ROWS)


class TraceBeginning(_Both):
    """A request of the first 500 of the trace (W6): the Python pool takes half a minute for all of them."""

    params = TRACE_ROWS
    whole = False


class Trace(_Rows):
    """A request of the whole trace (W6); `table.py` has the Python pool's time for it."""

    params = TRACE_ROWS
    repeat = (3, 3, 20.0)


class FreeList:
    """With the prefix cache off nothing of it is paid for (P026)."""

    def track_ratio_of_free(self) -> float:
        """Time of `free` / time of putting the blocks back on a deque; at most 1.1."""
        row = ROWS["W2 uncached"].make()
        ours, theirs = measure(row, 50, 50)
        return ours.parts["free"] / theirs.parts["free"]

    track_ratio_of_free.unit = "kvblocks / Python"  # type: ignore[attr-defined]
