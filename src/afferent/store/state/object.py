"""Stored object: its handle, state, key and leases."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from afferent.store.protocol.items import ItemLabel
from afferent.types import ContentKey, Handle, Lease, ObjectKind


class ObjectState(Enum):
    CREATED = "created"
    SEALED = "sealed"
    PENDING_DELETION = "pending_deletion"


class StoredObject(Struct, eq=False):
    """Object with its writer and pins.

    ``handle.nbytes`` is the requested size, and after the seal the used size. ``block_nbytes`` is
    the allocated size. ``tenant`` is the tenant of the request that needed it first, or of its
    source.

    Invariants, after each event:
        - A created object has a writer and no pins; a sealed object has no writer.
        - An object without writer and pins is sealed and has a key.
    """

    handle: Handle
    block_nbytes: int
    kind: ObjectKind
    state: ObjectState
    key: ContentKey | None = None
    writer: Lease | None = None
    pins: dict[Lease, int] = {}
    tenant: str = ""
    label: ItemLabel | None = None

    @property
    def held(self) -> bool:
        return self.writer is not None or bool(self.pins)


class NewObject(Struct, frozen=True):
    """Object to create; without a key, only its handle leads to it."""

    kind: ObjectKind
    nbytes: int
    key: ContentKey | None = None
    label: ItemLabel | None = None
