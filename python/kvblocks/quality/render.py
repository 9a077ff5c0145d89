"""A result as a table, as JSON and as a picture.

Owns the wording and what is shown. Imports report and the results.
Invariant: every number shown is in the JSON, unrounded.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import kvblocks.report as report
from kvblocks.config import CacheConfig
from kvblocks.quality.evaluate import Result, Score
from kvblocks.quality.lane import Variant
from kvblocks.quality.needle import Cell, exact_match
from kvblocks.quality.verdict import Thresholds

# The length at which the bits of an element are stated: residuals weigh more in shorter sequences.
CAPACITY_TOKENS: Final = 4096
_GIB: Final = 1 << 30


def bits_per_element(variant: Variant) -> float:
    """Stored bits per element of K and V in a sequence of 4,096 tokens: scales, zeros and 16-bit residual included."""
    if variant.bits is not None:
        return variant.bits
    config = variant.config
    return 8 * _bytes_per_seq(config, CAPACITY_TOKENS) / _elements(config, CAPACITY_TOKENS)


def as_json(result: Result, settings: dict[str, Any], thresholds: Thresholds) -> dict[str, Any]:
    """The whole result as plain values, with the settings that it was made with; null where a figure is not finite."""
    everyone = [result.reference, *result.scores]
    value: dict[str, Any] = {
        "settings": settings,
        "interrupted": result.interrupted,
        "thresholds": asdict(thresholds),
        "capacity_tokens": CAPACITY_TOKENS,
        "formats": [_score_json(score, result.reference) for score in everyone],
    }
    return {name: _finite(part) for name, part in value.items()}


def print_result(result: Result, title: str) -> None:
    """Print the table of all formats, a line for each that fails, and one where the run was interrupted."""
    rows = [_row(score, result.reference) for score in (result.reference, *result.scores)]
    headers = (
        "format",
        "bits an\nelement",
        "tokens\na GiB",
        "perplexity",
        "mean KL\nnats",
        "max KL\nnats",
        "top-1",
    )
    report.print_table(title, (*headers, "needle\nexact", "answer\nNLL", "verdict"), rows)
    if result.reference.needle is not None and exact_match(result.reference.needle) == 0:
        report.write_line("the reference repeats no key: this grid says nothing about formats on this model")
    for score in result.scores:
        if score.failures:
            report.write_line(f"{score.variant.name} fails: {'; '.join(score.failures)}")
    if result.interrupted:
        report.write_line("interrupted: the table shows what was measured until then")


def plot_grid(result: Result, path: str | Path, title: str) -> None:
    """Draw one heat map a format: exact match over context length and depth, in each cell also the answer's NLL.

    A cell that an interrupted run did not come to is left blank. Raises ValueError where there is no cell at all.
    """
    scores = [score for score in (result.reference, *result.scores) if score.needle]
    if not scores:
        raise ValueError("there is no needle grid to draw")
    columns = min(3, len(scores))
    num_rows = math.ceil(len(scores) / columns)
    lengths = sorted({cell.length for cell in scores[0].needle or []})
    depths = sorted({cell.depth for cell in scores[0].needle or []})
    width = columns * (1.4 + 0.85 * len(lengths)) + 1.2
    height = num_rows * (1.2 + 0.5 * len(depths)) + 0.6
    with report.figure(
        path,
        width_inches=width,
        height_inches=height,
        nrows=num_rows,
        ncols=columns,
        sharex=True,
        sharey=True,
        squeeze=False,
    ) as axes:
        panels = list(axes.flat)
        for axis, score in zip(panels, scores, strict=False):
            image = _draw(axis, score.needle or [], lengths, depths)
            axis.set_title(score.variant.name, fontsize=11)
        for axis in panels[len(scores) :]:
            axis.set_axis_off()
        for axis in axes[:, 0]:
            axis.set_ylabel("depth of the key")
        for column in range(columns):
            lowest = max(i for i in range(num_rows) if i * columns + column < len(scores))
            axes[lowest, column].set_xlabel("context, tokens")
            axes[lowest, column].tick_params(labelbottom=True)
        figure = panels[0].figure
        figure.suptitle(title)
        bar = figure.colorbar(image, ax=axes, shrink=0.8, ticks=[0, 0.25, 0.5, 0.75, 1])
        bar.ax.set_yticklabels(["0 %", "25 %", "50 %", "75 %", "100 %"])
        bar.set_label("keys repeated exactly")


def _draw(axis: Any, cells: list[Cell], lengths: list[int], depths: list[float]) -> Any:
    by_place = {(cell.length, cell.depth): cell for cell in cells}
    grid = [
        [by_place[length, depth].exact if (length, depth) in by_place else math.nan for length in lengths]
        for depth in depths
    ]
    image = axis.imshow(grid, cmap=report.COLOUR_MAP, vmin=0, vmax=1, aspect="auto")
    axis.grid(visible=False)
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    for y, depth in enumerate(depths):
        for x, length in enumerate(lengths):
            cell = by_place.get((length, depth))
            if cell is None:
                continue
            axis.text(
                x,
                y,
                f"{cell.exact:.0%}\nNLL {cell.nll:.2g}",
                ha="center",
                va="center",
                fontsize=7.5,
                # The map is dark below its middle.
                color="black" if cell.exact > 0.5 else "white",
            )
    return image


def _row(score: Score, reference: Score) -> tuple[str, ...]:
    bits = bits_per_element(score.variant)
    row = [score.variant.name, f"{bits:.2f}", f"{_tokens_per_gib(score.variant):,}"]
    text = score.text
    row += (
        ["", "", "", ""]
        if text is None
        else [f"{text.perplexity:.3f}", f"{text.kl_mean:.5f}", f"{text.kl_max:.3f}", f"{text.top1:.2%}"]
    )
    cells = score.needle
    row += ["", ""] if cells is None else [f"{exact_match(cells):.0%}", f"{_mean_nll(cells):.3f}"]
    verdict = "reference" if score is reference else "passes" if score.passes else "FAILS"
    return (*row, verdict)


def _score_json(score: Score, reference: Score) -> dict[str, Any]:
    variant, cells = score.variant, score.needle
    bits = bits_per_element(variant)
    return {
        "format": variant.name,
        "is_reference": score is reference,
        "backend": score.backend,
        "block_size": variant.config.block_size,
        "residual_tokens": variant.config.residual_tokens if variant.config.has_residual else None,
        "bits_per_element": bits,
        "tokens_per_gib": _tokens_per_gib(variant),
        "capacity_ratio": bits_per_element(reference.variant) / bits,
        "text": None if score.text is None else asdict(score.text),
        "needle": None
        if cells is None
        else {
            "exact": exact_match(cells),
            "nll": _mean_nll(cells),
            "cells": [asdict(cell) for cell in cells],
        },
        "passes": score.passes,
        "failures": score.failures,
    }


def _finite(value: Any) -> Any:
    # JSON has no NaN and no infinity, and a format that breaks a model brings both about.
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean_nll(cells: list[Cell]) -> float:
    return sum(cell.nll * cell.num_trials for cell in cells) / sum(cell.num_trials for cell in cells)


def _tokens_per_gib(variant: Variant) -> int:
    elements = _elements(variant.config, 1)
    return int(8 * _GIB / (bits_per_element(variant) * elements))


def _elements(config: CacheConfig, num_tokens: int) -> int:
    return num_tokens * config.num_layers * config.num_kv_heads * (config.head_dim + (config.head_dim_v or 0))


def _bytes_per_seq(config: CacheConfig, num_tokens: int) -> int:
    return -(-num_tokens // config.block_size) * config.bytes_per_block + config.bytes_per_seq
