"""The requests that run now, as columns that keep their rows.

Owns `Running`. Imports NumPy only. Invariant: rows 0..n are in use; a row that leaves is taken by the last one, so that
the others stay where they are (a step's block tables are kept up to date by row). Lengths are in tokens.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_REQUEST, _HANDLE, _STORED, _FINAL, _RESERVED, _ORDER = range(6)


class Running:
    """Growable columns: request, handle, tokens stored, tokens stored at the end, slots reserved, order."""

    def __init__(self) -> None:
        self.n = 0
        self._num_admitted = 0
        self._columns: Final = [np.empty(64, np.int64) for _ in range(6)]

    def _column(self, which: int) -> NDArray[np.int64]:
        return self._columns[which][: self.n]

    @property
    def request(self) -> NDArray[np.int64]:
        """Request numbers [n]; a view, as all columns are."""
        return self._column(_REQUEST)

    @property
    def handle(self) -> NDArray[np.int64]:
        """What the memory knows them by [n]."""
        return self._column(_HANDLE)

    @property
    def stored(self) -> NDArray[np.int64]:
        """Tokens whose K/V is stored [n]."""
        return self._column(_STORED)

    @property
    def final(self) -> NDArray[np.int64]:
        """Tokens stored at the last step [n]."""
        return self._column(_FINAL)

    @property
    def reserved(self) -> NDArray[np.int64]:
        """Slots that a reservation holds [n]; 0 under paging, where the manager knows."""
        return self._column(_RESERVED)

    def add(self, request: int, handle: int, stored: int, final: int, reserved: int) -> None:
        """Append a row. O(1) amortised."""
        if self.n == len(self._columns[0]):
            self._columns[:] = [np.concatenate([column, np.empty_like(column)]) for column in self._columns]
        row = (request, handle, stored, final, reserved, self._num_admitted)
        for column, value in zip(self._columns, row, strict=True):
            column[self.n] = value
        self.n += 1
        self._num_admitted += 1

    def newest(self) -> int:
        """The row that was admitted last."""
        return int(np.argmax(self._column(_ORDER)))

    def remove(self, rows: NDArray[np.int64]) -> None:
        """Take rows [m] out. O(m)."""
        for row in sorted(rows.tolist(), reverse=True):
            self.n -= 1
            for column in self._columns:
                column[row] = column[self.n]
