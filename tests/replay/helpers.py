"""Small traces, and where the full ones are."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvblocks.traces.trace import Trace


def make_trace(
    requests: Sequence[tuple[float, int, int, Sequence[int]]],
    tokens_per_id: int = 0,
    session: Sequence[int] | None = None,
) -> Trace:
    """A trace of (arrival, prompt tokens, output tokens, hash ids), in order."""
    ids = [item for row in requests for item in row[3]]
    return Trace(
        "test",
        np.array([row[0] for row in requests], np.float64),
        np.array([row[1] for row in requests], np.int32),
        np.array([row[2] for row in requests], np.int32),
        tokens_per_id,
        np.array(ids, np.int32),
        np.cumsum([0, *(len(row[3]) for row in requests)]).astype(np.int64),
        None if session is None else np.array(session, np.int32),
    )


def full_trace(name: str) -> Path:
    """A recorded trace; a skip where no folder is named, a failure where the folder has no such file."""
    folder = os.environ.get("KVBLOCKS_TRACES")
    if not folder:
        pytest.skip("KVBLOCKS_TRACES names no folder with recorded traces")
    path = Path(folder, name)
    assert path.is_file(), f"KVBLOCKS_TRACES has no {name}"
    return path
