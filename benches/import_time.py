"""What `import kvblocks` costs beside `import numpy`, which every user pays anyway.

Fresh interpreters alternate between `import numpy` and `import numpy, kvblocks`, each timed as a process;
the medians are compared. Exit status 1 if kvblocks adds more than the limit.
"""

import argparse
import statistics
import subprocess
import sys
import time


def process_ms(code: str) -> float:
    """Wall time of one interpreter that runs `code`, start and end included."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - start) * 1e3


def main() -> int:
    """Measure, print, compare with the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=25, help="interpreters of each kind")
    parser.add_argument("--limit-ms", type=float, default=30.0, help="most that kvblocks may add")
    options = parser.parse_args()

    alone, both = "import numpy", "import numpy, kvblocks"
    process_ms(both)  # writes the bytecode caches
    rounds = [(process_ms(alone), process_ms(both)) for _ in range(options.rounds)]
    numpy_ms, both_ms = (statistics.median(column) for column in zip(*rounds, strict=True))
    added_ms = both_ms - numpy_ms
    print(
        f"import numpy {numpy_ms:.1f} ms, with kvblocks {both_ms:.1f} ms: "
        f"{added_ms:+.1f} ms, ratio {both_ms / numpy_ms:.3f} "
        f"(medians of {options.rounds} interpreters; limit {options.limit_ms:.0f} ms)"
    )
    return int(added_ms > options.limit_ms)


if __name__ == "__main__":
    sys.exit(main())
