"""Region of the arena that belongs to one kind of object. Pure."""

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
"""Part of the arena for each kind; a kind that is not named has none."""

DEFAULT_SHARES: Shares = {
    ObjectKind.RAW: 0.25,
    ObjectKind.FEATURES: 0.48,
    ObjectKind.EMBEDDINGS: 0.25,
    ObjectKind.RECORDS: 0.02,
}
"""Shares of a server's store."""

LIBRARY_SHARES: Shares = {ObjectKind.FEATURES: 1.0}
"""Shares of a program's own store: it has raw media or embeddings only on request."""


Back = Callable[[int, int], int]
"""Backs ``[start, end)`` of the arena with memory; returns where the memory ends, maybe before."""


def all_has_memory(start: int, end: int) -> int:
    """Return the end of the memory of an arena that was allocated as a whole."""
    return sys.maxsize


class Region:
    """Blocks of one kind, and the evictable objects, least recently used first.

    The allocator manages the part that has memory, which begins at the start; `grow` extends it.
    """

    def __init__(self, capacity_nbytes: int, *, start: int, back: Back = all_has_memory) -> None:
        self.start, self.capacity_nbytes = start, capacity_nbytes // ALIGNMENT * ALIGNMENT
        self._back = back
        self.allocator = Allocator(0, start=start)
        self.evictable: OrderedDict[int, StoredObject] = OrderedDict()  # by offset

    @property
    def backed_nbytes(self) -> int:
        """Bytes that have memory, used or not."""
        return self.allocator.capacity_nbytes

    @property
    def largest_free_nbytes(self) -> int:
        """Longest extent that is available without eviction, memory permitting."""
        return max(self.allocator.largest_free_nbytes, self._last_nbytes)

    def grow(self, nbytes: int) -> int:
        """Get memory for up to ``nbytes`` more; return the number of added bytes."""
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
        """Return the bytes to `grow` by for an extent of ``nbytes`` at the end; 0 if impossible."""
        end = self.start + self.backed_nbytes
        free = end - self.allocator.free_start(end)
        return nbytes - free if free < nbytes <= self._last_nbytes else 0

    def put_evictable(self, item: StoredObject, *, is_next: bool = False) -> None:
        """Make an object evictable, as the most recently used, or else the next to be evicted."""
        self.evictable[item.handle.offset] = item
        if is_next:
            self.evictable.move_to_end(item.handle.offset, last=False)

    def keep(self, item: StoredObject) -> None:
        """Make an object unevictable."""
        del self.evictable[item.handle.offset]

    def choose_victims(self, nbytes: int) -> list[StoredObject] | None:
        """Choose the objects to evict for an extent of ``nbytes``; ``None`` if impossible."""
        chosen = choose_victims(self.allocator, self.evictable, nbytes)
        return None if chosen is None else [self.evictable[offset] for offset in chosen]

    @property
    def _last_nbytes(self) -> int:
        """Bytes from the last block to the end, with or without memory."""
        end = self.start + self.backed_nbytes
        return self.start + self.capacity_nbytes - self.allocator.free_start(end)


def divide(
    capacity_nbytes: int, shares: Shares, back: Back | None = None
) -> dict[ObjectKind, Region]:
    """Divide the arena into one region for each kind, side by side.

    Args:
        back: Gets memory for the regions on demand; without it, all have their memory.

    Raises:
        ConfigError: The size is invalid; or a share has an unknown kind, is negative, or the shares
            exceed the whole.
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
