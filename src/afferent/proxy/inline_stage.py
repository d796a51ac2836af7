"""Conversion of media locations to media in the body, for an upstream that reads no arena."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from afferent import keys
from afferent.config import RequestLimits
from afferent.engines.upstream import Upstream
from afferent.errors import AfferentError, UnsupportedMedia
from afferent.items.item import File, ReceivedItem, RequestItems
from afferent.items.request import ItemRequest
from afferent.items.stage import ItemStage
from afferent.keys import PLACEMENT_NBYTES, placement_digest
from afferent.media.body.cutter import ANY_MARKER
from afferent.media.body.raw import RawMedia
from afferent.media.body.received import ReceivedBody
from afferent.media.families.reencoded import FILE, ReencodedFamily
from afferent.media.headers.media_types import media_type_of
from afferent.media.headers.probe import Accepted, probe_accepted
from afferent.proxy.document_places import Place
from afferent.proxy.inline_body import InlineBody, InlineMedia, Markers, head_of
from afferent.proxy.media_locations import Document
from afferent.proxy.reference_stage import WAYS
from afferent.proxy.request_scope import RequestScope
from afferent.proxy.shown_documents import PageUse
from afferent.store.block import codec
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.telemetry.trace import Trace
from afferent.types import Handle, MiB, Modality

_TAG: Final = b"afferent/item-name/v1"
_FRAMES: Final = "video/jpeg"
_MAX_COMPARED_NBYTES: Final = MiB


class Inlined:
    """Media of a request, which are written into its body.

    Attributes:
        placement: See `UpstreamRequest.placement`.
    """

    def __init__(
        self, store: AsyncDaemonStore, media: Sequence[InlineMedia], placement: bytes
    ) -> None:
        self._store, self._media, self.placement = store, media, placement
        self._markers = Markers()

    def write(self, document: Document) -> bytes:
        """Return the JSON with markers in place of the base64 of the media, or of the whole object
        of an item with a name.
        """
        urls = [
            self._url(index, place, item)
            for index, (place, item) in enumerate(zip(document.places, self._media, strict=True))
        ]
        return document.write(
            urls,
            names=[item.name for item in self._media],
            media_types=[item.media_type for item in self._media],
        )

    def _url(self, index: int, place: Place, item: InlineMedia) -> str:
        if item.name:
            return self._markers.whole(index)
        return self._markers[index] if place.is_bare else item.head + self._markers[index]

    def is_as_received(self, document: Document, body: ReceivedBody, written: bytes) -> bool:
        """Whether a JSON with markers stands for the body as it was received. Blanks between tokens
        make no difference.
        """
        if len(body.json) > _MAX_COMPARED_NBYTES:
            return False
        received: dict[bytes, bytes] = {}
        for index, (place, item) in enumerate(zip(document.places, self._media, strict=True)):
            cut = body.cut.get(place.source) if isinstance(place.source, str) else None
            if cut is None or not cut.is_usual or item.is_features:
                return False
            received[cut.marker.encode()] = (cut.head + self._markers[index]).encode()
        text = ANY_MARKER.sub(lambda found: received.get(found[0], found[0]), body.json)
        try:
            return _tokens(text) == _tokens(written)
        except (msgspec.MsgspecError, RecursionError):
            return False

    def body(self, written: bytes) -> InlineBody:
        """Return the body of a JSON with markers."""
        return InlineBody(self._store, self._markers.split(written), self._media)


class InlineStage:
    """Brings the media of requests into the arena, and converts what the upstream does not read."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        items: ItemStage,
        upstream: Upstream,
        family: ReencodedFamily,
        *,
        secret: bytes,
    ) -> None:
        """Create the stage.

        Args:
            upstream: Says which files the family's replace, and whether it takes names.
            family: Family of ``items``.
            secret: Key of names.
        """
        self._store, self._items, self._upstream = store, items, upstream
        self._names = ItemNames(secret, family) if upstream.takes_names else None
        self._media_type = f"image/{family.format}"

    @property
    def items(self) -> ItemStage:
        """Stage of the items."""
        return self._items

    def pages_of(self, _: Document) -> PageUse:
        """Return the use of the pages of a body's documents: the upstream reads their images."""
        return PageUse(keeps_bytes=True)

    def early_placement(self, head: str, first: bytes, *, limits: RequestLimits) -> bytes:
        """Return the placement of a body by the beginning of its first item.

        Args:
            head: Text before the item's base64.
            first: First 64 KiB of the item.

        Returns:
            Empty where the item may be refused, or may be sent in another way than it came.
        """
        modality = _modality_of(head)
        if modality is None or head != head_of(media_type_of(modality, first)):
            return b""
        try:
            if modality is Modality.IMAGE:
                probe_accepted(first, limits, Accepted.KNOWN)
            is_converted = self._upstream.takes(modality, first)
        except AfferentError:  # or the header is longer
            return b""
        return b"" if is_converted else placement_digest(modality, first)

    async def read(
        self, own: RequestScope, document: Document, media: dict[str, RawMedia]
    ) -> Inlined:
        """Return the media for all locations; their objects are pinned under the request.

        Args:
            media: Media that were cut out of the body; those at a location are removed.

        Raises:
            InvalidMedia: An item is invalid.
            UnsupportedMedia: The upstream does not read an item, and it can't be converted.
            MediaNotCached: An item came by name alone.
            Unavailable: Try again.
        """
        request_id, share, trace = own.id, own.share, own.trace
        request = ItemRequest(request_id, document.parts(media), share)
        self._items.check_count(request)
        found = await self._items.read_bytes(request, trace)
        converted = [item for item in found.distinct if self._is_converted(item)]
        kept = await self._items.keep_bytes(request_id, found, trace)
        files = dict(zip(found.in_order, kept, strict=True))
        inlined = {item: self._as_sent(item, file) for item, file in files.items()}
        inlined |= await self._convert(request_id, converted, files, trace)
        machines = max(self._upstream.num_servers, 1)
        await self._items.enter_forwarded(request_id, found, trace, num_machines=machines)
        for item in found.in_order:
            way = "features" if inlined[item].is_features else "bytes"
            WAYS.labels(item.modality, way).inc()
        in_order = [inlined[item] for item in found.in_order]
        if self._names is not None:
            named = self._names.within(document, share.tenant)
            in_order = [
                replace(media, name=named(item, media)) if place.is_nameable else media
                for place, item, media in zip(
                    document.places, found.in_order, in_order, strict=True
                )
            ]
        return Inlined(self._store, in_order, self._placement(found.in_order[0], files))

    def _is_converted(self, item: ReceivedItem) -> bool:
        """Whether a file that is made here replaces an item.

        Raises:
            UnsupportedMedia: It has to, and can't.
        """
        file = self._items.sent(item)
        if item.modality is not Modality.IMAGE or file is None:
            return False
        if not self._upstream.takes(item.modality, file):
            return False
        if item.is_forwarded:
            raise UnsupportedMedia(
                f"the engine does not read {media_type_of(item.modality, file)}, and it can't be "
                "converted here (--engine-image-formats)"
            )
        return True

    async def _convert(
        self,
        request_id: str,
        items: Sequence[ReceivedItem],
        files: dict[ReceivedItem, File],
        trace: Trace,
    ) -> dict[ReceivedItem, InlineMedia]:
        if not items:
            return {}
        in_arena = [_in_arena(item, files[item]) for item in items]
        found = await self._items.plan(request_id, RequestItems(in_arena), trace)
        start_ns = time.monotonic_ns()
        ready = await self._items.prepare(request_id, found, trace, is_forwarded=True)
        trace.stage(start_ns, "convert", note=f"{len(ready)} images")
        return {
            item: InlineMedia(
                handle=each.handle,
                start=0,
                nbytes=self._file_nbytes(each.handle),
                media_type=self._media_type,
                is_features=True,
            )
            for item, each in zip(items, ready, strict=True)
        }

    def _file_nbytes(self, handle: Handle) -> int:
        tree: Any = codec.view(self._store.block(handle))
        return len(tree[FILE])

    def _as_sent(self, item: ReceivedItem, file: File) -> InlineMedia:
        handle, where = file
        is_text = item.raw is not None and item.raw.is_frames
        head = self._store.block(handle)[where.start : where.start + where.nbytes]
        return InlineMedia(
            handle=handle,
            start=where.start,
            nbytes=where.nbytes,
            media_type=_FRAMES if is_text else media_type_of(item.modality, head),
            is_text=is_text,
        )

    def _placement(self, item: ReceivedItem, files: dict[ReceivedItem, File]) -> bytes:
        handle, where = files[item]
        end = where.start + min(where.nbytes, PLACEMENT_NBYTES)
        return placement_digest(item.modality, self._store.block(handle)[where.start : end])


class ItemNames:
    """Names of items for servers that find an item by its name.

    A server may take items of one name for the same, also if two clients send them. So the name
    depends on all that shapes the features and on the tenant, and clients can't compute it.
    """

    def __init__(self, secret: bytes, family: ReencodedFamily) -> None:
        self._secret = secret
        self._conversion = msgspec.json.encode(family)

    def within(self, document: Document, tenant: str) -> Callable[[ReceivedItem, InlineMedia], str]:
        """Return the function that names the items of a request, with 32 hexadecimal digits."""
        common = keys.frame(_TAG, tenant.encode(), *document.named_options)

        def name(item: ReceivedItem, media: InlineMedia) -> str:
            made = self._conversion if media.is_features else b""
            shaped = keys.frame(
                *(common, item.modality.encode(), item.digest, media.media_type.encode(), made)
            )
            return hmac.digest(self._secret, shaped, hashlib.sha256)[:16].hex()

        return name


def _modality_of(head: str) -> Modality | None:
    return next((each for each in Modality if head.startswith(f"data:{each}/")), None)


def _tokens(text: bytes) -> bytes:
    return msgspec.json.format(text, indent=-1)


def _in_arena(item: ReceivedItem, file: File) -> ReceivedItem:
    """Return an item whose bytes are sealed in the arena."""
    handle, where = file
    origin = item.raw.origin if item.raw is not None else "data"
    raw = RawMedia(origin, where.nbytes, handle=handle, start=where.start, is_sealed=True)
    return replace(item, copies=(raw,))
