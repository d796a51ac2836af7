"""Connections of `Features` to stores: they drop the pins of shared items that a store has lost."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore


class PinnedTree:
    """Tree of pinned views of one item; ``tree`` is ``None`` once its store is lost."""

    __slots__ = ("__weakref__", "tree")

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree: dict[str, Any] | None = tree


class PinnedTrees:
    """Trees of one connection that are still alive; any thread may call the methods.

    Invariants: when the connection is lost, no tree stays, because the next daemon can't allocate
    a byte before this process has dropped all views of the former one.
    """

    def __init__(self, store: FeatureStore | AsyncFeatureStore) -> None:
        self._store = weakref.ref(store)
        self._lock = threading.Lock()
        self._alive: weakref.WeakSet[PinnedTree] = weakref.WeakSet()

    def add(self, tree: dict[str, Any]) -> PinnedTree:
        """Return the tree, to be dropped with the connection."""
        pinned = PinnedTree(tree)
        with self._lock:
            self._alive.add(pinned)
        if (store := self._store()) is not None and store.is_lost:
            pinned.tree = None
        return pinned

    def drop(self) -> None:
        """Drop all trees. Views that the program took out of them stay."""
        with self._lock:
            for pinned in self._alive:
                pinned.tree = None


class FeatureStore(DaemonStore):
    """Daemon store with the trees of the items that it shares."""

    def __init__(self, address: str, **arguments: Any) -> None:
        self.pinned_trees = PinnedTrees(self)
        super().__init__(address, **arguments)

    @property
    def is_lost(self) -> bool:
        """Whether the store is gone, and this connection was not closed."""
        return not self.is_open and not self._closed.is_set()

    def _reconnect(self) -> None:
        self.pinned_trees.drop()
        super()._reconnect()


class AsyncFeatureStore(AsyncDaemonStore):
    """Async daemon store with the trees of the items that it shares."""

    def __init__(self, *arguments: Any) -> None:
        self.pinned_trees = PinnedTrees(self)
        super().__init__(*arguments)

    @property
    def is_lost(self) -> bool:
        """Whether the store is gone, and this connection was not closed."""
        return not self.is_open and not self._is_closed

    async def _reconnect(self) -> None:
        self.pinned_trees.drop()
        await super()._reconnect()
