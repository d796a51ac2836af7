"""What a client asks of the store: one class for each verb, and what it names.

Every request carries ``seq``, which its reply repeats. A verb works on many objects in one round
trip. Requests that wait (`Wait`, `Take`, `Reserve`, `Enter`) are answered when there is something
to say, out of order.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from afferent.series import Sample
from afferent.types import (
    Failure,
    Handle,
    KeyBytes,
    NonNegative,
    ObjectKind,
    RequestId,
    Span,
)

NO_REPLY = 0
"""The ``seq`` of a request whose sender does not wait for a reply; only a failure is told."""
MAX_ITEMS = 4096
MAX_ALSO_FOR = 256

Payload = Annotated[bytes, Meta(max_length=4096)]
_Handles = Annotated[list[Handle], Meta(max_length=MAX_ITEMS)]
_Keys = Annotated[list[KeyBytes], Meta(max_length=MAX_ITEMS)]
_Positive = Annotated[int, Meta(ge=1, le=2**48)]
_Samples = Annotated[list[Sample], Meta(max_length=MAX_ITEMS)]

SlotName = Annotated[str, Meta(min_length=1, max_length=128)]
"""Such as ``"preprocess"``, or ``"tenant/NAME"``: what comes before the slash is its family."""


class JobSpec(Struct, array_like=True, forbid_unknown_fields=True):
    """How to make a missing object: the handles it is made from, and words for the worker."""

    inputs: Annotated[list[Handle], Meta(max_length=64)]
    payload: Payload


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

WAITING = (Wait, Reserve, Enter, Take)
"""Requests that are answered when there is something to say; all others are answered at once."""


def withdrawal(request: Request) -> Request | None:
    """What to say when an answer is not waited for any more, so that nothing is granted, no place
    taken, and no room waited for; ``None`` where there is nothing to take back.
    """
    match request:
        case Create():
            return Unreserve(NO_REPLY, request.request, [], request.seq)
        case Reserve():
            return Unreserve(NO_REPLY, request.request, request.items, request.seq)
        case Enter():
            return Leave(NO_REPLY, request.request, request.slot)
        case _:
            return None
