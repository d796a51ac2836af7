"""Record of a stored file, and the format of its object.

An object is the file's bytes, followed by a trailer of `TRAILER_NBYTES`: a mark, the length and the
digest of the record, the record in MessagePack, and zeros. The trailer is written last, so that an
object without one is incomplete: it is not shown. The digest in the record covers the bytes.
"""

from __future__ import annotations

import re
import secrets
import struct
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Struct

from afferent import keys
from afferent.errors import FormatError

TRAILER_NBYTES: Final = 4096
MAX_NAME = 255
"""Longest name of a file, in characters."""
_HEAD: Final = struct.Struct("<8sI32s")
_MARK: Final = b"AFFILE\0\1"
_ID: Final = re.compile(r"([a-z]{1,8}[-_])([0-9a-f]{16})([0-9a-f]{10})[0-9a-f]{22}")
FILE: Final = "file-"
"""Prefix of the ids of files."""
UPLOAD: Final = "upload_"
"""Prefix of the ids of uploads."""


class StoredFile(Struct, frozen=True, forbid_unknown_fields=True):
    """Complete file in a store.

    Attributes:
        id: Its id; the times of its creation and of its end are a part of it.
        name: Name that the client gave it.
        media_type: Media type by the client, or by the name.
        purpose: Purpose by the client; without effect here.
        nbytes: Length of its bytes.
        digest: Digest of its bytes (`afferent.keys.digest`).
    """

    id: str
    name: str
    media_type: str
    purpose: str
    nbytes: int
    digest: bytes

    @property
    def created_s(self) -> int:
        """Time of its creation, in seconds since 1970."""
        return created_ns(self.id) // 10**9

    @property
    def expires_s(self) -> int:
        """Time from which on it does not exist any more; 0: none."""
        return expires_s(self.id)


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Number of bytes that were read, and their digest (`afferent.keys.digest`)."""

    nbytes: int
    digest: bytes


def new_id(prefix: str, *, now_ns: int, expires_s: int) -> str:
    """Return an id that sorts by time, and that can't be guessed.

    Args:
        now_ns: Time of creation, in nanoseconds since 1970.
        expires_s: End of the object's life, in seconds since 1970; 0: none.
    """
    return f"{prefix}{now_ns:016x}{expires_s:010x}{secrets.token_hex(11)}"


def is_id(text: str, prefix: str) -> bool:
    """Whether the text has the form of an id."""
    found = _ID.fullmatch(text)
    return found is not None and found[1] == prefix


def created_ns(id: str) -> int:
    """Return the time of creation in an id."""
    return int(id[-48:-32], 16)


def expires_s(id: str) -> int:
    """Return the end of an object's life in its id; 0: none."""
    return int(id[-32:-22], 16)


def sibling(id: str, prefix: str) -> str:
    """Return the id with another prefix, and the same times."""
    return prefix + id[-48:]


def trailer_of(record: StoredFile) -> bytes:
    """Encode the trailer.

    Raises:
        FormatError: The record is too long.
    """
    body = msgspec.msgpack.encode(record)
    trailer = _HEAD.pack(_MARK, len(body), keys.digest(body)) + body
    if len(trailer) > TRAILER_NBYTES:
        raise FormatError("the record of a file is too long")
    return trailer.ljust(TRAILER_NBYTES, b"\0")


def read_trailer(data: bytes) -> StoredFile | None:
    """Decode the last bytes of an object; ``None`` if they are no trailer."""
    if len(data) != TRAILER_NBYTES:
        return None
    mark, nbytes, digest = _HEAD.unpack_from(data)
    body = data[_HEAD.size : _HEAD.size + nbytes]
    if mark != _MARK or keys.digest(body) != digest:
        return None
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError:
        return None


_decoder = msgspec.msgpack.Decoder(StoredFile)
