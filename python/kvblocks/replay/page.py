"""The report as one HTML page that needs nothing else: tables, figures as inline SVG, the data.

Owns `write_page`. Imports report and plots. Invariant: no reference to anything outside the page.
"""

from __future__ import annotations

import html
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import kvblocks.report as report

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff }
body { max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
td { font-variant-numeric: tabular-nums }
th { border-bottom: 2px solid #555; vertical-align: bottom }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff }
tbody tr:hover td { background: #eef5fa }
svg { max-width: 100%; height: auto }
.note { color: #555; max-width: 60rem }
""".strip()


# A table of more columns is shown on its side.
_MAX_COLUMNS: Final = 12


def svg(draw: Callable[[Path], None]) -> str:
    """What `draw` saves, as an element to stand in a page: no declaration, no metadata, no namespaces."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figure.svg")
        draw(path)
        text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    elif isinstance(value, int) and not isinstance(value, bool):
        value = f"{value:,}"
    return html.escape(str(value))


def _table(records: Sequence[Mapping[str, Any]]) -> str:
    """The fields that somebody has a value of: a column each, or a row each where they are many."""
    names = [name for name in records[0] if any(record[name] not in (None, False) for record in records)]
    rows: list[list[object]] = [[name.replace("_", " ") for name in names]]
    rows += [[record[name] for name in names] for record in records]
    if len(names) > _MAX_COLUMNS:
        rows = [list(row) for row in zip(*rows, strict=True)]
    head, *body = (
        ["".join(f"<{tag}>{_cell(cell)}</{tag}>" for cell in row) for tag in ("th", "td")] for row in rows
    )
    lines = "\n".join(f"<tr>{cells}</tr>" for _, cells in body)
    return f"<table><thead><tr>{head[0]}</tr></thead><tbody>\n{lines}\n</tbody></table>"


def write_page(
    path: str | Path,
    title: str,
    lines: Iterable[str],
    sections: Iterable[tuple[str, Sequence[Mapping[str, Any]], Callable[[Path], None] | None]],
    data: object,
) -> None:
    """Write the page: lines of introduction; sections (heading, records of a table, figure); the data as JSON."""
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *(f'<p class="note">{html.escape(line)}</p>' for line in lines),
    ]
    for number, (heading, records, draw) in enumerate(sections):
        parts.append(f"<h2>{html.escape(heading)}</h2>")
        if draw is not None:
            # The ids inside figures, such as clip paths, must differ between figures.
            parts.append(re.sub(r'((?:id="|href="#|url\(#))', rf"\g<1>f{number}-", svg(draw)))
        if records:
            parts.append(_table(records))
    # No "<" at all: neither "</script>" nor "<!--" may stand in a script element.
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    parts.append(f'<script type="application/json" id="data">{embedded}</script>')
    report.write_text(
        path,
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>\n{_STYLE}\n</style>\n</head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n",
    )
