"""Base64 that arrives in pieces: strict, and never more of it at a time than one piece."""

from __future__ import annotations

import binascii
import string

import pybase64

from afferent.errors import InvalidMedia

_QUANTUM = 4
_PADDING = ord("=")
_ALPHABET = (string.ascii_letters + string.digits + "+/").encode()


class Base64Text:
    """Decodes one item's base64, however it is cut.

    Strict: the standard alphabet, correct padding, and nothing else; line breaks are for the caller
    to leave out. Bits that the last character has to spare may be set, as every common decoder
    allows.
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
        """What `decode` would give, in two pieces and without a copy of ``text``.

        ``None``, and nothing has changed, if some of it is no base64, or if the item ends in it.
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
        """The bytes that ``text`` completes.

        Raises:
            InvalidMedia: It is not base64. The caller knows which item it is, and says so.
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
            # Of the strict calls the fastest; on large pieces it lets other threads run.
            return pybase64.b64decode(memoryview(text)[:whole], validate=True)
        except (binascii.Error, ValueError) as error:
            raise _malformed() from error

    def finish(self) -> None:
        """
        Raises:
            InvalidMedia: The text ended between two quanta: its padding is missing.
        """
        if self._rest:
            raise _malformed()


def _malformed() -> InvalidMedia:
    return InvalidMedia("the base64 is malformed")
