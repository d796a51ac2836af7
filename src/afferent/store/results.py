"""What the store answers: the results of the verbs of `afferent.store.requests`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from afferent.store.requests import Payload
from afferent.types import Failure, Handle, KeyBytes, NonNegative, ObjectKind, Span


class Outcome(Struct, array_like=True, forbid_unknown_fields=True):
    """What became of an item. ``handle`` is set, and pinned, for ``hit`` and ``made``.

    ``busy``: somebody else makes it. ``miss``: this request's job makes it. ``yours``: ``handle``
    is for this request to write and seal.
    """

    state: Literal["hit", "made", "busy", "miss", "yours", "absent", "failed"]
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
    state: Literal["created", "sealed", "doomed"]
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
    granted_nbytes: int


class KindStatistics(Struct, forbid_unknown_fields=True):
    """One kind's share of the arena. ``held``: being written or pinned, so never evicted."""

    capacity_nbytes: int
    used_nbytes: int
    held_nbytes: int
    granted_nbytes: int
    largest_free_nbytes: int
    num_free_runs: int
    num_objects: int
    num_held: int
    num_evicted: int


class SlotStatistics(Struct, forbid_unknown_fields=True):
    """The slots of one family: places taken, and requests that wait for one."""

    num_taken: int
    num_queued: int


class Statistics(Struct, forbid_unknown_fields=True):
    segment: int
    capacity_nbytes: int
    used_nbytes: int
    held_nbytes: int
    granted_nbytes: int
    kinds: dict[ObjectKind, KindStatistics]
    num_objects: int
    num_evicted: int
    num_jobs_queued: int
    num_jobs_running: int
    num_workers: int
    num_clients: int
    num_reservations_queued: int
    num_hits: int
    num_misses: int
    num_joined: int
    slots: dict[str, SlotStatistics]
