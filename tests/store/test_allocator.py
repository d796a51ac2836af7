from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from afferent.errors import StoreError
from afferent.store.state.allocator import ALIGNMENT, Allocator, round_up
from tests.examples import examples


@pytest.mark.parametrize(("nbytes", "rounded"), [(0, 64), (1, 64), (64, 64), (65, 128), (200, 256)])
def test_sizes_are_whole_cache_lines(nbytes: int, rounded: int) -> None:
    assert round_up(nbytes) == rounded


def test_blocks_are_aligned_and_distinct() -> None:
    allocator = Allocator(1024)
    offsets = [allocator.allocate(size) for size in (1, 64, 65, 200)]
    assert offsets == [0, 64, 128, 256]
    assert allocator.free_nbytes == 1024 - 64 - 64 - 128 - 256
    assert allocator.num_blocks == 4
    allocator.validate()


def test_full_is_none_not_an_error() -> None:
    allocator = Allocator(256)
    assert allocator.allocate(257) is None
    assert allocator.allocate(256) == 0
    assert allocator.allocate(1) is None


def test_an_empty_range_is_full() -> None:
    allocator = Allocator(63)
    assert allocator.allocate(1) is None
    assert allocator.largest_free_nbytes == allocator.free_nbytes == 0
    allocator.validate()


def test_the_shortest_run_that_holds_it() -> None:
    allocator = Allocator(10 * 64)
    blocks = [allocator.allocate(size * 64) for size in (3, 1, 2, 1, 3)]
    for block in (blocks[0], blocks[2], blocks[4]):
        assert block is not None
        allocator.free(block)
    assert allocator.allocate(128) == blocks[2]
    assert allocator.num_free_extents == 2


def test_neighbours_are_merged() -> None:
    allocator = Allocator(4 * 64)
    offsets = [allocator.allocate(64) for _ in range(4)]
    for offset in (offsets[0], offsets[2], offsets[1], offsets[3]):
        assert offset is not None
        allocator.free(offset)
        allocator.validate()
    assert allocator.largest_free_nbytes == 256


@pytest.mark.parametrize("offset", [0, 32, 128, 960, 2048])
def test_only_what_was_allocated_is_freed(offset: int) -> None:
    allocator = Allocator(1024)
    assert [allocator.allocate(64), allocator.allocate(128)] == [0, 64]
    allocator.free(0)
    with pytest.raises(StoreError):
        allocator.free(offset)
    allocator.validate()


def test_a_block_does_not_grow() -> None:
    allocator = Allocator(1024)
    allocator.allocate(100)
    with pytest.raises(StoreError, match="grow"):
        allocator.shrink(0, 129)
    assert allocator.shrink(0, 120) == 0
    assert allocator.shrink(0, 10) == 64
    allocator.validate()


def test_a_block_is_cut_into_its_parts() -> None:
    allocator = Allocator(1024, start=4096)
    block = allocator.allocate(320)
    assert block == 4096
    assert allocator.split(block, [64, 192, 64]) == [4096, 4160, 4352]
    allocator.validate()
    allocator.free(4160)
    assert allocator.largest_free_nbytes == 1024 - 320
    with pytest.raises(StoreError, match="sum"):
        allocator.split(4096, [128])


def test_what_is_given_back_together_is_merged() -> None:
    allocator = Allocator(8 * 64, start=640)
    blocks = [allocator.allocate(64) for _ in range(8)]
    assert blocks == list(range(640, 640 + 8 * 64, 64))
    allocator.free_all(640 + 64 * line for line in (0, 1, 3, 6, 7))
    allocator.validate()
    assert (allocator.num_free_extents, allocator.free_nbytes) == (3, 5 * 64)
    allocator.free_all([])
    allocator.free_all([640 + 2 * 64, 640 + 5 * 64])
    allocator.validate()
    assert (allocator.num_free_extents, allocator.num_blocks) == (2, 1)


LINES = 40


class Allocating(RuleBasedStateMachine):
    """Compare the allocator with a map that has an entry for each cache line."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(LINES * ALIGNMENT, start=640)
        self.map: list[int | None] = [None] * LINES  # the block of each line
        self.blocks: dict[int, int] = {}  # lines by offset
        self.next = 1

    def runs(self) -> list[tuple[int, int]]:
        """Return the length and the first line of each free extent."""
        found, begin = [], None
        for line, owner in enumerate([*self.map, 0]):
            if owner is None and begin is None:
                begin = line
            elif owner is not None and begin is not None:
                found.append((line - begin, begin))
                begin = None
        return found

    def take(self, line: int, count: int) -> None:
        for at in range(line, line + count):
            assert self.map[at] is None
            self.map[at] = self.next
        self.blocks[640 + line * ALIGNMENT] = count
        self.next += 1

    @rule(nbytes=st.integers(1, 12 * ALIGNMENT))
    def allocate(self, nbytes: int) -> None:
        count = -(-nbytes // ALIGNMENT)
        fits = [run for run in self.runs() if run[0] >= count]
        offset = self.allocator.allocate(nbytes)
        if not fits:
            assert offset is None
            return
        assert offset == 640 + min(fits)[1] * ALIGNMENT
        self.take(min(fits)[1], count)

    @precondition(lambda self: self.blocks)
    @rule(which=st.integers(0, LINES))
    def free(self, which: int) -> None:
        offset = list(self.blocks)[which % len(self.blocks)]
        self.allocator.free(offset)
        self.clear(offset, 0)

    @precondition(lambda self: self.blocks)
    @rule(which=st.integers(0, LINES), part=st.floats(0.0, 1.0))
    def shrink(self, which: int, part: float) -> None:
        offset = list(self.blocks)[which % len(self.blocks)]
        count = self.blocks[offset]
        kept = max(1, int(count * part))
        assert self.allocator.shrink(offset, kept * ALIGNMENT) == (count - kept) * ALIGNMENT
        self.clear(offset, kept)

    def clear(self, offset: int, kept: int) -> None:
        line = (offset - 640) // ALIGNMENT
        count = self.blocks.pop(offset)
        if kept:
            self.blocks[offset] = kept
        self.map[line + kept : line + count] = [None] * (count - kept)

    @invariant()
    def agrees(self) -> None:
        self.allocator.validate()
        runs = self.runs()
        assert self.allocator.free_nbytes == self.map.count(None) * ALIGNMENT
        assert self.allocator.num_free_extents == len(runs)
        assert self.allocator.largest_free_nbytes == max(runs, default=(0, 0))[0] * ALIGNMENT
        for length, line in runs:
            start, end = 640 + line * ALIGNMENT, 640 + (line + length) * ALIGNMENT
            assert self.allocator.free_end(start) == end
            assert self.allocator.free_start(end) == start
        for offset, count in self.blocks.items():
            assert self.allocator.size_of(offset) == count * ALIGNMENT
            assert self.allocator.free_end(offset) == offset


TestAllocating = Allocating.TestCase
TestAllocating.settings = examples(40, storm=400, stateful_step_count=40)
