"""The README's example runs as printed, and its commands and links exist."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_prints_what_the_readme_says(readme_example: tuple[str, str]) -> None:
    code, expected = readme_example
    assert len(code.splitlines()) <= 14
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == expected


@pytest.mark.parametrize(
    "document",
    ["README.md", "CONTRIBUTING.md", "docs/design.md", "docs/layout.md", "docs/planner.md", "docs/replay.md"],
)
def test_relative_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize(("document", "at_least"), [("README.md", 2), ("CONTRIBUTING.md", 8)])
def test_make_targets_named_in_the_documents_exist(document: str, at_least: int) -> None:
    named = set(re.findall(r"^make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert len(named) >= at_least
    assert named - targets == set()
