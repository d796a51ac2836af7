"""Where blocks go in the arena: first fit over a sorted list of free runs. Pure."""

from __future__ import annotations

from bisect import bisect_left

from afferent.errors import StoreError

ALIGNMENT = 64


def round_up(nbytes: int) -> int:
    """``nbytes`` as the allocator counts it: whole cache lines, at least one."""
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)


class Allocator:
    """Contiguous, 64-byte aligned blocks of one range. Neighbouring free runs are merged."""

    def __init__(self, capacity_nbytes: int) -> None:
        self.capacity_nbytes = capacity_nbytes // ALIGNMENT * ALIGNMENT
        self.free_nbytes = self.capacity_nbytes
        self._starts = [0]
        self._sizes = [self.capacity_nbytes]

    @property
    def largest_free_nbytes(self) -> int:
        return max(self._sizes, default=0)

    def allocate(self, nbytes: int) -> int | None:
        """Take the first free run of ``nbytes`` (rounded up); its offset, or ``None``."""
        nbytes = round_up(nbytes)
        for index, size in enumerate(self._sizes):
            if size >= nbytes:
                offset = self._starts[index]
                if size == nbytes:
                    del self._starts[index], self._sizes[index]
                else:
                    self._starts[index] += nbytes
                    self._sizes[index] -= nbytes
                self.free_nbytes -= nbytes
                return offset
        return None

    def free(self, offset: int, nbytes: int) -> None:
        """Give ``[offset, offset + nbytes)`` back; ``nbytes`` is rounded up as when it was taken.

        Raises:
            StoreError: Part of it is free already, or outside of the range.
        """
        nbytes = round_up(nbytes)
        index = bisect_left(self._starts, offset)
        before_end = self._starts[index - 1] + self._sizes[index - 1] if index else 0
        after_start = self._starts[index] if index < len(self._starts) else self.capacity_nbytes
        if not before_end <= offset <= offset + nbytes <= after_start:
            raise StoreError(f"[{offset}, +{nbytes}) was not allocated")
        joins_before = index > 0 and before_end == offset
        joins_after = index < len(self._starts) and after_start == offset + nbytes
        if joins_before and joins_after:
            self._sizes[index - 1] += nbytes + self._sizes[index]
            del self._starts[index], self._sizes[index]
        elif joins_before:
            self._sizes[index - 1] += nbytes
        elif joins_after:
            self._starts[index] = offset
            self._sizes[index] += nbytes
        else:
            self._starts.insert(index, offset)
            self._sizes.insert(index, nbytes)
        self.free_nbytes += nbytes

    def validate(self) -> None:
        """Check every rule of this class; for tests."""
        end = -1
        for start, size in zip(self._starts, self._sizes, strict=True):
            if start <= end or size <= 0 or start % ALIGNMENT or size % ALIGNMENT:
                raise StoreError(f"free run [{start}, +{size}) is out of order")
            end = start + size
        if end > self.capacity_nbytes or sum(self._sizes) != self.free_nbytes:
            raise StoreError("the free bytes do not add up")
