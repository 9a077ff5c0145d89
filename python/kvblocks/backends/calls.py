"""The calls of the host backends that are running, and the memory of each: what makes them safe from any thread.

Owns `holding`. Imports NumPy and the standard library.
Invariant: of two calls that run at once, neither writes memory that the other touches. A call waits for those that
came before it and collide with it, and for no others, so nobody waits for ever.
"""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Iterable[NDArray[Any] | None]


class _Call:
    """The arrays that a call reads and those that it writes."""

    def __init__(self, reads: Arrays, writes: Arrays) -> None:
        self.reads = [array for array in reads if array is not None]
        self.writes = [array for array in writes if array is not None]

    def collides(self, other: "_Call") -> bool:
        return (
            _meet(self.writes, other.writes)
            or _meet(self.writes, other.reads)
            or _meet(self.reads, other.writes)
        )


def _meet(some: list[NDArray[Any]], others: list[NDArray[Any]]) -> bool:
    """Whether the memory from the first to the last byte of an array meets that of another."""
    return any(np.may_share_memory(a, b) for a in some for b in others)


# In the order in which they came; the condition guards the list and tells of its changes.
_calls: list[_Call] = []
_changed = threading.Condition(threading.Lock())


@contextmanager
def holding(*, reads: Arrays, writes: Arrays) -> Iterator[None]:
    """Run a block once no earlier call collides with it. Arrays may be views, and None is no array."""
    call = _Call(reads, writes)
    try:
        with _changed:
            _calls.append(call)
            while any(call.collides(other) for other in takewhile(lambda other: other is not call, _calls)):
                _changed.wait()
        yield
    finally:
        with _changed:
            if call in _calls:  # not if it was interrupted on its way in
                _calls.remove(call)
            if _calls:
                _changed.notify_all()


def _forget_other_threads() -> None:
    """In a process made by fork() the calls of the parent's other threads never end."""
    global _changed
    _calls.clear()
    _changed = threading.Condition(threading.Lock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
