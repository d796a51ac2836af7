"""Content keys: the identity of an object.

A key covers everything that determines the object's bytes: the tenant, the model, the processor
with its settings and this request's options, and the digest of the *encoded* media. Every part is
length-prefixed, so no two lists of parts can collide by a moved boundary. The digest is never
truncated.

    >>> from afferent import keys
    >>> media = keys.digest(b"the file's bytes")
    >>> fingerprint = keys.frame(b"my-model/v1", b"settings of its processor")
    >>> one = keys.features_key(tenant="anna", fingerprint=fingerprint, options=b"", media=media)
    >>> other = keys.features_key(tenant="ben", fingerprint=fingerprint, options=b"", media=media)
    >>> len(one), one == other  # tenants share nothing
    (32, False)
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Literal, Protocol

from blake3 import blake3

from afferent.errors import FormatError
from afferent.types import ContentKey, Modality
from afferent.wording import shown

_FEATURES_TAG = b"afferent/features/v1"
_CONVERSATION_TAG = b"afferent/conversation/v1"
_NAMED_CONVERSATION_TAG = b"afferent/named-conversation/v1"
_SESSION_TAG = b"afferent/session/v1"
_NAME_TAG = b"afferent/name/v1"
_EMBEDDINGS_TAG = b"afferent/embeddings/v1"
_TENANTS = "afferent 2026 tenants in keys"
_PLACEMENT = "afferent 2026 placement of items"


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the BLAKE3-256 digest of ``data``, 32 bytes. Releases the GIL.

    Raises:
        FormatError: ``data`` is text, or not bytes at all.
    """
    try:
        return blake3(data).digest()
    except TypeError:
        raise _no_bytes("data", data) from None


def digest_file(path: Path) -> bytes:
    """Return the digest of a file, read on all cores.

    Raises:
        OSError: It can't be read.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    return hasher.digest()


class Hasher(Protocol):
    """Digest of bytes that come in pieces."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Add the next bytes."""

    def digest(self) -> bytes:
        """Return the digest of all bytes so far, 32 bytes."""


def hasher() -> Hasher:
    """Return a hasher whose digest is that of `digest`."""
    return blake3()


Algorithm = Literal["blake3", "sha256", "sha512"]


def hash_pieces(pieces: Iterable[bytes | memoryview], algorithm: Algorithm) -> bytes:
    """Return the digest of all pieces, one after the other."""
    hasher = blake3() if algorithm == "blake3" else hashlib.new(algorithm)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


class Keyed:
    """Keyed digests, by a secret that processes share; without a secret, plain ones."""

    def __init__(self, secret: bytes, *, context: str) -> None:
        """Create it.

        Args:
            secret: Of any length; empty for plain digests.
            context: Purpose of the digests: another purpose has another key.
        """
        self._key = blake3(secret, derive_key_context=context).digest() if secret else None

    @property
    def is_keyed(self) -> bool:
        return self._key is not None

    def digest(self, data: bytes | memoryview) -> bytes:
        """Return the digest of ``data``, 32 bytes."""
        return (blake3(data, key=self._key) if self._key else blake3(data)).digest()

    def after(self, prefix: bytes) -> Callable[[bytes], bytes]:
        """Return a function that digests ``prefix`` and its argument; the prefix is hashed once."""
        begun = blake3(prefix, key=self._key) if self._key else blake3(prefix)

        def digest_after(data: bytes) -> bytes:
            hasher = begun.copy()
            hasher.update(data)
            return hasher.digest()

        return digest_after


def tenant_tags(secret: bytes) -> Callable[[str], str]:
    """Return the function from a tenant's name to its tag, the ``tenant`` of the tenant's keys.

    Keys are also the names of items outside of the store, where a cache may have no other
    separation of tenants. So a tenant that could compute another's keys could find its results.

    Args:
        secret: Secret that clients do not know. Empty: a tag is the tenant's name.
    """
    keyed = Keyed(secret, context=_TENANTS)
    if not keyed.is_keyed:
        return str
    return functools.cache(lambda tenant: keyed.digest(tenant.encode()).hex())


def frame(tag: bytes, *parts: bytes) -> ContentKey:
    """Return the key of ``tag`` and ``parts``: BLAKE3-256 over them, each with its length.

    Raises:
        FormatError: One of them is text, or not bytes at all.
    """
    return ContentKey(
        _framed(tag=tag, **{f"parts[{index}]": part for index, part in enumerate(parts)})
    )


def _framed(**parts: bytes) -> bytes:
    pieces: list[bytes] = []
    for name, part in parts.items():
        if not isinstance(part, bytes | bytearray | memoryview):
            raise _no_bytes(name, part)
        pieces += (len(part).to_bytes(8, "little"), part)
    # Joined first: parts are short, and each call of the hasher costs more than their copy.
    return blake3(b"".join(pieces)).digest()


def _no_bytes(name: str, value: object) -> FormatError:
    hint = ": encode it" if isinstance(value, str) else ""
    return FormatError(f"{name} must be bytes, not {shown(value)}{hint}")


def _encoded(name: str, text: str) -> bytes:
    """Return a text as UTF-8.

    Raises:
        FormatError: It is no text.
    """
    if not isinstance(text, str):
        raise FormatError(f"{name} must be text, not {shown(text)}")
    return text.encode()


def features_key(*, tenant: str, fingerprint: bytes, options: bytes, media: bytes) -> ContentKey:
    """Return the key of the features that a processor makes from one item.

    Args:
        tenant: Tenants never share objects, so that timing reveals nothing about another's media.
            A server gives its tag (`tenant_tags`).
        fingerprint: Digest of the processor's settings and the versions of all code that makes
            features.
        options: The request's own processor options, canonically encoded.
        media: `digest` of the encoded media.

    Raises:
        FormatError: One of them is text instead of bytes, or bytes instead of text.
    """
    return ContentKey(
        _framed(
            tag=_FEATURES_TAG,
            tenant=_encoded("tenant", tenant),
            fingerprint=fingerprint,
            options=options,
            media=media,
        )
    )


def item_key(
    *, tenant: str, fingerprint: bytes, modality: Modality, media: bytes, max_pixels: int = 0
) -> ContentKey:
    """Return the key of the features that the server makes of a request's item.

    Args:
        tenant: As for `features_key`.
        fingerprint: Likewise.
        modality: Requested modality: one file may be sent as an image and as a video.
        media: `digest` of the encoded media.
        max_pixels: The request's own limit for an image; 0 for none.
    """
    options = f"{modality} {max_pixels}".encode()
    return features_key(tenant=tenant, fingerprint=fingerprint, options=options, media=media)


PLACEMENT_NBYTES: Final = 65_536
"""Length of the part of a file that decides its placement."""


def placement_digest(modality: Modality, head: bytes | memoryview) -> bytes:
    """Return the digest by which a gateway places an item: 32 bytes.

    A gateway knows it long before the end of a body. Items with the same digest are placed alike;
    they need not be the same.

    Args:
        head: The encoded media, or at least its first `PLACEMENT_NBYTES` bytes.
    """
    return (
        blake3(f"{modality} ".encode(), derive_key_context=_PLACEMENT)
        .update(memoryview(head)[:PLACEMENT_NBYTES])
        .digest()
    )


def name_key(*, tenant: str, name: str) -> ContentKey:
    """Return the key of the record behind a tenant's own id of an item."""
    return frame(_NAME_TAG, _encoded("tenant", tenant), _encoded("name", name))


def embeddings_key(*, item: ContentKey, weights: bytes) -> ContentKey:
    """Return the key of the embeddings that an encoder makes of an item's features.

    Args:
        item: The key of the features.
        weights: Digest of the encoder's weights.
    """
    return ContentKey(_framed(tag=_EMBEDDINGS_TAG, item=item, weights=weights))


def conversation_key(*, tenant: str, response_id: str) -> ContentKey:
    """Return the key of the conversation that ends with an answer."""
    return frame(_CONVERSATION_TAG, tenant.encode(), response_id.encode())


def named_conversation_key(*, tenant: str, conversation_id: str, part: str) -> ContentKey:
    """Return the key of a part of a conversation that has an id of its own."""
    encoded = (tenant.encode(), conversation_id.encode(), part.encode())
    return frame(_NAMED_CONVERSATION_TAG, *encoded)


def session_key(*, tenant: str, session_id: str, part: str) -> ContentKey:
    """Return the key of a part of a live session's log."""
    return frame(_SESSION_TAG, tenant.encode(), session_id.encode(), part.encode())
