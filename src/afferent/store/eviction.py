"""Which objects make way: the least recently used whose places join to a hole. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from afferent.store.allocator import Allocator, round_up


@dataclass(slots=True)
class _Stretch:
    """A part of a hole: the block at ``offset``, or a free run."""

    offset: int
    nbytes: int
    is_free: bool


def choose_victims(
    allocator: Allocator, candidates: Iterable[int], nbytes: int
) -> list[int] | None:
    """The blocks to free so that a run of ``nbytes`` opens; changes nothing.

    Candidates are imagined away, oldest first, until the places of some of them and the free runs
    between join to a hole that is long enough. Only blocks of this hole are chosen, and of those
    the fewest bytes that open it, so nothing younger than need be is lost, and nothing that lies
    elsewhere.

    Args:
        candidates: Offsets of blocks that may go, least recently used first.

    Returns:
        The chosen offsets, or ``None`` when even all candidates would not open such a run.
    """
    nbytes = round_up(nbytes)
    ends: dict[int, int] = {}  # imagined runs by their start, and by their end
    starts: dict[int, int] = {}
    for offset in candidates:
        end = offset + allocator.size_of(offset)
        # A run that ends here has been imagined, or is free, or this block is taken to its left.
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
        run_end = allocator.free_end(start)
        is_free = run_end > start
        size = run_end - start if is_free else allocator.size_of(start)
        found.append(_Stretch(start, size, is_free))
        start += size
    return found


def _fewest_bytes(hole: list[_Stretch], nbytes: int) -> list[int]:
    """The blocks of the part of the hole that is long enough and costs the fewest bytes."""
    best: tuple[int, int, int] | None = None  # bytes evicted, first, last
    first = total = evicted = 0
    for last, stretch in enumerate(hole):
        total += stretch.nbytes
        evicted += 0 if stretch.is_free else stretch.nbytes
        while total - hole[first].nbytes >= nbytes:
            total -= hole[first].nbytes
            evicted -= 0 if hole[first].is_free else hole[first].nbytes
            first += 1
        if total >= nbytes and (best is None or evicted < best[0]):
            best = (evicted, first, last)
    if best is None:
        return []
    return [part.offset for part in hole[best[1] : best[2] + 1] if not part.is_free]
