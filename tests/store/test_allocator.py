from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afferent.errors import StoreError
from afferent.store.allocator import ALIGNMENT, Allocator, round_up


def test_blocks_are_aligned_and_distinct() -> None:
    allocator = Allocator(1024)
    offsets = [allocator.allocate(size) for size in (1, 64, 65, 200)]
    assert offsets == [0, 64, 128, 256]
    assert allocator.free_nbytes == 1024 - 64 - 64 - 128 - 256
    allocator.validate()


def test_full_is_none_not_an_error() -> None:
    allocator = Allocator(256)
    assert allocator.allocate(257) is None
    assert allocator.allocate(256) == 0
    assert allocator.allocate(1) is None


def test_neighbours_are_merged() -> None:
    allocator = Allocator(4 * 64)
    offsets = [allocator.allocate(64) for _ in range(4)]
    for offset in (offsets[0], offsets[2], offsets[1], offsets[3]):
        assert offset is not None
        allocator.free(offset, 64)
        allocator.validate()
    assert allocator.largest_free_nbytes == 256


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 64), (64, 128), (960, 128), (2048, 64)])
def test_what_was_not_allocated_is_not_freed(offset: int, nbytes: int) -> None:
    allocator = Allocator(1024)
    assert allocator.allocate(128) == 0
    allocator.free(0, 64)
    with pytest.raises(StoreError):
        allocator.free(offset, nbytes)
    allocator.validate()


@given(st.lists(st.tuples(st.integers(1, 700), st.integers(0, 20)), max_size=60))
def test_against_a_map_of_bytes(steps: list[tuple[int, int]]) -> None:
    """Allocate, or free the n-th live block; compare with a byte per cache line."""
    lines = 4096 // ALIGNMENT
    allocator, owned, taken = Allocator(4096), [], [False] * lines
    for nbytes, which in steps:
        if which < len(owned) and which % 2:
            offset, size = owned.pop(which)
            allocator.free(offset, size)
            for line in range(offset // ALIGNMENT, (offset + round_up(size)) // ALIGNMENT):
                taken[line] = False
        else:
            need = round_up(nbytes) // ALIGNMENT
            fits = [i for i in range(lines - need + 1) if not any(taken[i : i + need])]
            offset = allocator.allocate(nbytes)
            assert offset == (fits[0] * ALIGNMENT if fits else None)
            if offset is not None:
                owned.append((offset, nbytes))
                for line in range(offset // ALIGNMENT, offset // ALIGNMENT + need):
                    assert not taken[line]
                    taken[line] = True
        allocator.validate()
        assert allocator.free_nbytes == taken.count(False) * ALIGNMENT
