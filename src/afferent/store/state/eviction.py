"""Which objects make way: the least recently used whose blocks join to an extent. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from afferent.store.state.allocator import Allocator, round_up


@dataclass(slots=True)
class _Stretch:
    """A part of an extent: the block at ``offset``, or a free extent."""

    offset: int
    nbytes: int
    is_free: bool


def choose_victims(
    allocator: Allocator, candidates: Iterable[int], nbytes: int
) -> list[int] | None:
    """The blocks to free so that an extent of ``nbytes`` opens; changes nothing.

    Candidates are imagined away, oldest first, until some of them and the free extents between them
    join to one that is long enough. Only blocks of this extent are chosen, and of those the fewest
    bytes that open it, so nothing younger than need be is lost, and nothing that lies elsewhere.

    Args:
        candidates: Offsets of blocks that may go, least recently used first.

    Returns:
        The chosen offsets, or ``None`` when even all candidates would not open such an extent.
    """
    nbytes = round_up(nbytes)
    ends: dict[int, int] = {}  # imagined extents by their start, and by their end
    starts: dict[int, int] = {}
    for offset in candidates:
        end = offset + allocator.size_of(offset)
        # An extent that ends here was imagined, or is free, or this block is taken to its left.
        # What has been joined is not forgotten: nobody asks for its inner ends again.
        start = starts.get(offset)
        if start is None:
            start = allocator.free_start(offset)
        beyond = ends.get(end)
        if beyond is None:
            beyond = allocator.free_end(end)
        if beyond - start >= nbytes:
            return _fewest_bytes(_stretches(allocator, start, beyond), nbytes)
        ends[start], starts[beyond] = beyond, start
    return None


def _stretches(allocator: Allocator, start: int, end: int) -> list[_Stretch]:
    """What lies in ``[start, end)``, in order of address."""
    found = []
    while start < end:
        extent_end = allocator.free_end(start)
        is_free = extent_end > start
        size = extent_end - start if is_free else allocator.size_of(start)
        found.append(_Stretch(start, size, is_free))
        start += size
    return found


def _fewest_bytes(extent: list[_Stretch], nbytes: int) -> list[int]:
    """The blocks of the part of the extent that is long enough and costs the fewest bytes."""
    best: tuple[int, int, int] | None = None  # bytes evicted, first, last
    first = total = evicted = 0
    for last, stretch in enumerate(extent):
        total += stretch.nbytes
        evicted += 0 if stretch.is_free else stretch.nbytes
        while total - extent[first].nbytes >= nbytes:
            total -= extent[first].nbytes
            evicted -= 0 if extent[first].is_free else extent[first].nbytes
            first += 1
        if total >= nbytes and (best is None or evicted < best[0]):
            best = (evicted, first, last)
    if best is None:
        return []
    return [part.offset for part in extent[best[1] : best[2] + 1] if not part.is_free]
