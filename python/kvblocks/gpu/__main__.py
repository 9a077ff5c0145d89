"""`python -m kvblocks.gpu`: what a GPU needs and this machine lacks; with --prebuild, kernels for another machine."""

import argparse
import sys
from pathlib import Path

from kvblocks.gpu.readiness import check
from kvblocks.kernels.cubins import prebuild


def main() -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvblocks.gpu", description=__doc__)
    parser.add_argument(
        "--prebuild",
        type=Path,
        metavar="FOLDER",
        help="compile every kernel into a folder for KVBLOCKS_CUBINS",
    )
    parser.add_argument("--arch", default="sm_90", help="what --prebuild compiles for (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.prebuild is not None:
        manifest = prebuild(arguments.prebuild, arguments.arch)
        sys.stdout.write(f"{len(manifest['kernels'])} kernels for {arguments.arch} in {arguments.prebuild}\n")
        return 0
    readiness = check()
    sys.stdout.write(f"{readiness}\n")
    return 0 if readiness.is_ready else 1


if __name__ == "__main__":
    sys.exit(main())
