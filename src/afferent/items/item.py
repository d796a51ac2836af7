"""Items of a request. Each stage returns new values, and no stage changes those of another.

    request        `ItemRequest`     what the body says: data, URLs, ids
    receive        `ReceivedItem`    the bytes are here or known; the key names the features
    plan           `Planned`         the size of the features, and their form in a prompt
    stage.find     `Outcome`         existing features are pinned
    stage.make     `File`, `Outcome` bytes of missing items are in the arena, and jobs make features
    stage          `ReadyItem`       the features exist, pinned

A stage handles all items of a request at once, so that each sends one call to the store.

`DocumentReader` comes before them: it makes items of the pages of a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from afferent.config import RequestLimits
from afferent.engines.upstream import NameOf
from afferent.files.file_store import FileStore
from afferent.items.names import Binding, Name
from afferent.media.body.raw import RawMedia
from afferent.media.families.family import Family
from afferent.media.families.plan import Prompt
from afferent.media.fetch.url_memory import Flights
from afferent.media.headers.probe import Accepted, ForwardedHeader, ImageBound, MediaHeader
from afferent.media.workers.jobs import InputRange, Planned
from afferent.store.state.region import Shares
from afferent.types import ContentKey, Handle, Modality

File = tuple[Handle, InputRange]
"""Arena object with an item's bytes, perhaps with other items, and the item's range in it."""


@dataclass(frozen=True, slots=True)
class Processor:
    """Processor of a model's features; ``fingerprint`` is a part of their keys."""

    family: Family
    fingerprint: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSettings:
    """Settings of an `ItemStage`; ``timeout_s`` limits the wait for items that others make."""

    limits: RequestLimits
    limits_by_tenant: Mapping[str, RequestLimits] = field(default_factory=dict)
    """Limits of tenants with their own."""
    shares: Shares
    timeout_s: float
    has_tier: bool = False
    """Whether other nodes may have missing objects."""
    accepted: Accepted = Accepted.DECODED
    """Image files that a backend decodes."""
    tenant_secret: bytes = b""
    """Secret of the tenants' tags in keys; empty if there are no tenants."""
    name_of: NameOf | None = None
    """See `Upstream.name_of`."""
    files: FileStore | None = None
    """Store of the files that parts name."""

    def limits_of(self, tenant: str) -> RequestLimits:
        """Return the limits of a tenant's requests."""
        return self.limits_by_tenant.get(tenant, self.limits)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReceivedItem:
    """One item of a request, however often it occurs.

    Attributes:
        digest: Digest of the encoded bytes.
        key: Key of the features.
        max_pixels: The request's own limit for this image; 0 for none.
        name: Client's id of it; one of them, if there are several.
        is_recalled: Whether it was sent, and its bytes were neither fetched nor kept: its features
            existed. So it is with pages of documents.
        is_new: Whether this request has made its features before: those of a page, or of an image
            while the rest of the body arrived.
        copies: The encoded bytes, as often as they were sent; empty if they were not sent.
        header: Header of an image, its bound, or header of a file that Afferent does not decode; a
            video or audio clip has none yet.
        alias: Its name outside of the store, if that is not the key.
    """

    modality: Modality
    digest: bytes
    key: ContentKey
    max_pixels: int = 0
    name: Name | None = None
    is_recalled: bool = False
    is_new: bool = False
    copies: Sequence[RawMedia] = ()
    header: MediaHeader | ImageBound | ForwardedHeader | None = None
    alias: bytes = b""

    @property
    def raw(self) -> RawMedia | None:
        """Encoded bytes; ``None`` for an item that was not sent."""
        return self.copies[-1] if self.copies else None

    @property
    def is_forwarded(self) -> bool:
        """Whether it was sent and is not decoded here."""
        return isinstance(self.header, ForwardedHeader)

    @property
    def data(self) -> bytes | memoryview | None:
        """Bytes on the heap."""
        return self.raw.data if self.raw is not None else None

    @property
    def file(self) -> File | None:
        """Location of the bytes; ``None`` if they are on the heap or were not sent."""
        raw = self.raw
        if raw is None or raw.handle is None:
            return None
        return raw.handle, InputRange(raw.start, raw.nbytes)


@dataclass(frozen=True, slots=True)
class RequestItems:
    """All items of a request.

    Attributes:
        in_order: In the order of the messages; a repeated item is the same object.
        new_names: Client media ids that are still to be bound.
        flights: Fetches that other requests wait for; ended when the items are made or have failed.
        plans: Headers and exact plans of the images whose headers are known, once they are planned.
    """

    in_order: Sequence[ReceivedItem] = ()
    new_names: Mapping[Name, Binding] = field(default_factory=dict)
    flights: Flights | None = None
    plans: Mapping[ReceivedItem, Planned] = field(default_factory=dict)

    @property
    def distinct(self) -> list[ReceivedItem]:
        return list(dict.fromkeys(self.in_order))

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Context for making the items; at its end, requests that wait for them retry."""
        try:
            yield
        finally:
            if self.flights is not None:
                self.flights.end()

    @property
    def prompts(self) -> list[Prompt] | None:
        """Prompt of each item, in order; ``None`` while one of them is unknown."""
        if any(item not in self.plans for item in self.in_order):
            return None
        return [self.plans[item].plan.prompt for item in self.in_order]

    @property
    def received(self) -> tuple[list[Handle], list[Handle]]:
        """Objects with received bytes: the sealed ones, and the others."""
        is_sealed = {
            raw.handle: raw.is_sealed
            for item in self.distinct
            for raw in item.copies
            if raw.handle is not None
        }
        sealed = [handle for handle, yes in is_sealed.items() if yes]
        return sealed, [handle for handle, yes in is_sealed.items() if not yes]
