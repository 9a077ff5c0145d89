"""Contiguous regions against a naive model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.replay.regions import Buddy, FirstFit


@given(
    st.sampled_from([FirstFit, Buddy]),
    st.integers(1, 70),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 40)), max_size=60),
)
def test_regions_never_overlap_and_are_refused_only_without_a_hole(
    kind: type[FirstFit] | type[Buddy], capacity: int, actions: list[tuple[bool, int, int]]
) -> None:
    regions = kind(capacity)
    held: dict[int, int] = {}
    for allocates, exponent, size in actions:
        if allocates:
            wanted = size if kind is FirstFit else 1 << exponent
            taken = {slot for start, held_size in held.items() for slot in range(start, start + held_size)}
            align = 1 if kind is FirstFit else wanted
            holes = [
                start
                for start in range(0, capacity - wanted + 1, align)
                if taken.isdisjoint(range(start, start + wanted))
            ]
            start = regions.allocate(wanted)
            if start is None:
                assert not holes
            else:
                assert start in holes
                assert kind is Buddy or start == holes[0]
                held[start] = wanted
        elif held:
            start = sorted(held)[size % len(held)]
            regions.free(start, held.pop(start))
        assert regions.free_slots == capacity - sum(held.values())
    for start, size in held.items():
        regions.free(start, size)
    # All is merged again: the largest region that the capacity can have is there.
    assert regions.allocate(capacity if kind is FirstFit else 1 << capacity.bit_length() >> 1) == 0


@pytest.mark.parametrize("kind", [FirstFit, Buddy])
def test_no_capacity_has_no_region(kind: type[FirstFit] | type[Buddy]) -> None:
    assert kind(0).allocate(1) is None


def test_buddies_split_the_smallest_region_and_merge() -> None:
    buddy = Buddy(16)
    assert [buddy.allocate(size) for size in (4, 2, 8, 2)] == [0, 4, 8, 6]
    assert buddy.allocate(1) is None
    buddy.free(4, 2)
    assert buddy.allocate(4) is None
    buddy.free(6, 2)
    assert buddy.allocate(4) == 4
