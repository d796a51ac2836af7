"""Turns of a conversation as the store keeps them: without media, but with their digests."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from afferent.builtin.pipeline.request import CallPart, Message, Part, TextPart
from afferent.items.acquire import write_and_seal
from afferent.items.request import Detail, DocumentPart, MediaPart, PageRange, SeenMedia
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import ContentKey, CreateItem, KeyBytes, KiB, Modality, ObjectKind

MAX_NBYTES = 256 * KiB
"""Limit of one conversation; a longer one is answered, and not stored."""
MAX_PARTS = 4096
"""Limit of messages and parts in one conversation: each takes time to parse, even a short one."""


class _Text(Struct, frozen=True, array_like=True, tag="text", forbid_unknown_fields=True):
    text: str


class _Media(Struct, frozen=True, array_like=True, tag="media", forbid_unknown_fields=True):
    modality: Modality
    digest: KeyBytes
    detail: Detail


class _Document(Struct, frozen=True, array_like=True, tag="document", forbid_unknown_fields=True):
    """Document by the digest of its file: its pages are known as long as the store has them."""

    digest: KeyBytes
    first: int
    last: int
    dpi: int
    detail: Detail


class _Call(Struct, frozen=True, array_like=True, tag="call", forbid_unknown_fields=True):
    name: str
    arguments: str


_Kept = _Text | _Media | _Document | _Call


class Turn(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Stored message: its text, and the digests of its media."""

    role: str
    parts: list[_Kept]

    @property
    def message(self) -> Message:
        """Internal message; its media are digests of known items."""
        return Message(self.role, tuple(_part(part) for part in self.parts))

    @classmethod
    def of(cls, message: Message, digests: Iterator[bytes]) -> Turn:
        """Create it from a message, and take the digests of its media."""
        return cls(message.role, [_kept(part, digests) for part in message.parts])


async def write_record(
    store: AsyncDaemonStore, request_id: str, key: ContentKey, data: bytes
) -> None:
    """Store bytes under a key; the request has a pin on them.

    Raises:
        Unavailable: Try again.
    """
    (handle,) = await store.create(request_id, [CreateItem(ObjectKind.RECORDS, len(data), key)])
    await write_and_seal(store, request_id, [handle], [data])


def _kept(part: Part, digests: Iterator[bytes]) -> _Kept:
    match part:
        case CallPart(name, arguments):
            return _Call(name, arguments)
        case TextPart(text):
            return _Text(text)
        case MediaPart():
            return _Media(part.modality, next(digests), part.detail)
        case DocumentPart(pages=pages, dpi=dpi, detail=detail):
            return _Document(next(digests), pages.first, pages.last, dpi, detail)


def _part(part: _Kept) -> Part:
    match part:
        case _Call(name, arguments):
            return CallPart(name, arguments)
        case _Text(text):
            return TextPart(text)
        case _Media(modality, digest, detail):
            return MediaPart(modality, SeenMedia(digest), detail)
        case _Document(digest, first, last, dpi, detail):
            return DocumentPart(SeenMedia(digest), PageRange(first, last), dpi, detail)
