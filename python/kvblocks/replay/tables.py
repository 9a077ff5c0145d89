"""The report as text: tables of results, of pool sizes, of hit rates.

Owns the choice and the format of columns. Imports report, scenario, sizing, hit_rate. Invariant: every column names its
unit, and shows what the JSON has under a longer name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import kvblocks.report as report
from kvblocks.replay.hit_rate import HitRate
from kvblocks.replay.scenario import Result
from kvblocks.replay.sizing import Sizing
from kvblocks.traces.trace import Trace

# A mean time in the queue of more than this share of the time in which requests came is remarked on.
_LATE: Final = 0.1


def percent(share: float) -> str:
    """A share, such as "72.15" for 0.7215."""
    return f"{100 * share:.2f}"


def tokens(count: float | None) -> str:
    """A count with separators; a dash for none."""
    return "-" if count is None else f"{count:,.0f}"


def time(value: float | None) -> str:
    """A time with as many digits as tell something."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def size(num_tokens: float | None, bytes_per_token: float | None) -> str:
    """Tokens, and bytes where it is known what one takes; "unbounded" for None."""
    if num_tokens is None:
        return "unbounded"
    if bytes_per_token is None:
        return tokens(num_tokens)
    return f"{tokens(num_tokens)} ({report.format_bytes(num_tokens * bytes_per_token)})"


def label(result: Result, results: Sequence[Result]) -> str:
    """The scenario's name, with its context limit where the results differ in it."""
    name = result.scenario.name
    if len({other.max_context_tokens for other in results}) > 1:
        name += f" context {result.max_context_tokens:,}"
    return name


def print_trace(trace: Trace, notes: Iterable[str] = ()) -> None:
    """What was read, what was left out and why, and what else is to be known before the results."""
    span = f", {time(float(trace.arrival_s[-1]))} s" if trace.arrival_s is not None else ", no times"
    reuse = f", hash ids of {trace.tokens_per_id} tokens" if trace.tokens_per_id else ", no hash ids"
    report.write_line(
        f"{trace.name}: {len(trace):,} requests{span}{reuse}; prompts {trace.prompt_tokens.mean():,.0f} tokens on "
        f"average, {trace.prompt_tokens.max():,} at most, outputs {trace.output_tokens.mean():,.0f} and "
        f"{trace.output_tokens.max():,}"
    )
    for line in left_out(trace):
        report.write_line(line)
    for note in notes:
        report.write_line(note)


def left_out(trace: Trace) -> Iterator[str]:
    """A line for each kind of row that was not taken as it stands, and for the first broken ones."""
    skipped = trace.skipped
    for count, what in (
        (skipped.empty_requests, "requests without a prompt or an output left out"),
        (skipped.out_of_order, "rows out of order, sorted by time"),
        (skipped.repeated_ids, "rows repeat a request id, kept"),
        (skipped.bad_lines, "broken lines left out"),
    ):
        if count:
            yield f"  {count:,} {what}"
    for example in skipped.bad_examples:
        yield f"    {example}"


def print_results(results: Sequence[Result], span_s: float | None) -> None:
    """All tables about replays; span_s: from the first arrival to the last."""
    unit = results[0].time_unit
    _print(
        "Memory: allocated slots, weighted by time, that hold no token",
        results,
        [
            ("waste\n[%]", lambda r: percent(r.waste)),
            ("for later\n[%]", lambda r: percent(r.waste_reserved)),
            ("never used\n[%]", lambda r: percent(r.waste_never_used)),
            ("internal\n[%]", lambda r: percent(r.waste_internal)),
            ("allocated\nmean [tokens]", lambda r: tokens(r.allocated_mean_tokens)),
            ("\npeak [tokens]", lambda r: tokens(r.allocated_peak_tokens)),
            (f"peak at\n[{unit}]", lambda r: time(r.allocated_peak_time)),
        ],
        note=_paging_note(results),
    )
    _print(
        "At once",
        results,
        [
            ("requests\nmean", lambda r: f"{r.running_mean:,.1f}"),
            ("\np99", lambda r: tokens(r.running_p99)),
            ("\npeak", lambda r: tokens(r.running_peak)),
            ("KV [tokens]\nmean", lambda r: tokens(r.kv_tokens_mean)),
            ("\np99", lambda r: tokens(r.kv_tokens_p99)),
            ("\npeak", lambda r: tokens(r.kv_tokens_peak)),
            ("sharing", lambda r: f"{r.sharing:.2f}"),
            (f"duration\n[{unit}]", lambda r: time(r.duration)),
        ],
        note=_keeping_up_note(results, span_s),
    )
    _print(
        "Service",
        results,
        [
            ("done", lambda r: tokens(r.completed)),
            ("rejected", lambda r: tokens(r.rejected_too_long + r.rejected_never_fits)),
            ("preempted", lambda r: tokens(r.preemptions)),
            (f"queue\nmean [{unit}]", lambda r: time(r.queue_mean)),
            (f"\np99 [{unit}]", lambda r: time(r.queue_p99)),
            *(
                [
                    (f"first token\nmean [{unit}]", lambda r: time(r.ttft_mean)),
                    (f"\np50 [{unit}]", lambda r: time(r.ttft_p50)),
                    (f"\np99 [{unit}]", lambda r: time(r.ttft_p99)),
                ]
                if unit == "s"
                else []
            ),
        ],
    )
    if any(r.policy == "prefix" or r.preemptions for r in results):
        _print(
            "Prompt tokens: found in the prefix cache, computed, and brought back after a preemption",
            [r for r in results if r.policy == "prefix" or r.preemptions],
            [
                ("found\n[% tokens]", lambda r: percent(r.token_hit_rate)),
                ("\n[% blocks]", lambda r: percent(r.block_hit_rate)),
                ("skipped\n[tokens]", lambda r: tokens(r.skipped_prefill_tokens)),
                ("computed\n[tokens]", lambda r: tokens(r.prefill_tokens)),
                ("again\n[tokens]", lambda r: tokens(r.recomputed_tokens + r.swapped_in_tokens)),
                ("evicted\n[blocks]", lambda r: tokens(r.evicted_blocks)),
            ],
        )
    short = [r for r in results if r.first_oom_time is not None]
    if short:
        _print(
            "First time that memory was short",
            short,
            [
                (f"at\n[{unit}]", lambda r: time(r.first_oom_time)),
                ("for", lambda r: r.first_oom_kind or ""),
                ("short\n[tokens]", lambda r: tokens(r.first_oom_short_tokens)),
                ("free in pieces\n[tokens]", lambda r: tokens(r.first_oom_unusable_tokens)),
                ("running", lambda r: tokens(r.first_oom_running)),
                ("KV\n[tokens]", lambda r: tokens(r.first_oom_kv_tokens)),
            ],
        )


def _print(
    title: str,
    results: Sequence[Result],
    columns: Sequence[tuple[str, Callable[[Result], str]]],
    note: str = "",
) -> None:
    report.print_table(
        title,
        ["policy", "pool\n[tokens]", *(header for header, _ in columns)],
        [
            [label(r, results), size(r.pool_tokens, r.bytes_per_token), *(cell(r) for _, cell in columns)]
            for r in results
        ],
        num_left=2,
        note=note,
    )


def _paging_note(results: Sequence[Result]) -> str:
    paged = [r for r in results if r.block_size_tokens and r.running_mean]
    if not paged:
        return ""
    worst = max(paged, key=lambda r: r.waste_internal)
    return (
        f"Paging wastes about (block - 1) / 2 slots a request: {percent(worst.waste_internal)} % with blocks of "
        f"{worst.block_size_tokens} and {worst.kv_tokens_mean / worst.running_mean:,.0f} tokens a request."
    )


def _keeping_up_note(results: Sequence[Result], span_s: float | None) -> str:
    """A warning where the queue has grown all along."""
    if span_s is None or results[0].time_unit != "s":
        return ""
    if all((r.queue_mean or 0.0) <= _LATE * span_s for r in results):
        return ""
    return (
        f"Requests came for {time(span_s)} s. Where they queue for long, the engine cannot keep up: its pool is too "
        "small, or its rates are too low."
    )


def print_sizing(sizings: Sequence[Sizing]) -> None:
    """What the mean suggests and what it comes to; what survives."""
    unit = sizings[0].mean_pool.time_unit
    rows = []
    for sizing in sizings:
        mean, peak = sizing.mean_pool, sizing.peak_pool
        rows.append(
            [
                mean.scenario.name,
                size(mean.pool_tokens, mean.bytes_per_token),
                time(mean.first_oom_time),
                tokens(mean.preemptions),
                tokens(mean.rejected_never_fits),
                time(mean.queue_p99),
                "none found" if peak is None else size(peak.pool_tokens, peak.bytes_per_token),
                "-"
                if peak is None or not mean.pool_tokens
                else f"{(peak.pool_tokens or 0) / mean.pool_tokens:.2f}",
            ]
        )
    report.print_table(
        "Pool size: what the mean suggests and what comes of it; the smallest that is never short",
        [
            *("policy", "pool of the mean\n[tokens]", f"short at\n[{unit}]", "preempted", "never fit"),
            *(f"queue\np99 [{unit}]", "smallest pool\n[tokens]", "/ mean"),
        ],
        rows,
        num_left=2,
    )


Curve = Sequence[tuple[int, dict[str, HitRate]]]


def print_curve(block_size: int, points: Curve, ceiling: HitRate) -> None:
    """Hit rates by capacity."""
    rows = [
        [
            tokens(capacity),
            tokens(capacity * block_size),
            percent(rates["lru"].tokens),
            percent(rates["lru"].blocks),
            percent(rates["fifo"].tokens),
            percent(rates["lfu"].tokens),
            percent(rates["optimum"].tokens),
            tokens(rates["lru"].left_out),
        ]
        for capacity, rates in points
    ]
    report.print_table(
        f"Prefix cache, blocks of {block_size} tokens: prompt tokens found against capacity",
        [
            *("capacity\n[blocks]", "\n[tokens]", "LRU\n[% tokens]", "LRU\n[% blocks]", "FIFO\n[% tokens]"),
            *("LFU\n[% tokens]", "optimum\n[% tokens]", "prompts longer\nthan the cache"),
        ],
        rows,
        num_left=0,
        note=f"An infinite cache finds {percent(ceiling.tokens)} % of the tokens, {percent(ceiling.blocks)} % of the "
        "blocks. LRU is the block manager's; the optimum (Belady) knows the future.",
    )
