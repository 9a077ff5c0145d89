"""Which rows of the speed table this machine can tell apart: each is measured twice, and noisy ones are marked.

Run it from the checkout, on an idle machine: python -m benches.noise [ROW ...]
"""

import argparse
from collections.abc import Callable

from .benchmarks.row import Row, measure
from .benchmarks.rows import ROWS, UnavailableError

LIMIT = 0.05


def run_twice(make: Callable[[], Row], samples: int) -> tuple[float, float, str]:
    """Typical cost of a row in two runs, each on a workload made anew, and its unit."""
    rows = [make() for _ in range(2)]
    first, second = (measure(row, samples, 1)[0].total(row) for row in rows)
    return first, second, rows[0].unit


def is_noisy(first: float, second: float) -> bool:
    """Whether two runs of one commit differ by 5 % or more of the lesser."""
    return abs(first - second) >= LIMIT * min(first, second)


def main() -> None:
    """Measure the rows asked for, or all, and print them as they come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"beginnings of row names: {', '.join(ROWS)}")
    wanted = tuple(parser.parse_args().rows) or ("",)
    print(f"{'row':<13}{'unit':<9}{'first':>9}{'second':>9}{'differ':>9}")
    for name, entry in ROWS.items():
        if not name.startswith(wanted):
            continue
        try:
            first, second, unit = run_twice(entry.make, entry.samples)
        except UnavailableError as reason:
            print(f"{name:<13}skipped: {reason}")
            continue
        mark = "  noisy" if is_noisy(first, second) else ""
        differ = abs(first - second) / min(first, second)
        print(f"{name:<13}{unit:<9}{first:9.2f}{second:9.2f}{differ:9.1%}{mark}", flush=True)


if __name__ == "__main__":
    main()
