"""One object of the store: what it is, where it is, and who holds it."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from afferent.types import ContentKey, Handle, Lease, ObjectKind


class ObjectState(Enum):
    CREATED = "created"
    SEALED = "sealed"
    PENDING_DELETION = "pending_deletion"


class StoredObject(Struct, eq=False):
    """One object and who holds it.

    The handle says how many bytes were asked for, or used once it is sealed; ``block_nbytes`` how
    many the arena gave for them. ``tenant`` is whose request it was made for, or what it was
    computed from.
    """

    handle: Handle
    block_nbytes: int
    kind: ObjectKind
    state: ObjectState
    key: ContentKey | None = None
    writer: Lease | None = None
    pins: dict[Lease, int] = {}
    tenant: str = ""

    @property
    def held(self) -> bool:
        return self.writer is not None or bool(self.pins)


class NewObject(Struct, frozen=True):
    """What to create: an object without a key can only be found by its handle."""

    kind: ObjectKind
    nbytes: int
    key: ContentKey | None = None
