"""The report as figures.

Owns one function a figure, each from results to a file. Imports report, scenario, sizing and tables. Invariant: axes
carry units; series differ by more than colour.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import kvblocks.report as report
from kvblocks.replay.hit_rate import HitRate
from kvblocks.replay.scenario import Result
from kvblocks.replay.sizing import Sizing
from kvblocks.replay.tables import Curve, label

# Panels of one figure: more are no longer legible.
_MAX_PANELS: Final = 12
_USED, _LATER, _NEVER, _INTERNAL, _CACHED = (report.COLOURS[at] for at in (0, 4, 1, 3, 2))


def _scale(most: float) -> tuple[float, str]:
    """A unit that keeps axis labels short, and its name."""
    for unit, name in ((1e9, "billion "), (1e6, "million "), (1e3, "thousand ")):
        if most >= 2 * unit:
            return unit, name
    return 1.0, ""


def titled(result: Result, results: Sequence[Result]) -> str:
    """A panel's title."""
    pool = "unbounded pool" if result.pool_tokens is None else f"pool of {result.pool_tokens:,} tokens"
    return f"{label(result, results)}, {pool}"


@contextlib.contextmanager
def _panels(path: Path, results: Sequence[Result], **subplots: Any) -> Iterator[list[tuple[Any, Result]]]:
    """A panel for each result, titled, with time below."""
    shown = [result for result in results if result.series][:_MAX_PANELS]
    columns = 1 if len(shown) == 1 else 2
    rows = -(-len(shown) // columns)
    with report.figure(
        path,
        width_inches=9 if columns == 1 else 14,
        height_inches=1.2 + 2.8 * rows,
        nrows=rows,
        ncols=columns,
        squeeze=False,
        **subplots,
    ) as axes:
        yield list(zip(axes.flat, shown, strict=False))
        for panel, result in zip(axes.flat, shown, strict=False):
            panel.set_title(titled(result, results), fontsize=10)
            panel.set_xlim(0, result.duration or 1)
            panel.set_ylim(0)
            panel.set_xlabel(f"time [{result.time_unit}]")
        for panel in axes.flat[len(shown) :]:
            panel.set_axis_off()


def _steps(result: Result, name: str) -> Any:
    """A field of the series at the begin of each stretch, and at the end of the last."""
    values = [getattr(sample, name) for sample in result.series]
    return np.append(values, values[-1:])


def _times(result: Result) -> Any:
    return np.array([sample.start for sample in result.series] + [result.duration])


def occupancy(path: Path, results: Sequence[Result]) -> None:
    """Slots over time, a panel for each result: holding tokens, allocated in vain, cached; the pool as a line."""
    most = max(max(s.allocated + s.cached for s in r.series) for r in results if r.series)
    unit, prefix = _scale(max([most, *(float(r.pool_tokens) for r in results if r.pool_tokens is not None)]))
    with _panels(path, results) as panels:
        handles: dict[str, Any] = {}
        for panel, result in panels:
            _occupancy(panel, result, unit)
            panel.set_ylabel(f"slots [{prefix}tokens]")
            handles |= {
                label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
            }
        names = list(handles)
        panels[0][0].figure.legend(
            list(handles.values()), names, loc="outside upper center", ncols=len(names)
        )


def _occupancy(panel: Any, result: Result, unit: float) -> None:
    times = _times(result)
    used, allocated, cached = (_steps(result, name) / unit for name in ("used", "allocated", "cached"))
    style: dict[str, Any] = {"step": "post", "linewidth": 0}
    panel.fill_between(times, 0, used, color=_USED, label="hold tokens", **style)
    panel.fill_between(times, used, allocated, color=_NEVER, label="allocated in vain", **style)
    if cached.any():
        panel.fill_between(
            *(times, allocated, allocated + cached),
            color=_CACHED,
            alpha=0.45,
            label="cached, reclaimable",
            **style,
        )
    if result.pool_tokens is not None:
        panel.axhline(result.pool_tokens / unit, color="black", linestyle="--", linewidth=1, label="pool")
    if result.first_oom_time is not None:
        panel.axvline(
            result.first_oom_time, color="black", linestyle=":", linewidth=1.2, label="first out of memory"
        )


def running(path: Path, results: Sequence[Result]) -> None:
    """Requests running at once over time, a panel for each result, all to the same scale."""
    with _panels(path, results, sharey=True) as panels:
        for panel, result in panels:
            counts = _steps(result, "running")
            panel.step(_times(result), counts, where="post", linewidth=1.2, color=_USED)
            panel.axhline(result.running_mean, color="black", linestyle="--", linewidth=1)
            panel.annotate(
                f"mean {result.running_mean:,.1f}",
                xy=(0.99, result.running_mean),
                xycoords=("axes fraction", "data"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="right",
                fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )
            panel.set_ylabel("requests running")


def waste(path: Path, results: Sequence[Result]) -> None:
    """Shares of the allocated slots, a bar for each result."""
    names = [titled(result, results) for result in results]
    places = np.arange(len(results))[::-1]
    with report.figure(path, width_inches=10, height_inches=1.6 + 0.42 * len(results)) as axes:
        left = np.zeros(len(results))
        for name, colour, hatch, share in _parts(results):
            axes.barh(places, share, left=left, color=colour, hatch=hatch, edgecolor="white", label=name)
            left += share
        for place, result in zip(places, results, strict=True):
            axes.text(100.6, place, f"{100 * result.waste:.2f} % waste", va="center", fontsize=9)
        axes.set_yticks(places, names)
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of allocated slots, weighted by time [%]")
        axes.grid(visible=False, axis="y")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=9)


def _parts(results: Sequence[Result]) -> list[tuple[str, str, str, Any]]:
    def share(of: Callable[[Result], float]) -> Any:
        return 100 * np.array([of(result) for result in results])

    return [
        ("holds a token", _USED, "", share(lambda r: 1 - r.waste)),
        ("reserved for later", _LATER, "///", share(lambda r: r.waste_reserved)),
        ("never used", _NEVER, "xx", share(lambda r: r.waste_never_used)),
        ("internal", _INTERNAL, "..", share(lambda r: r.waste_internal)),
    ]


def pools(path: Path, sizings: Sequence[Sizing]) -> None:
    """For each policy the pool that the mean suggests and the smallest that survives."""
    most = max((s.peak_pool or s.mean_pool).pool_tokens or 0 for s in sizings)
    unit, prefix = _scale(most)
    places = np.arange(len(sizings))[::-1]
    mean = [(s.mean_pool.pool_tokens or 0) / unit for s in sizings]
    peak = [0.0 if s.peak_pool is None else (s.peak_pool.pool_tokens or 0) / unit for s in sizings]
    with report.figure(path, height_inches=1.6 + 0.6 * len(sizings)) as axes:
        axes.barh(
            places + 0.2,
            mean,
            0.38,
            color=_LATER,
            hatch="///",
            edgecolor="white",
            label="what the mean suggests",
        )
        axes.barh(
            places - 0.2, peak, 0.38, color=_USED, edgecolor="white", label="smallest that is never short"
        )
        for place, value, sizing in zip(places, peak, sizings, strict=True):
            if sizing.peak_pool is not None and sizing.mean_pool.pool_tokens:
                ratio = (sizing.peak_pool.pool_tokens or 0) / sizing.mean_pool.pool_tokens
                axes.text(value, place - 0.2, f" {ratio:.2f} x", va="center", fontsize=9)
        axes.set_yticks(places, [s.mean_pool.scenario.name for s in sizings])
        axes.set_xlabel(f"pool [{prefix}tokens]")
        axes.margins(x=0.1)
        axes.grid(visible=False, axis="y")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=9)


def hit_rates(path: Path, block_size: int, points: Curve, ceiling: HitRate) -> None:
    """Token hit rate against capacity: LRU, FIFO, LFU, the optimum, and the ceiling."""
    names = {"lru": "LRU (block manager)", "fifo": "FIFO", "lfu": "LFU", "optimum": "optimum (Belady)"}
    markers = {"lru": "o", "fifo": "s", "lfu": "v", "optimum": "^"}
    with report.figure(path) as axes:
        capacities = [capacity * block_size for capacity, _ in points]
        for index, (policy, name) in enumerate(names.items()):
            rates = [100 * by_policy[policy].tokens for _, by_policy in points]
            axes.plot(capacities, rates, marker=markers[policy], label=name, **report.series_style(index))
        axes.axhline(100 * ceiling.tokens, color="black", linestyle="--", linewidth=1, label="infinite cache")
        axes.set_xscale("log")
        axes.set_ylim(0)
        axes.set_xlabel(f"capacity [tokens], blocks of {block_size}")
        axes.set_ylabel("prompt tokens found [%]")
        axes.legend(loc="best")
