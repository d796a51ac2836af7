"""The part of the arena that belongs to one kind of object. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

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


class Region:
    """Blocks of one kind, and which objects may be evicted, least recently used first."""

    def __init__(self, capacity_nbytes: int, *, start: int) -> None:
        self.allocator = Allocator(capacity_nbytes, start=start)
        self.evictable: OrderedDict[int, StoredObject] = OrderedDict()  # by offset

    def put_evictable(self, item: StoredObject) -> None:
        """The object may go; it is the most recently used now."""
        self.evictable[item.handle.offset] = item

    def keep(self, item: StoredObject) -> None:
        """The object may not go any more."""
        del self.evictable[item.handle.offset]

    def choose_victims(self, nbytes: int) -> list[StoredObject] | None:
        """What to evict so that an extent of ``nbytes`` opens; ``None`` when nothing would."""
        chosen = choose_victims(self.allocator, self.evictable, nbytes)
        return None if chosen is None else [self.evictable[offset] for offset in chosen]


def divide(capacity_nbytes: int, shares: Shares) -> dict[ObjectKind, Region]:
    """One region for each kind, side by side.

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
        regions[kind] = Region(nbytes, start=start)
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
