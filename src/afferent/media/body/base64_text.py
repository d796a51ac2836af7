"""Strict decoder of base64 that arrives in pieces; it stores at most one piece."""

from __future__ import annotations

import binascii
import string

import pybase64

from afferent.errors import InvalidMedia

_QUANTUM = 4
_PADDING = ord("=")
_ALPHABET = (string.ascii_letters + string.digits + "+/").encode()


class Base64Text:
    """Decodes one item's base64, in pieces of any size.

    Strict: the standard alphabet, correct padding, and nothing else; the caller removes line
    breaks. The unused bits of the last character may be set, as every common decoder allows.

    Invariants:
        - After padding, no further character is accepted.
    """

    def __init__(self) -> None:
        self._rest = b""  # fewer than four characters, which give no byte yet
        self._padded = False
        self.last = b""
        """The four characters with padding, once they have come."""

    @property
    def rest(self) -> bytes:
        """Characters that have given no byte yet."""
        return self._rest

    def decode_whole(self, text: memoryview) -> tuple[bytes, bytes] | None:
        """Return the result of `decode` in two pieces, without a copy of ``text``.

        Returns ``None`` without a change of state if a part is no base64, or if the item ends in
        the text.
        """
        begun = -len(self._rest) % _QUANTUM
        end = len(text) - (len(text) - begun) % _QUANTUM
        rest = bytes(text[end:])
        if self._padded or end <= begun or rest.translate(None, _ALPHABET):
            return None
        if text[end - 1] == _PADDING or (begun and text[begun - 1] == _PADDING):
            return None
        try:
            first = pybase64.b64decode(self._rest + bytes(text[:begun]), validate=True)
            data = pybase64.b64decode(text[begun:end], validate=True)
        except (binascii.Error, ValueError):
            return None
        self._rest = rest
        return first, data

    def decode(self, text: bytes | memoryview) -> bytes:
        """Return the bytes that ``text`` completes.

        Raises:
            InvalidMedia: It is not base64. The caller adds the item's number.
        """
        if self._rest:
            text = self._rest + text
        whole = len(text) & ~3
        self._rest = bytes(text[whole:])
        if not whole and not self._rest:
            return b""
        if self._padded:
            raise _malformed()
        if not whole:
            return b""
        self._padded = text[whole - 1] == _PADDING
        if self._padded:
            self.last = bytes(text[whole - _QUANTUM : whole])
        try:
            # The fastest of the strict calls; on large pieces it releases the GIL.
            return pybase64.b64decode(memoryview(text)[:whole], validate=True)
        except (binascii.Error, ValueError) as error:
            raise _malformed() from error

    def finish(self) -> None:
        """Check that the text is complete.

        Raises:
            InvalidMedia: The text ended between two quanta: its padding is missing.
        """
        if self._rest:
            raise _malformed()


def _malformed() -> InvalidMedia:
    return InvalidMedia("the base64 is malformed")
