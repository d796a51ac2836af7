"""What a request names, one struct for each thing that can be wanted, created, sealed, reserved."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from afferent.types import Handle, KeyBytes, ObjectKind

MAX_ITEMS = 4096

Nbytes = Annotated[int, Meta(ge=1, le=2**48)]
Payload = Annotated[bytes, Meta(max_length=4096)]
Sources = Annotated[list[Handle], Meta(max_length=64)]


class Find(Struct, frozen=True, array_like=True, tag="find", forbid_unknown_fields=True):
    """Pin the object if it is sealed; otherwise it is absent, also while somebody makes it."""

    key: KeyBytes


class Join(Struct, frozen=True, array_like=True, tag="join", forbid_unknown_fields=True):
    """Pin the object, or wait for it while somebody makes it; otherwise it is absent."""

    key: KeyBytes


class Claim(Struct, frozen=True, array_like=True, tag="claim", forbid_unknown_fields=True):
    """As `Join`, but what nobody makes is created for this request, to write and seal.

    ``nbytes`` is the most that it may take.
    """

    key: KeyBytes
    kind: ObjectKind
    nbytes: Nbytes


class Queue(Struct, frozen=True, array_like=True, tag="queue", forbid_unknown_fields=True):
    """As `Join`, but what nobody makes becomes a job: a worker makes it from ``inputs``.

    ``nbytes`` is the most that it may take; ``payload`` is for the worker; ``cost_us`` is a guess
    of how long one will work on it, by which jobs are handed out fairly.
    """

    key: KeyBytes
    kind: ObjectKind
    nbytes: Nbytes
    inputs: Sources
    payload: Payload
    cost_us: Annotated[int, Meta(ge=1, le=2**40)] = 1000


class Fetch(Struct, frozen=True, array_like=True, tag="fetch", forbid_unknown_fields=True):
    """As `Join`, but what nobody makes is looked for beyond this machine, where a tier is connected
    and has time; what is not there either is absent.

    ``nbytes`` is the most that it may take; ``cost_us`` how long it would take to make it.
    """

    key: KeyBytes
    kind: ObjectKind
    nbytes: Nbytes
    cost_us: Annotated[int, Meta(ge=1, le=2**40)] = 1000


Wanted = Find | Join | Claim | Queue | Fetch
"""What a request acquires: they say what happens where the object is missing."""


class CreateItem(Struct, array_like=True, forbid_unknown_fields=True):
    kind: ObjectKind
    nbytes: Nbytes
    key: KeyBytes | None = None


class SealItem(Struct, array_like=True, forbid_unknown_fields=True):
    """``sources`` are what it was computed from, which the request must still have pinned;
    ``made_us`` is how long its making took, 0 where nobody has measured that.
    """

    handle: Handle
    used_nbytes: Nbytes
    sources: Sources = []
    made_us: Annotated[int, Meta(ge=0, le=2**40)] = 0


class ReserveItem(Struct, array_like=True, forbid_unknown_fields=True):
    """Room for one object: it is rounded up as an object's block is."""

    kind: ObjectKind
    nbytes: Nbytes
