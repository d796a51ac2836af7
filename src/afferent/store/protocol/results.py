"""Results of the verbs of `afferent.store.protocol.requests`."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from afferent.admission.permits import PermitStatistics
from afferent.store.protocol.items import ItemName, Payload
from afferent.types import Failure, Handle, KeyBytes, Modality, NonNegative, ObjectKind, Span


class Hit(Struct, tag="hit", frozen=True, array_like=True, forbid_unknown_fields=True):
    """The object exists, and the request pins it."""

    handle: Handle


class Made(Struct, tag="made", frozen=True, array_like=True, forbid_unknown_fields=True):
    """The object was made while the request waited, and the request pins it."""

    handle: Handle
    spans: list[Span] = []


class Owner(Struct, tag="owner", frozen=True, array_like=True, forbid_unknown_fields=True):
    """The request makes the object itself: it writes to the handle, and seals it."""

    handle: Handle


class InFlight(Struct, tag="in_flight", frozen=True, array_like=True, forbid_unknown_fields=True):
    """Another request makes the object; follow with `Wait`."""


class Scheduled(Struct, tag="scheduled", frozen=True, array_like=True, forbid_unknown_fields=True):
    """This request's job makes the object; follow with `Wait`."""


class Absent(Struct, tag="absent", frozen=True, array_like=True, forbid_unknown_fields=True):
    """The object does not exist, and is not made for this request."""

    spans: list[Span] = []


class Failed(Struct, tag="failed", frozen=True, array_like=True, forbid_unknown_fields=True):
    """The object could not be made, or exists and can't be pinned now."""

    failure: Failure
    spans: list[Span] = []


Outcome = Hit | Made | Owner | InFlight | Scheduled | Absent | Failed
"""Outcome of one item of `Acquire` or `Wait`."""
Pending: Final = (InFlight, Scheduled)
"""Outcomes after which a `Wait` follows."""


def existing(outcome: Outcome) -> Handle | None:
    """Return the pinned handle of an object that exists; ``None`` for every other outcome."""
    return outcome.handle if isinstance(outcome, Hit | Made) else None


def spans_of(outcome: Outcome) -> list[Span]:
    """Return the spans of a job that has ended; none for an outcome without a job."""
    return outcome.spans if isinstance(outcome, Made | Absent | Failed) else []


Role = Literal["make", "fetch", "keep"]
"""Role of a worker: it makes objects, fetches them from a tier, or copies them to the tier."""


class Order(Struct, array_like=True, forbid_unknown_fields=True):
    """Job for a worker: read ``inputs``, write into ``target``, then `Finish`.

    A fetcher gets a `Fetching` as payload. If it finishes with a failure, the object is made here.
    The role ``keep`` gets a `Keeping`. Its object is pinned under the request that the `Keeping`
    names; releasing that request ends the job.
    """

    job: NonNegative
    target: Handle
    inputs: list[Handle]
    payload: Payload


class Fetching(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Object to fetch, and the approximate time to make it here."""

    key: KeyBytes
    kind: ObjectKind
    nbytes: NonNegative
    cost_us: NonNegative


class Keeping(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Object that was made here, to be copied to the tier.

    ``cost_us`` is the estimated time to make it, ``made_us`` the measured one; 0 if unknown.
    ``num_dropped`` counts the objects dropped since the order before: the queue was full, they were
    gone, or reservations waited for their space. ``tenant`` is empty for the default tenant, or if
    unknown.
    """

    key: KeyBytes
    kind: ObjectKind
    request: str
    cost_us: NonNegative
    made_us: NonNegative
    num_dropped: NonNegative
    tenant: str = ""


class StoredItem(Struct, frozen=True, array_like=True, tag="stored", forbid_unknown_fields=True):
    """Media item in the store, with the bytes of its features or embeddings.

    Attributes:
        name: Name of the item: its key, or the name in its `ItemLabel`.
        nbytes: Size of the object.
        placement: `keys.placement_digest` of its encoded bytes; empty if they are unknown.
        tenant: Tenant of its first request; empty for the default tenant.
    """

    name: ItemName
    kind: ObjectKind
    nbytes: NonNegative
    modality: Modality | None
    placement: bytes
    tenant: str


class RemovedItem(Struct, frozen=True, array_like=True, tag="removed", forbid_unknown_fields=True):
    """Item that is not in the store any more."""

    name: ItemName
    kind: ObjectKind


ItemChange = StoredItem | RemovedItem


class ItemChanges(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Changes of items, in order.

    Attributes:
        seq: Number of the last change.
        is_complete: Whether no change before them was lost. Otherwise there are none here, and the
            reader lists all items.
    """

    seq: NonNegative
    changes: list[ItemChange]
    is_complete: bool = True


class ItemPage(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Part of all items.

    Attributes:
        seq: Number of the latest change by now. The changes after that of the first page complete
            the list.
        after: Position of the next page; 0 for the last page.
    """

    seq: NonNegative
    items: list[StoredItem]
    after: NonNegative


class Evicted(Struct, array_like=True, forbid_unknown_fields=True):
    """Number and bytes of evicted objects."""

    num_objects: int
    nbytes: int


StateName = Literal["created", "sealed", "pending_deletion", "fetching", "demoting"]


class ObjectInfo(Struct, forbid_unknown_fields=True):
    """Description of an object.

    ``pins`` and ``writer`` are numbers of clients; 0 is the store itself, for its jobs. A
    ``fetching`` object is being written by the tier process. A ``demoting`` one is sealed and being
    copied to the tier.
    """

    handle: Handle
    kind: ObjectKind
    state: StateName
    key: KeyBytes | None
    writer: int | None
    pins: list[int]


class ClientInfo(Struct, forbid_unknown_fields=True):
    """Client process. If it is not ``connected``, it may still read or write its objects."""

    client: int
    name: str
    pid: int
    connected: bool
    num_held: int
    held_nbytes: int
    reserved_nbytes: int


class TenantInfo(Struct, forbid_unknown_fields=True):
    """Tenant with queued requests or reserved space; ``weight`` is that of its latest request.

    Attributes:
        tenant: Empty for the default tenant.
        reserved_nbytes: Reserved, and not yet used.
        num_reservations_queued: Requests that wait for space.
        queued_nbytes: Bytes that they wait for.
        num_permits_queued: Requests that wait for a permit.
        num_jobs: Jobs that are queued or running.
    """

    tenant: str
    weight: float
    reserved_nbytes: int = 0
    num_reservations_queued: int = 0
    queued_nbytes: int = 0
    num_permits_queued: int = 0
    num_jobs: int = 0


class KindStatistics(Struct, forbid_unknown_fields=True):
    """Use of one kind's share of the arena.

    ``backed`` bytes have memory, used or not. ``held`` bytes are being written or pinned, so they
    are never evicted.
    """

    capacity_nbytes: int
    backed_nbytes: int
    used_nbytes: int
    held_nbytes: int
    reserved_nbytes: int
    largest_free_nbytes: int
    num_free_extents: int
    num_objects: int
    num_held: int
    num_evicted: int


class Statistics(Struct, forbid_unknown_fields=True):
    """Statistics of the whole store."""

    segment: int
    capacity_nbytes: int
    backed_nbytes: int
    used_nbytes: int
    held_nbytes: int
    reserved_nbytes: int
    kinds: dict[ObjectKind, KindStatistics]
    num_objects: int
    num_evicted: int
    num_jobs_queued: int
    num_jobs_running: int
    num_jobs_made: int
    num_jobs_failed: int
    num_jobs_fetched: int
    num_workers: int
    num_clients: int
    num_reservations_queued: int
    num_hits: int
    num_misses: int
    num_joined: int
    permits: dict[str, PermitStatistics]
