"""What a replay measures: sums over time, peaks, distributions and a series of bounded length.

Owns `Account` and `Sample`. Imports memory and NumPy. Invariant: every sum is weighted by the time (seconds, or steps)
that a state lasts; the memory used does not grow with the length of the replay, but for two times a request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvblocks.replay.memory import ALLOCATED, CACHED, INTERNAL, LATER, NEVER, USED, Occupancy

_MAX_SAMPLES = 400
# Bounds of the bins of `WeightedQuantiles`: each is 0.5 % wider than the one before.
_RATIO = 1.005
_LOG_RATIO = math.log(_RATIO)


class WeightedQuantiles:
    """Time that a whole number >= 0 spent in each bin: bins of one number below 200, then 0.5 % wide."""

    _EXACT = 200

    def __init__(self) -> None:
        self._weights = np.zeros(self._EXACT + 8000)
        self._largest = 0

    def add_one(self, value: int, weight: float) -> None:
        """A value that lasted weight. O(1)."""
        self._largest = max(self._largest, value)
        if value > self._EXACT:
            value = self._EXACT + int(math.log(value / self._EXACT) / _LOG_RATIO)
        self._weights[value] += weight

    def add(self, values: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Values [k] that lasted weights [k]. O(k)."""
        if len(values) == 1:
            self.add_one(int(values[0]), float(weights[0]))
            return
        self._largest = max(self._largest, int(values.max()))
        ratio = np.log(np.maximum(values, self._EXACT) / self._EXACT) / _LOG_RATIO
        np.add.at(self._weights, np.minimum(values, self._EXACT) + ratio.astype(np.int64), weights)

    def quantile(self, share: float) -> float:
        """The number at or below which `share` of the time was spent.

        Exact below 200, else up to 0.5 % too high, but never above the largest: what stays the same all the time has
        just that quantile.
        """
        total = np.cumsum(self._weights)
        if total[-1] == 0:
            return 0.0
        at = int(np.searchsorted(total, share * total[-1] * (1 - 1e-12)))
        if at < self._EXACT:
            return float(at)
        end_of_bin = self._EXACT * math.exp((at + 1 - self._EXACT) * _LOG_RATIO)
        return min(end_of_bin, float(self._largest))


@dataclass
class Sample:
    """A stretch of time and the mean of what it held; peak_slots is the most that was allocated in it."""

    start: float
    duration: float
    used: float
    allocated: float
    cached: float
    running: float
    waiting: float
    peak_slots: int


def _merged(first: Sample, second: Sample) -> Sample:
    duration = first.duration + second.duration
    share = first.duration / duration if duration else 0.5
    means = {
        name: share * getattr(first, name) + (1 - share) * getattr(second, name)
        for name in ("used", "allocated", "cached", "running", "waiting")
    }
    return Sample(first.start, duration, **means, peak_slots=max(first.peak_slots, second.peak_slots))


@dataclass
class Account:
    """Integrals over time in slots, or requests, times the unit of time; and peaks."""

    time: float = 0.0
    allocated: float = 0.0
    used: float = 0.0
    later: float = 0.0
    never: float = 0.0
    internal: float = 0.0
    cached: float = 0.0
    stored: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    peak_running: int = 0
    peak_stored: int = 0
    peak_allocated: int = 0
    peak_time: float = 0.0
    running_quantiles: WeightedQuantiles = field(default_factory=WeightedQuantiles)
    stored_quantiles: WeightedQuantiles = field(default_factory=WeightedQuantiles)
    samples: list[Sample] = field(default_factory=list)

    def idle(self, until: float) -> None:
        """Time without a request; what is cached then is not followed."""
        duration = until - self.time
        if duration > 0:
            self.running_quantiles.add_one(0, duration)
            self.stored_quantiles.add_one(0, duration)
            self._sample(Sample(self.time, duration, 0, 0, 0, 0, 0, 0))
            self.time = until

    def add(
        self,
        occupancy: Occupancy,
        stored: NDArray[np.int64],
        durations: NDArray[np.float64],
        num_running: int,
        num_waiting: NDArray[np.int64],
    ) -> None:
        """Steps [k] one after the other: durations, tokens that all requests have stored, requests that wait.

        Tokens of a shared block count in `stored` once a request, in the occupancy once. O(k).
        """
        total = float(durations.sum())
        sums = (occupancy.slots @ durations).tolist()
        self.allocated += sums[ALLOCATED]
        self.used += sums[USED]
        self.later += sums[LATER]
        self.never += sums[NEVER]
        self.internal += sums[INTERNAL]
        self.cached += sums[CACHED]
        self.stored += float(stored @ durations)
        num_waiting_time = float(num_waiting @ durations)
        self.waiting += num_waiting_time
        self.running += num_running * total
        self.running_quantiles.add_one(num_running, total)
        self.stored_quantiles.add(stored, durations)
        self.peak_running = max(self.peak_running, num_running)
        self.peak_stored = max(self.peak_stored, int(stored[-1]))
        first = int(np.argmax(occupancy.slots[ALLOCATED]))
        peak = int(occupancy.slots[ALLOCATED, first])
        if peak > self.peak_allocated:
            self.peak_allocated = peak
            self.peak_time = self.time + float(durations[:first].sum())
        used, allocated, cached = (sums[which] / total for which in (USED, ALLOCATED, CACHED))
        waiting = num_waiting_time / total
        self._sample(Sample(self.time, total, used, allocated, cached, num_running, waiting, peak))
        self.time += total

    def _sample(self, sample: Sample) -> None:
        self.samples.append(sample)
        if len(self.samples) >= 2 * _MAX_SAMPLES:
            # Short neighbours are merged first: what is left resolves time evenly.
            width = self.time / _MAX_SAMPLES
            merged = self.samples[:1]
            for item in self.samples[1:]:
                if merged[-1].duration + item.duration <= width:
                    merged[-1] = _merged(merged[-1], item)
                else:
                    merged.append(item)
            while len(merged) >= 3 * _MAX_SAMPLES // 2:
                merged = [_merged(*merged[at : at + 2]) for at in range(0, len(merged) - 1, 2)] + (
                    merged[-1:] if len(merged) % 2 else []
                )
            self.samples = merged
