"""What clients and the store daemon say to each other: schema'd msgpack, version 1.

Every request carries ``seq``, which its `Reply` repeats. A verb works on many objects in one round
trip. Requests that wait (`Wait`, `Take`, `Reserve`, `Enter`) are answered when there is something
to say, out of order.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from afferent.errors import FormatError
from afferent.metrics import Sample
from afferent.types import (
    Failure,
    Handle,
    KeyBytes,
    NonNegative,
    ObjectKind,
    RequestId,
    Span,
    decode,
)

VERSION = 1
NO_REPLY = 0
"""The ``seq`` of a request whose sender does not wait for a reply; only a failure is told."""
MAX_ITEMS = 4096
MAX_ALSO_FOR = 256

_Payload = Annotated[bytes, Meta(max_length=4096)]
_Handles = Annotated[list[Handle], Meta(max_length=MAX_ITEMS)]
_Keys = Annotated[list[KeyBytes], Meta(max_length=MAX_ITEMS)]
_Positive = Annotated[int, Meta(ge=1, le=2**48)]
_Samples = Annotated[list[Sample], Meta(max_length=MAX_ITEMS)]

SlotName = Annotated[str, Meta(min_length=1, max_length=128)]
"""Such as ``"preprocess"``, or ``"tenant/NAME"``: what comes before the slash is its family."""


class Hello(Struct, array_like=True, tag="hello", forbid_unknown_fields=True):
    """The first message of a connection; answered by `Welcome` and the arena's descriptor.

    ``token`` is a random number that a client keeps for its life. Who says hello, or `Bye`, says
    that nothing is in use any more which was held under an earlier connection with that token.
    """

    version: int
    writable: bool
    name: Annotated[str, Meta(max_length=64)]
    token: NonNegative


class Bye(Struct, array_like=True, tag="bye", forbid_unknown_fields=True):
    """The first and last message of a connection: its client has left the store.

    It is answered (by a `Welcome`, without the arena), and it has a connection of its own, so that
    a client can repeat it until an answer says that it has not been lost with a daemon.
    """

    token: NonNegative


class Welcome(Struct, array_like=True, forbid_unknown_fields=True):
    """``segment`` is the number of the store's epoch; ``client`` the client's own, never given to
    another one. It is 0 for who was not let in.
    """

    version: int
    segment: NonNegative
    client: NonNegative


class JobSpec(Struct, array_like=True, forbid_unknown_fields=True):
    """How to make a missing object: the handles it is made from, and words for the worker."""

    inputs: Annotated[list[Handle], Meta(max_length=64)]
    payload: _Payload


class AcquireItem(Struct, array_like=True, forbid_unknown_fields=True):
    """An object that is wanted; ``nbytes`` is the most that making it may take.

    ``make`` says what happens when it is missing: a job is queued; or it is created for this
    request, ``"self"``, to write and seal; or nothing. With ``None`` what others are making is
    waited for; with ``"find"`` it is absent.
    """

    key: KeyBytes
    kind: ObjectKind
    nbytes: _Positive
    make: JobSpec | Literal["self", "find"] | None


class Acquire(Struct, array_like=True, tag="acquire", forbid_unknown_fields=True):
    """Pin what exists, see to it that what does not is made: a list of `Outcome`."""

    seq: int
    request: RequestId
    items: Annotated[list[AcquireItem], Meta(max_length=MAX_ITEMS)]


class Wait(Struct, array_like=True, tag="wait", forbid_unknown_fields=True):
    """Answered when each key, acquired before, has been made or has failed: a list of `Outcome`.

    It is answered early when a maker has gone and one of the keys is this request's to make now:
    ``yours``, with ``busy`` for those that others still make.
    """

    seq: int
    request: RequestId
    keys: _Keys


class CreateItem(Struct, array_like=True, forbid_unknown_fields=True):
    kind: ObjectKind
    nbytes: _Positive
    key: KeyBytes | None = None


class Create(Struct, array_like=True, tag="create", forbid_unknown_fields=True):
    """Blocks to write, all or none: a list of `Handle`."""

    seq: int
    request: RequestId
    items: Annotated[list[CreateItem], Meta(max_length=MAX_ITEMS)]


class SealItem(Struct, array_like=True, forbid_unknown_fields=True):
    """``sources`` are what it was computed from, which the request must still have pinned."""

    handle: Handle
    used_nbytes: _Positive
    sources: Annotated[list[Handle], Meta(max_length=64)] = []


class Seal(Struct, array_like=True, tag="seal", forbid_unknown_fields=True):
    """End the writing, of all or none; the request keeps a pin on each: `Handle`s, trimmed."""

    seq: int
    request: RequestId
    items: Annotated[list[SealItem], Meta(max_length=MAX_ITEMS)]


class Abort(Struct, array_like=True, tag="abort", forbid_unknown_fields=True):
    """Give up writing. Who waits for the objects fails too, or without ``failure`` may try."""

    seq: int
    request: RequestId
    handles: _Handles
    failure: Failure | None = None


class Get(Struct, array_like=True, tag="get", forbid_unknown_fields=True):
    """Pin sealed objects by handle, all or none: for the sender, and once for each of the clients
    in ``also_for``, under the same name of a request.
    """

    seq: int
    request: RequestId
    handles: _Handles
    also_for: Annotated[list[NonNegative], Meta(max_length=MAX_ALSO_FOR)] = []


class Release(Struct, array_like=True, tag="release", forbid_unknown_fields=True):
    """Take back one pin of each; without ``handles``, drop all that the request holds."""

    seq: int
    request: RequestId
    handles: _Handles | None


class ReserveItem(Struct, array_like=True, forbid_unknown_fields=True):
    """Room for one object: it is rounded up as an object's block is."""

    kind: ObjectKind
    nbytes: _Positive


class Reserve(Struct, array_like=True, tag="reserve", forbid_unknown_fields=True):
    """Room for objects that will be created or acquired, granted to the request all or nothing.

    With ``queue`` it is answered when it has been granted, in order of arrival.
    """

    seq: int
    request: RequestId
    items: Annotated[list[ReserveItem], Meta(max_length=MAX_ITEMS)]
    queue: bool


class Unreserve(Struct, array_like=True, tag="unreserve", forbid_unknown_fields=True):
    """Take a `Reserve` back, named by its ``ticket`` (its ``seq``), whether it was granted or not.

    Of what was granted, that much is returned of what has not been spent. A `Create` that waits is
    taken back likewise.
    """

    seq: int
    request: RequestId
    items: Annotated[list[ReserveItem], Meta(max_length=MAX_ITEMS)]
    ticket: int


class Enter(Struct, array_like=True, tag="enter", forbid_unknown_fields=True):
    """Be one of at most ``limit`` requests of all clients that are in a slot of this name.

    With ``queue`` it is answered when there is a place, in order of arrival. The place is the
    request's until it leaves, or is released and its jobs have ended.
    """

    seq: int
    request: RequestId
    slot: SlotName
    limit: Annotated[int, Meta(ge=1, le=2**31)]
    queue: bool


class Leave(Struct, array_like=True, tag="leave", forbid_unknown_fields=True):
    """Give a place in a slot back, or stop waiting for one."""

    seq: int
    request: RequestId
    slot: SlotName


class Delete(Struct, array_like=True, tag="delete", forbid_unknown_fields=True):
    """Take sealed objects away by key: a list of whether each was there.

    Those who have one pinned keep it until they let go.
    """

    seq: int
    keys: _Keys


class Evict(Struct, array_like=True, tag="evict", forbid_unknown_fields=True):
    """Evict the least recently used of a kind, ``nbytes`` of them or all: `Evicted`."""

    seq: int
    kind: ObjectKind
    nbytes: _Positive | None


class List(Struct, array_like=True, tag="list", forbid_unknown_fields=True):
    """The largest objects: a list of `ObjectInfo`."""

    seq: int
    kind: ObjectKind | None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS)]


class Clients(Struct, array_like=True, tag="clients", forbid_unknown_fields=True):
    """Who is connected, or was and still holds something: a list of `ClientInfo`."""

    seq: int


class Take(Struct, array_like=True, tag="take", forbid_unknown_fields=True):
    """Answered with an `Order` when there is a job."""

    seq: int


class Finish(Struct, array_like=True, tag="finish", forbid_unknown_fields=True):
    """The end of a job: how many bytes were written, or why it failed."""

    seq: int
    job: NonNegative
    used_nbytes: NonNegative
    failure: Failure | None
    spans: Annotated[list[Span], Meta(max_length=64)]


class Stat(Struct, array_like=True, tag="stat", forbid_unknown_fields=True):
    """Answered with `Statistics`."""

    seq: int


class Push(Struct, array_like=True, tag="push", forbid_unknown_fields=True):
    """All that a process has counted so far; ``source`` is a number that it keeps for its life."""

    seq: int
    source: NonNegative
    samples: _Samples


class Figures(Struct, array_like=True, tag="figures", forbid_unknown_fields=True):
    """What all processes have counted, the dead included: a list of `Sample`."""

    seq: int


Request = (
    Acquire
    | Wait
    | Create
    | Seal
    | Abort
    | Get
    | Release
    | Reserve
    | Unreserve
    | Enter
    | Leave
    | Delete
    | Evict
    | List
    | Clients
    | Take
    | Finish
    | Stat
    | Push
    | Figures
)


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
    payload: _Payload


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


class Reply(Struct, array_like=True, forbid_unknown_fields=True):
    """``result`` is the verb's own type, or nil with ``failure``."""

    seq: int
    result: msgspec.Raw
    failure: Failure | None = None


WAITING = (Wait, Reserve, Enter, Take)
"""Requests that are answered when there is something to say; all others are answered at once."""

request_decoder = msgspec.msgpack.Decoder(Request)
hello_decoder = msgspec.msgpack.Decoder(Hello | Bye)
reply_decoder = msgspec.msgpack.Decoder(Reply)
_any_decoder = msgspec.msgpack.Decoder()


def seq_of(frame: bytes) -> int:
    """The ``seq`` of a request that does not follow its schema.

    Raises:
        FormatError: It is no request at all.
    """
    match decode(_any_decoder, frame):
        case [str(), int() as seq, *_]:
            return seq
        case _:
            raise FormatError("not a request")
