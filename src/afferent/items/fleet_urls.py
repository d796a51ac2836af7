"""Media that another node of the fleet has recently fetched, by their URLs.

With a tier, the result of a URL is stored there: a record under the tenant and the URL that names
the bytes; and the bytes, under the tenant and their digest. It is valid for as long as its media
host allows, as within one process. A node that finds both does not ask the host, and digests the
bytes again. Otherwise it fetches, as without a tier.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct

from afferent import keys
from afferent.admission.shares import Share
from afferent.config import Limits
from afferent.errors import AfferentError
from afferent.media.body.raw import RawMedia
from afferent.media.fetch.fetch_policy import check_url
from afferent.media.fetch.source import WantedMedia
from afferent.media.fetch.url_memory import UrlMemory
from afferent.runtime.tasks import in_thread
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.settle import settle
from afferent.store.protocol.items import Claim, Fetch, SealItem
from afferent.store.protocol.results import Owner, existing, spans_of
from afferent.telemetry.trace import Trace
from afferent.types import (
    ContentKey,
    Handle,
    KeyBytes,
    MiB,
    NonNegative,
    ObjectKind,
    decode,
    encode,
)

log = logging.getLogger(__name__)

_RAW_TAG: Final = b"afferent/raw/v1"
_RECORD_NBYTES = 128
_FETCH_US = 20_000
"""Approximate time of a media host, until the tier process has measured some."""
_LONGEST_S = 10.0
_LONG_NBYTES = MiB


class _Seen(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Result of a URL, its expiry (in seconds since 1970), and the time of the fetch."""

    digest: KeyBytes
    nbytes: NonNegative
    until_s: float
    took_us: NonNegative


_decoder = msgspec.msgpack.Decoder(_Seen)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Media from a media host: its location, bytes and digest."""

    raw: RawMedia
    data: memoryview
    digest: bytes


class FleetUrls:
    """Finds and stores URL results, over one store; neither ever fails a request."""

    def __init__(self, store: AsyncDaemonStore, limits: Limits) -> None:
        self._store, self._limits = store, limits
        self._numbers = itertools.count()

    async def find(
        self, request_id: str, wanted: Sequence[WantedMedia], *, tenant: str, trace: Trace
    ) -> dict[WantedMedia, RawMedia]:
        """Return the media that other nodes have fetched, pinned in the arena by the request.

        Raises:
            ForbiddenUrl: A URL may not be fetched.
        """
        for each in wanted:
            check_url(each.url, allow=self._limits.fetch_allow)
        try:
            seen = await self._records(list(dict.fromkeys(wanted)), tenant, trace)
            return await self._bytes(request_id, seen, tenant, trace) if seen else {}
        except AfferentError as error:
            log.info("media were not looked for beyond", extra={"reason": error.code})
            return {}

    async def leave(self, fetched: Mapping[WantedMedia, Fetched], share: Share) -> None:
        """Store the results of URLs for other nodes; ``share`` names their tenant."""
        lease = f"url-{next(self._numbers)}"
        try:
            self._store.introduce(lease, share)
            for url, each in fetched.items():
                await self._leave(lease, url, each, share.tenant)
        except AfferentError as error:  # there is no space, or no store
            log.info("media were not left for others", extra={"reason": error.code})
        finally:
            self._store.forget(lease)

    # Find

    async def _records(
        self, wanted: Sequence[WantedMedia], tenant: str, trace: Trace
    ) -> dict[WantedMedia, _Seen]:
        """Return the valid records of these URLs."""
        said = await self._said(wanted, tenant, trace)
        now_s = time.time()
        if old := [url for url, seen in said.items() if seen.until_s <= now_s]:
            # This may be an old local copy; another node may have a newer record.
            await self._store.delete([_record_key(url, tenant) for url in old])
            said |= await self._said(old, tenant, trace)
        return {
            url: seen
            for url, seen in said.items()
            if now_s < seen.until_s and 0 < seen.nbytes <= self._limits.of(url.modality).max_nbytes
        }

    async def _said(
        self, wanted: Sequence[WantedMedia], tenant: str, trace: Trace
    ) -> dict[WantedMedia, _Seen]:
        lease = f"url-{next(self._numbers)}"
        asked = [
            Fetch(_record_key(url, tenant), ObjectKind.RECORDS, _RECORD_NBYTES, _FETCH_US)
            for url in wanted
        ]
        try:
            handles = await self._settled(lease, asked, trace)
            return {
                url: decode(_decoder, self._store.block(handle))
                for url, handle in zip(wanted, handles, strict=True)
                if handle is not None
            }
        finally:
            self._store.forget(lease)

    async def _bytes(
        self, request_id: str, seen: Mapping[WantedMedia, _Seen], tenant: str, trace: Trace
    ) -> dict[WantedMedia, RawMedia]:
        asked = {
            one.digest: Fetch(
                _raw_key(tenant, one.digest), ObjectKind.RAW, one.nbytes, max(1, one.took_us)
            )
            for one in seen.values()
        }
        handles = await self._settled(request_id, list(asked.values()), trace)
        here = dict(zip(asked, handles, strict=True))
        now_s = time.time()
        return {
            url: RawMedia(
                *("tier", handle.nbytes),
                handle=handle,
                is_sealed=True,
                fresh_s=max(0.0, one.until_s - now_s),
            )
            for url, one in seen.items()
            if (handle := here[one.digest]) is not None
        }

    async def _settled(
        self, lease: str, asked: Sequence[Fetch], trace: Trace
    ) -> list[Handle | None]:
        """Return the pinned handle of each; ``None`` if it is unavailable."""
        outcomes = await self._store.acquire(lease, asked)
        asked_keys = [ContentKey(each.key) for each in asked]
        outcomes = await settle(self._store, lease, asked_keys, outcomes, timeout_s=_LONGEST_S)
        for outcome in outcomes:
            trace.add(spans_of(outcome))
        return [existing(outcome) for outcome in outcomes]

    # Store

    async def _leave(self, lease: str, url: WantedMedia, came: Fetched, tenant: str) -> None:
        """Store the bytes, then the record, after deleting an old one, which would block it."""
        raw, data = came.raw, came.data
        await self._write(lease, _raw_key(tenant, came.digest), ObjectKind.RAW, data, raw.took_us)
        until_s = time.time() + raw.fresh_s
        seen = encode(_Seen(came.digest, len(data), until_s, raw.took_us))
        key = _record_key(url, tenant)
        await self._store.delete([key])
        await self._write(lease, key, ObjectKind.RECORDS, memoryview(seen), raw.took_us)

    async def _write(
        self, lease: str, key: ContentKey, kind: ObjectKind, data: memoryview, took_us: int
    ) -> None:
        """Write an object, unless it exists or another request writes it."""
        (outcome,) = await self._store.acquire(lease, [Claim(key, kind, len(data))])
        if not isinstance(outcome, Owner):
            return
        target = np.frombuffer(self._store.block(outcome.handle), np.uint8)[: len(data)]
        source = np.frombuffer(data, np.uint8)
        if len(data) > _LONG_NBYTES:
            await in_thread(np.copyto, target, source)
        else:
            np.copyto(target, source)
        await self._store.seal(lease, [SealItem(outcome.handle, len(data), [], took_us)])


def _record_key(url: WantedMedia, tenant: str) -> ContentKey:
    return ContentKey(UrlMemory.key(url.url, tenant=tenant, modality=url.modality))


def _raw_key(tenant: str, digest: bytes) -> ContentKey:
    return ContentKey(keys.frame(_RAW_TAG, tenant.encode(), digest))
