"""Calls that are planned once by their shapes, and repeated with other addresses.

Owns `Plan` and `Planner`. Imports the device backend, patches and kernels.
Invariant: a plan is made by the device backend itself, run over placeholders of the arguments and of temporary arrays.
So a repeated call launches what the backend would, with the same bytes but for the addresses.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends.device import DeviceBackend
from kvblocks.backends.memory import Memory
from kvblocks.gpu.patches import (
    ALIGNMENT,
    FIRST_SCRATCH,
    Patches,
    Placeholder,
    new_placeholder,
    placeholder,
)
from kvblocks.kernels.launcher import Attributes, Grid, Launch, Launcher
from kvblocks.kernels.specs import Instance
from kvblocks.layout import Array, LayerCache


class _Make(NamedTuple):
    """A temporary array: made by a method of the memory out of values, or out of another array of the plan."""

    number: int
    make: Callable[[Memory, list[Array]], Array]


class _Assign(NamedTuple):
    target: int
    source: int


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

    def scratch(self, shape: Sequence[int], dtype: Any) -> Array:
        return self.real.scratch(shape, dtype) if self.plan is None else self.plan.scratched(shape, dtype)

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
        if self.plan is None:
            return self.real.plain(array)
        if not isinstance(array, Placeholder):  # a constant
            view = self.real.describe("array", array)
            return self.plan.made(view.shape, view.dtype, lambda memory, _: memory.plain(array))
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
        self._memory.plan.launches.append(Launch(function, grid, threads, shared_bytes, params.copy()))

    def bind(self, launches: Sequence[Launch]) -> Callable[[int], None]:
        def fire(stream: int) -> None:
            for each in launches:
                self.launch(*each, stream)

        return fire

    def attributes(self, function: Any) -> Attributes:
        return self.real.attributes(function)


class Plan:
    """One call, to be repeated over other arrays of the same signature.

    memory: of the device that it launches on. offsets: of each argument's address from a multiple of ALIGNMENT, which
    its placeholder has as well.
    """

    def __init__(self, memory: Memory, offsets: Sequence[int]) -> None:
        self.memory = memory
        self.device = memory.device()
        self.launches: list[Launch] = []
        self.makes: list[_Make] = []
        self.finishes: list[_Make] = []
        self.assigns: list[_Assign] = []
        self.scratch_bytes = 0
        self.kept: list[object] = []
        # Caches whose addresses are among the constants.
        self.pool: list[ref[LayerCache]] = []
        self.result: Any = None
        self._offsets = offsets
        self._next = len(offsets)
        self._scratch: list[int] = []

    def is_for(self, pool: Sequence[LayerCache]) -> bool:
        """Whether these are the caches whose addresses are among the constants."""
        return all(kept() is each for kept, each in zip(self.pool, pool, strict=True))

    # --- While the plan is made.

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
        return new_placeholder(number, shape, dtype)

    def scratched(self, shape: Sequence[int], dtype: Any) -> Placeholder:
        """An array in the memory that each launch is given for its own use."""
        array = new_placeholder(FIRST_SCRATCH + len(self._scratch), shape, dtype)
        self._scratch.append(self.scratch_bytes)
        self.scratch_bytes += -(-array.view.nbytes // ALIGNMENT) * ALIGNMENT
        return array

    def seal(self, launcher: Launcher) -> None:
        """Prepare the launches, all of which are known now."""
        # Attention and the combination of its splits take the same bytes: one record serves both.
        records: dict[bytes, NDArray[np.void]] = {}
        shared = [
            each._replace(params=records.setdefault(each.params.tobytes(), each.params))
            for each in self.launches
        ]
        patches = Patches(list(records.values()), self._offsets, len(self.makes), self._scratch)
        self._write, self._fire = patches.write, launcher.bind(shared)
        # What runs without its arrays: nothing is made of them, and the result is an argument or nothing.
        self.is_simple = not (self.makes or self.finishes or self.assigns) and (
            self.result is None or isinstance(self.result, Placeholder)
        )

    # --- A run: `prepare`, `launch`, `finish`, of which simple plans need the second only.

    def prepare(
        self, address_of: Callable[[Array], int], arrays: Sequence[Array], addresses: list[int]
    ) -> list[Array]:
        """The arguments with the arrays that a run makes before its launches, whose addresses are appended."""
        held = list(arrays)
        for each in self.makes:
            array = each.make(self.memory, held)
            held.append(array)
            addresses.append(address_of(array))
        return held

    def launch(self, addresses: list[int], scratch: int, stream: int) -> None:
        """Launch over these addresses. scratch: of `scratch_bytes`. Its caller lets one thread at a time do so."""
        self._write(addresses, scratch)
        self._fire(stream)

    def finish(self, held: list[Array]) -> Any:
        """What the backend's method returns, made now where it has to be."""
        for pair in self.assigns:
            self.memory.assign(held[pair.target], held[pair.source])
        held += [each.make(self.memory, held) for each in self.finishes]
        return self._real(self.result, held)

    def _real(self, result: Any, held: Sequence[Array]) -> Any:
        if isinstance(result, Placeholder):
            return held[result.number]
        if isinstance(result, tuple):
            values = [self._real(each, held) for each in result]
            return type(result)(*values) if hasattr(result, "_fields") else tuple(values)
        return result


class Planner:
    """Makes plans for a launcher and a memory, of one device."""

    def __init__(self, launcher: Launcher, memory: Memory) -> None:
        self._launcher = launcher
        self._memory = _PlanningMemory(memory)
        self._backend = DeviceBackend("planner", _PlanningLauncher(launcher, self._memory), self._memory)
        self._planning = threading.Lock()
        self.first_error()  # makes the report before there is a plan that would take it for its own

    def plan(
        self,
        views: Sequence[NDArray[Any] | None],
        call: Callable[..., Any],
        same: Mapping[int, int] = MappingProxyType({}),
    ) -> Plan:
        """The plan of `call(backend, *arrays)` for arrays that are described by views; None stands for None.

        same: by the number of an array, that of an earlier one which starts at the same address in every call. Raises
        what the backend's method raises for arrays like these. Half a millisecond.
        """
        offsets = [0 if view is None else view.ctypes.data % ALIGNMENT for view in views]
        arguments = [
            None if view is None else placeholder(same.get(number, number), view)
            for number, view in enumerate(views)
        ]
        plan = Plan(self._memory.real, offsets)
        with self._planning:
            self._memory.plan = plan
            try:
                plan.result = call(self._backend, *arguments)
            finally:
                self._memory.plan = None
        plan.seal(self._launcher)
        return plan

    def plan_for(
        self, pool: Sequence[LayerCache], views: Sequence[NDArray[Any] | None], call: Callable[..., Any]
    ) -> Plan:
        """`plan` of a call that stores addresses of a pool's caches, in tables that the plan keeps."""
        plan = self.plan(views, call)
        plan.pool = [ref(each) for each in pool]
        plan.kept.append(self._backend.tables_of(pool))
        return plan

    def first_error(self) -> str | None:
        """See `DeviceBackend.first_error`."""
        return self._backend.first_error()
