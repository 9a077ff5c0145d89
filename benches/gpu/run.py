"""Everything that a card can tell, in one command and at most eight minutes: ceilings, tests, graphs, the table.

    python -m kvblocks.gpu --prebuild cubins --arch sm_90      # before, on any machine
    KVBLOCKS_CUBINS=cubins python -m benches.gpu.run --output results

Writes result.json and result.md. A part that fails is named there with its reason and does not stop the others, not
even by a fault that takes the device from the process: another one goes on. The exit status is 1 if any part failed.
--dry-run prints the table's floors and needs nothing.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from .cases import CASES, REFERENCE_COPY, markdown

ROOT = Path(__file__).resolve().parents[2]
# Seconds of the whole; what would begin later is left out and named.
BUDGET_S = 450
TESTS_S = 200
NCU_S = 60


class Report:
    """What was found so far; parts run under it, within a deadline."""

    def __init__(self, output: Path, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.output = output
        self.results: dict[str, Any] = {"date": date.today().isoformat(), "failures": {}, "attempted": []}
        self._deadline = deadline
        self._clock = clock

    def resume(self) -> None:
        """Go on with what another process has found so far."""
        self.results = json.loads((self.output / "result.json").read_text())

    def remaining(self) -> float:
        """Seconds that are left."""
        return self._deadline - self._clock()

    def part(self, name: str, run: Callable[[], Any]) -> Any:
        """What a part returns, or None where it failed or there was no time, which is noted; saves what there is."""
        if self.remaining() <= 0:
            self.results["failures"][name] = "no time was left"
            return None
        found = None
        try:
            found = run()
        except Exception as error:  # noqa: BLE001  a part must not take the others with it
            self.results["failures"][name] = f"{type(error).__name__}: {error}"
        self.save()
        return found

    def save(self) -> None:
        """Write both files."""
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / "result.json").write_text(json.dumps(self.results, indent=1) + "\n")
        (self.output / "result.md").write_text(markdown(self.results))


def machine() -> dict[str, str]:
    """Names and versions; raises RuntimeError that says what is missing."""
    from kvblocks import gpu

    readiness = gpu.check()
    if not readiness.is_ready:
        raise RuntimeError("; ".join(readiness.problems))
    torch = importlib.import_module("torch")
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "found": ", ".join(readiness.found),
        "commit": _output(["git", "rev-parse", "--short", "HEAD"]) or "unknown",
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or "unknown",
    }


def run_tests(seconds: float) -> str:
    """The closing line of the tests that need a device; raises RuntimeError if they fail or none passes."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--no-header"]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=max(1, seconds), check=False
    )
    summary = closing_line(run.stdout)
    if run.returncode != 0 or " passed" not in f" {summary}":
        raise RuntimeError(f"{summary or 'no summary'}\n{run.stdout[-3000:]}{run.stderr[-1000:]}")
    return summary


def closing_line(text: str) -> str:
    """Pytest's last line that counts tests, or ""."""
    lines = [line for line in text.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    return lines[-1].strip("= ") if lines else ""


def ncu_summary(seconds: float) -> str:
    """What Nsight Compute says of the first decode; raises RuntimeError where it may not look."""
    tool = shutil.which("ncu")
    if tool is None:
        raise RuntimeError("ncu is not installed")
    metrics = (
        "gpu__time_duration.sum,dram__bytes_read.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,"
        "sm__warps_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread"
    )
    command = [tool, "--clock-control", "none", "--metrics", metrics, "--kernel-name", "regex:kvb_paged"]
    command += ["--launch-count", "2", sys.executable, "-m", "benches.gpu.run", "--one-decode"]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=max(1, seconds), check=False
    )
    kept = [line.strip() for line in run.stdout.splitlines() if "__" in line or "kvb_" in line]
    if run.returncode != 0 or not kept:
        raise RuntimeError(f"ncu gave {run.returncode}: {run.stdout[-500:]}{run.stderr[-500:]}")
    return "; ".join(re.sub(r"\s+", " ", line) for line in kept)


def measure(report: Report, *, with_tests: bool) -> bool:
    """Every part in turn, what others depend on first; False if the device has to be had anew for those that are left.

    A kernel that faults leaves its process no device: a process that is told to resume goes on with the next part.
    """
    found = report.part("machine", machine)
    device = found and report.part("torch", lambda: importlib.import_module("benches.gpu.device"))
    if device is None:
        return True
    report.results |= found
    for name, run in parts(report, device, with_tests=with_tests).items():
        if name in report.results["attempted"]:
            continue
        report.results["attempted"].append(name)
        if report.part(name, run) is None and not device.is_alive():
            return False
    return True


def parts(report: Report, device: Any, *, with_tests: bool) -> dict[str, Callable[[], Any]]:
    """What is measured, by name; each part puts what it finds into the results."""
    results = report.results

    def ceilings() -> bool:
        results.update(device.ceilings())
        return True

    def graph() -> str:
        told = str(device.graph_check())
        results["graph capture and replay"] = told
        if told != "ok":
            raise RuntimeError(told)
        return told

    def host() -> bool:
        for name, cost in device.host_us().items():
            results[f"host us of an attention call, {name}"] = round(cost, 2)
        return True

    def into(key: str, name: str, run: Callable[[], Any]) -> Callable[[], Any]:
        def found() -> Any:
            each = run()
            if each:
                results.setdefault(key, {})[name] = each
            return each or True

        return found

    def set_to(key: str, run: Callable[[], Any]) -> Callable[[], Any]:
        def found() -> Any:
            results[key] = run()
            return results[key]

        return found

    every: dict[str, Callable[[], Any]] = {
        "ceilings": ceilings,
        "graph": graph,
        "host": host,
    }
    every |= {case.name: into("cases_us", case.name, partial(device.run_case, case)) for case in CASES}
    if with_tests:
        every["tests"] = set_to("tests", lambda: run_tests(min(TESTS_S, report.remaining())))
    every |= {
        f"others: {case.name}": into("others_us", case.name, partial(device.others, case)) for case in CASES
    }
    every["ncu"] = set_to("ncu", lambda: ncu_summary(min(NCU_S, report.remaining())))
    return every


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.gpu.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("gpu-result"), help="folder of the result")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds (default: %(default)s)")
    parser.add_argument("--no-tests", action="store_true", help="leave the tests out")
    parser.add_argument("--dry-run", action="store_true", help="print the floors; needs no device")
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one-decode", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.dry_run:
        for case in CASES:
            floor = case.floor_us(REFERENCE_COPY)
            print(f"{case.name:<42}{case.num_bytes / 1e6:9.1f} MB{floor:9.1f} us at 4.3 TB/s")
        return 0
    if options.one_decode:
        device = importlib.import_module("benches.gpu.device")
        device.Pool("bfloat16", 64, 8192).decode()
        importlib.import_module("torch").cuda.synchronize()
        return 0
    report = Report(options.output, time.monotonic() + options.budget)
    if options.resume:
        report.resume()
    if not measure(report, with_tests=not options.no_tests):
        anew = ["--resume", "--output", str(options.output), "--budget", str(report.remaining())]
        anew += ["--no-tests"] * options.no_tests
        os.execv(sys.executable, [sys.executable, "-m", "benches.gpu.run", *anew])
    print((options.output / "result.md").read_text())
    return 1 if report.results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
