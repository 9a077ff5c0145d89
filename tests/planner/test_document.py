"""The code of docs/planner.md prints what it says."""

import contextlib
import io
import re
from pathlib import Path


def test_the_example_from_python() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "planner.md"
    ((code, expected),) = re.findall(
        r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, page, "exec"), {})
    assert printed.getvalue() == expected
