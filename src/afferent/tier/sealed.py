"""Header of a value, version 1: its identity, and the digest of each part of its body.

    offset  length   field
    0       8        magic: the bytes "AFF-TIER"
    8       2        version, u16: 1
    10      2        flags, u16: 1 if the seal is keyed
    12      4        kind, u32: 1 features, 2 embeddings, 3 raw media, 4 result of a URL
    16      8        nbytes, u64: of the body
    24      32       key: identity of the body
    56      32 * n   BLAKE3-256 of each MiB of the body, the last of the rest
    ...     32       seal: BLAKE3-256 of all before it, keyed if the tier is shared

Integers are little-endian. No field of a header is used before its seal is checked, and no part
before its digest. So exactly the processes with the key can define a body. A header is refused if
it has another format, version, key, or kind of seal than this node uses.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hmac import compare_digest

from afferent import keys
from afferent.errors import FormatError
from afferent.tier.protocol import MAX_BODY_NBYTES, num_parts, part
from afferent.types import KEY_NBYTES, ContentKey, ObjectKind

VERSION = 1
TIERED = (ObjectKind.FEATURES, ObjectKind.EMBEDDINGS, ObjectKind.RAW, ObjectKind.RECORDS)
"""Kinds of objects with a number: the possible kinds of a value."""
_MAGIC = b"AFF-TIER"
_KEYED = 1
_DIGEST_NBYTES = 32
_FIXED = struct.Struct("<8sHHIQ32s")
_KINDS = {kind: number for number, kind in enumerate(TIERED, 1)}
_BY_NUMBER = {number: kind for kind, number in _KINDS.items()}
_SECRET_CONTEXT = "afferent 2026-11 seal of values in a tier"  # noqa: S105 it is no secret
_NAME_TAG = b"afferent/tier/v1"


class Sealer:
    """Creates and reads headers, with a secret shared by the nodes of a fleet, or without."""

    def __init__(self, secret: bytes = b"") -> None:
        self._keyed = keys.Keyed(secret, context=_SECRET_CONTEXT)
        self._name = self._keyed.after(_NAME_TAG)

    @property
    def is_keyed(self) -> bool:
        return self._keyed.is_keyed

    def name_of(self, key: ContentKey) -> bytes:
        """Return the name of a value in the tier.

        It does not reveal the value to other users of the tier. Nodes with another secret, or
        another version of this format, use different names.
        """
        return self._name(key)

    def seal(self, key: ContentKey, kind: ObjectKind, body: memoryview) -> bytes:
        """Return the header of a body."""
        flags = _KEYED if self.is_keyed else 0
        fixed = _FIXED.pack(_MAGIC, VERSION, flags, _KINDS[kind], len(body), key)
        digests = [keys.digest(part(body, index)) for index in range(num_parts(len(body)))]
        data = b"".join((fixed, *digests))
        return data + self._keyed.digest(data)

    def open(self, head: bytes, key: ContentKey) -> Head:
        """Check and parse a header.

        Raises:
            FormatError: It is not of this key, or not sealed as this node seals.
        """
        if len(head) < _FIXED.size + _DIGEST_NBYTES:
            raise FormatError("a head is too short")
        data, seal = head[:-_DIGEST_NBYTES], head[-_DIGEST_NBYTES:]
        magic, version, flags, kind, nbytes, named = _FIXED.unpack_from(data)
        if magic != _MAGIC or version != VERSION:
            raise FormatError("a head is of another version, or none")
        if flags != (_KEYED if self.is_keyed else 0):
            raise FormatError("a head is sealed in another way")
        if not compare_digest(seal, self._keyed.digest(data)):
            raise FormatError("a head's seal is broken")
        if named != key:
            raise FormatError("a head is of another key")
        if kind not in _BY_NUMBER or not 0 < nbytes <= MAX_BODY_NBYTES:
            raise FormatError("a head says what can't be")
        listed = data[_FIXED.size :]
        if len(listed) != _DIGEST_NBYTES * num_parts(nbytes):
            raise FormatError("a head has another number of digests than its body has parts")
        starts = range(0, len(listed), _DIGEST_NBYTES)
        digests = tuple(listed[at : at + _DIGEST_NBYTES] for at in starts)
        return Head(key, _BY_NUMBER[kind], nbytes, digests)


@dataclass(frozen=True, slots=True)
class Head:
    """Description of a body; its seal has been checked."""

    key: ContentKey
    kind: ObjectKind
    nbytes: int
    digests: Sequence[bytes]

    def has(self, index: int, data: memoryview) -> bool:
        """Whether ``data`` is this part of the body."""
        return compare_digest(keys.digest(data), self.digests[index])


def check_key(key: bytes) -> ContentKey:
    """Check the length of a key.

    Raises:
        FormatError: It has another length.
    """
    if len(key) != KEY_NBYTES:
        raise FormatError(f"a key has {KEY_NBYTES} bytes, not {len(key)}")
    return ContentKey(key)
