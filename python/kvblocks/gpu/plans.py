"""Calls that are planned once by their shapes, and repeated with other addresses.

Owns `Plan` and `Planner`. Imports the device backend and kernels.
Invariant: a plan is made by the device backend itself, run over placeholders: each argument and each temporary array
stands at an address that no array can have, and its place in the parameters is where that address turns up. So a
repeated call launches what the backend would, with the same bytes but for the addresses.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends.device import DeviceBackend
from kvblocks.backends.memory import Memory
from kvblocks.kernels.launcher import Attributes, Grid, Launcher
from kvblocks.kernels.params import POINTER
from kvblocks.kernels.specs import Instance
from kvblocks.layout import Array, LayerCache

# Placeholder i stands in the middle of its own range of 2^50 bytes, beyond every address of a process.
_FIRST: Final = 1 << 62
_RANGE_LOG2: Final = 50
_MIDDLE: Final = 1 << (_RANGE_LOG2 - 1)
# Bytes of the widest access: what placeholders keep of an address, and signatures tell apart.
ALIGNMENT: Final = 16


class Placeholder:
    """An array that a plan knows by number, shape, dtype and strides."""

    def __init__(self, number: int, view: NDArray[Any]) -> None:
        self.number = number
        self.view = view

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.view.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements."""
        return self.view.dtype


class _Described:
    def __init__(self, **interface: Any) -> None:
        self.__array_interface__ = interface | {"version": 3}


def _base(number: int) -> int:
    return _FIRST + (number << _RANGE_LOG2) + _MIDDLE


def placeholder(number: int, view: NDArray[Any]) -> Placeholder:
    """Stand in for an array that is described by a view; number: of it in its plan."""
    address = _base(number) + view.ctypes.data % ALIGNMENT
    described = _Described(
        data=(address, False), shape=view.shape, typestr=view.dtype.str, strides=view.strides
    )
    return Placeholder(number, np.asarray(described))


class _Make(NamedTuple):
    """A temporary array: made by a method of the memory out of values, or out of another array of the plan."""

    number: int
    make: Callable[[Memory, list[Array]], Array]


class _Assign(NamedTuple):
    target: int
    source: int


class _Launch(NamedTuple):
    """words: the parameters as 64-bit words. patches: (word, number of the array, bytes beyond its address)."""

    words: memoryview
    patches: list[tuple[int, int, int]]
    fire: Callable[[int], None]
    record: NDArray[np.void]


class _PlanningMemory:
    """Memory whose new arrays are placeholders while a plan is being made, and real ones otherwise."""

    def __init__(self, memory: Memory) -> None:
        self.real = memory
        self.num_multiprocessors = memory.num_multiprocessors
        self.max_shared_bytes = memory.max_shared_bytes
        self.plan: Plan | None = None

    def describe(self, name: str, array: Array) -> NDArray[Any]:
        if isinstance(array, Placeholder):
            return array.view
        # A described array is its own description.
        return array if isinstance(array, np.ndarray) else self.real.describe(name, array)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        if self.plan is None:
            return self.real.empty(shape, dtype)
        return self.plan.made(shape, dtype, lambda memory, _: memory.empty(shape, dtype))

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        if self.plan is None:
            return self.real.zeros(shape, dtype)
        return self.plan.made(shape, dtype, lambda memory, _: memory.zeros(shape, dtype))

    def upload(self, array: NDArray[Any]) -> Array:
        """A constant of the plan, which keeps it."""
        uploaded = self.real.upload(array)
        if self.plan is not None:
            self.plan.kept.append(uploaded)
        return uploaded

    def download(self, array: Array) -> NDArray[Any]:
        return self.real.download(array)

    def plain(self, array: Array) -> Array:
        if self.plan is None or not isinstance(array, Placeholder):
            return self.real.plain(array)
        number = array.number
        return self.plan.made(array.shape, array.dtype, lambda memory, arrays: memory.plain(arrays[number]))

    def assign(self, target: Array, source: Array | int) -> None:
        if self.plan is None:
            self.real.assign(target, source)
        else:
            assert isinstance(target, Placeholder)
            assert isinstance(source, Placeholder)
            self.plan.assigns.append(_Assign(target.number, source.number))

    def convert(self, array: Array, dtype: Any) -> Array:
        if self.plan is None:
            return self.real.convert(array, dtype)
        number = array.number
        return self.plan.finished(
            array.shape, dtype, lambda memory, arrays: memory.convert(arrays[number], dtype)
        )

    def device(self) -> int:
        return self.real.device()

    def stream(self) -> int:
        return 0  # a plan is given the stream when it runs


class _PlanningLauncher:
    """Loads for real, and keeps launches for later."""

    def __init__(self, launcher: Launcher, memory: _PlanningMemory) -> None:
        self.real = launcher
        self._memory = memory

    def load(self, instance: Instance) -> Any:
        return self.real.load(instance)

    def launch(
        self,
        function: Any,
        grid: Grid,
        threads: int,
        shared_bytes: int,
        params: NDArray[np.void],
        stream: int,
    ) -> None:
        assert self._memory.plan is not None
        plan = self._memory.plan
        # Attention and the combination of its splits take the same bytes: one record serves both.
        if plan.launches and params.tobytes() == plan.placed:
            record = plan.launches[-1].record
            fire = self.real.bind(function, grid, threads, shared_bytes, record)
            plan.launches.append(plan.launches[-1]._replace(fire=fire, patches=[]))
            return
        record, plan.placed = params.copy(), params.tobytes()
        fire = self.real.bind(function, grid, threads, shared_bytes, record)
        plan.launches.append(_bound(record, fire, plan.offsets))

    def bind(
        self, function: Any, grid: Grid, threads: int, shared_bytes: int, params: NDArray[np.void]
    ) -> Callable[[int], None]:
        return self.real.bind(function, grid, threads, shared_bytes, params)

    def attributes(self, function: Any) -> Attributes:
        return self.real.attributes(function)


def _bound(record: NDArray[np.void], fire: Callable[[int], None], offsets: Sequence[int]) -> _Launch:
    patches = []
    words = record.reshape(1).view(np.uint64)
    for word in _pointer_words(record.dtype):
        address = int(words[word])
        if address >= _FIRST:
            number = (address - _FIRST) >> _RANGE_LOG2
            offset = offsets[number] if number < len(offsets) else 0
            patches.append((word, number, address - _base(number) - offset))
    return _Launch(words.data, patches, fire, record)


def _pointer_words(dtype: np.dtype[Any], start: int = 0) -> list[int]:
    """Which 64-bit words of a record are addresses."""
    if dtype.subdtype is not None:
        element, shape = dtype.subdtype
        count = int(np.prod(shape))
        return [
            word for at in range(count) for word in _pointer_words(element, start + at * element.itemsize)
        ]
    if dtype.fields is None:
        return [start // 8] if dtype == POINTER else []
    return [
        word for field, offset, *_ in dtype.fields.values() for word in _pointer_words(field, start + offset)
    ]


class Plan:
    """One call, ready to be repeated over other arrays of the same signature. Any thread may run it."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self.offsets = (
            offsets  # of each argument's address from a multiple of ALIGNMENT; placeholders have the same
        )
        self.launches: list[_Launch] = []
        self.makes: list[_Make] = []
        self.finishes: list[_Make] = []
        self.assigns: list[_Assign] = []
        self.placed = b""  # the last launch's parameters, placeholders in them
        self.kept: list[object] = []
        # Caches whose addresses are among the constants.
        self.pool: list[ref[LayerCache]] = []
        self.result: Any = None
        self._next = len(offsets)
        self._running = threading.Lock()

    def is_for(self, pool: Sequence[LayerCache]) -> bool:
        """Whether these are the caches whose addresses are among the constants."""
        return all(kept() is each for kept, each in zip(self.pool, pool, strict=True))

    def made(
        self, shape: Sequence[int], dtype: Any, make: Callable[[Memory, list[Array]], Array]
    ) -> Placeholder:
        """A temporary array that each run makes before the launches."""
        return self._add(self.makes, shape, dtype, make)

    def finished(
        self, shape: Sequence[int], dtype: Any, make: Callable[[Memory, list[Array]], Array]
    ) -> Placeholder:
        """An array that each run makes after the launches."""
        return self._add(self.finishes, shape, dtype, make)

    def _add(
        self,
        to: list[_Make],
        shape: Sequence[int],
        dtype: Any,
        make: Callable[[Memory, list[Array]], Array],
    ) -> Placeholder:
        number = self._next
        self._next += 1
        to.append(_Make(number, make))
        # New arrays of every allocator are aligned like this one.
        described = _Described(data=(ALIGNMENT, False), shape=tuple(shape), typestr=np.dtype(dtype).str)
        return placeholder(number, np.asarray(described))

    def run(
        self,
        memory: Memory,
        address_of: Callable[[Array], int],
        arrays: Sequence[Array],
        addresses: list[int],
        stream: int,
    ) -> Any:
        """Launch over arrays and their addresses, on a stream; returns what the backend's method returns."""
        held = arrays
        if self.makes:
            held = list(arrays)
            for each in self.makes:
                array = each.make(memory, held)
                held.append(array)
                addresses.append(address_of(array))
        with self._running:
            for launch in self.launches:
                words = launch.words
                for word, number, delta in launch.patches:
                    words[word] = addresses[number] + delta
                launch.fire(stream)
        if self.assigns or self.finishes:
            held = list(held)
            for pair in self.assigns:
                memory.assign(held[pair.target], held[pair.source])
            held += [each.make(memory, held) for each in self.finishes]
        return self._real(self.result, held)

    def _real(self, result: Any, held: Sequence[Array]) -> Any:
        if isinstance(result, Placeholder):
            return held[result.number]
        if isinstance(result, tuple):
            values = [self._real(each, held) for each in result]
            return type(result)(*values) if hasattr(result, "_fields") else tuple(values)
        return result


class Planner:
    """Makes plans for a launcher and a memory."""

    def __init__(self, launcher: Launcher, memory: Memory, *, split_size: int | None = None) -> None:
        self._memory = _PlanningMemory(memory)
        self.backend = DeviceBackend(
            "planner", _PlanningLauncher(launcher, self._memory), self._memory, split_size=split_size
        )
        self._planning = threading.Lock()
        self.first_error()  # makes the report before there is a plan that would take it for its own

    def plan(self, views: Sequence[NDArray[Any] | None], call: Callable[..., Any]) -> Plan:
        """The plan of `call(backend, *arrays)` for arrays that are described by views; None stands for None.

        Raises what the backend's method raises for arrays like these. Half a millisecond.
        """
        offsets = [0 if view is None else view.ctypes.data % ALIGNMENT for view in views]
        arguments = [None if view is None else placeholder(number, view) for number, view in enumerate(views)]
        plan = Plan(offsets)
        with self._planning:
            self._memory.plan = plan
            try:
                plan.result = call(self.backend, *arguments)
            finally:
                self._memory.plan = None
        return plan

    def first_error(self) -> str | None:
        """See `DeviceBackend.first_error`."""
        return self.backend.first_error()
