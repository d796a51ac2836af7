"""Receiver of a request's items: their bytes and keys, or only the keys of known items."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from afferent import keys
from afferent.config import RequestLimits
from afferent.errors import (
    InternalError,
    InvalidMedia,
    MediaNotCached,
    MediaTooLarge,
    UnsupportedMedia,
)
from afferent.files.stored_file import StoredFile
from afferent.items.acquire import count, handle_if_there
from afferent.items.item import ItemSettings, Processor, ReceivedItem, RequestItems
from afferent.items.names import Binding, Name, Names, check
from afferent.items.recall import Recall, may_be_known
from afferent.items.request import Detail, ItemRequest, MediaPart, SeenMedia
from afferent.items.urls import UrlReader
from afferent.media.body.digest import Digester
from afferent.media.body.pace import Pace
from afferent.media.body.raw import RawMedia
from afferent.media.headers.probe import (
    Accepted,
    ForwardedHeader,
    ImageBound,
    ImageHeader,
    MediaHeader,
    probe_accepted,
    probe_frames,
)
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Find, in_messages
from afferent.telemetry.registry import counter
from afferent.telemetry.trace import Trace
from afferent.types import FILE_KINDS, ContentKey, Modality

MEDIA_BYTES = counter(
    "afferent_media_bytes_total",
    "Bytes of media as they came: in the body, fetched, or from a tier that had them fetched",
    modality=FILE_KINDS,
    origin=("data", "fetch", "tier"),
)
LOW_DETAIL_PIXELS = 512 * 512
"""Maximum of pixels for an image in low detail."""
NO_FRAMES = (
    "images with commas between them (data:video/jpeg) are no video here; send a file, such as an "
    "MP4"
)
"""Message for the frames of a video in place of a file."""
_MAX_LISTED = 8
_MAX_NEEDED = 1024
_MOST_KEYS = 8192


@dataclass(frozen=True, slots=True)
class _Part:
    media: MediaPart
    name: Name | None
    is_recalled: bool = False

    @property
    def is_sent(self) -> bool:
        return isinstance(self.media.source, str | RawMedia | StoredFile)

    def digest(self, bindings: Mapping[Name, Binding]) -> bytes | None:
        """Return the digest of a part that was not sent; ``None`` if its name is unknown."""
        if isinstance(self.media.source, SeenMedia):
            return self.media.source.digest
        binding = bindings.get(self.name) if self.name is not None else None
        if self.name is None or binding is None:
            return None
        check(self.name, binding, Binding(binding.digest, self.media.modality))
        return binding.digest


@dataclass(frozen=True, slots=True)
class _Received:
    """Received bytes of a part that was sent."""

    raw: RawMedia
    header: MediaHeader | ImageBound | ForwardedHeader | None
    digest: bytes
    alias: bytes


class ItemReader:
    """Reads items for one model."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        processor: Processor,
        names: Names,
        settings: ItemSettings,
    ) -> None:
        self._name_of = settings.name_of
        self._tag_of = keys.tenant_tags(settings.tenant_secret)
        self._accepted = settings.accepted
        self._store, self._names, self._settings = store, names, settings
        self._fingerprint, self._limits = processor.fingerprint, settings.limits
        self._key_of = functools.lru_cache(_MOST_KEYS)(self._made_key)
        self.digester = Digester()
        """Hashes media; it ends with the reader."""
        self._urls = UrlReader(store, settings, has_tier=settings.has_tier)
        self._recall = Recall(store, timeout_s=settings.limits.fetch_total_timeout_s)
        follows_image = processor.family.bounded(LOW_DETAIL_PIXELS) is not processor.family
        self._low_detail_pixels = LOW_DETAIL_PIXELS if follows_image else 0
        self._modalities = tuple(processor.family.tokens)
        self._needed: dict[bytes, None] = {}

    async def knows(self, request_id: str, tenant: str, digest: bytes) -> bool:
        """Return whether features of media with this digest exist, so that the bytes need not come.

        Not if they were needed before, for features of another kind, or as bytes.
        """
        if self._name_of is not None or digest in self._needed:
            return False
        wanted = [
            self._key_of(self._tag_of(tenant), modality, 0, digest) for modality in self._modalities
        ]
        return bool(await self._find(request_id, wanted))

    def need(self, digests: Iterable[bytes]) -> None:
        """Remember that the bytes with these digests have to come."""
        self._needed |= dict.fromkeys(digests)
        while len(self._needed) > _MAX_NEEDED:
            del self._needed[next(iter(self._needed))]

    async def read(
        self, request: ItemRequest, trace: Trace, *, may_recall: bool = True
    ) -> RequestItems:
        """Return the items, without plans.

        Args:
            may_recall: Whether features suffice: the bytes of a URL cache hit are not fetched.

        Raises:
            MediaNotCached: Some were not sent, and are not cached.
            InvalidMedia: An item is invalid, or its name belongs to another item.
            Unavailable: Try again.
        """
        if not may_recall or self._name_of is not None:  # an alias needs the bytes
            return await self._read(request, request.media, {}, trace)
        recalled = await self._recall.find(
            request, request.media, lambda part, digest: self._key(request, part, digest)
        )
        try:
            items = await self._read(request, request.media, recalled.known, trace)
        except BaseException:
            recalled.flights.end()
            raise
        return replace(items, flights=recalled.flights)

    async def _read(
        self,
        request: ItemRequest,
        media: Sequence[MediaPart],
        recalled: Mapping[MediaPart, MediaPart],
        trace: Trace,
    ) -> RequestItems:
        parts = []
        for each in media:
            known = recalled.get(each) if may_be_known(each) else _left_out(each)
            name = Name.of(each.uuid, tenant=request.tenant) if each.uuid else None
            is_page = isinstance(each.source, SeenMedia) and each.is_page
            parts.append(_Part(known or each, name, is_recalled=known is not None or is_page))
        names = [part.name for part in parts if part.name is not None]
        coming = {part.name for part in parts if part.is_sent}
        bindings = await self._names.find(request.request_id, names, sent=coming)
        bound = frozenset(bindings)
        unsent = [
            p
            for p in parts
            if not (p.is_sent or p.is_recalled) and (p.name is None or p.name not in coming)
        ]
        await self._check_here(request, unsent, bindings)
        sent = [part for part in parts if part.is_sent]
        received = await self._receive_all(request, sent, trace)
        for part, came in zip(sent, received, strict=True):
            self._recall.remember(request, part.media, came.raw, came.digest)
            if part.name is not None:
                given = Binding(came.digest, part.media.modality)
                check(part.name, bindings.setdefault(part.name, given), given)
        new_names = {
            part.name: bindings[part.name]
            for part in sent
            if part.name is not None and part.name not in bound
        }
        return RequestItems(self._in_order(request, parts, received, bindings), new_names)

    def _in_order(
        self,
        request: ItemRequest,
        parts: Sequence[_Part],
        received: Sequence[_Received],
        bindings: Mapping[Name, Binding],
    ) -> list[ReceivedItem]:
        occurrences: dict[ContentKey, list[tuple[_Part, bytes, _Received | None]]] = {}
        in_order, waiting = [], iter(received)
        for part in parts:
            came = next(waiting) if part.is_sent else None
            digest = came.digest if came is not None else part.digest(bindings)
            if digest is None:
                raise InternalError("an item is missing that was there")
            key = self._key(request, part.media, digest)
            occurrences.setdefault(key, []).append((part, digest, came))
            in_order.append(key)
        items = {key: self._item(key, same) for key, same in occurrences.items()}
        return [items[key] for key in in_order]

    async def close(self) -> None:
        await self._urls.close()
        self.digester.close()

    # Items that were not sent

    async def missing(self, request: ItemRequest) -> set[MediaPart]:
        """Return the items known by their digests whose features are gone."""
        seen = {part for part in request.media if isinstance(part.source, SeenMedia)}
        return seen - await self.find_seen(request, request.media)

    async def _check_here(
        self, request: ItemRequest, unsent: Sequence[_Part], bindings: Mapping[Name, Binding]
    ) -> None:
        """Refuse missing items, all at once, before any work is done."""
        if not unsent:
            return
        wanted = [
            self._key(request, part.media, digest) if digest is not None else None
            for part, digest in ((part, part.digest(bindings)) for part in unsent)
        ]
        here = await self._find(request.request_id, [key for key in wanted if key is not None])
        missing = [part for part, key in zip(unsent, wanted, strict=True) if key not in here]
        if missing:
            raise not_cached([part.name for part in missing])

    async def _find(self, request_id: str, wanted: Sequence[ContentKey]) -> set[ContentKey]:
        """Return the existing keys; nothing stays pinned, as a wait may follow."""
        found: set[ContentKey] = set()
        for some in in_messages(wanted):
            outcomes = await self._store.acquire(request_id, [Find(key) for key in some])
            handles = [handle_if_there(outcome) for outcome in outcomes]
            found |= {key for key, handle in zip(some, handles, strict=True) if handle is not None}
            if pinned := [handle for handle in handles if handle is not None]:
                await self._store.release(request_id, pinned)
        return found

    async def find_seen(self, request: ItemRequest, parts: Sequence[MediaPart]) -> set[MediaPart]:
        """Return the parts, known by their digests, whose features exist; nothing is pinned."""
        wanted = {
            part: self._key(request, part, part.source.digest)
            for part in parts
            if isinstance(part.source, SeenMedia)
        }
        here = await self._find(request.request_id, list(dict.fromkeys(wanted.values())))
        return {part for part, key in wanted.items() if key in here}

    # Items that were sent

    async def _receive_all(
        self, request: ItemRequest, parts: Sequence[_Part], trace: Trace
    ) -> list[_Received]:
        """Return the bytes, headers and digests of sent parts."""
        if not parts:
            return []
        received = [self._received(part.media) for part in parts]
        urls = [part.media for part, raw in zip(parts, received, strict=True) if raw is None]
        read = iter(await self._urls.read(request, urls, trace) if urls else ())
        media = [raw if raw is not None else next(read) for raw in received]
        start_ns = time.monotonic_ns()
        views = [memoryview(item.bytes_in(self._store)) for item in media]
        headers, pace = [], Pace()
        limits = self._settings.limits_of(request.share.tenant)
        for part, raw, view in zip(parts, media, views, strict=True):
            header = self._header(part.media.modality, view, limits, raw)
            if raw.is_frames and self._accepted is Accepted.KNOWN:
                num_pixels = 0
                for width, height in probe_frames(view, limits):
                    num_pixels += width * height
                    await pace.rest()
                header = ForwardedHeader(num_pixels)
            headers.append(header)
            await pace.rest()
        new = [view for raw, view in zip(media, views, strict=True) if raw.digest is None]
        made = iter(await self.digester.digest_all(new))
        digests = [next(made) if raw.digest is None else raw.digest for raw in media]
        came = zip((part.media for part in parts), media, views, digests, strict=True)
        await self._urls.leave(request, list(came))
        aliases = await self._aliases(parts, views, headers)
        del views, new
        trace.stage(start_ns, "digest")
        return [_Received(*each) for each in zip(media, headers, digests, aliases, strict=True)]

    async def _aliases(
        self,
        parts: Sequence[_Part],
        files: Sequence[memoryview],
        headers: Sequence[MediaHeader | ImageBound | ForwardedHeader | None],
    ) -> list[bytes]:
        """Return the aliases of images that have no options and no name of their client."""
        aliases = [b""] * len(parts)
        if self._name_of is None:
            return aliases
        plain = [
            index
            for index, (part, header) in enumerate(zip(parts, headers, strict=True))
            if isinstance(header, ImageHeader)
            and part.name is None
            and not self._max_pixels(part.media)
        ]
        name_of = functools.partial(self._name_of, Modality.IMAGE)
        named = await self.digester.apply(name_of, [files[index] for index in plain])
        for index, alias in zip(plain, named, strict=True):
            aliases[index] = alias
        return aliases

    def _received(self, part: MediaPart) -> RawMedia | None:
        """Return the media that came with the body."""
        if not isinstance(part.source, RawMedia):
            return None
        most = self._limits.of(part.modality).max_nbytes
        if part.source.nbytes > most:
            raise MediaTooLarge(
                f"the {part.modality} file has more than {most} bytes "
                f"(--max-{part.modality}-nbytes)"
            )
        return part.source

    def _header(
        self, modality: Modality, data: memoryview, limits: RequestLimits, raw: RawMedia
    ) -> MediaHeader | ImageBound | ForwardedHeader | None:
        """Read an image's header; sandboxed workers read the containers of video and audio."""
        if raw.is_frames and (modality is not Modality.VIDEO or not self._accepts_frames):
            raise UnsupportedMedia(NO_FRAMES)
        if modality is Modality.IMAGE:
            return probe_accepted(data, limits, self._accepted)
        if not len(data):
            raise InvalidMedia(f"the {modality} file is empty")
        return None

    def most_pixels(self, detail: Detail, max_pixels: int) -> int:
        """Return the limit for an image of a request; 0 for none.

        Args:
            max_pixels: The request's own limit; 0 for none.
        """
        return max_pixels or (self._low_detail_pixels if detail == "low" else 0)

    def decodes(self, data: memoryview, tenant: str) -> bool:
        """Return whether these are the bytes of an image that is decoded here."""
        if self._accepted is Accepted.MEASURED or Modality.IMAGE not in self._modalities:
            return False
        try:
            header = probe_accepted(data, self._settings.limits_of(tenant), self._accepted)
        except InvalidMedia:
            return False
        return isinstance(header, ImageHeader | ImageBound)

    @property
    def _accepts_frames(self) -> bool:
        return self._accepted in (Accepted.KNOWN, Accepted.ALL)

    # Common

    def _item(
        self, key: ContentKey, same: Sequence[tuple[_Part, bytes, _Received | None]]
    ) -> ReceivedItem:
        """Return the item of all parts with one key."""
        part, digest, _ = same[0]
        sent = [came for _, _, came in same if came is not None]
        return ReceivedItem(
            modality=part.media.modality,
            digest=digest,
            key=key,
            max_pixels=self._max_pixels(part.media),
            name=part.name,
            is_recalled=part.is_recalled,
            is_new=any(_is_new(part.media) for part, _, _ in same),
            copies=[came.raw for came in sent],
            header=sent[-1].header if sent else None,
            alias=sent[-1].alias if len({came.alias for came in sent}) == 1 else b"",
        )

    def _key(self, request: ItemRequest, part: MediaPart, digest: bytes) -> ContentKey:
        tag = self._tag_of(request.tenant)
        return self._key_of(tag, part.modality, self._max_pixels(part), digest)

    def _made_key(self, tag: str, modality: Modality, max_pixels: int, digest: bytes) -> ContentKey:
        return keys.item_key(
            tenant=tag,
            fingerprint=self._fingerprint,
            modality=modality,
            max_pixels=max_pixels,
            media=digest,
        )

    def _max_pixels(self, part: MediaPart) -> int:
        if part.modality is not Modality.IMAGE:
            return 0
        return self.most_pixels(part.detail, part.max_pixels)


def _is_new(part: MediaPart) -> bool:
    return isinstance(part.source, SeenMedia | RawMedia) and part.source.is_new


def _left_out(part: MediaPart) -> MediaPart | None:
    """Return the part by its digest, if its bytes were not kept; else ``None``."""
    raw = part.source
    if not isinstance(raw, RawMedia) or not raw.is_left_out or raw.digest is None:
        return None
    return replace(part, source=SeenMedia(raw.digest))


def not_cached(names: Sequence[Name | None]) -> MediaNotCached:
    """Return the error for missing items with these names, or without one."""
    uuids = tuple(dict.fromkeys(name.uuid for name in names if name is not None))
    listed = [repr(uuid) for uuid in uuids[:_MAX_LISTED]]
    if len(uuids) > _MAX_LISTED:
        listed.append(f"{len(uuids) - _MAX_LISTED} more")
    which = f" (uuid {', '.join(listed)})" if listed else ""
    missing = count(len(names), "item")
    return MediaNotCached(
        f"{missing} not sent and not cached any more; send the data again{which}", uuids=uuids
    )
