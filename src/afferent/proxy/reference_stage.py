"""Conversion of media locations to media handles: of features made here, or of bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from afferent.admission.shares import Share
from afferent.engines import quarantine
from afferent.engines.ahead import Ahead
from afferent.engines.references import FeaturesReference, Of, RawReference, Reference
from afferent.engines.upstream import Upstream
from afferent.errors import (
    InternalError,
    InvalidMedia,
    MediaNotEncodable,
    StoreRestarted,
    StoreUnavailable,
)
from afferent.items.early import EarlyBody
from afferent.items.item import ReceivedItem, RequestItems
from afferent.items.request import ItemRequest, MediaPart
from afferent.items.stage import ItemStage
from afferent.keys import frame
from afferent.media.body.raw import RawMedia
from afferent.proxy.media_locations import Document
from afferent.proxy.prompts import PromptTokens
from afferent.proxy.request_scope import RequestScope
from afferent.proxy.shown_documents import PageUse
from afferent.store.block import codec
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Find
from afferent.store.protocol.results import existing
from afferent.telemetry.registry import counter
from afferent.telemetry.trace import Trace
from afferent.types import ContentKey, Handle, Modality

log = logging.getLogger(__name__)

_RAW_NAME_TAG = b"afferent/raw-name/v1"
_AGAIN = "the media were lost with a former life of the store; try again"

WAYS = counter(
    "afferent_upstream_items_total",
    "Items passed on by reference: to features that we made, or to their bytes as they came",
    modality=tuple(Modality),
    way=("features", "bytes"),
)


class _Options(Struct, forbid_unknown_fields=True):
    """Supported options of the model's processor."""

    max_pixels: Annotated[int, Meta(ge=1, le=2**31)]


_options = msgspec.json.Decoder(_Options)


@dataclass(frozen=True, slots=True)
class Referenced:
    """Media handles of a request, and their objects.

    Attributes:
        references: One for each location.
        keys: Keys of the features, in order.
        names: Item names for the engine's caches; only if the engine processes the items itself.
        pinned: Objects that are pinned until the engine has encoded them, or longer, by key.
    """

    references: Sequence[Reference] = ()
    keys: Sequence[bytes] = ()
    names: Sequence[str] | None = None
    pinned: dict[ContentKey, Handle] = field(default_factory=dict)

    @property
    def placement(self) -> bytes:
        """See `UpstreamRequest.placement`."""
        return self.keys[0] if self.keys else b""


class ReferenceStage:
    """Brings the media of requests into the arena, and creates their media handles."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        items: ItemStage,
        upstream: Upstream,
        tokens: PromptTokens | None,
        *,
        has_tenants: bool,
        valid_s: float,
        ahead: Ahead | None = None,
    ) -> None:
        """Create the stage.

        Args:
            upstream: Knows for which files it would make the same features.
            tokens: Prompt tokens of the model; ``None`` if no features are made for it.
            has_tenants: Whether the server has tenants.
            valid_s: Lifetime of a media handle.
            ahead: Embedding prefetcher: it fetches the items' embeddings from other machines before
                the upstream needs them; ``None`` without a tier.
        """
        self._store, self._items, self._tokens = store, items, tokens
        self.knows = items.knows
        self._upstream, self._has_tenants = upstream, has_tenants
        self._valid_s, self._ahead = valid_s, ahead
        self._told: set[Modality] = set()

    async def refer(
        self, own: RequestScope, document: Document, media: dict[str, RawMedia]
    ) -> Referenced:
        """Return media handles for all locations; their objects are pinned under the request.

        Args:
            media: Media that were cut out of the body; those at a location are removed.

        Raises:
            InvalidMedia: An item is invalid.
            MediaNotCached: An item came by name alone, and is not cached.
            Unavailable: Try again.
        """
        max_pixels = self._max_pixels(document)
        parts = document.parts(media, max_pixels=max_pixels or 0)
        request, trace = ItemRequest(own.id, parts, own.share), own.trace
        self._items.check_count(request)
        if max_pixels is not None and all(self._makes_any(part.modality) for part in parts):
            found = await self._items.read(request, trace)
            with found.awaited():
                if all(map(self._makes, found.distinct)):
                    return await self._features(request, found, document, trace)
            if any(item.raw is None for item in found.distinct):
                # Their features exist, but the engine takes features of all images, or of none.
                found = await self._items.read_bytes(_without(request, found), trace)
        else:
            found = await self._items.read_bytes(request, trace)
        # A pixel limit is supported for images only; the engine interprets it for others.
        if max_pixels == 0 and all(map(self._makes, found.distinct)):
            found = await self._items.plan(own.id, found, trace)
            return await self._features(request, found, document, trace)
        return await self._forward(request, found, trace, document.named_options)

    async def refer_file(self, own: RequestScope, part: MediaPart) -> Referenced:
        """Return the media handle of a file that the engine processes itself; it stays pinned.

        Raises:
            InvalidMedia: It is empty, too large or not allowed.
            Unavailable: Try again.
        """
        request = ItemRequest(own.id, (part,), own.share)
        self._items.check_count(request)
        found = await self._items.read_bytes(request, own.trace)
        return await self._forward(request, found, own.trace)

    def early(self, share: Share) -> EarlyBody | None:
        """Return what begins a body's images while the rest of it arrives, if features are made."""
        makes_any = self._makes_any(Modality.IMAGE) and self._upstream.takes(Modality.IMAGE, None)
        # With names outside of the store, it is not known whether an image has features.
        return self._items.early.body(share) if makes_any and not self._items.names_items else None

    @property
    def items(self) -> ItemStage:
        """Stage of the items."""
        return self._items

    def pages_of(self, document: Document) -> PageUse:
        """Return the use of the pages of a body's documents.

        Features of them are made at once if the engine takes features of all media of the request.
        """
        max_pixels = self._max_pixels(document)
        makes_all = max_pixels is not None and self._makes_any(Modality.IMAGE)
        makes_all = makes_all and self._upstream.takes(Modality.IMAGE, None)
        keeps_bytes = not makes_all or bool(document.places) or self._items.names_items
        return PageUse(keeps_bytes=keeps_bytes, max_pixels=max_pixels or 0)

    async def check(self, request_id: str, referenced: Referenced) -> None:
        """Check that the objects of the media handles have existed all the time.

        Raises:
            StoreRestarted: An object was lost; the engine's answer is invalid.
        """
        if not referenced.references:
            return
        try:
            if referenced.pinned:
                handles = list(referenced.pinned.values())
                if not await self._store.check_pins(request_id, handles):
                    raise StoreRestarted(_AGAIN)
            else:
                await self._store.stat()  # an answer proves that the store was never gone
            self.check_here(referenced)
        except StoreUnavailable as error:
            raise StoreRestarted(_AGAIN) from error

    async def explain(self, request_id: str, referenced: Referenced) -> None:
        """Explain an engine's failure, if its cause is known here.

        Raises:
            StoreRestarted: An object was lost, perhaps after it was encoded once: a preempted
                request is encoded again.
            MediaNotEncodable: An item is in quarantine.
        """
        await self.check(request_id, referenced)
        item_keys = list(referenced.pinned)
        if not item_keys:
            return
        records = [quarantine.record_key(key) for key in item_keys]
        try:
            outcomes = await self._store.acquire(
                request_id, [Find(key) for key in (*item_keys, *records)]
            )
            handles = [existing(each) for each in outcomes]
            found = handles[len(item_keys) :]
            is_bad = any(
                handle is not None and quarantine.is_active(self._store.block(handle))
                for handle in found
            )
        except (StoreUnavailable, StoreRestarted) as error:
            raise StoreRestarted(_AGAIN) from error
        if is_bad:
            raise MediaNotEncodable("the model's encoder fails for an item of this request")
        if None in handles[: len(item_keys)]:
            raise StoreRestarted(_AGAIN)

    def check_here(self, referenced: Referenced) -> None:
        """Do the part of `check` that needs no call to the store.

        Raises:
            StoreRestarted: An object was lost.
        """
        for reference in referenced.references[:1]:
            self._store.block(reference.handle)

    def _makes_any(self, modality: Modality) -> bool:
        """Whether features are made of any file of this modality."""
        makes = self._tokens is not None and self._items.takes(modality)
        return makes and modality is Modality.IMAGE

    def _makes(self, item: ReceivedItem) -> bool:
        if self._tokens is None or not self._items.takes(item.modality) or item.is_forwarded:
            return False
        return self._upstream.takes(item.modality, self._items.sent(item))

    async def close(self) -> None:
        await self._items.close()

    def _max_pixels(self, document: Document) -> int | None:
        """Return the pixel limit in the options; ``None`` if there are others, for the upstream."""
        if not document.options:
            return 0
        if set(document.options) != {"mm_processor_kwargs"}:
            return None
        try:
            options = _options.decode(document.options["mm_processor_kwargs"])
        except msgspec.MsgspecError:
            return None
        return options.max_pixels if self._items.follows(options.max_pixels) else None

    async def _features(
        self, request: ItemRequest, found: RequestItems, document: Document, trace: Trace
    ) -> Referenced:
        if self._tokens is None:
            raise InternalError("features of a model that none are made for")
        ready = await self._items.prepare(request.request_id, found, trace)
        expires_s = time.time() + self._valid_s
        references: list[FeaturesReference] = []
        for part, item in zip(request.media, ready, strict=True):
            WAYS.labels(part.modality, "features").inc()
            tree: Any = codec.view(self._store.block(item.handle))
            reference = self._tokens.reference(
                part.modality,
                tree,
                item.prompt,
                key=item.key,
                handle=item.handle,
                expires_s=expires_s,
                of=self._of(request, len(references)),
                alias=item.alias,
            )
            if reference.num_embeds == 0:
                raise InvalidMedia("an item becomes nothing in the prompt")
            references.append(reference)
        keys = [item.key for item in ready]
        if self._ahead is not None:
            rows = {item.key: each.num_embeds for item, each in zip(ready, references, strict=True)}
            start_ns = time.monotonic_ns()
            names = {item.key: item.alias for item in ready}
            spans = await self._ahead.fetch(rows, names=names, share=request.share)
            if spans:
                trace.add(spans)
                trace.stage(start_ns, "wait_for_embeddings")
        pinned = {item.key: item.handle for item in ready}
        if document.is_read_once:
            self._store.release_early(request.request_id, list(pinned.values()))
        return Referenced(references, keys, None, pinned)

    async def _forward(
        self,
        request: ItemRequest,
        found: RequestItems,
        trace: Trace,
        named_options: Sequence[bytes] = (),
    ) -> Referenced:
        """Return media handles of bytes, once the gate has admitted what the engine makes of them.

        Args:
            named_options: Options of the upstream that are a part of the items' names.
        """
        self._tell(found.distinct)
        files = await self._items.keep_bytes(request.request_id, found, trace)
        await self._items.enter_forwarded(request.request_id, found, trace)
        expires_s = time.time() + self._valid_s
        references: list[RawReference] = []
        for part, item, (handle, where) in zip(request.media, found.in_order, files, strict=True):
            WAYS.labels(part.modality, "bytes").inc()
            references.append(
                RawReference(
                    part.modality,
                    handle,
                    where.start,
                    where.nbytes,
                    expires_s,
                    is_frames=item.raw is not None and item.raw.is_frames,
                    of=self._of(request, len(references)),
                )
            )
        keys = [item.key for item in found.in_order]
        # The upstream processes these bytes itself; its caches keep the results apart from ours.
        # By the name alone, vLLM would give a video the frames that other options have made of it.
        names = [frame(_RAW_NAME_TAG, key, *named_options).hex() for key in keys]
        return Referenced(references, keys, names)

    def _of(self, request: ItemRequest, index: int) -> Of:
        return Of(request.request_id, index, len(request.media), self._has_tenants)

    def _tell(self, items: Sequence[ReceivedItem]) -> None:
        """Log once for each modality that the engine processes it, so there is no speedup."""
        for item in items:
            if item.modality not in self._told and not self._makes(item):
                self._told.add(item.modality)
                log.warning("the engine processes this itself", extra={"modality": item.modality})


def _without(request: ItemRequest, found: RequestItems) -> ItemRequest:
    """Return the request with received media in place of its URLs."""
    media = tuple(
        replace(part, source=item.raw) if item.raw is not None else part
        for part, item in zip(request.media, found.in_order, strict=True)
    )
    return replace(request, media=media)
