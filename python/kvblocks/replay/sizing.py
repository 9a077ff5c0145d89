"""The smallest pool that survives the peak, beside the one that the mean suggests.

Owns `Sizing` and `size_pool`. Imports report and scenario. Definition: a pool survives if no admission is ever refused
and nobody is preempted. Invariant: the smallest pool was replayed, and survived.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import kvblocks.report as report
from kvblocks.replay.scenario import Options, Result, run_scenario
from kvblocks.replay.simulate import Engine
from kvblocks.traces.trace import Trace

# A pool that does not survive is tried again this much larger, at most so often; then the gap to one that does not is
# halved until it is this narrow.
_GROWTH: Final = 1.25
_MAX_TRIES: Final = 16
_GAP: Final = 1 / 32


@dataclass(frozen=True)
class Sizing:
    """mean_pool: what an unbounded pool had allocated on average, and what becomes of a pool of just that size.

    peak_pool: the smallest pool found that survives; None if none was within the tries.
    """

    mean_pool: Result
    peak_pool: Result | None
    interrupted: bool = False


def size_pool(
    trace: Trace,
    unbounded: Result,
    engine: Engine,
    options: Options,
) -> Sizing:
    """From the replay of an unbounded pool, replay pools of its mean and of its peak. O(a few replays).

    Each replay shows its own progress, as their number is not known before. Interrupted in one, the rest is left out:
    what was found until then is not the answer.

    Mostly the unbounded pool's peak is the answer, and one replay says so. A prefix cache needs more: a smaller pool
    keeps less, so requests find less, take longer, and overlap more. (The buddy system cuts another capacity
    differently.) Then larger pools are tried, and the answer is exact to 1/32.
    """
    unit = unbounded.scenario.block_size or 1

    def replay(slots: float) -> Result:
        whole = max(unit, -(-int(slots) // unit) * unit)
        scenario = replace(unbounded.scenario, pool_slots=whole)
        with report.progress(f"sizing {scenario.name}: {whole:,} tokens", len(trace)) as tell:
            return run_scenario(trace, scenario, engine, options, tell)

    mean_pool = replay(unbounded.allocated_mean_tokens)
    if mean_pool.interrupted:
        return Sizing(mean_pool, None, interrupted=True)
    failed, best = 0.0, None
    slots = float(unbounded.high_water_tokens)
    for _ in range(_MAX_TRIES):
        result = replay(slots)
        if result.interrupted:
            return Sizing(mean_pool, None, interrupted=True)
        if _survived(result):
            best = result
            high = slots
            break
        failed, slots = slots, slots * _GROWTH
    while best is not None and failed and high > failed * (1 + _GAP):
        middle = (failed + high) / 2
        result = replay(middle)
        if result.interrupted:
            return Sizing(mean_pool, best, interrupted=True)
        if _survived(result):
            best, high = result, middle
        else:
            failed = middle
    return Sizing(mean_pool, best)


def _survived(result: Result) -> bool:
    return result.first_oom_time is None and result.rejected_never_fits == 0
