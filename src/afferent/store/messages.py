"""What clients and the store daemon say to each other: schema'd msgpack, version 1.

Every request carries ``seq``, which its `Reply` repeats. A verb works on many objects in one round
trip. Requests that wait (`Wait`, `Take`) are answered when there is something to say, out of order.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from afferent.types import Failure, Handle, KeyBytes, NonNegative, ObjectKind, RequestId, Span

VERSION = 1
MAX_ITEMS = 4096

_Payload = Annotated[bytes, Meta(max_length=4096)]
_Handles = Annotated[list[Handle], Meta(max_length=MAX_ITEMS)]
_Keys = Annotated[list[KeyBytes], Meta(max_length=MAX_ITEMS)]
_Positive = Annotated[int, Meta(ge=1, le=2**48)]


class Hello(Struct, array_like=True, tag="hello", forbid_unknown_fields=True):
    """The first message of a connection; answered by `Welcome` and the arena's descriptor."""

    version: int
    writable: bool
    name: Annotated[str, Meta(max_length=64)]


class Welcome(Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    segment: NonNegative


class JobSpec(Struct, array_like=True, forbid_unknown_fields=True):
    """How to make a missing object: the handles it is made from, and words for the worker."""

    inputs: Annotated[list[Handle], Meta(max_length=64)]
    payload: _Payload


class AcquireItem(Struct, array_like=True, forbid_unknown_fields=True):
    """An object that is wanted; ``nbytes`` is the most that making it may take.

    Without a ``job`` nothing is made: the outcome of a missing object is ``absent``.
    """

    key: KeyBytes
    kind: ObjectKind
    nbytes: _Positive
    job: JobSpec | None


class Acquire(Struct, array_like=True, tag="acquire", forbid_unknown_fields=True):
    """Pin what exists, queue jobs for what does not: a list of `Outcome`."""

    seq: int
    request: RequestId
    items: Annotated[list[AcquireItem], Meta(max_length=MAX_ITEMS)]


class Wait(Struct, array_like=True, tag="wait", forbid_unknown_fields=True):
    """Answered when each key, acquired before, has been made or has failed: a list of `Outcome`."""

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
    handle: Handle
    used_nbytes: _Positive


class Seal(Struct, array_like=True, tag="seal", forbid_unknown_fields=True):
    """End the writing; the request keeps a pin on each: a list of `Handle`, trimmed."""

    seq: int
    request: RequestId
    items: Annotated[list[SealItem], Meta(max_length=MAX_ITEMS)]


class Abort(Struct, array_like=True, tag="abort", forbid_unknown_fields=True):
    seq: int
    request: RequestId
    handles: _Handles


class Get(Struct, array_like=True, tag="get", forbid_unknown_fields=True):
    """Pin sealed objects by handle, all or none."""

    seq: int
    request: RequestId
    handles: _Handles


class Release(Struct, array_like=True, tag="release", forbid_unknown_fields=True):
    """Take back one pin of each; without ``handles``, drop all that the request holds."""

    seq: int
    request: RequestId
    handles: _Handles | None


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


Request = Acquire | Wait | Create | Seal | Abort | Get | Release | Take | Finish | Stat


class Outcome(Struct, array_like=True, forbid_unknown_fields=True):
    """What became of an item. ``handle`` is set, and pinned, for ``hit`` and ``made``.

    ``busy``: somebody else's job makes it. ``miss``: this request's job makes it.
    """

    state: Literal["hit", "made", "busy", "miss", "absent", "failed"]
    handle: Handle | None = None
    failure: Failure | None = None
    spans: list[Span] = []


class Order(Struct, array_like=True, forbid_unknown_fields=True):
    """A job for a worker: read ``inputs``, write into ``target``, then `Finish`."""

    job: NonNegative
    target: Handle
    inputs: list[Handle]
    payload: _Payload


class Statistics(Struct, forbid_unknown_fields=True):
    capacity_nbytes: int
    used_nbytes: int
    pinned_nbytes: int
    largest_free_nbytes: int
    num_objects: int
    nbytes_by_kind: dict[str, int]
    num_jobs_queued: int
    num_jobs_running: int
    num_workers: int
    num_clients: int
    num_hits: int
    num_misses: int
    num_joined: int
    num_evicted: int


class Reply(Struct, array_like=True, forbid_unknown_fields=True):
    """``result`` is the verb's own type, or nil with ``failure``."""

    seq: int
    result: msgspec.Raw
    failure: Failure | None = None


request_decoder = msgspec.msgpack.Decoder(Request)
hello_decoder = msgspec.msgpack.Decoder(Hello)
reply_decoder = msgspec.msgpack.Decoder(Reply)
