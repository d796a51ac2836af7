"""A few at a time, and who is next by fair shares: of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from afferent.quota.shares import FairQueue, Share


@dataclass(frozen=True, slots=True)
class User:
    """A request that wants places: whose it is, and something that is its own."""

    share: Share
    request: Hashable


class FairPlaces:
    """A number of places. Who waits is next by `FairQueue`: a place each, whatever it is for."""

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
                self._leave()  # it was given just now
            self._waiting.discard(granted)
            raise

    def _leave(self) -> None:
        while (granted := self._waiting.pop()) is not None:
            if not granted.cancelled():  # else it was given up, and has not been taken out yet
                granted.set_result(None)
                return
        self._num_free += 1


@dataclass(slots=True)
class _Named:
    """``num_users`` have a place, or wait for one."""

    places: FairPlaces
    num_users: int = field(default=0)


class PlacesByName:
    """So many places under each name; names that nobody uses are forgotten."""

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
