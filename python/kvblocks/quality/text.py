"""The text that formats are measured on: the project's own, or a file.

Owns the cutting into windows. Imports the standard library and report.
Invariant: windows follow one another and overlap nowhere.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np

from kvblocks.quality.model import IDS
from kvblocks.report import UserError


def own_text() -> str:
    """Four annual messages of presidents of the United States (1863, 1926, 1862, 1913): 170 kB in the public domain."""
    return (files("kvblocks.quality") / "prose.txt").read_text(encoding="utf-8")


def read_text(path: str | Path | None) -> str:
    """The text of a UTF-8 file, or the project's own; UserError where it cannot be read."""
    if path is None:
        return own_text()
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"is no UTF-8 text: {error}"
        raise UserError(f"{path}: {reason}") from error


def cut(
    ids: IDS, num_windows: int, window_tokens: int, *, start: tuple[int, ...] = (), what: str = "text"
) -> tuple[IDS, IDS]:
    """The first windows of a text's ids, int64 [num_windows, window_tokens], and the ids after them.

    Each window begins with `start`. UserError where that fills it, and where the text is too short.
    """
    of_text = window_tokens - len(start)
    if of_text < 1:
        raise UserError(
            f"a window of {window_tokens} tokens has no room for text: {len(start)} begin every sequence"
        )
    needed = num_windows * of_text
    if len(ids) < needed:
        raise UserError(
            f"the {what} has {len(ids)} tokens: {num_windows} windows of {window_tokens} tokens need {needed}"
        )
    starts = np.tile(np.array(start, np.int64), (num_windows, 1))
    return np.hstack([starts, ids[:needed].reshape(num_windows, of_text)]), ids[needed:]
