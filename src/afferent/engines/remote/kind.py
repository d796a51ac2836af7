"""Base class of descriptions of engines that run in a process of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec import Struct

from afferent.engines.contract import Caller, EngineKind, SettingsT
from afferent.engines.protocol import Engine
from afferent.engines.remote.client import RemoteEngine
from afferent.runtime import wire
from afferent.runtime.sockets import new_address


class RemoteLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address at which the engine listens for frontends.

    Attributes:
        address: A unix socket's path.
    """

    address: str


class Listening(Struct, frozen=True, kw_only=True):
    """Listening socket of an engine's process, which outlives it: connections wait during a
    restart.
    """

    link: RemoteLink
    fd: int


def listening(name: str) -> Listening:
    """Return a new listening socket, which accepts connections of this user only."""
    address = new_address(name)
    return Listening(link=RemoteLink(address=address), fd=wire.listen(address).detach())


class RemoteKind(EngineKind[SettingsT, RemoteLink]):
    """Engine that speaks `afferent.engines.remote.messages`, by `EngineHost` or by itself."""

    link_type = RemoteLink

    @asynccontextmanager
    async def connect(self, link: RemoteLink, caller: Caller) -> AsyncIterator[Engine]:
        """See `EngineKind.connect`."""
        engine = RemoteEngine(link.address, name=caller.name)
        running = asyncio.create_task(engine.run())
        try:
            yield engine
        finally:
            running.cancel()
            await asyncio.wait([running])
