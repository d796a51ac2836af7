"""The part of the arena that belongs to one kind of object. Pure."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping

from afferent.errors import ConfigError
from afferent.store.state.allocator import ALIGNMENT, Allocator
from afferent.store.state.eviction import choose_victims
from afferent.store.state.object import StoredObject
from afferent.types import ObjectKind
from afferent.wording import any_of, shown

Shares = Mapping[ObjectKind, float]
"""What part of the arena each kind has; a kind that is not named has none."""

DEFAULT_SHARES: Shares = {
    ObjectKind.RAW: 0.25,
    ObjectKind.FEATURES: 0.48,
    ObjectKind.EMBEDDINGS: 0.25,
    ObjectKind.RECORDS: 0.02,
}
"""Of a server's store."""

LIBRARY_SHARES: Shares = {ObjectKind.FEATURES: 1.0}
"""Of a program's own store: it has raw media or embeddings only where it asks for them."""


Back = Callable[[int, int], int]
"""Has memory for ``[start, end)`` of the arena; where what has memory ends, which may be before."""


def all_has_memory(start: int, end: int) -> int:
    """Of an arena that was allocated as a whole."""
    return sys.maxsize


class Region:
    """Blocks of one kind, and which objects may be evicted, least recently used first.

    Its allocator has what has memory of it, from the start on; `grow` gets more.
    """

    def __init__(self, capacity_nbytes: int, *, start: int, back: Back = all_has_memory) -> None:
        self.start, self.capacity_nbytes = start, capacity_nbytes // ALIGNMENT * ALIGNMENT
        self._back = back
        self.allocator = Allocator(0, start=start)
        self.evictable: OrderedDict[int, StoredObject] = OrderedDict()  # by offset

    @property
    def backed_nbytes(self) -> int:
        """What has memory of it, used or not."""
        return self.allocator.capacity_nbytes

    @property
    def largest_free_nbytes(self) -> int:
        """The longest extent that can be had without evicting anything, memory permitting."""
        return max(self.allocator.largest_free_nbytes, self._last_nbytes)

    def grow(self, nbytes: int) -> int:
        """Get memory for so much more, as far as there is any; how much more has memory now."""
        begin = self.start + self.backed_nbytes
        end = min(begin + nbytes, self.start + self.capacity_nbytes)
        if end <= begin:
            return 0
        backed = min(self._back(begin, end), self.start + self.capacity_nbytes)
        grown = max(backed - begin, 0) // ALIGNMENT * ALIGNMENT
        if grown:
            self.allocator.grow(grown)
        return grown

    def missing_nbytes(self, nbytes: int) -> int:
        """By how much to `grow` for an extent of ``nbytes`` at the end; 0 if none fits there."""
        end = self.start + self.backed_nbytes
        free = end - self.allocator.free_start(end)
        return nbytes - free if free < nbytes <= self._last_nbytes else 0

    def put_evictable(self, item: StoredObject, *, is_next: bool = False) -> None:
        """The object may go; it is the most recently used now, or else the first to go."""
        self.evictable[item.handle.offset] = item
        if is_next:
            self.evictable.move_to_end(item.handle.offset, last=False)

    def keep(self, item: StoredObject) -> None:
        """The object may not go any more."""
        del self.evictable[item.handle.offset]

    def choose_victims(self, nbytes: int) -> list[StoredObject] | None:
        """What to evict so that an extent of ``nbytes`` opens; ``None`` when nothing would."""
        chosen = choose_victims(self.allocator, self.evictable, nbytes)
        return None if chosen is None else [self.evictable[offset] for offset in chosen]

    @property
    def _last_nbytes(self) -> int:
        """From the last block to the end, whether it has memory or not."""
        end = self.start + self.backed_nbytes
        return self.start + self.capacity_nbytes - self.allocator.free_start(end)


def divide(
    capacity_nbytes: int, shares: Shares, back: Back | None = None
) -> dict[ObjectKind, Region]:
    """One region for each kind, side by side.

    Args:
        back: Gets them memory as they need it; without it, all have theirs.

    Raises:
        ConfigError: It is no size; or the shares are of no kind, negative, or more than the whole.
    """
    if not hasattr(capacity_nbytes, "__index__") or capacity_nbytes <= 0:
        raise ConfigError(
            f"an arena's size is a number of bytes, such as 64 * MiB, not {capacity_nbytes!r}"
        )
    _check_shares(shares)
    regions, start = {}, 0
    for kind in ObjectKind:
        left = capacity_nbytes - start
        nbytes = min(left, int(capacity_nbytes * shares.get(kind, 0.0))) // ALIGNMENT * ALIGNMENT
        regions[kind] = Region(nbytes, start=start, back=back or all_has_memory)
        if back is None:
            regions[kind].grow(nbytes)
        start += nbytes
    return regions


def _check_shares(shares: object) -> None:
    if not isinstance(shares, Mapping):
        raise ConfigError(
            "shares say what part of the arena each kind of object has, such as "
            f"{{ObjectKind.FEATURES: 1.0}}, and not {shown(shares)}"
        )
    for kind, share in shares.items():
        if kind not in tuple(ObjectKind):
            raise ConfigError(f"shares are of {any_of(ObjectKind)}, and not of {shown(kind)}")
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigError(f"shares: that of {kind} is between 0 and 1, and not {shown(share)}")
    if not 0 < (total := sum(shares.values())) <= 1 + 1e-9:
        raise ConfigError(f"shares are more than 0 and at most 1 in all, and not {total:g}")
