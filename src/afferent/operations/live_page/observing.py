"""Snapshots of a server's processes: the store, and each frontend."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from afferent.errors import AfferentError
from afferent.proxy.reports import (
    MAX_ANSWER_NBYTES,
    SOCKET_NAME,
    FrontendReport,
    Question,
)
from afferent.runtime import wire
from afferent.runtime.sockets import addresses_in
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.results import ClientInfo, ObjectInfo, Statistics, TenantInfo
from afferent.telemetry.readings import Reading

_TIMEOUT_S = 0.8
"""Timeout of each answer: a slower process is missing in the snapshot."""
_LISTS_S = 5.0
"""Interval of the lists that are expensive for the store: it goes through all objects for them."""
_MAX_OBJECTS = 12

_report_decoder = msgspec.json.Decoder(FrontendReport)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """The largest objects, and the pins of clients; taken less often than the rest."""

    objects: Sequence[ObjectInfo] = ()
    clients: Sequence[ClientInfo] = ()
    taken_s: float = -_LISTS_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Snapshot at ``taken_s`` by `time.monotonic`. No ``statistics``: the store did not answer."""

    taken_s: float
    frontends: Sequence[FrontendReport] = ()
    statistics: Statistics | None = None
    readings: Sequence[Reading] = ()
    tenants: Sequence[TenantInfo] = ()
    lists: Lists = field(default_factory=Lists)


class Observer:
    """Observer of one server, identified by the folder of its sockets. No process waits for it.

    Invariants: at most one connection to each frontend, and one to the store.
    """

    def __init__(self, folder: Path, *, name: str) -> None:
        """Observe as the store's client ``name``, which snapshots omit."""
        self._folder, self._name = folder, name
        self._links: dict[str, _Link] = {}
        self._store: AsyncDaemonStore | None = None
        self._lists = Lists()

    async def observe(self) -> Observation:
        """Take a snapshot; a process that does not answer is missing in it."""
        seen = Observation(taken_s=time.monotonic(), frontends=await self._ask_frontends())
        if self._store is None and seen.frontends:
            address = seen.frontends[0].store_address
            with contextlib.suppress(AfferentError):
                self._store = await AsyncDaemonStore.connect(
                    address, name=self._name, timeout_s=_TIMEOUT_S
                )
        if self._store is None:
            return seen
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._ask_store(self._store, seen)
        except (AfferentError, TimeoutError):
            return seen

    async def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
        store, self._store = self._store, None
        if store is not None:
            await store.close()

    async def _ask_frontends(self) -> list[FrontendReport]:
        addresses = addresses_in(self._folder, SOCKET_NAME)
        for gone in self._links.keys() - set(addresses):
            self._links.pop(gone).close()
        links = [self._links.setdefault(each, _Link(each)) for each in addresses]
        # A killed frontend leaves its address: ask one that answered the last question.
        chosen = next((link for link in links if link.is_open), links[0] if links else None)
        asked = (link.ask(Question(of_engine=link is chosen)) for link in links)
        return [report for report in await asyncio.gather(*asked) if report is not None]

    async def _ask_store(self, store: AsyncDaemonStore, seen: Observation) -> Observation:
        statistics = await store.stat()
        statistics.num_clients -= 1
        if seen.taken_s - self._lists.taken_s >= _LISTS_S:
            self._lists = Lists(
                objects=await store.list_objects(limit=_MAX_OBJECTS),
                clients=[each for each in await store.list_clients() if not self._is_own(each)],
                taken_s=seen.taken_s,
            )
        return replace(
            seen,
            statistics=statistics,
            readings=await store.read_metrics(),
            tenants=await store.list_tenants(),
            lists=self._lists,
        )

    def _is_own(self, client: ClientInfo) -> bool:
        return client.pid == os.getpid() and client.name == self._name


class _Link:
    """Connection to a frontend, opened when needed."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the frontend answered the last question."""
        return self._streams is not None

    async def ask(self, question: Question) -> FrontendReport | None:
        """Return the frontend's report; ``None`` if it is gone or does not answer in time."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer = self._streams = self._streams or await self._connect()
                writer.write(msgspec.json.encode(question) + b"\n")
                return _report_decoder.decode(await reader.readline())
        except (OSError, ValueError, TimeoutError, AfferentError, msgspec.MsgspecError):
            self.close()
            return None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        streams = await asyncio.open_unix_connection(self._address, limit=MAX_ANSWER_NBYTES)
        wire.check_peer(streams[1].get_extra_info("socket"))
        return streams

    def close(self) -> None:
        """Close the connection: a late answer would be taken for that to the next question."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
