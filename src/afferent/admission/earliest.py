"""Indexed heap: a heap whose entries can be moved or removed. Pure."""

from __future__ import annotations

import heapq
import itertools
from typing import Any, Generic, TypeVar

E = TypeVar("E")
T = TypeVar("T")

_MAX_PASSED_OVER = 64


class Earliest(Generic[T, E]):
    """Entries with a tag each: the least one first; of equal ones, the one tagged earliest."""

    def __init__(self) -> None:
        self._nodes: dict[E, tuple[Any, int, E]] = {}
        # Contains outdated nodes too, of moved and removed entries: `first` skips them.
        self.heap: list[tuple[Any, int, E]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, entry: E) -> bool:
        return entry in self._nodes

    def tag(self, entry: E) -> T | None:
        node = self._nodes.get(entry)
        return node[0] if node is not None else None

    def put(self, entry: E, tag: T) -> None:
        """Add an entry, or replace its tag."""
        # Bounds the outdated nodes that entries leave behind while nothing calls `first`.
        if len(self.heap) > 2 * len(self._nodes) + _MAX_PASSED_OVER:
            self.heap = list(self._nodes.values())
            heapq.heapify(self.heap)
        self._nodes[entry] = node = (tag, next(self._numbers), entry)
        heapq.heappush(self.heap, node)

    def remove(self, entry: E) -> None:
        del self._nodes[entry]

    def first(self) -> E | None:
        while self.heap:
            node = self.heap[0]
            if self._nodes.get(node[2]) is node:
                return node[2]
            heapq.heappop(self.heap)
        return None
