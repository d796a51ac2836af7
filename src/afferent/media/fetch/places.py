"""Connection limits with fair scheduling between tenants, for one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from afferent.admission.shares import FairQueue, Share


@dataclass(frozen=True, slots=True)
class User:
    """Request that needs slots: its tenant's share, and an identity of its own."""

    share: Share
    request: Hashable


class FairPlaces:
    """Semaphore, fair between tenants: `FairQueue` chooses the next waiter; each slot costs the
    same.

    Invariants:
        - While a waiter exists, no slot is free.
        - A slot that was granted to a cancelled waiter goes to the next one.
    """

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def at(self, user: User) -> AsyncIterator[None]:
        await self._enter(user)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, user: User) -> None:
        if self._num_free:
            self._num_free -= 1
            self._waiting.charge(user.share, 1)
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.push(granted, share=user.share, flow=user.request, cost=1)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._leave()  # the slot was granted just before the cancellation
            self._waiting.discard(granted)
            raise

    def _leave(self) -> None:
        while (granted := self._waiting.pop()) is not None:
            if not granted.cancelled():  # a cancelled waiter may not have left the queue yet
                granted.set_result(None)
                return
        self._num_free += 1


@dataclass(slots=True)
class _Named:
    """Slots of one name; ``num_users`` have a slot, or wait for one."""

    places: FairPlaces
    num_users: int = field(default=0)


class PlacesByName:
    """Slots for each name; unused names are forgotten."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._names: dict[str, _Named] = {}

    def __len__(self) -> int:
        return len(self._names)

    @asynccontextmanager
    async def at(self, name: str, user: User) -> AsyncIterator[None]:
        named = self._names.setdefault(name, _Named(FairPlaces(self._num_places)))
        named.num_users += 1
        try:
            async with named.places.at(user):
                yield
        finally:
            named.num_users -= 1
            if not named.num_users:
                del self._names[name]
