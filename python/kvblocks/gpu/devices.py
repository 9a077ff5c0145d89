"""Where direct calls run: one device and one library, with the plans of what was called before.

Owns `Device` and `device_for`. Imports plans and libraries.
Invariant: a plan is found by everything that went into it but addresses; caches of one shape share theirs.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final, NamedTuple
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends.foreign import look_at, stream_address
from kvblocks.gpu.libraries import Library, library_of
from kvblocks.gpu.plans import ALIGNMENT, Plan, Planner
from kvblocks.layout import Array, LayerCache

# Prefill comes in as many shapes as there are lengths: the oldest plans go.
_MOST_PLANS: Final = 512


class _Known(NamedTuple):
    """A cache that was met: a number for all that look alike, and its addresses."""

    cache: "ref[LayerCache]"
    number: int
    addresses: list[int]
    views: list[NDArray[Any]]


class Device:
    """Plans calls for one device and one library, and repeats them. Any thread may call."""

    def __init__(self, library: Library, index: int, split_size: int | None = None) -> None:
        self.library = library
        self.index = index
        self.memory = library.memory(index)
        self.planner = Planner(library.launcher(index), self.memory, split_size=split_size)
        self._plans: dict[object, Plan] = {}
        self._known: dict[int, _Known] = {}
        self._numbers: dict[object, int] = {}
        self._changing = threading.Lock()

    def run(
        self,
        call: Callable[..., Any],
        names: Sequence[str],
        arrays: Sequence[Array | None],
        options: tuple[object, ...] = (),
        *,
        cache: LayerCache | None = None,
        pool: tuple[LayerCache, ...] = (),
        stream: object = None,
        workspace: Array | None = None,
    ) -> Any:
        """Run `call(backend, [cache or pool,] *arrays, *options)` on a stream; returns what it returns.

        call: a function that lives as long as the process. names: of the arrays, for errors. cache: one that any other
        of its shape may stand in for; pool: caches whose addresses the call itself stores. stream: see
        `stream_address`; None is the library's current one. workspace: where temporary arrays go, else they are new.
        """
        library = self.library
        current = library.current_stream(self.index)
        address = current if stream is None else stream_address(stream)
        if address != current:
            with library.on(address, self.index):
                return self._run(call, names, arrays, options, cache, pool, address, workspace)
        return self._run(call, names, arrays, options, cache, pool, address, workspace)

    def _run(
        self,
        call: Callable[..., Any],
        names: Sequence[str],
        arrays: Sequence[Array | None],
        options: tuple[object, ...],
        cache: LayerCache | None,
        pool: tuple[LayerCache, ...],
        stream: int,
        workspace: Array | None,
    ) -> Any:
        look = self.library.look
        addresses: list[int] = []
        key: list[object] = [call, options]
        for array in arrays:
            if array is None:
                addresses.append(0)
                key.append(None)
            else:
                address, signature = look(array)
                addresses.append(address)
                key.append(signature)
        if cache is not None:
            known = self._look_at_cache(cache)
            addresses += known.addresses
            key.append(known.number)
        elif pool:
            key.append(tuple(id(each) for each in pool))
        found = tuple(key)
        plan = self._plans.get(found)
        if plan is None or (pool and not plan.is_for(pool)):
            plan = self._make(found, call, names, arrays, options, cache, pool, stream)
        memory: Any = self.memory if workspace is None else _Carver(workspace)
        held = (*arrays, *known.views) if cache is not None else arrays
        address_of = self.library.address_of if workspace is None else _address_of_carved
        return plan.run(memory, address_of, held, addresses, stream)

    def _make(
        self,
        key: object,
        call: Callable[..., Any],
        names: Sequence[str],
        arrays: Sequence[Array | None],
        options: tuple[object, ...],
        cache: LayerCache | None,
        pool: tuple[LayerCache, ...],
        stream: int,
    ) -> Plan:
        describe, index = self.library.describe, self.index
        views = [
            None if array is None else describe(name, array, index)
            for name, array in zip(names, arrays, strict=True)
        ]
        guard = self.library.planning_on(stream, index) if stream else nullcontext()
        with guard:
            if cache is not None:
                plan = self._plan_for_any_cache(call, views, options, cache)
            else:
                # The pool's caches are looked at again where a plan is found: an id may be another cache's by then.
                bound = (
                    (lambda backend, *placed: call(backend, pool, *placed, *options))
                    if pool
                    else (lambda backend, *placed: call(backend, *placed, *options))
                )
                plan = self.planner.plan(views, bound)
                plan.pool = [ref(each) for each in pool]
        with self._changing:
            while len(self._plans) >= _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        return plan

    def _plan_for_any_cache(
        self,
        call: Callable[..., Any],
        views: list[NDArray[Any] | None],
        options: tuple[object, ...],
        cache: LayerCache,
    ) -> Plan:
        known = self._look_at_cache(cache)
        names = [name for name, _ in cache.named_arrays]
        num_arguments = len(views)

        def placed(backend: Any, *arrays: Any) -> Any:
            parts = {name: each.view for name, each in zip(names, arrays[num_arguments:], strict=True)}
            standing = LayerCache(
                format=cache.format, block_size=cache.block_size, layout=cache.layout, **parts
            )
            return call(backend, standing, *arrays[:num_arguments], *options)

        return self.planner.plan([*views, *known.views], placed)

    def _look_at_cache(self, cache: LayerCache) -> _Known:
        known = self._known.get(id(cache))
        if known is not None and known.cache() is cache:
            return known
        if not isinstance(cache, LayerCache):
            raise TypeError(f"cache: {type(cache).__name__}, expected a LayerCache")
        views = [self.library.describe(name, array, self.index) for name, array in cache.named_arrays]
        looks = tuple(
            (view.shape, view.strides, view.dtype.str, view.ctypes.data % ALIGNMENT) for view in views
        )
        names = tuple(name for name, _ in cache.named_arrays)
        look = (str(cache.format), cache.block_size, cache.layout, names, looks)
        with self._changing:
            number = self._numbers.setdefault(look, len(self._numbers))
            gone = id(cache)
            known = _Known(
                ref(cache, lambda _: self._known.pop(gone, None)),
                number,
                [view.ctypes.data for view in views],
                views,
            )
            self._known[id(cache)] = known
        return known


class _Carved(NamedTuple):
    address: int


class _Carver:
    """Temporary arrays in a workspace, one after the other."""

    def __init__(self, workspace: Array) -> None:
        self._seen = look_at("workspace", workspace)
        self._used = -self._seen.address % ALIGNMENT

    def empty(self, shape: Sequence[int], dtype: Any) -> _Carved:
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        start, self._used = self._used, self._used + num_bytes
        if self._used > self._seen.nbytes:
            raise ValueError(
                f"workspace: {self._seen.nbytes} bytes, the call needs {num_bytes + ALIGNMENT - 1} to be sure"
            )
        return _Carved(self._seen.address + start)

    def plain(self, array: Array) -> _Carved:
        raise ValueError(
            "workspace: an argument that is not contiguous would have to be copied, which it cannot hold"
        )


def _address_of_carved(array: _Carved) -> int:
    return array.address


_DEVICES: Final[dict[tuple[Library, int, int | None], Device]] = {}


def device_for(array: object, split_size: int | None = None) -> Device:
    """Where a call with this array runs. Raises TypeError for what is no array on a GPU."""
    library = library_of(array)
    key = library, library.device_of(array), split_size
    device = _DEVICES.get(key)
    if device is None:
        device = _DEVICES.setdefault(key, Device(*key))
    return device
