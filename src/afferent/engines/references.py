"""Media handles: signed URLs that replace media in a request, and name blocks of the arena.

A reference is a URL of a few hundred bytes. Its signature proves that this server made it, so no
client can name a block of the arena by its own; and it expires. Pure, but for the time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from afferent import keys
from afferent.errors import FormatError, MediaTooLarge
from afferent.types import Handle, KeyBytes, Modality, NonNegative, decode, encode

SCHEME: Final = "afferent:"
VERSION = 5
SCHEMA = "5-a47b7d2188d2a484127135301b281f2c"
"""The version, and the digest of its references (`tests.wire_schema`)."""
_BLOCK_TAG = b"afferent/name-of-block/v1"
_TAG = f"afferent/reference/v{VERSION}".encode()
_MAC_NBYTES = 16
_MAX_CHARS = 1 << 17
"""A reference has all tokens around its item: a video of 768 frames has 47,000 characters."""

Run = tuple[NonNegative, Annotated[int, Meta(ge=0, le=2**31)]]
"""A token, and the number of its repetitions."""
NUMBER_RUN: Final[Run] = (0, 0)
"""Stands for the tokens of the item's number among those of its modality in a request, from 0."""


class Of(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Request that a reference belongs to. After the request, the reference is invalid.

    Attributes:
        request: The request's id.
        index: Index of the reference among those of the request.
        number: Number of the request's references.
        has_tenants: Whether the server has tenants, which must not share results.
    """

    request: str = ""
    index: NonNegative = 0
    number: NonNegative = 1
    has_tenants: bool = False


class FeaturesReference(Struct, frozen=True, array_like=True, tag="f", forbid_unknown_fields=True):
    """Item with computed features.

    Attributes:
        modality: Modality of the item.
        key: Key of its features, and its name in the engine's caches.
        handle: The block of its features; the process that made the reference pins it until the
            answer has ended.
        marker: The tokens that the chat template writes for the item; of most models it is one.
        embed: The token that stands for each row of embeddings.
        prompt: Tokens that replace the marker.
        small: Features that are needed outside the encoder, for positions: ``image_grid_thw``.
        expires_s: `time.time` from which on the reference is invalid.
        of: The request that it belongs to.
        alias: Its name in the engine's caches, if that is not the key.
        has_own_tokenizer: Whether the features and tokens are those of a model in Mistral's own
            format.
    """

    modality: Modality
    key: KeyBytes
    handle: Handle
    marker: Annotated[tuple[NonNegative, ...], Meta(min_length=1)]
    embed: NonNegative
    prompt: tuple[Run, ...]
    small: dict[str, list[int | float] | int | float]
    expires_s: float
    of: Of = Of()
    alias: Annotated[bytes, Meta(max_length=64)] = b""
    has_own_tokenizer: bool = False

    @property
    def num_embeds(self) -> int:
        """Rows of embeddings that the encoder has to produce."""
        return sum(number for token, number in self.prompt if token == self.embed)

    @property
    def is_numbered(self) -> bool:
        """Whether the prompt depends on the item's number."""
        return NUMBER_RUN in self.prompt

    def token_ids(self, number: Sequence[int] = ()) -> list[int]:
        """Return the tokens of `prompt`, one by one.

        Args:
            number: Tokens of the item's number, if it `is_numbered`.
        """
        ids: list[int] = []
        for run in self.prompt:
            ids += number if run == NUMBER_RUN else [run[0]] * run[1]
        return ids

    @property
    def name(self) -> str:
        """Name of the item in the engine's caches: 64 hexadecimal digits, or those of an alias.

        The engine must never keep a result that was computed without the features.
        """
        return (self.alias or self.key).hex()

    @property
    def name_of_block(self) -> str:
        """Name of the item as it is in its block, also of 64 digits, for any other engine.

        A result that was computed from lost features is never found again, since the features that
        replace them have another generation.
        """
        block = f"{self.handle.segment:x}-{self.handle.generation:x}"
        return keys.frame(_BLOCK_TAG, self.key, block.encode()).hex()


class RawReference(Struct, frozen=True, array_like=True, tag="r", forbid_unknown_fields=True):
    """Item as it was sent, for an engine that decodes it itself.

    Attributes:
        modality: Modality of the item.
        handle: The object with its bytes, perhaps with others' bytes; pinned likewise.
        start: Offset of the item's bytes in the object.
        nbytes: Number of its bytes.
        expires_s: `time.time` from which on the reference is invalid.
        is_frames: The bytes are the text behind ``data:video/jpeg;base64,``.
        of: The request that it belongs to.
    """

    modality: Modality
    handle: Handle
    start: NonNegative
    nbytes: NonNegative
    expires_s: float
    is_frames: bool = False
    of: Of = Of()


Reference = FeaturesReference | RawReference
_decoder = msgspec.msgpack.Decoder(Reference)


def sign(reference: Reference, secret: bytes) -> str:
    """Return the URL of a reference.

    Raises:
        MediaTooLarge: The item has too many tokens around it.
    """
    payload = encode(reference)
    url = SCHEME + base64.urlsafe_b64encode(_mac(secret, payload) + payload).decode()
    if len(url) > _MAX_CHARS:
        raise MediaTooLarge(f"an item's reference has more than {_MAX_CHARS} characters")
    return url


def verify(url: str, secret: bytes, *, now_s: float | None = None) -> Reference:
    """Return the reference of a URL.

    Raises:
        FormatError: The URL is no reference, was signed with another secret, or has expired.
    """
    if not url.startswith(SCHEME) or len(url) > _MAX_CHARS:
        raise FormatError("not a reference")
    try:
        data = base64.b64decode(url[len(SCHEME) :], altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError("not a reference") from error
    mac, payload = data[:_MAC_NBYTES], data[_MAC_NBYTES:]
    if not hmac.compare_digest(mac, _mac(secret, payload)):
        raise FormatError("a reference that was not made here, or before a restart")
    reference: Reference = decode(_decoder, payload)
    if reference.expires_s <= (time.time() if now_s is None else now_s):
        raise FormatError("a reference that has expired")
    return reference


def _mac(secret: bytes, payload: bytes) -> bytes:
    return hmac.new(secret, _TAG + payload, hashlib.sha256).digest()[:_MAC_NBYTES]


def out_of_reach(url: str) -> str:
    """Return the words for a reference that can't be read at the moment, in an upstream's error.

    The server in front of the upstream sends an error that clients retry instead. No client knows
    the words: it has no reference.
    """
    return f"the media are out of reach now ({keys.digest(url.encode()).hex()[:16]})"
