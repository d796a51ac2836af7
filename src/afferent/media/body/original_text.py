"""Original text of an item in its JSON, from its decoded bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pybase64

_PLAIN: Final = b"/"
_ESCAPED: Final = b"\\/"
"""Two spellings of a slash; PHP's encoder writes the second one."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the decoding of an item.

    Attributes:
        num_decoded: Bytes so far.
        rest: Characters that have given no byte yet.
        last: The four characters with padding, once they have come.
    """

    num_decoded: int
    rest: bytes
    last: bytes


class OriginalText:
    """Difference between an item's text and the encoding of its decoded bytes.

    Usual text equals the encoding of the bytes: nothing of it is stored. From the first piece that
    is written otherwise (with line breaks, or malformed), all of the text is stored.

    Invariants:
        - The text is the head, the first ``_num_decoded`` bytes, encoded, and the tail.
        - All slashes before the tail are written in one way.
    """

    def __init__(self, *, is_base64: bool) -> None:
        """Create an empty text.

        Args:
            is_base64: If false, the bytes are the text itself, without escapes.
        """
        self._is_base64 = is_base64
        self._head = b""
        self._num_decoded = 0
        self._tail: bytearray | None = None
        self._slash = b""

    def begin(self, raw: bytes, text: bytes | None, head: bytes) -> None:
        """Add the first characters of the string.

        Args:
            raw: The characters as they are written.
            text: The characters without escapes; ``None`` if they can't be decoded.
            head: The part of the text before the base64.
        """
        if b"/" in raw:
            self._slash = _ESCAPED if b"\\" in raw else _PLAIN
        if text is None or self._written(text) != raw:
            self._tail = bytearray(raw)
        else:
            self._head = self._written(head)

    def take(
        self, raw: bytes | memoryview, text: bytes | memoryview | None, before: Progress
    ) -> None:
        """Add the next characters.

        Args:
            raw: The characters as they are written.
            text: The characters without escapes; ``None`` if they can't be decoded.
        """
        if self._tail is None and (text is None or not self._is_usual(raw, text)):
            self._keep(before)
        if self._tail is not None:
            self._tail += raw

    def finish(self, done: Progress) -> None:
        """Add the end of the string."""
        if self._tail is None and (done.rest or not _is_canonical(done.last)):
            self._keep(done)

    @property
    def is_usual(self) -> bool:
        """Whether the text, once it has ended, is the head and the plain encoding of the bytes."""
        return self._tail is None and self._slash != _ESCAPED

    def _keep(self, before: Progress) -> None:
        """Store the text from here on, and the part of the earlier text that its bytes do not
        determine.
        """
        kept, self._num_decoded = before.rest, before.num_decoded
        if not _is_canonical(before.last):
            kept = before.last + kept
            self._num_decoded -= len(pybase64.b64decode(before.last))
        self._tail = bytearray(self._written(kept))

    def of(self, data: bytes | memoryview) -> bytes:
        """Return the original text of these bytes."""
        if self._tail is None:
            return self._head + self._encoded(data)
        return self._head + self._encoded(data[: self._num_decoded]) + bytes(self._tail)

    def _is_usual(self, raw: bytes | memoryview, text: bytes | memoryview) -> bool:
        if raw is text and self._slash != _ESCAPED:  # most pieces: no search for slashes
            self._slash = _PLAIN
            return True
        raw, text = bytes(raw), bytes(text)
        self._slash = self._slash or (_ESCAPED if b"\\" in raw else _PLAIN)
        return self._written(text) == raw

    def _encoded(self, data: bytes | memoryview) -> bytes:
        return self._written(pybase64.b64encode(data) if self._is_base64 else bytes(data))

    def _written(self, text: bytes) -> bytes:
        return text.replace(_PLAIN, _ESCAPED) if self._slash == _ESCAPED else text


def _is_canonical(last: bytes) -> bool:
    """Whether the unused bits before the padding are not set."""
    return not last or pybase64.b64encode(pybase64.b64decode(last)) == last
