"""Room in the arena for media of one request that come side by side: several lie in one object.

Each fetch says how long its item is when its host has said so. If each made an object of its own,
a request of a hundred items would ask the store a hundred times, and wait for each answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from afferent.errors import ArenaTooSmall, StoreFull
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import CreateItem
from afferent.types import Handle, MiB, ObjectKind

_MAX_AHEAD_NBYTES = 4 * MiB
"""What is taken for items that have not been announced yet, and may be shorter."""


@dataclass(frozen=True, slots=True)
class Place:
    """``block`` is for one item: from ``start`` on in the object ``handle``."""

    handle: Handle
    start: int
    block: memoryview


class SharedRoom:
    """All of it belongs to the request: when the request is forgotten, so is this.

    Growth never waits, as in `afferent.ingest.raw`.
    """

    def __init__(self, store: AsyncDaemonStore, request_id: str, *, num_items: int) -> None:
        """``num_items`` are expected, all about as long as the first."""
        self._store, self._request_id = store, request_id
        self._num_expected = num_items
        self._used: dict[Handle, int] = {}  # the last one has room left
        self._handle: Handle | None = None
        self._lock = asyncio.Lock()

    async def take(self, nbytes: int) -> Place:
        """Room for one item.

        Raises:
            StoreFull: There is none now.
            ArenaTooSmall: There never is.
        """
        async with self._lock:  # who comes meanwhile finds a place in what is on its way
            handle = self._handle
            if handle is None or self._used[handle] + nbytes > handle.nbytes:
                handle = self._handle = await self._create(nbytes)
                self._used[handle] = 0
            start = self._used[handle]
            self._used[handle] += nbytes
            self._num_expected -= 1
        return Place(handle, start, self._store.block(handle)[start : start + nbytes])

    def settle(self, in_use: Collection[Handle]) -> dict[Handle, Handle]:
        """No more comes: objects as long as they have to be, by what they were called till now.
        They are still to be sealed.

        Args:
            in_use: Those in which there is something.
        """
        left = [handle for handle in self._used if handle not in in_use]
        if left:  # nothing came of what was announced
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
                pass  # what is needed now may be there
        return await self._create_one(nbytes)

    async def _create_one(self, nbytes: int) -> Handle:
        item = CreateItem(ObjectKind.RAW, nbytes)
        (handle,) = await self._store.create(self._request_id, [item])
        return handle
