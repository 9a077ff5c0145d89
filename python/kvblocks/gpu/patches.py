"""Addresses that stand in for arrays while a call is planned, and their places in the parameters afterwards.

Owns `Placeholder` and `Patches`. Imports the records of parameters.
Invariant: a placeholder's address is one that no array can have, so that wherever it turns up, it was put there for
that array.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvblocks.kernels.params import POINTER

# Placeholder i stands in the middle of its own range of 2^50 bytes, beyond every address of a process.
_FIRST: Final = 1 << 62
_RANGE_LOG2: Final = 50
_MIDDLE: Final = 1 << (_RANGE_LOG2 - 1)
# Scratch arrays are numbered from here, apart from arguments and results.
FIRST_SCRATCH: Final = 2048
_CONSTANT: Final = -1
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
        data=(address, not view.flags.writeable),
        shape=view.shape,
        typestr=view.dtype.str,
        strides=view.strides,
    )
    return Placeholder(number, np.asarray(described))


def new_placeholder(number: int, shape: Sequence[int], dtype: Any) -> Placeholder:
    """Stand in for an array that an allocator will make, aligned as those of every allocator are."""
    described = _Described(data=(ALIGNMENT, False), shape=tuple(shape), typestr=np.dtype(dtype).str)
    return placeholder(number, np.asarray(described))


class _Fill(NamedTuple):
    """Neighbouring addresses of a record. pick: takes them out of a call's list; pack: writes them at byte `at`."""

    pack: Callable[..., None]
    record: memoryview
    at: int
    pick: Callable[[list[int]], Sequence[int]]


class _Place(NamedTuple):
    """A word of a record: entry `source` of a call's list plus `shift` bytes, or `shift` if that is _CONSTANT."""

    record: NDArray[np.void]
    word: int
    source: int
    shift: int


class Patches:
    """The addresses of some records, to be written anew for every call.

    offsets: of each argument's address from a multiple of ALIGNMENT. num_made: arrays that a call makes beside them.
    scratch: where each scratch array starts in the memory for them.
    """

    def __init__(
        self,
        records: Sequence[NDArray[np.void]],
        offsets: Sequence[int],
        num_made: int,
        scratch: Sequence[int],
    ) -> None:
        num_placed = len(offsets) + num_made
        places = [
            _Place(record, word, *_source(int(record.reshape(1).view(np.uint64)[word]), offsets, num_placed))
            for record in records
            for word in _pointer_words(record.dtype)
        ]
        # A call's list: arguments, what was made, scratch, addresses inside of these, constants.
        self._scratch = list(scratch)
        self._shifted = list(dict.fromkeys((p.source, p.shift) for p in places if p.source >= 0 and p.shift))
        self._constants = list(dict.fromkeys(p.shift for p in places if p.source < 0))
        beside = [*self._shifted, *((_CONSTANT, address) for address in self._constants)]
        entries = {key: num_placed + len(scratch) + at for at, key in enumerate(beside)}
        self._fills = []
        run: list[_Place] = []
        for place, following in zip(places, [*places[1:], None], strict=True):
            run.append(place)
            if following and following.record is place.record and following.word == place.word + 1:
                continue
            picked = [entries.get((p.source, p.shift), p.source) for p in run]
            # itemgetter gives one item as it is, and a slice as a list.
            pick = itemgetter(*picked) if len(picked) > 1 else itemgetter(slice(picked[0], picked[0] + 1))
            words = place.record.reshape(1).view(np.uint8).data
            self._fills.append(_Fill(Struct(f"{len(run)}Q").pack_into, words, 8 * run[0].word, pick))
            run = []

    def write(self, addresses: list[int], scratch: int) -> None:
        """Write a call's addresses, of its arguments and of what it made; the list is used up. scratch: an address."""
        if self._scratch:
            addresses += [scratch + start for start in self._scratch]
        if self._shifted:
            addresses += [addresses[source] + shift for source, shift in self._shifted]
        addresses += self._constants
        for pack, record, at, pick in self._fills:
            pack(record, at, *pick(addresses))


def _source(address: int, offsets: Sequence[int], num_placed: int) -> tuple[int, int]:
    """Where an address comes from, as `source` and `shift` of a place."""
    if address < _FIRST:
        return _CONSTANT, address
    number = (address - _FIRST) >> _RANGE_LOG2
    shift = address - _base(number) - (offsets[number] if number < len(offsets) else 0)
    return number if number < FIRST_SCRATCH else number - FIRST_SCRATCH + num_placed, shift


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
