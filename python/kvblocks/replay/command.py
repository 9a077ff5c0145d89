"""`kvblocks replay`: the order of the work, and where its results go.

Owns `configure` and `run`. Imports everything else in this package. Invariant: what was replayed when the user
interrupts is printed and written as if it were all.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import kvblocks.report as report
from kvblocks.replay import page, plots, tables
from kvblocks.replay.account import Sample
from kvblocks.replay.hit_rate import MODELS, HitRate, Segments, capacities, ceiling, curve
from kvblocks.replay.options import (
    configure,
    cost_of,
    engine_of,
    make_engine,
    make_options,
    make_scenarios,
    make_trace,
    parse_counts,
)
from kvblocks.replay.scenario import Options, Result, Scenario, run_scenario
from kvblocks.replay.simulate import Engine
from kvblocks.replay.sizing import Sizing, size_pool
from kvblocks.report import UserError
from kvblocks.traces.trace import Trace

__all__ = ["configure", "run"]

_STOPPED: Final = "interrupted: the tables show what was replayed until then"


@dataclass(frozen=True)
class Curve:
    """Hit rates against capacity for one block size."""

    block_size: int
    ceiling: HitRate
    points: list[tuple[int, dict[str, HitRate]]] = field(default_factory=list)

    def records(self) -> Iterator[dict[str, Any]]:
        """A record for each capacity and policy."""
        for capacity, rates in [*self.points, (None, {"infinite": self.ceiling})]:
            for policy, rate in rates.items():
                counts = {name: value for name, value in asdict(rate).items() if name != "left_out"}
                yield {
                    "block_size_tokens": self.block_size,
                    "capacity_blocks": capacity,
                    "policy": policy,
                    "token_hit_rate": rate.tokens,
                    "block_hit_rate": rate.blocks,
                    **counts,
                    "longer_than_cache": rate.left_out,
                }


@dataclass
class Work:
    """What has been done so far."""

    results: list[Result] = field(default_factory=list)
    sizings: list[Sizing] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    interrupted: bool = False


def run(args: argparse.Namespace) -> int:
    """Replay, print, write; 0, or 130 where the user interrupted."""
    trace = make_trace(args)
    engine, options = make_engine(args, trace), make_options(args, trace)
    costs = cost_of(args)
    scenarios = list(make_scenarios(args, trace, costs))
    notes = [note for cost in costs for note in cost.not_counted()]
    sizes = _curve_sizes(args, trace)
    if args.size and (engine.mode == "saturated" or all(s.pool_slots is not None for s in scenarios)):
        raise UserError("--size: needs arrivals and an unbounded pool, as without --mode and --pool")
    _check_outputs(args)
    prints = "-" not in (args.json, args.csv, args.html)
    work = Work()
    try:
        if prints:
            tables.print_trace(trace, notes)
        else:
            sys.stderr.writelines(f"kvblocks: {line.strip()}\n" for line in (*tables.left_out(trace), *notes))
        _replay(args, trace, scenarios, engine, options, work)
        if not work.interrupted and sizes is not None:
            _draw_curves(args, trace, sizes, work)
    except KeyboardInterrupt:
        work.interrupted = True
    if prints:
        _print(trace, work)
    _write(args, trace, engine, options, work, notes)
    return report.INTERRUPTED if work.interrupted else 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Say now, not after minutes of work, that results could not be written or drawn."""
    if args.plots is not None:
        try:
            Path(args.plots).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--plots {args.plots}: no folder can be made: {error.strerror}") from error
    for path in (args.json, args.csv, args.html):
        if path not in (None, "-") and not Path(path).absolute().parent.is_dir():
            raise UserError(f"{path}: cannot write: there is no folder {Path(path).parent}")
    if args.plots is not None or args.html is not None:
        report.require("matplotlib")


def _replay(
    args: argparse.Namespace,
    trace: Trace,
    scenarios: Sequence[Scenario],
    engine: Engine,
    options: Options,
    work: Work,
) -> None:
    truncates = args.over_context == "truncate"
    cut = {s.max_context: trace.truncated(s.max_context) if truncates else trace for s in scenarios}
    with report.progress("replaying", len(scenarios) * len(trace)) as tell:
        for scenario in scenarios:
            adapted = engine_of(args, engine, scenario)
            result = run_scenario(cut[scenario.max_context], scenario, adapted, options, tell)
            work.results.append(result)
            if result.interrupted:
                work.interrupted = True
                return
    if not args.size:
        return
    for result in work.results:
        if result.scenario.pool_slots is None:
            adapted = engine_of(args, engine, result.scenario)
            sizing = size_pool(cut[result.max_context_tokens], result, adapted, options)
            if sizing.interrupted:
                work.interrupted = True
                return
            work.sizings.append(sizing)


def _curve_sizes(args: argparse.Namespace, trace: Trace) -> list[int] | None:
    """Capacities in blocks; empty for the default, None for no curve."""
    if not args.curve and args.capacities is None:
        return None
    if not trace.tokens_per_id:
        raise UserError(f"--curve: {trace.name} has no hash ids, so that nothing is known to be shared")
    return [] if args.capacities is None else parse_counts("--capacities", args.capacities)


def _draw_curves(args: argparse.Namespace, trace: Trace, sizes: Sequence[int], work: Work) -> None:
    for block_size in parse_counts("--block-size", args.block_size):
        segments = Segments(trace, block_size)
        work.curves.append(Curve(block_size, ceiling(segments)))
        wanted = sizes or capacities(segments)
        with report.progress(
            f"hit rates, blocks of {block_size}", len(MODELS) * len(trace) * len(wanted)
        ) as tell:
            work.curves[-1].points.extend(curve(segments, wanted, tell))


def _print(trace: Trace, work: Work) -> None:
    if work.results:
        span = None if trace.arrival_s is None else float(trace.arrival_s[-1])
        tables.print_results(work.results, span)
    if work.sizings:
        tables.print_sizing(work.sizings)
    for drawn in work.curves:
        tables.print_curve(drawn.block_size, drawn.points, drawn.ceiling)
    if work.interrupted:
        report.write_line(_STOPPED)


def _sizing_records(work: Work) -> list[dict[str, Any]]:
    return [
        {"found": found, **result.record()}
        for sizing in work.sizings
        for found, result in (("mean", sizing.mean_pool), ("smallest", sizing.peak_pool))
        if result is not None
    ]


def _write(
    args: argparse.Namespace,
    trace: Trace,
    engine: Engine,
    options: Options,
    work: Work,
    notes: Sequence[str],
) -> None:
    records = [result.record() for result in work.results]
    if args.csv is not None and records:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        report.write_text(args.csv, text.getvalue())
    data = {**_data(args, trace, engine, options, work), "notes": list(notes)}
    if args.json is not None:
        report.write_json(args.json, data)
    figures = _figures(work)
    if args.plots is not None:
        for name, draw in figures.items():
            draw(Path(args.plots, f"{name}.png"))
    if args.html is not None:
        curves = [record for drawn in work.curves for record in drawn.records()]
        sections = [
            ("Slots over time: used, wasted, cached", records, figures.get("occupancy")),
            ("Requests running at once", [], figures.get("running")),
            ("Waste", [], figures.get("waste")),
            (
                "Pool size: what the mean suggests, and the smallest that is never short",
                _sizing_records(work),
                figures.get("pools"),
            ),
            ("Prefix cache: hit rate against capacity", curves, None),
            *(
                (f"Blocks of {drawn.block_size} tokens", [], figures[f"hit_rate_{drawn.block_size}"])
                for drawn in work.curves
                if drawn.points
            ),
        ]
        page.write_page(
            args.html,
            f"Replay of {trace.name}",
            [*_introduction(trace, engine), *notes, *([_STOPPED] if work.interrupted else [])],
            [section for section in sections if section[1] or section[2]],
            data,
        )


def _introduction(trace: Trace, engine: Engine) -> Iterator[str]:
    yield (
        f"{len(trace):,} requests, {int(trace.prompt_tokens.sum()):,} prompt tokens, "
        f"{int(trace.output_tokens.sum()):,} tokens of output; {trace.skipped.bad_lines:,} broken lines and "
        f"{trace.skipped.empty_requests:,} empty requests were left out."
    )
    if engine.mode == "saturated":
        yield "Saturated: all requests wait from the start, and time is counted in steps of one token a request."
    else:
        yield (
            f"Requests come when the trace says. A step takes {1000 * engine.inter_token_s:g} ms and what its prompts "
            f"take at {engine.prefill_tokens_per_s:,.0f} tokens a second."
        )


def _figures(work: Work) -> dict[str, Callable[[Path], None]]:
    """Name of a figure -> what draws it into a file."""
    figures: dict[str, Callable[[Path], None]] = {}
    if any(result.series for result in work.results):
        figures["occupancy"] = partial(plots.occupancy, results=work.results)
        figures["running"] = partial(plots.running, results=work.results)
        figures["waste"] = partial(plots.waste, results=work.results)
    if work.sizings:
        figures["pools"] = partial(plots.pools, sizings=work.sizings)
    for drawn in work.curves:
        if drawn.points:
            figures[f"hit_rate_{drawn.block_size}"] = partial(
                plots.hit_rates, block_size=drawn.block_size, points=drawn.points, ceiling=drawn.ceiling
            )
    return figures


def _series(result: Result) -> dict[str, list[float]]:
    """Columns: the samples of a result field by field, in slots and requests, rounded to what a plot shows."""
    return {
        name: [round(float(getattr(sample, name)), 6) for sample in result.series]
        for name in Sample.__dataclass_fields__
    }


def _data(
    args: argparse.Namespace, trace: Trace, engine: Engine, options: Options, work: Work
) -> dict[str, Any]:
    return {
        "trace": {
            "name": trace.name,
            "requests": len(trace),
            "prompt_tokens": int(trace.prompt_tokens.sum()),
            "output_tokens": int(trace.output_tokens.sum()),
            "tokens_per_id": trace.tokens_per_id,
            **asdict(trace.skipped),
        },
        "engine": asdict(engine),
        "options": asdict(options),
        "over_context": args.over_context,
        "interrupted": work.interrupted,
        "results": [{**result.record(), "series": _series(result)} for result in work.results],
        "pool_sizes": _sizing_records(work),
        "hit_rates": [record for drawn in work.curves for record in drawn.records()],
    }
