"""Item events between a server and its gateways or routers: addresses and messages.

The framing is that of vLLM's KV events: a message has three frames, the topic, the number of the
batch (8 bytes, big-endian) and the batch as msgpack. A batch is an array, and an event is a map
with its ``type``.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from afferent.store.protocol.results import ItemChange, RemovedItem, StoredItem
from afferent.types import Modality, ObjectKind

TOPIC: Final = b"items"
USER: Final = "afferent"
"""User name that a subscriber sends with the key."""
SEQ_NBYTES: Final = 8
END: Final = -1
"""Number in place of a batch's: the answer to a request has ended."""
NOT_ANSWERED: Final = -2
"""The same, for a request that could not be answered."""
LIST: Final = b"list"
"""Request for all items."""


class ItemEvent(Struct, frozen=True, tag=True, omit_defaults=True):
    """Event of any type; the field ``type`` has the name of its class."""


class ItemStored(ItemEvent, frozen=True):
    """The server has an item.

    Attributes:
        name: Name of the item, in hexadecimal digits: the one in vLLM's caches and in the
            ``mm_hashes`` of a rendered prompt.
        kind: ``features``, or ``embeddings`` of the encoder.
        nbytes: Their size.
        modality: ``image``, ``video`` or ``audio``, if it is known.
        placement: `keys.placement_digest` of the item's file, in hexadecimal digits, if it is
            known.
    """

    name: str
    kind: ObjectKind
    nbytes: int
    modality: Modality | None = None
    placement: str | None = None


class ItemRemoved(ItemEvent, frozen=True):
    """The server does not have an item's features, or embeddings, any more."""

    name: str
    kind: ObjectKind


class AllItemsCleared(ItemEvent, frozen=True):
    """The server has no items but those of the events that follow."""


class ItemEventBatch(Struct, frozen=True, array_like=True):
    """Events of one message, and the time at which they were published, in seconds since 1970."""

    ts: float
    events: list[ItemStored | ItemRemoved | AllItemsCleared]


Event = ItemStored | ItemRemoved | AllItemsCleared

_encoder = msgspec.msgpack.Encoder()


def event_of(change: ItemChange) -> Event:
    """Return the event for a change in the store."""
    if isinstance(change, RemovedItem):
        return ItemRemoved(change.name.hex(), change.kind)
    return stored_event(change)


def stored_event(item: StoredItem) -> ItemStored:
    """Return the event for an item in the store."""
    placement = item.placement.hex() or None
    return ItemStored(item.name.hex(), item.kind, item.nbytes, item.modality, placement)


def pack_batch(events: list[Event], *, now_s: float) -> bytes:
    return _encoder.encode(ItemEventBatch(now_s, events))


def pack_seq(seq: int) -> bytes:
    """Return the number of a batch, `END` or `NOT_ANSWERED` as a frame."""
    return seq.to_bytes(SEQ_NBYTES, "big", signed=True)


def unpack_seq(frame: bytes) -> int:
    return int.from_bytes(frame, "big", signed=True)


def requests_endpoint(endpoint: str) -> str:
    """Return the address for requests: the next port, or the path with ``.requests``."""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.requests"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + 1}"
