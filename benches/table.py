"""The speed table: every row of `benchmarks.rows` beside the Python pool and the bare loop's floor.

Warm: the block manager's samples one after another, as the floor's. Cold: in turn with the Python pool's.

Run it from the checkout: python -m benches.table [--quick] [--parts] [ROW ...]
"""

import argparse
import sys
import time

from .benchmarks.floor import build, floor
from .benchmarks.mooncake import HIT_RATES, hit_rate, read_prompts, trace_path
from .benchmarks.resident import resident_bytes
from .benchmarks.row import Measured, Row, measure, measure_warm
from .benchmarks.rows import ROWS, UnavailableError

Parts = dict[str, float]


def print_row(
    name: str, row: Row, cold: Measured, warm: Measured, python: Measured, bare: Parts | None, goal: float
) -> None:
    """One line: warm and cold cost; the floor and the goal, and the warm cost's ratios to them; the Python pool's."""
    total, pool = warm.total(row), python.total(row)
    least = f"{'':16}"
    if bare is not None:
        lowest = sum(bare[part] for part in row.counted)
        least = f"{lowest:8.2f}{total / lowest:8.1f}"
    print(
        f"{name:<13}{row.unit:<9}{total:9.2f}{cold.total(row):9.2f}{least}{goal:8g}{total / goal:8.2f}"
        f"{pool:10.1f}{cold.total(row) / pool:8.3f}",
        flush=True,
    )


def print_parts(cold: Measured, warm: Measured, python: Measured, bare: Parts | None) -> None:
    """What each call of the row costs on all sides."""
    sides = {"warm": warm.parts, "cold": cold.parts, "floor": bare or {}, "Python": python.parts}
    for side, costs in sides.items():
        if costs:
            parts = "  ".join(f"{part} {cost:.2f}" for part, cost in costs.items())
            print(f"{'':13}{side:<9}{parts}", flush=True)


def main() -> int:
    """Measure the rows asked for, or all, and print them as they come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"beginnings of row names: {', '.join(ROWS)}")
    parser.add_argument("--quick", action="store_true", help="few samples, 500 prompts of the trace")
    parser.add_argument("--parts", action="store_true", help="also what each call costs")
    options = parser.parse_args()

    start = time.monotonic()
    wanted = tuple(options.rows) or ("",)
    has_floor = build()
    print(
        f"{'row':<13}{'unit':<9}{'warm':>9}{'cold':>9}{'floor':>8}{'/ floor':>8}{'goal':>8}{'/ goal':>8}"
        f"{'Python':>10}{'ratio':>8}"
    )
    for name, entry in ROWS.items():
        if not name.startswith(wanted):
            continue
        quick = options.quick
        try:
            row = entry.quick() if quick and entry.quick else entry.make()
        except UnavailableError as reason:
            print(f"{name:<13}skipped: {reason}")
            continue
        samples, python_samples = (3, 1) if quick else (entry.samples, entry.python_samples)
        cold, python = measure(row, samples, python_samples)
        warm = measure_warm(row, samples)
        bare = floor(name, row, samples) if has_floor else None
        print_row(name, row, cold, warm, python, bare, entry.goal)
        if options.parts:
            print_parts(cold, warm, python, bare)
    if "W8".startswith(wanted):
        for side in ("xxh3", "sha256", "python"):
            untouched, full = resident_bytes(side)
            goal = {"xxh3": "  (goal 8, 128)", "sha256": "  (goal 8, 144)", "python": ""}[side]
            print(
                f"{'W8 resident':<13}{side}: bytes per block untouched {untouched:.1f}, full {full:.1f}{goal}"
            )
    path = trace_path()
    if path is not None and "W6".startswith(wanted):
        prompts = read_prompts(path)
        for num_blocks, expected in list(HIT_RATES.items())[: 2 if options.quick else None]:
            rate = hit_rate(prompts, num_blocks)
            print(f"{'W6 hit rate':<13}{num_blocks} blocks: {rate:.4f} of tokens (expected {expected:.4f})")
    print(f"{time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
