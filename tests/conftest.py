"""What all suites share: the depth of property tests, the README's example, and `--require-passed`."""

import os
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvblocks.gpu import check

# No deadline: a slow machine is not a failure. "ci" digs deeper, and prints what reproduces a failure.
settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), max_examples=250, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def readme_example() -> tuple[str, str]:
    """The code of the README's example, and what it prints."""
    readme = Path(__file__).resolve().parents[1] / "README.md"
    blocks = re.findall(
        r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == 1
    code, printed = blocks[0]
    return code, printed


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that need a GPU say what is missing where there is none."""
    if item.get_closest_marker("gpu") is not None:
        problems = _gpu_problems()
        if problems:
            pytest.skip("; ".join(problems))


@cache
def _gpu_problems() -> tuple[str, ...]:
    return check().problems


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-passed",
        type=int,
        default=0,
        metavar="N",
        help="fail unless at least N tests passed, so that a suite that was skipped as a whole is no success",
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    passed = len(terminalreporter.stats.get("passed", []))
    required: int = config.getoption("--require-passed")
    if passed < required:
        terminalreporter.write_line(f"{passed} tests passed, at least {required} required", red=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if hasattr(session.config, "workerinput"):
        return  # a worker of xdist: the process that collects the results counts them
    assert isinstance(reporter, pytest.TerminalReporter)
    if len(reporter.stats.get("passed", [])) < session.config.getoption("--require-passed"):
        session.exitstatus = exitstatus or pytest.ExitCode.TESTS_FAILED
