"""Where direct calls run: the arrays of one library, with the plans of what was called before.

Owns `Dispatcher` and `dispatcher_for`. Imports plans, scratch and libraries.
Invariant: a plan is found by everything that went into it but addresses; caches of one shape share theirs. Addresses
are written and launched by one thread at a time.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final, NamedTuple
from weakref import ref

from numpy.typing import NDArray

from kvblocks.backends.foreign import look_at, stream_address
from kvblocks.gpu.libraries import Library, library_of
from kvblocks.gpu.patches import ALIGNMENT
from kvblocks.gpu.plans import Plan, Planner
from kvblocks.gpu.scratch import Scratch
from kvblocks.layout import Array, LayerCache

# Prefill comes in as many shapes as there are lengths: the oldest plans go.
_MOST_PLANS: Final = 512


# For calls that take no cache.
_NO_CACHE: Final = object()


class _Known(NamedTuple):
    """A cache that was met: a number for all that look alike on one device, and its addresses."""

    cache: "ref[LayerCache]"
    number: int
    addresses: list[int]
    views: list[NDArray[Any]]


class Dispatcher:
    """Plans calls for the arrays of one library, and repeats them. Any thread may call."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._look = library.look
        self._current_stream = library.current_stream
        self._planners: dict[int, Planner] = {}
        self._scratch: dict[int, Scratch] = {}
        self._plans: dict[object, Plan] = {}
        self._known: dict[int, _Known] = {}
        self._numbers: dict[object, int] = {}
        self._captured: set[Plan] = set()
        self._changing, self._launching = threading.Lock(), threading.Lock()

    def run(
        self,
        call: Callable[..., Any],
        names: Sequence[str],
        arrays: tuple[Array | None, ...],
        options: tuple[object, ...] = (),
        cache: object = _NO_CACHE,
        pool: tuple[LayerCache, ...] = (),
        stream: object = None,
        workspace: Array | None = None,
    ) -> Any:
        """Run `call(backend, [cache or pool,] *arrays, *options)` on a stream; returns what it returns.

        call: a function that lives as long as the process. names: of the arrays, for errors; the first array says which
        device. cache: one that any other of its shape may stand in for; pool: caches whose addresses the call itself
        stores. stream: see `stream_address`; None is the library's current one. workspace: where partial results go.
        """
        address = None if stream is None else stream_address(stream)
        addresses, looks = self._look(names, arrays, address)
        known = None
        if cache is not _NO_CACHE:
            known = self._known.get(id(cache))
            if known is None or known.cache() is not cache:
                known = self._meet(cache, self.library.device_of(names[0], arrays[0]))
            addresses += known.addresses
            key: object = (call, options, known.number, looks)
        else:
            key = (call, options, tuple(map(id, pool)), looks)
        try:
            plan = self._plans.get(key)
        except TypeError:  # an option that cannot be a key, which the check will name
            plan = None
        if plan is None or (pool and not plan.is_for(pool)):  # an id may be another cache's by now
            plan = self._make(key, call, names, arrays, options, cache, pool, address)
        current = self._current_stream(plan.device)
        if address is None:
            return self._enqueue(plan, arrays, known, addresses, current, workspace)
        with nullcontext() if address == current else self.library.on(address, plan.device):
            return self._enqueue(plan, arrays, known, addresses, address, workspace)

    def planner(self, device: int) -> Planner:
        """The planner of a device. Raises CaptureError where the first call on it is captured."""
        planner = self._planners.get(device)
        if planner is None:
            library = self.library
            memory = library.memory(device)
            made = Planner(library.launcher(device), memory)
            with self._changing:
                planner = self._planners.setdefault(device, made)
                self._scratch.setdefault(
                    device,
                    Scratch(memory, library.address_of, lambda stream: library.is_capturing(stream, device)),
                )
        return planner

    def _enqueue(
        self,
        plan: Plan,
        arrays: tuple[Array | None, ...],
        known: _Known | None,
        addresses: list[int],
        stream: int,
        workspace: Array | None,
    ) -> Any:
        held = None
        if not plan.is_simple:
            views = known.views if known is not None else ()
            held = plan.prepare(self.library.address_of, [*arrays, *views], addresses)
        with self._launching:
            scratch, owner = 0, workspace
            if plan.scratch_bytes:
                if workspace is None:
                    scratch, owner = self._scratch[plan.device].of(stream, plan.scratch_bytes)
                else:
                    scratch = _address_in(workspace, plan.scratch_bytes, plan.device)
            plan.launch(addresses, scratch, stream)
            del owner
        if plan.kept and self.library.is_capturing(stream, plan.device):
            self._captured.add(plan)  # a graph reads its constants from now on
        if held is not None:
            return plan.finish(held)
        return None if plan.result is None else arrays[plan.result.number]

    def _make(
        self,
        key: object,
        call: Callable[..., Any],
        names: Sequence[str],
        arrays: tuple[Array | None, ...],
        options: tuple[object, ...],
        cache: object,
        pool: tuple[LayerCache, ...],
        address: int | None,
    ) -> Plan:
        library = self.library
        device = library.device_of(names[0], arrays[0])
        if address is None:
            address = library.current_stream(device)
        views = [
            None if array is None else library.describe(name, array, device)
            for name, array in zip(names, arrays, strict=True)
        ]
        with library.planning_on(address, device) if address else nullcontext():
            planner = self.planner(device)
            if cache is not _NO_CACHE:
                plan = self._plan_for_any_cache(planner, call, views, options, cache, device)
            elif pool:
                plan = planner.plan_for(
                    pool, views, lambda backend, *placed: call(backend, pool, *placed, *options)
                )
            else:
                plan = planner.plan(views, lambda backend, *placed: call(backend, *placed, *options))
        with self._changing:
            while len(self._plans) >= _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        return plan

    def _plan_for_any_cache(
        self,
        planner: Planner,
        call: Callable[..., Any],
        views: list[NDArray[Any] | None],
        options: tuple[object, ...],
        cache: object,
        device: int,
    ) -> Plan:
        known = self._meet(cache, device)
        assert isinstance(cache, LayerCache)
        names = [name for name, _ in cache.named_arrays]
        num_arguments = len(views)

        def placed(backend: Any, *arrays: Any) -> Any:
            parts = {name: each.view for name, each in zip(names, arrays[num_arguments:], strict=True)}
            standing = LayerCache(
                format=cache.format, block_size=cache.block_size, layout=cache.layout, **parts
            )
            return call(backend, standing, *arrays[:num_arguments], *options)

        same = {num_arguments + at: num_arguments + first for at, first in enumerate(_firsts(known.views))}
        return planner.plan([*views, *known.views], placed, same)

    def _meet(self, cache: object, device: int) -> _Known:
        """What is known of a cache, looked at if it is new. Raises ValueError for one of another device."""
        if not isinstance(cache, LayerCache):
            raise TypeError(f"cache: {type(cache).__name__}, expected a LayerCache")
        views = [self.library.describe(name, array, device) for name, array in cache.named_arrays]
        looks = tuple(
            (view.shape, view.strides, view.dtype.str, view.ctypes.data % ALIGNMENT) for view in views
        )
        names = tuple(name for name, _ in cache.named_arrays)
        look = (str(cache.format), cache.block_size, cache.layout, names, looks, _firsts(views), device)
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


def _firsts(views: Sequence[NDArray[Any]]) -> tuple[int, ...]:
    """For each array the first that starts where it does: V of latents is a part of K."""
    starts = [view.ctypes.data for view in views]
    return tuple(map(starts.index, starts))


def _address_in(workspace: Array, num_bytes: int, device: int) -> int:
    """An aligned address with so many bytes behind it. Raises ValueError where they are not."""
    seen = look_at("workspace", workspace)
    if seen.device not in (device, None):
        raise ValueError(f"workspace: on device {seen.device}, the call runs on device {device}")
    if not seen.is_contiguous:
        raise ValueError(
            f"workspace: strides {seen.strides} of shape {seen.shape}, expected contiguous memory"
        )
    skipped = -seen.address % ALIGNMENT
    if skipped + num_bytes > seen.nbytes:
        raise ValueError(
            f"workspace: {seen.nbytes} bytes, the call needs {num_bytes + ALIGNMENT - 1} to be sure"
        )
    return seen.address + skipped


_DISPATCHERS: Final[dict[Library, Dispatcher]] = {}


def dispatcher_for(name: str, array: object) -> Dispatcher:
    """Where a call with this argument runs. Raises TypeError that names it for what is no array on a GPU."""
    return dispatcher_of(library_of(name, array))


def dispatcher_of(library: Library) -> Dispatcher:
    """Where calls with a library's arrays run."""
    dispatcher = _DISPATCHERS.get(library)
    if dispatcher is None:
        dispatcher = _DISPATCHERS.setdefault(library, Dispatcher(library))
    return dispatcher
