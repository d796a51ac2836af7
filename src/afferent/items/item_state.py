"""Items of a request, with the state of each.

    received, keyed    `receive`: the bytes are here or known; the key names the features
    planned            `plan`: the size of the features, and their form in a prompt
    found              `items`: existing features are pinned
    admitted           `items`: there is space for missing ones, and their bytes are in the arena
    acquired           `acquire`: all are pinned, or being made, by this request or another
    made               `items`: all exist

A stage handles all items of a request at once, so that each sends one call to the store. It sets
the fields of its step in each item.

A stage that makes several items of one part (the pages of a document) would come between the first
two: it replaces the part's item by these items, and the part in the messages by their parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from afferent.items.names import Binding, Name
from afferent.media.body.raw import RawMedia
from afferent.media.families.family import Family
from afferent.media.families.plan import FeaturePlan, Prompt
from afferent.media.fetch.url_memory import Flights
from afferent.media.headers.probe import ForwardedHeader, MediaHeader
from afferent.media.workers.jobs import InputRange, Planned
from afferent.store.protocol.results import Outcome
from afferent.types import ContentKey, Handle, Modality


@dataclass(frozen=True, slots=True)
class Processor:
    """Processor of a model's features; ``fingerprint`` is a part of their keys."""

    family: Family
    fingerprint: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class ItemState:
    """One item of a request, however often it occurs.

    Attributes:
        digest: Digest of the encoded bytes.
        key: Key of the features.
        max_pixels: The request's own limit for this image; 0 for none.
        name: Client's id of it; one of them, if there are several.
        is_recalled: Whether it was sent as a URL and is a URL cache hit.
        copies: The encoded bytes, as often as they were sent; empty if they were not sent.
        header: Header of an image, or of a file that Afferent does not decode; a video or audio
            clip has none yet.
        plan: Exact plan of an image.
        written: Location of the bytes that were on the heap.
        bound: Header and maximum size of a video or audio clip.
        state: State of the features when they were requested: existing, or to be made.
        outcome: Latest outcome from the store.
    """

    # received, keyed
    modality: Modality
    digest: bytes
    key: ContentKey
    max_pixels: int = 0
    name: Name | None = None
    is_recalled: bool = False
    copies: list[RawMedia] = field(default_factory=list)
    header: MediaHeader | ForwardedHeader | None = None
    # planned
    plan: FeaturePlan | None = None
    # admitted
    written: Handle | None = None
    bound: Planned | None = None
    # found, acquired, made
    state: str = ""
    outcome: Outcome | None = None

    @property
    def raw(self) -> RawMedia | None:
        """Encoded bytes; ``None`` for an item that was not sent."""
        return self.copies[-1] if self.copies else None

    @property
    def is_forwarded(self) -> bool:
        """Whether it was sent and is not decoded here."""
        return isinstance(self.header, ForwardedHeader)

    @property
    def data(self) -> bytes | None:
        """Bytes on the heap."""
        return self.raw.data if self.raw is not None else None

    @property
    def file(self) -> tuple[Handle, InputRange] | None:
        """Arena object with the bytes, perhaps with other items, and their range in it."""
        raw = self.raw
        if raw is None:
            return None
        if self.written is not None:
            return self.written, InputRange(0, raw.nbytes)
        return None if raw.handle is None else (raw.handle, InputRange(raw.start, raw.nbytes))

    @property
    def pinned(self) -> Handle | None:
        """Features, once they exist."""
        return self.outcome.handle if self.outcome is not None else None


@dataclass(frozen=True, slots=True)
class RequestItems:
    """All items of a request.

    Attributes:
        in_order: In the order of the messages; a repeated item is the same object.
        new_names: Client media ids that are still to be bound.
        flights: Fetches that other requests wait for; ended when the items are made or have failed.
    """

    in_order: Sequence[ItemState] = ()
    new_names: Mapping[Name, Binding] = field(default_factory=dict)
    flights: Flights | None = None

    @property
    def distinct(self) -> list[ItemState]:
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
        prompts = [item.plan.prompt for item in self.in_order if item.plan is not None]
        return prompts if len(prompts) == len(self.in_order) else None

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
