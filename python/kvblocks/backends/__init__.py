"""Choosing a backend by name.

Owns the table of names. Imports base at once and a backend's module only when it is asked for.
Invariant: importing this package imports nothing but NumPy and the standard library.
"""

import importlib
import os

from kvblocks.backends.base import Backend, Supported, Tail

__all__ = ["BACKENDS", "DEFAULT_BACKEND", "Backend", "Supported", "Tail", "get_backend"]

# name -> (module, class)
BACKENDS = {
    "numpy": ("kvblocks.backends.numpy", "NumpyBackend"),
    "cpu": ("kvblocks.backends.cpu", "CpuBackend"),
    "cupy": ("kvblocks.backends.cupy", "CupyBackend"),
}
DEFAULT_BACKEND = "cpu"


def get_backend(name: str | None = None) -> Backend:
    """The backend of that name; None asks KVBLOCKS_BACKEND of the environment, unless empty, then the default.

    Raises ValueError that lists the names, and TypeError for what is no name.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"backend: {type(name).__name__}, expected a name or None")
    source = "backend"
    if name is None:
        source, name = "KVBLOCKS_BACKEND", os.environ.get("KVBLOCKS_BACKEND") or DEFAULT_BACKEND
    if name not in BACKENDS:
        raise ValueError(f"{source} is {name!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    module, class_name = BACKENDS[name]
    backend: Backend = getattr(importlib.import_module(module), class_name)()
    return backend
