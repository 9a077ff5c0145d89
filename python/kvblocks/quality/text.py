"""The text that formats are measured on: the project's own, or a file.

Owns the cutting into windows. Imports the standard library, NumPy and report.
Invariant: windows come from the beginning of the text, and the tokens of a calibration from its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from kvblocks.quality.model import IDS
from kvblocks.report import UserError

Encode = Callable[[str], Sequence[int]]


def own_text() -> str:
    """Three annual messages of presidents of the United States (1863, 1926, 1862), in the public domain: 149 kB."""
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


def cut(text: str, encode: Encode, num_windows: int, window_tokens: int, *, from_end: bool = False) -> IDS:
    """The first (or the last) windows of a text, int64 [num_windows, window_tokens]; UserError if it is too short."""
    ids = np.array(encode(text), np.int64)
    needed = num_windows * window_tokens
    if len(ids) < needed:
        raise UserError(
            f"the text has {len(ids)} tokens: {num_windows} windows of {window_tokens} tokens need {needed}"
        )
    part = ids[len(ids) - needed :] if from_end else ids[:needed]
    return part.reshape(num_windows, window_tokens)
