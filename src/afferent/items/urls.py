"""Reader of URLs and stored files: from another node's fetch, a media host, or a file."""

from __future__ import annotations

import time
from collections.abc import Sequence

from afferent.errors import InternalError
from afferent.files.stored_file import StoredFile
from afferent.items.acquire import count
from afferent.items.fleet_urls import Fetched, FleetUrls
from afferent.items.item import ItemSettings
from afferent.items.request import DocumentPart, ItemRequest, MediaPart
from afferent.media.body.raw import RawMedia
from afferent.media.fetch.fetch import Fetcher
from afferent.media.fetch.source import MediaSource, WantedMedia
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.telemetry.trace import Trace

Came = tuple[MediaPart, RawMedia, memoryview, bytes]
"""Part, its media, its bytes and their digest."""


class UrlReader:
    """Reads URLs; one for each process that accepts requests."""

    def __init__(self, store: AsyncDaemonStore, settings: ItemSettings, *, has_tier: bool) -> None:
        """Create it.

        Args:
            has_tier: Whether other nodes may have fetched the result of a URL.
        """
        self._store, self._limits, self._files = store, settings.limits, settings.files
        self._fetcher = Fetcher(self._limits)
        self._fleet = FleetUrls(store, self._limits) if has_tier else None

    async def read(
        self, request: ItemRequest, parts: Sequence[MediaPart | DocumentPart], trace: Trace
    ) -> list[RawMedia]:
        """Read all URLs concurrently.

        Raises:
            InvalidMedia: Or one of its subclasses, with the reason.
            StoreFull: There is no space in the arena now.
        """
        most = [self._limits.of(part.modality).max_nbytes for part in parts]
        left_nbytes = max(self._limits.max_body_nbytes, *most)
        wanted = [_wanted(part) for part in parts]
        found = await self._find(request, wanted, left_nbytes, trace)
        left_nbytes -= sum(raw.nbytes for raw in found.values())
        start_ns = time.monotonic_ns()
        source = MediaSource(
            self._store,
            request.request_id,
            limits=self._limits,
            fetches=self._fetcher.session(max_nbytes=left_nbytes, share=request.share),
            files=self._files,
            tenant=request.tenant,
        )
        with trace.at("fetch"):
            read = iter(await source.read_all([each for each in wanted if each not in found]))
        media = [found[each] if each in found else next(read) for each in wanted]
        fetched = [item.nbytes for item in media if item.origin == "fetch"]
        if fetched:
            note = count(len(fetched), "item")
            trace.stage(start_ns, "fetch", copied_nbytes=sum(fetched), note=note)
        return media

    async def leave(self, request: ItemRequest, came: Sequence[Came]) -> None:
        """Store the media from media hosts for other nodes."""
        if self._fleet is None:
            return
        fetched = {
            _wanted(part): Fetched(raw, data, digest)
            for part, raw, data, digest in came
            if raw.took_us and raw.fresh_s > 0
        }
        if fetched:
            await self._fleet.leave(fetched, request.share)

    async def close(self) -> None:
        await self._fetcher.close()

    async def _find(
        self,
        request: ItemRequest,
        wanted: Sequence[WantedMedia],
        most_nbytes: int,
        trace: Trace,
    ) -> dict[WantedMedia, RawMedia]:
        """Return the media that other nodes have fetched, within the request's size limit."""
        hosted = [each for each in wanted if each.is_http]
        if self._fleet is None or not hosted:
            return {}
        found = await self._fleet.find(
            request.request_id, hosted, tenant=request.tenant, trace=trace
        )
        is_too_much = sum(raw.nbytes for raw in found.values()) > most_nbytes
        return {} if is_too_much else found


def _wanted(part: MediaPart | DocumentPart) -> WantedMedia:
    if not isinstance(part.source, str | StoredFile):
        raise InternalError("an item was not sent")
    return WantedMedia(part.source, part.modality)
