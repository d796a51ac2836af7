"""Choice of the objects to evict: the least recently used whose blocks form one extent. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from afferent.store.state.allocator import Allocator, round_up


@dataclass(slots=True)
class _Stretch:
    """Part of an extent: the block at ``offset``, or a free extent."""

    offset: int
    nbytes: int
    is_free: bool


def choose_victims(
    allocator: Allocator, candidates: Iterable[int], nbytes: int
) -> list[int] | None:
    """Choose the blocks to free for an extent of ``nbytes``; changes nothing.

    The search marks candidates as free, oldest first, until some of them and the free extents
    between them form one extent of this size. It chooses only blocks of this extent, and of those
    the fewest bytes. So it evicts no younger object than necessary, and none elsewhere.

    Args:
        candidates: Offsets of evictable blocks, least recently used first.

    Returns:
        The chosen offsets, or ``None`` if all candidates together give no such extent.
    """
    nbytes = round_up(nbytes)
    ends: dict[int, int] = {}  # simulated extents by their start, and by their end
    starts: dict[int, int] = {}
    for offset in candidates:
        end = offset + allocator.size_of(offset)
        # The left neighbour is a simulated extent, a free extent, or a block in use. Merged
        # extents keep stale inner ends: they are never looked up again.
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
    """Return the blocks and free extents in ``[start, end)``, in order of address."""
    found = []
    while start < end:
        extent_end = allocator.free_end(start)
        is_free = extent_end > start
        size = extent_end - start if is_free else allocator.size_of(start)
        found.append(_Stretch(start, size, is_free))
        start += size
    return found


def _fewest_bytes(extent: list[_Stretch], nbytes: int) -> list[int]:
    """Return the blocks of the long enough part of the extent that evicts the fewest bytes."""
    best: tuple[int, int, int] | None = None  # evicted bytes, first, last
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
