"""A request's items, and how far each has come.

    received, keyed    `receive`: the bytes are here, or are known; the key says what they become
    planned            `plan`: how large that is, and how it is written in a prompt
    found              `items`: what there is already is pinned
    admitted           `items`: there is room for what is missing, and its bytes are in the arena
    acquired           `acquire`: all is pinned, or is being made, by this request or another
    made               `items`: all is there

A stage takes all items of a request at once, so that each asks the store one time for all of them;
it sets what its step says of each.

What makes several items of one part (the pages of a document) would come between the first two: it
puts them in the place of the part's item, and their parts in the place of its part in the messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from afferent.ingest.probe import ForwardedHeader, MediaHeader
from afferent.ingest.raw import RawMedia
from afferent.ingest.url_memory import Flights
from afferent.preprocess.family import Family
from afferent.preprocess.jobs import InputRange, Planned
from afferent.preprocess.plan import FeaturePlan, Prompt
from afferent.serve.flow.names import Binding, Name
from afferent.store.protocol.results import Outcome
from afferent.types import ContentKey, Handle, Modality


@dataclass(frozen=True, slots=True)
class Processor:
    """What makes a model's features; ``fingerprint`` is a part of their keys."""

    family: Family
    fingerprint: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class ItemState:
    """One item of a request, however often it is shown.

    Attributes:
        digest: Of the encoded bytes.
        key: Of the features.
        max_pixels: The request's own limit for this image; 0 for none.
        name: What the client calls it; one of the names, if there are several.
        is_recalled: It was sent as a URL, and is known from before.
        copies: The encoded bytes, as often as they were sent; not at all if the item has been here.
        header: Of an image, or of a file that is not decoded here; a video or audio clip has none
            yet.
        plan: Of an image, and exact.
        written: Where the bytes were put that came on the heap.
        bound: Of a video or audio clip: its header, and at most so much.
        state: Whether the features were there, or were to be made: the store's word.
        outcome: What the store said of them last.
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
        """The encoded bytes; ``None`` of an item that was not sent."""
        return self.copies[-1] if self.copies else None

    @property
    def is_forwarded(self) -> bool:
        """Whether it was sent and is not decoded here."""
        return isinstance(self.header, ForwardedHeader)

    @property
    def data(self) -> bytes | None:
        """The bytes that are on the heap."""
        return self.raw.data if self.raw is not None else None

    @property
    def file(self) -> tuple[Handle, InputRange] | None:
        """The object in the arena that the bytes are in, with others' perhaps, and where in it."""
        raw = self.raw
        if raw is None:
            return None
        if self.written is not None:
            return self.written, InputRange(0, raw.nbytes)
        return None if raw.handle is None else (raw.handle, InputRange(raw.start, raw.nbytes))

    @property
    def pinned(self) -> Handle | None:
        """The features, as soon as they are there."""
        return self.outcome.handle if self.outcome is not None else None


@dataclass(frozen=True, slots=True)
class RequestItems:
    """All items of a request.

    Attributes:
        in_order: As the messages show them; what is shown twice is the same twice.
        new_names: Still to be bound.
        flights: What others wait for: to be ended when the items are made, or nothing comes of it.
    """

    in_order: Sequence[ItemState] = ()
    new_names: Mapping[Name, Binding] = field(default_factory=dict)
    flights: Flights | None = None

    @property
    def distinct(self) -> list[ItemState]:
        return list(dict.fromkeys(self.in_order))

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Within this, the items are made; at its end, those who wait for them look again."""
        try:
            yield
        finally:
            if self.flights is not None:
                self.flights.end()

    @property
    def prompts(self) -> list[Prompt] | None:
        """How each is written, in order; ``None`` while that is not known of all."""
        prompts = [item.plan.prompt for item in self.in_order if item.plan is not None]
        return prompts if len(prompts) == len(self.in_order) else None

    @property
    def received(self) -> tuple[list[Handle], list[Handle]]:
        """Objects that bytes came in: those that are sealed, and those that are not."""
        is_sealed = {
            raw.handle: raw.is_sealed
            for item in self.distinct
            for raw in item.copies
            if raw.handle is not None
        }
        sealed = [handle for handle, yes in is_sealed.items() if yes]
        return sealed, [handle for handle, yes in is_sealed.items() if not yes]
