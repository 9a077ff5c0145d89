"""What `import kvblocks` costs beside `import numpy`, which every user pays anyway.

Fresh interpreters alternate between `import numpy` and `import numpy, kvblocks`; the medians of whole processes are
compared, in wall time and in CPU time. Exit status 1 if kvblocks adds more CPU time than the limit: on a busy machine
wall time measures the others.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from typing import NamedTuple


class Cost(NamedTuple):
    """Milliseconds of one interpreter, start and end included."""

    wall_ms: float
    cpu_ms: float


def cost(code: str) -> Cost:
    """Run `code` in an interpreter of its own."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Cost(wall * 1e3, cpu * 1e3)


def main() -> int:
    """Measure, print, compare with the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=25, help="interpreters of each kind")
    parser.add_argument("--limit-ms", type=float, default=30.0, help="most CPU time that kvblocks may add")
    options = parser.parse_args()

    alone, both = "import numpy", "import numpy, kvblocks"
    cost(both)  # writes the bytecode caches
    rounds = [(cost(alone), cost(both)) for _ in range(options.rounds)]
    added = Cost(0.0, 0.0)
    for field in Cost._fields:
        numpy_ms, both_ms = (
            statistics.median(getattr(c, field) for c in column) for column in zip(*rounds, strict=True)
        )
        added = added._replace(**{field: both_ms - numpy_ms})
        print(
            f"{field.removesuffix('_ms'):>4} time: import numpy {numpy_ms:.1f} ms, with kvblocks {both_ms:.1f} ms, "
            f"{both_ms - numpy_ms:+.1f} ms, ratio {both_ms / numpy_ms:.3f}"
        )
    print(f"medians of {options.rounds} interpreters each; limit {options.limit_ms:.0f} ms of CPU time")
    return int(added.cpu_ms > options.limit_ms)


if __name__ == "__main__":
    sys.exit(main())
