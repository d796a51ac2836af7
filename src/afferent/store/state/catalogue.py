"""Catalogue of media items in the store, and the log of their changes. Pure.

Programs outside the store, such as routers, follow it: they read all items once, and then the
changes. The log is bounded; a reader that is too slow for it reads all items again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final

from msgspec import structs

from afferent.store.protocol.items import MAX_ITEMS, ItemLabel
from afferent.store.protocol.results import (
    ItemChange,
    ItemChanges,
    ItemPage,
    RemovedItem,
    StoredItem,
)
from afferent.store.state.object import StoredObject
from afferent.types import ObjectKind

LISTED_KINDS: Final = frozenset({ObjectKind.FEATURES, ObjectKind.EMBEDDINGS})
"""Kinds of objects that are media items; others are the server's own, such as conversations."""
_MAX_LOG = 16_384


class Catalogue:
    """Sealed items with a key, and the log of their changes.

    Changes are numbered from 1. An object that is evicted and restored in one event is removed and
    stored again.

    Invariants:
        - It has exactly the sealed objects of `LISTED_KINDS` that a key leads to.
        - The items are in the order of their numbers.
        - The log ends with the latest change.
    """

    def __init__(self, *, max_log: int = _MAX_LOG) -> None:
        self.seq = 0
        """Number of the latest change."""
        self._items: dict[int, tuple[int, StoredObject]] = {}  # by generation: number, object
        self._by_name: dict[bytes, list[StoredObject]] = {}
        # A stored object is described when it is read: its tenant is set after its seal.
        self._log: deque[StoredObject | RemovedItem] = deque(maxlen=max_log)

    def __contains__(self, item: StoredObject) -> bool:
        return item.handle.generation in self._items

    def __len__(self) -> int:
        return len(self._items)

    def store(self, item: StoredObject) -> None:
        """Add a sealed object, if it is a media item."""
        if item.key is None or item.kind not in LISTED_KINDS:
            return
        self._add(item)
        self._items[item.handle.generation] = (self.seq, item)
        self._by_name.setdefault(_name(item), []).append(item)

    def remove(self, item: StoredObject) -> None:
        """Remove an object, if it is listed."""
        if self._items.pop(item.handle.generation, None) is None:
            return
        name = _name(item)
        self._by_name[name].remove(item)
        if not self._by_name[name]:
            del self._by_name[name]
        self._add(RemovedItem(name, item.kind))

    def find(self, names: Iterable[bytes]) -> list[StoredItem]:
        """Return the items with these names; a name may have features and embeddings."""
        return [_described(item) for name in names for item in self._by_name.get(name, ())]

    def changes_after(self, seq: int) -> ItemChanges:
        """Return the first changes after a number, at most `MAX_ITEMS`.

        They are not complete if the log does not reach back to this number, or the number is of
        another epoch.
        """
        num_new = self.seq - seq
        if not 0 <= num_new <= len(self._log):
            return ItemChanges(self.seq, [], is_complete=False)
        start = len(self._log) - num_new
        end = min(start + MAX_ITEMS, len(self._log))
        changes = [_change(self._log[at]) for at in range(start, end)]
        return ItemChanges(seq + len(changes), changes)

    def page(self, after: int) -> ItemPage:
        """Return the first items that were stored after a number, at most `MAX_ITEMS`."""
        later = (entry for entry in self._items.values() if entry[0] > after)
        found = list(islice(later, MAX_ITEMS + 1))
        listed = found[:MAX_ITEMS]
        resume = listed[-1][0] if len(found) > len(listed) else 0
        return ItemPage(self.seq, [_described(item) for _, item in listed], resume)

    def _add(self, change: StoredObject | RemovedItem) -> None:
        self.seq += 1
        self._log.append(change)


def inherited_label(source: StoredObject) -> ItemLabel:
    """Return the label of an object that is computed from ``source``: it is of the same item."""
    name, label = _name(source), source.label
    return ItemLabel(name=name) if label is None else structs.replace(label, name=name)


def _name(item: StoredObject) -> bytes:
    return item.label.name if item.label is not None and item.label.name else item.key or b""


def _change(entry: StoredObject | RemovedItem) -> ItemChange:
    return entry if isinstance(entry, RemovedItem) else _described(entry)


def _described(item: StoredObject) -> StoredItem:
    label = item.label
    return StoredItem(
        _name(item),
        item.kind,
        item.handle.nbytes,
        None if label is None else label.modality,
        b"" if label is None else label.placement,
        item.tenant,
    )
