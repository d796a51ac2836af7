"""What the store answers: the results of the verbs of `afferent.store.protocol.requests`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from afferent.quota.permits import PermitStatistics
from afferent.store.protocol.items import Payload
from afferent.types import Failure, Handle, KeyBytes, NonNegative, ObjectKind, Span


class Outcome(Struct, array_like=True, forbid_unknown_fields=True):
    """What became of an item. ``handle`` is set, and pinned, for ``hit`` and ``made``.

    ``owner``: the request makes it, and ``handle`` is for it to write and seal. ``in_flight``:
    somebody else makes it. ``scheduled``: this request's job makes it.
    """

    state: Literal["hit", "made", "in_flight", "scheduled", "owner", "absent", "failed"]
    handle: Handle | None = None
    failure: Failure | None = None
    spans: list[Span] = []


Role = Literal["make", "fetch", "keep"]
"""What a worker does: makes objects, fetches them from a tier, or writes them there."""


class Order(Struct, array_like=True, forbid_unknown_fields=True):
    """A job for a worker: read ``inputs``, write into ``target``, then `Finish`.

    Who fetches gets a `Fetching` for a payload. It says with a failure that the object is not to be
    had: then it is made here. Who keeps gets a `Keeping`; the object is pinned under the request
    that it names, and there is nothing to finish but that.
    """

    job: NonNegative
    target: Handle
    inputs: list[Handle]
    payload: Payload


class Fetching(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is to be fetched, and about how long it would take to make it here."""

    key: KeyBytes
    kind: ObjectKind
    nbytes: NonNegative
    cost_us: NonNegative


class Keeping(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What has been made here.

    ``cost_us`` is what its making was expected to take, ``made_us`` what it took; 0 where nobody
    knows. ``num_dropped`` are objects that were not handed out since the order before: there were
    too many, they were gone, or others waited for their room. ``tenant`` is whose it is, as far as
    is known; empty for the nameless one.
    """

    key: KeyBytes
    kind: ObjectKind
    request: str
    cost_us: NonNegative
    made_us: NonNegative
    num_dropped: NonNegative
    tenant: str = ""


class Evicted(Struct, array_like=True, forbid_unknown_fields=True):
    num_objects: int
    nbytes: int


StateName = Literal["created", "sealed", "pending_deletion", "fetching", "demoting"]


class ObjectInfo(Struct, forbid_unknown_fields=True):
    """``pins`` and ``writer`` are numbers of clients; 0 is the store itself, for its jobs.

    ``fetching`` is being written by a tier, ``demoting`` is sealed and being copied to it.
    """

    handle: Handle
    kind: ObjectKind
    state: StateName
    key: KeyBytes | None
    writer: int | None
    pins: list[int]


class ClientInfo(Struct, forbid_unknown_fields=True):
    """A process. One that is not ``connected`` may still read or write what it holds."""

    client: int
    name: str
    pid: int
    connected: bool
    num_held: int
    held_nbytes: int
    reserved_nbytes: int


class TenantInfo(Struct, forbid_unknown_fields=True):
    """Whose requests queue or hold back room now. ``weight`` is that of the latest of them.

    Attributes:
        tenant: Empty for the nameless one.
        reserved_nbytes: Reserved, and not yet used.
        num_reservations_queued: Requests that wait for room.
        queued_nbytes: What they wait for.
        num_permits_queued: Requests that wait for a permit.
        num_jobs: Items that are to be made, or are being made.
    """

    tenant: str
    weight: float
    reserved_nbytes: int = 0
    num_reservations_queued: int = 0
    queued_nbytes: int = 0
    num_permits_queued: int = 0
    num_jobs: int = 0


class KindStatistics(Struct, forbid_unknown_fields=True):
    """One kind's share of the arena. ``backed``: has memory, used or not. ``held``: being written
    or pinned, so never evicted.
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
