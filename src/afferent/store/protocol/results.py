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


class Order(Struct, array_like=True, forbid_unknown_fields=True):
    """A job for a worker: read ``inputs``, write into ``target``, then `Finish`."""

    job: NonNegative
    target: Handle
    inputs: list[Handle]
    payload: Payload


class Evicted(Struct, array_like=True, forbid_unknown_fields=True):
    num_objects: int
    nbytes: int


class ObjectInfo(Struct, forbid_unknown_fields=True):
    """``pins`` and ``writer`` are numbers of clients; 0 is the store itself, for its jobs."""

    handle: Handle
    kind: ObjectKind
    state: Literal["created", "sealed", "pending_deletion"]
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


class KindStatistics(Struct, forbid_unknown_fields=True):
    """One kind's share of the arena. ``held``: being written or pinned, so never evicted."""

    capacity_nbytes: int
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
    num_workers: int
    num_clients: int
    num_reservations_queued: int
    num_hits: int
    num_misses: int
    num_joined: int
    permits: dict[str, PermitStatistics]
