"""Items of requests: structs for objects to acquire, create, seal or reserve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from afferent.types import Handle, KeyBytes, Modality, Nbytes, ObjectKind

MAX_ITEMS = 4096
"""Largest number of items in a message."""
T = TypeVar("T")

Payload = Annotated[bytes, Meta(max_length=4096)]
Sources = Annotated[list[Handle], Meta(max_length=64)]


MAX_NAME_NBYTES = 64
ItemName = Annotated[bytes, Meta(max_length=MAX_NAME_NBYTES)]


def in_messages(items: Sequence[T], *, most: int = MAX_ITEMS) -> Iterator[Sequence[T]]:
    """Divide items, keys or handles among messages: one may not take all of them."""
    for start in range(0, len(items), most):
        yield items[start : start + most]


class ItemLabel(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Description of the media item behind an object, for programs that follow the store's items.

    Attributes:
        modality: Modality of the item, if it is known.
        placement: `keys.placement_digest` of its encoded bytes; empty if they are unknown.
        name: Name of the item outside of the store; empty: the object's key.
    """

    modality: Modality | None = None
    placement: Annotated[bytes, Meta(max_length=32)] = b""
    name: ItemName = b""


class Find(Struct, frozen=True, array_like=True, tag="find", forbid_unknown_fields=True):
    """Pin the object if it is sealed; otherwise it is absent, even while it is being made."""

    key: KeyBytes


class Join(Struct, frozen=True, array_like=True, tag="join", forbid_unknown_fields=True):
    """Pin the object, or wait for it while it is being made; otherwise it is absent."""

    key: KeyBytes


class Claim(Struct, frozen=True, array_like=True, tag="claim", forbid_unknown_fields=True):
    """Join the object, or create it for this request to write and seal.

    ``nbytes`` is its maximum size.
    """

    key: KeyBytes
    kind: ObjectKind
    nbytes: Nbytes
    label: ItemLabel | None = None


class Queue(Struct, frozen=True, array_like=True, tag="queue", forbid_unknown_fields=True):
    """Join the object, or queue a job: a worker makes it from ``inputs``.

    ``nbytes`` is its maximum size, and ``payload`` is for the worker. ``cost_us`` estimates the
    worker's time; fair scheduling of jobs uses it.
    """

    key: KeyBytes
    kind: ObjectKind
    nbytes: Nbytes
    inputs: Sources
    payload: Payload
    cost_us: Annotated[int, Meta(ge=1, le=2**40)] = 1000
    label: ItemLabel | None = None


class Fetch(Struct, frozen=True, array_like=True, tag="fetch", forbid_unknown_fields=True):
    """Join the object, or fetch it from a connected, idle tier; otherwise it is absent.

    ``nbytes`` is its maximum size; ``cost_us`` is the time to make it here.
    """

    key: KeyBytes
    kind: ObjectKind
    nbytes: Nbytes
    cost_us: Annotated[int, Meta(ge=1, le=2**40)] = 1000
    label: ItemLabel | None = None


Wanted = Find | Join | Claim | Queue | Fetch
"""Item to acquire; the class defines how a missing object is handled."""


class SealItem(Struct, array_like=True, forbid_unknown_fields=True):
    """Object to seal.

    ``sources`` are its inputs, which the request must still have pinned. ``made_us`` is the time it
    took to make it, 0 if that was not measured.
    """

    handle: Handle
    used_nbytes: Nbytes
    sources: Sources = []
    made_us: Annotated[int, Meta(ge=0, le=2**40)] = 0
