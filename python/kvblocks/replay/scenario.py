"""One replay: a policy, its pool and its limits; and what came of it, as one flat record.

Owns `Scenario`, `Options`, `Result` and `run_scenario`. Imports paged, reservations, simulate and trace. Invariant: a
field of `Result` ends in its unit, or is a share between 0 and 1, or counts what its name says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvblocks.replay.account import Sample
from kvblocks.replay.memory import Memory
from kvblocks.replay.paged import PagedMemory
from kvblocks.replay.reservations import RESERVATIONS, ReservedMemory
from kvblocks.replay.simulate import Engine, Run, simulate
from kvblocks.report import UserError
from kvblocks.traces.trace import Trace

PAGED: Final = ("paged", "prefix")
POLICIES: Final = (*RESERVATIONS, *PAGED)


@dataclass(frozen=True)
class Scenario:
    """What is replayed. policy: of `POLICIES`; block_size: tokens, None for reservations.

    pool_slots: token slots, None for as many as are asked for. max_context: tokens stored of the longest request that
    is accepted; kv_format, bytes_per_token: what a slot costs, None where nobody said.
    """

    policy: str
    block_size: int | None
    pool_slots: int | None
    max_context: int
    kv_format: str | None = None
    bytes_per_token: float | None = None

    @property
    def name(self) -> str:
        """The policy and what distinguishes it, such as "paged-16" or "prefix-16 fp8"."""
        name = self.policy if self.block_size is None else f"{self.policy}-{self.block_size}"
        return f"{name} {self.kv_format}" if self.kv_format else name


@dataclass(frozen=True)
class Options:
    """What paged policies share. watermark: share of the blocks that admissions leave free; see `PagedMemory`."""

    watermark: float = 0.0
    declared_output_tokens: int | None = None
    decoded: bool = False


@dataclass(frozen=True)
class Result:
    """One row of the report. Shares of waste are of allocated slots, weighted by time; times are in `time_unit`."""

    policy: str
    block_size_tokens: int | None
    kv_format: str | None
    bytes_per_token: float | None
    pool_tokens: int | None
    max_context_tokens: int
    mode: str
    time_unit: str
    interrupted: bool
    duration: float
    requests: int
    completed: int
    rejected_too_long: int
    rejected_never_fits: int
    waste: float
    waste_reserved: float
    waste_never_used: float
    waste_internal: float
    running_mean: float
    running_p99: float
    running_peak: int
    kv_tokens_mean: float
    kv_tokens_p99: float
    kv_tokens_peak: int
    allocated_mean_tokens: float
    allocated_peak_tokens: int
    allocated_peak_time: float
    high_water_tokens: int
    cached_mean_tokens: float
    sharing: float
    token_hit_rate: float
    block_hit_rate: float
    readmit_token_hit_rate: float
    prefill_tokens: int
    skipped_prefill_tokens: int
    evicted_blocks: int
    preemptions: int
    recomputed_tokens: int
    swapped_out_tokens: int
    swapped_in_tokens: int
    waiting_mean: float
    queue_mean: float | None
    queue_p99: float | None
    ttft_mean: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    output_tokens: int
    output_tokens_per_time: float
    first_oom_time: float | None
    first_oom_kind: str | None
    first_oom_short_tokens: int | None
    first_oom_unusable_tokens: int | None
    first_oom_running: int | None
    first_oom_kv_tokens: int | None
    scenario: Scenario = field(repr=False, compare=False)
    series: list[Sample] = field(repr=False, compare=False)

    def record(self) -> dict[str, Any]:
        """The fields by name, ready for JSON and CSV, without the series."""
        return {
            name: value for name, value in asdict(replace(self, series=[])).items() if name not in _HIDDEN
        }


_HIDDEN: Final = ("scenario", "series")


def make_memory(trace: Trace, scenario: Scenario, options: Options) -> Memory:
    """The memory of a scenario, empty."""
    if scenario.block_size is None:
        return ReservedMemory(trace, scenario.policy, scenario.max_context, scenario.pool_slots)
    blocks = None if scenario.pool_slots is None else scenario.pool_slots // scenario.block_size
    try:
        return PagedMemory(
            trace,
            scenario.block_size,
            blocks,
            prefix_cache=scenario.policy == "prefix",
            decoded=options.decoded,
            watermark_blocks=0 if blocks is None else math.ceil(options.watermark * blocks),
            declared_output_tokens=options.declared_output_tokens,
        )
    except ValueError as error:
        pool = (
            "an unbounded pool"
            if scenario.pool_slots is None
            else f"a pool of {scenario.pool_slots:,} tokens"
        )
        raise UserError(f"{scenario.name}: {pool}: {error}") from error


def run_scenario(
    trace: Trace,
    scenario: Scenario,
    engine: Engine,
    options: Options,
    tell: Callable[[int], Any] = lambda done: None,
) -> Result:
    """Replay the trace; see `simulate`."""
    memory = make_memory(trace, scenario, options)
    run = simulate(trace, memory, engine, scenario.max_context, tell)
    return _result(trace, scenario, engine, memory, run)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _statistics(values: NDArray[np.float64]) -> tuple[float | None, float | None, float | None]:
    """Mean, median and 99th percentile of what is there."""
    there = values[~np.isnan(values)]
    if not len(there):
        return None, None, None
    p50, p99 = np.percentile(there, (50, 99), method="inverted_cdf")
    return float(there.mean()), float(p50), float(p99)


def _result(trace: Trace, scenario: Scenario, engine: Engine, memory: Memory, run: Run) -> Result:
    account, lookups, oom = run.account, memory.lookups(), run.first_oom
    arrivals = engine.mode == "arrivals" and trace.arrival_s is not None
    begin = trace.arrival_s if arrivals and trace.arrival_s is not None else 0.0
    queue_mean, _, queue_p99 = _statistics(run.queued_s - begin)
    ttft = _statistics(run.first_token_s - begin) if arrivals else (None, None, None)
    return Result(
        policy=scenario.policy,
        block_size_tokens=scenario.block_size,
        kv_format=scenario.kv_format,
        bytes_per_token=scenario.bytes_per_token,
        pool_tokens=memory.capacity_slots,
        max_context_tokens=scenario.max_context,
        mode=engine.mode,
        time_unit="s" if arrivals else "steps",
        interrupted=run.interrupted,
        duration=account.time,
        requests=len(trace),
        completed=run.completed,
        rejected_too_long=run.too_long,
        rejected_never_fits=run.never_fits,
        waste=_share(account.allocated - account.used, account.allocated),
        waste_reserved=_share(account.later, account.allocated),
        waste_never_used=_share(account.never, account.allocated),
        waste_internal=_share(account.internal, account.allocated),
        running_mean=_share(account.running, account.time),
        running_p99=account.running_quantiles.quantile(0.99),
        running_peak=account.peak_running,
        kv_tokens_mean=_share(account.stored, account.time),
        kv_tokens_p99=account.stored_quantiles.quantile(0.99),
        kv_tokens_peak=account.peak_stored,
        allocated_mean_tokens=_share(account.allocated, account.time),
        allocated_peak_tokens=account.peak_allocated,
        allocated_peak_time=account.peak_time,
        high_water_tokens=memory.peak_slots,
        cached_mean_tokens=_share(account.cached, account.time),
        sharing=_share(account.stored, account.used) if account.used else 1.0,
        token_hit_rate=_share(lookups.hit_tokens, lookups.queried_tokens),
        block_hit_rate=_share(lookups.hit_blocks, lookups.queried_blocks),
        readmit_token_hit_rate=_share(lookups.readmit_hit_tokens, lookups.readmit_queried_tokens),
        prefill_tokens=run.prefill_tokens,
        skipped_prefill_tokens=run.skipped_tokens,
        evicted_blocks=lookups.evicted_blocks,
        preemptions=run.preemptions,
        recomputed_tokens=run.recomputed_tokens,
        swapped_out_tokens=run.swapped_out_tokens,
        swapped_in_tokens=run.swapped_in_tokens,
        waiting_mean=_share(account.waiting, account.time),
        queue_mean=queue_mean,
        queue_p99=queue_p99,
        ttft_mean=ttft[0],
        ttft_p50=ttft[1],
        ttft_p99=ttft[2],
        output_tokens=run.output_tokens,
        output_tokens_per_time=_share(run.output_tokens, account.time),
        first_oom_time=None if oom is None else oom.time,
        first_oom_kind=None if oom is None else oom.kind,
        first_oom_short_tokens=None if oom is None else oom.short_slots,
        first_oom_unusable_tokens=None if oom is None else oom.unusable_slots,
        first_oom_running=None if oom is None else oom.running,
        first_oom_kv_tokens=None if oom is None else oom.stored_tokens,
        scenario=scenario,
        series=account.samples,
    )
