"""Allocator of blocks in a range of the arena: best fit over the free extents. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from afferent.errors import StoreError

ALIGNMENT = 64


def round_up(nbytes: int) -> int:
    """Round ``nbytes`` up to whole cache lines, at least one."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT or ALIGNMENT


class Allocator:
    """Contiguous, 64-byte aligned blocks of ``[start, start + capacity)``.

    Arguments are rounded up by `round_up`; returned sizes are rounded already.

    Invariants:
        - Blocks and free extents fill the range, without gaps and without overlap.
        - Adjacent free extents are merged.
        - A block comes from the shortest free extent that fits.
        - ``free_nbytes`` is the sum of the free extents.
    """

    def __init__(self, capacity_nbytes: int, *, start: int = 0) -> None:
        self.start = start
        self.capacity_nbytes = self.free_nbytes = capacity_nbytes // ALIGNMENT * ALIGNMENT
        self._taken: dict[int, int] = {}  # offset: size
        self._free: dict[int, int] = {}  # start of a free extent: its end
        self._free_by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []  # (size, start), ascending
        if self.capacity_nbytes:
            self._add_extent(start, start + self.capacity_nbytes)

    @property
    def largest_free_nbytes(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def num_free_extents(self) -> int:
        return len(self._by_size)

    @property
    def num_blocks(self) -> int:
        return len(self._taken)

    def size_of(self, offset: int) -> int:
        """Return the size of the block at ``offset``."""
        return self._taken[offset]

    def free_end(self, start: int) -> int:
        """Return the end of the free extent that starts here, or ``start`` if there is none."""
        return self._free.get(start, start)

    def free_start(self, end: int) -> int:
        """Return the start of the free extent that ends here, or ``end`` if there is none."""
        return self._free_by_end.get(end, end)

    def allocate(self, nbytes: int) -> int | None:
        """Take a block and return its offset, or ``None`` if no free extent is long enough."""
        nbytes = round_up(nbytes)
        index = bisect_left(self._by_size, (nbytes, 0))
        if index == len(self._by_size):
            return None
        _, start = self._by_size.pop(index)
        end = self._free.pop(start)
        del self._free_by_end[end]
        if start + nbytes < end:
            self._add_extent(start + nbytes, end)
        self._taken[start] = nbytes
        self.free_nbytes -= nbytes
        return start

    def take_again(self, offset: int, nbytes: int) -> None:
        """Take a block at ``offset``, where all bytes are free. Scans all free extents."""
        start, end = next(
            (start, end)
            for start, end in self._free.items()
            if start <= offset and offset + nbytes <= end
        )
        self._drop_extent(start, end)
        if start < offset:
            self._add_extent(start, offset)
        if offset + nbytes < end:
            self._add_extent(offset + nbytes, end)
        self._taken[offset] = nbytes
        self.free_nbytes -= nbytes

    def split(self, offset: int, sizes: Iterable[int]) -> list[int]:
        """Split a block into blocks of ``sizes``, which add up to it; return their offsets."""
        end = offset + self._taken.pop(offset)
        offsets = []
        for size in sizes:
            offsets.append(offset)
            self._taken[offset] = size
            offset += size
        if offset != end:
            raise StoreError("a block is not the sum of its parts")
        return offsets

    def shrink(self, offset: int, nbytes: int) -> int:
        """Keep the first ``nbytes`` of a block and free the rest; return the freed bytes."""
        kept, taken = round_up(nbytes), self._taken[offset]
        if kept > taken:
            raise StoreError("a block can't grow")
        if kept < taken:
            self._taken[offset] = kept
            self._release(offset + kept, taken - kept)
        return taken - kept

    def free(self, offset: int) -> None:
        """Free a block.

        Raises:
            StoreError: No block begins there.
        """
        nbytes = self._taken.pop(offset, None)
        if nbytes is None:
            raise StoreError(f"no block begins at {offset}")
        self._release(offset, nbytes)

    def grow(self, nbytes: int) -> None:
        """Add ``nbytes``, a multiple of `ALIGNMENT`, at the end."""
        end = self.start + self.capacity_nbytes
        self.capacity_nbytes += nbytes
        self._release(end, nbytes)

    def free_all(self, offsets: Iterable[int]) -> None:
        """Free blocks, given in order of address. Adjacent blocks are freed in one step."""
        start = end = self.start
        for offset in offsets:
            if offset != end and start < end:
                self._release(start, end - start)
            if offset != end:
                start = offset
            end = offset + self._taken.pop(offset)
        if start < end:
            self._release(start, end - start)

    def validate(self) -> None:
        """Check every invariant; for tests."""
        blocks = [(start, start + size, True) for start, size in self._taken.items()]
        blocks += [(start, end, False) for start, end in self._free.items()]
        at, was_taken = self.start, True
        for start, end, taken in sorted(blocks):
            if start != at or start % ALIGNMENT or end <= start or not (taken or was_taken):
                raise StoreError(f"the block at {start} overlaps, leaves a gap or is not merged")
            at, was_taken = end, taken
        if at != self.start + self.capacity_nbytes:
            raise StoreError("the blocks do not fill the range")
        if self._by_size != sorted((end - start, start) for start, end in self._free.items()):
            raise StoreError("the list of free sizes is wrong")
        if self._free_by_end != {end: start for start, end in self._free.items()}:
            raise StoreError("the list of free ends is wrong")
        if self.free_nbytes != sum(size for size, _ in self._by_size):
            raise StoreError("the free bytes do not add up")

    def _release(self, offset: int, nbytes: int) -> None:
        start, end = self.free_start(offset), self.free_end(offset + nbytes)
        if start < offset:
            self._drop_extent(start, offset)
        if end > offset + nbytes:
            self._drop_extent(offset + nbytes, end)
        self._add_extent(start, end)
        self.free_nbytes += nbytes

    def _add_extent(self, start: int, end: int) -> None:
        self._free[start] = end
        self._free_by_end[end] = start
        insort(self._by_size, (end - start, start))

    def _drop_extent(self, start: int, end: int) -> None:
        del self._free[start], self._free_by_end[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
