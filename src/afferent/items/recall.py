"""URL cache: items whose URLs were fetched recently, or are being fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from afferent.files.stored_file import StoredFile
from afferent.items.request import ItemRequest, MediaPart, SeenMedia
from afferent.media.body.raw import RawMedia
from afferent.media.fetch.url_memory import Flights, UrlMemory
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.settle import settle
from afferent.store.protocol.items import Join
from afferent.store.protocol.results import existing
from afferent.types import ContentKey

KeyOf = Callable[[MediaPart, bytes], ContentKey]
"""Returns the key of an item's features, from the digest of its bytes."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """URL cache hits of a request.

    Attributes:
        known: Parts with existing features, by the received part: they need not be fetched.
        flights: The other URLs, which this request fetches for all concurrent requests.
    """

    known: Mapping[MediaPart, MediaPart]
    flights: Flights


class Recall:
    """Looks up URLs, over one store."""

    def __init__(self, store: AsyncDaemonStore, *, timeout_s: float) -> None:
        """Create it.

        Args:
            timeout_s: Limit of the wait for another request's fetch.
        """
        self._store, self._timeout_s = store, timeout_s
        self._memory = UrlMemory()

    async def find(
        self, request: ItemRequest, parts: Sequence[MediaPart], key_of: KeyOf
    ) -> Recalled:
        """Return the parts whose URLs or files need not be read; follow with `Flights.end`."""
        urls = {part: self._url_key(request, part) for part in parts if is_fetched(part)}
        flights, others = self._memory.take_off(
            key for key in urls.values() if self._memory.digest(key) is None
        )
        try:
            if others:
                await self._wait(others)
            digests = {part: self._memory.digest(key) for part, key in urls.items()}
            digests |= {
                part: part.source.digest
                for part in parts
                if isinstance(part.source, StoredFile) and not part.uuid
            }
            known = {part: digest for part, digest in digests.items() if digest is not None}
            wanted = {part: key_of(part, digest) for part, digest in known.items()}
            here = await self._those_here(request.request_id, list(set(wanted.values())))
        except BaseException:
            flights.end()
            raise
        seen = {
            part: replace(part, source=SeenMedia(known[part]))
            for part, key in wanted.items()
            if key in here
        }
        return Recalled(seen, flights)

    def remember(self, request: ItemRequest, part: MediaPart, raw: RawMedia, digest: bytes) -> None:
        if is_fetched(part):
            self._memory.remember(self._url_key(request, part), digest, fresh_s=raw.fresh_s)

    async def _wait(self, others: Sequence[asyncio.Event]) -> None:
        waiting = [asyncio.ensure_future(other.wait()) for other in others]
        try:
            await asyncio.wait(waiting, timeout=self._timeout_s)
        finally:
            for each in waiting:
                each.cancel()

    async def _those_here(self, request_id: str, keys: list[ContentKey]) -> set[ContentKey]:
        """Return the keys that exist or are being made; nothing stays pinned."""
        if not keys:
            return set()
        outcomes = await self._store.acquire(request_id, [Join(key) for key in keys])
        settled = await settle(self._store, request_id, keys, outcomes, timeout_s=self._timeout_s)
        found = {
            key: handle
            for key, outcome in zip(keys, settled, strict=True)
            if (handle := existing(outcome)) is not None
        }
        if found:
            await self._store.release(request_id, list(found.values()))
        return set(found)

    @staticmethod
    def _url_key(request: ItemRequest, part: MediaPart) -> bytes:
        return UrlMemory.key(str(part.source), tenant=request.tenant, modality=part.modality)


def may_be_known(part: MediaPart) -> bool:
    """Whether the digest of a part may be known before its bytes are read."""
    return is_fetched(part) or isinstance(part.source, StoredFile)


def is_fetched(part: MediaPart) -> bool:
    """Whether it comes from a media host; an item with a ``uuid`` is known by that instead."""
    source = part.source
    return isinstance(source, str) and source[:4].lower() == "http" and not part.uuid
