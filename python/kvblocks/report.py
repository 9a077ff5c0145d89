"""What the commands share in how they speak: the error of a user's input, tables, files, progress, figures.

Owns `UserError`, the exit status of an interrupted command, and the use of rich and matplotlib, both of the extra
`tools` and imported when first used. Imports the standard library only. Results go to standard
output, progress to standard error.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

# The qualitative palette of Okabe and Ito, https://jfly.uni-koeln.de/color/, without its yellow, which is too light on
# white: its colours stay apart under the common forms of colour blindness. Line styles tell series apart in grey too.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LINE_STYLES: Final = ("-", "--", "-.", ":")
# A sequential colour map that is even in lightness and safe for colour blind readers, for grids.
COLOUR_MAP: Final = "cividis"
FIGURE_SUFFIXES: Final = (".png", ".svg", ".pdf")

_STYLE: Final[dict[str, Any]] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 120,
    "font.size": 11,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "kvblocks",
}
# Exit status of a command that was interrupted: 128 and the number of SIGINT, as shells count it.
INTERRUPTED: Final = 130
# Characters a line where the output is no terminal.
_PLAIN_WIDTH: Final = 120


class UserError(Exception):
    """Input that a command cannot use: one sentence with the file, line, field or option, and what was expected."""


def require(module: str) -> ModuleType:
    """Import a module of the extra `tools`; a UserError with its package and the pip command where it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{module.split('.')[0]} is not installed: pip install 'kvblocks[tools]'") from error


def format_bytes(num_bytes: float) -> str:
    """A size in the largest binary unit of which it holds at least one, such as "2.00 GiB"; exact below 1 KiB."""
    sign, size = ("-" if num_bytes < 0 else ""), abs(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:,.0f} B" if unit == "B" else f"{sign}{size:,.2f} {unit}"
        size /= 1024
    return f"{sign}{size:,.2f} TiB"


def write_line(text: str = "") -> None:
    """Write one line to standard output."""
    sys.stdout.write(text + "\n")


def print_table(
    title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], *, note: str = "", num_left: int = 1
) -> None:
    """Print a table to standard output, its first `num_left` columns flush left and the others flush right.

    A header may hold a line break, with the unit on its second line. Needs the extra `tools`.
    """
    text = require("rich.text").Text
    table = require("rich.table").Table(box=require("rich.box").SIMPLE_HEAD)
    for column, header in enumerate(headers):
        table.add_column(
            text(header),
            justify="left" if column < num_left else "right",
            vertical="bottom",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(text, row))
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    console = require("rich.console").Console(file=sys.stdout, width=width)
    # Captured, as a console that writes by itself ends the process with status 1 where the reader has gone.
    with console.capture() as captured:
        console.print(text(title, style="bold"))
        console.print(table)
        if note:
            console.print(text(note, style="italic"))
        console.print()
    sys.stdout.write(captured.get())


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to a file, or to standard output where the path is "-"; a UserError where that fails."""
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror}") from error


def write_json(path: str | Path, value: object) -> None:
    """Write a value as indented JSON, as `write_text` does; infinity and NaN raise ValueError, as JSON has neither."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextlib.contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show on standard error how much of `total` is done and when it will be, if that is a terminal.

    Yields the function that is told how much more is done. Needs the extra `tools` only on a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    rich = require("rich.progress")
    bar = rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.TimeRemainingColumn(),
        console=require("rich.console").Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)


def check_figure(path: str | Path) -> None:
    """Raise UserError unless the ending of `path` names a format that figures are saved in."""
    if Path(path).suffix not in FIGURE_SUFFIXES:
        raise UserError(f"{path}: expected a name that ends in {', '.join(FIGURE_SUFFIXES)}")


@contextlib.contextmanager
def figure(
    path: str | Path, *, width_inches: float = 9.0, height_inches: float = 5.5, **subplots: Any
) -> Iterator[Any]:
    """Yield matplotlib axes (an array where `subplots` ask for it, as `Figure.subplots` does), then save the figure.

    The ending of `path` names the format: .png, .svg or .pdf. A UserError where that or the file is impossible.
    """
    check_figure(path)
    matplotlib = require("matplotlib")
    with matplotlib.rc_context(_STYLE):
        canvas = require("matplotlib.figure").Figure((width_inches, height_inches), layout="constrained")
        yield canvas.subplots(**subplots)
        try:
            canvas.savefig(path)
        except OSError as error:
            raise UserError(f"{path}: cannot write: {error.strerror}") from error


def series_style(index: int) -> dict[str, Any]:
    """Colour and line style of series number `index` (from 0): 28 are told apart, the first 7 by colour alone."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)],
    }
