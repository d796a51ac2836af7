"""Shared objects in the arena for concurrent media of one request: several items in one object.

Each fetch announces its item's length when its host has sent it. With one object for each item, a
request of a hundred items would make a hundred requests to the store, and wait for each answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from afferent.errors import ArenaTooSmall, StoreFull
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import CreateItem, Handle, MiB, ObjectKind

_MAX_AHEAD_NBYTES = 4 * MiB
"""Most bytes that are reserved for items that have not been announced yet, and may be shorter."""


@dataclass(frozen=True, slots=True)
class Place:
    """Space for one item: ``block`` is the part from ``start`` on in the object ``handle``."""

    handle: Handle
    start: int
    block: memoryview


class SharedRoom:
    """Space for the items of one request, in shared objects.

    All of it belongs to the request, and is released with it. Growth never waits, as in
    `afferent.media.body.raw`.

    Invariants:
        - ``_used`` has the used bytes of each object; only the last one has space left.
        - One object is created at a time, under ``_lock``.
    """

    def __init__(self, store: AsyncDaemonStore, request_id: str, *, num_items: int) -> None:
        """Create no object yet; ``num_items`` are expected, all about as long as the first."""
        self._store, self._request_id = store, request_id
        self._num_expected = num_items
        self._used: dict[Handle, int] = {}  # the last one has room left
        self._handle: Handle | None = None
        self._lock = asyncio.Lock()

    async def take(self, nbytes: int) -> Place:
        """Reserve space for one item.

        Raises:
            StoreFull: There is no space now.
            ArenaTooSmall: The arena never has so much space.
        """
        async with self._lock:  # concurrent items share the object that is being created
            handle = self._handle
            if handle is None or self._used[handle] + nbytes > handle.nbytes:
                handle = self._handle = await self._create(nbytes)
                self._used[handle] = 0
            start = self._used[handle]
            self._used[handle] += nbytes
            self._num_expected -= 1
        return Place(handle, start, self._store.block(handle)[start : start + nbytes])

    def settle(self, in_use: Collection[Handle]) -> dict[Handle, Handle]:
        """End the reservations; return each object cut to its used length, by its earlier handle.

        The objects are still to be sealed.

        Args:
            in_use: Objects with items; the others are discarded.
        """
        left = [handle for handle in self._used if handle not in in_use]
        if left:  # the announced items did not come
            self._store.discard(self._request_id, left)
        return {
            handle: msgspec.structs.replace(handle, nbytes=nbytes)
            for handle, nbytes in self._used.items()
        }

    async def _create(self, nbytes: int) -> Handle:
        ahead_nbytes = min(nbytes * max(self._num_expected, 1), _MAX_AHEAD_NBYTES)
        if ahead_nbytes > nbytes:
            try:
                return await self._create_one(ahead_nbytes)
            except (StoreFull, ArenaTooSmall):
                pass  # there may be space for this item alone
        return await self._create_one(nbytes)

    async def _create_one(self, nbytes: int) -> Handle:
        item = CreateItem(ObjectKind.RAW, nbytes)
        (handle,) = await self._store.create(self._request_id, [item])
        return handle
