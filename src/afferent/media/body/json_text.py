"""JSON of a request without its media, bounded while it arrives."""

from __future__ import annotations

import numpy as np

from afferent.errors import BodyTooLarge, InvalidRequest

_STEPS = bytes(1 if byte in b"[{" else 255 if byte in b"]}" else 0 for byte in range(256))
"""Change of the nesting for each byte, as signed 8-bit numbers."""

_PLAIN = bytes(byte for byte in range(256) if byte not in b'"[]{}')
_CHECKED_NBYTES = 4096
PART_VALUES = 16
"""Strings, lists and objects for each part that a request's messages may have."""


def check_encoding(text: bytes) -> None:
    """Refuse text that a JSON parser would read in another encoding than UTF-8.

    Raises:
        InvalidRequest: It is UTF-16 or UTF-32, or begins with a byte order mark.
    """
    if b"\0" in text[:4] or text.startswith((b"\xef\xbb\xbf", b"\xfe\xff", b"\xff\xfe")):
        raise InvalidRequest("the body must be JSON in UTF-8, without a byte order mark")


class JsonText:
    """Collects JSON text from which media have been cut.

    Parsing takes up to a hundred times the text's length in memory, time for each string, list and
    object, and a stack as deep as they are nested. So all of these are limited before the parsing.

    Invariants:
        - Markers count towards no limit.
        - The shape is known for the first ``_checked`` bytes.
    """

    def __init__(
        self, *, max_nbytes: int, max_parts: int, is_parsed: bool = True, max_depth: int
    ) -> None:
        """Create an empty text.

        Args:
            max_parts: It may have `PART_VALUES` strings, lists and objects for each.
            is_parsed: If false, only ``max_nbytes`` counts: the text is searched, and forwarded.
        """
        self._max_nbytes, self._max_depth = max_nbytes, max_depth
        self._max_values = PART_VALUES * max_parts
        self._is_parsed = is_parsed
        self._text = bytearray()
        self._markers_nbytes = 0
        self._checked = 0  # how much of the text the nesting is known for
        self._depth = 0
        self._num_marks = 0  # quotes and brackets
        self._in_string = False
        self._backslash = b""

    def append(self, piece: bytes) -> None:
        """Append text as the client sent it.

        Raises:
            BodyTooLarge: The text has more than ``max_nbytes``.
            InvalidRequest: It is nested deeper than ``max_depth``, or has too many small parts.
        """
        self._text += piece
        if len(self._text) - self._markers_nbytes > self._max_nbytes:
            setting = "--max-json-nbytes" if self._is_parsed else "--max-body-nbytes"
            raise BodyTooLarge(
                f"the body has more than {self._max_nbytes} bytes besides its media ({setting})"
            )
        if self._is_parsed and len(self._text) - self._checked >= _CHECKED_NBYTES:
            self._check_shape()

    def append_marker(self, marker: bytes) -> None:
        """Append a marker of our own, which counts towards no limit."""
        self._text += marker
        self._markers_nbytes += len(marker)

    @property
    def text(self) -> bytearray:
        """The text as far as it has come; not to be kept."""
        return self._text

    def finish(self) -> bytes:
        """Return the whole text. Raises as `append` does."""
        if self._is_parsed:
            self._check_shape()
        return bytes(self._text)

    def _check_shape(self) -> None:
        piece = self._backslash + self._text[self._checked :]
        self._checked = len(self._text)
        # One backslash of each odd run remains: it escapes the next character.
        piece = piece.replace(b"\\\\", b"")
        self._backslash = b"\\" if piece.endswith(b"\\") else b""
        strings = piece.replace(b'\\"', b"").translate(None, _PLAIN).split(b'"')
        brackets = b"".join(strings[self._in_string :: 2])
        # Each string has two quotes, each list and object two brackets.
        self._num_marks += len(strings) - 1 + len(brackets)
        if self._num_marks > 2 * self._max_values:
            raise InvalidRequest(
                f"the body has more than {self._max_values} strings, lists and objects: "
                f"{PART_VALUES} for each part that is allowed (--max-parts)"
            )
        self._in_string ^= len(strings) % 2 == 0
        num_opened = brackets.count(b"[") + brackets.count(b"{")
        if self._depth + num_opened <= self._max_depth:  # in any order
            self._depth += 2 * num_opened - len(brackets)
        else:
            steps = np.frombuffer(brackets.translate(_STEPS), dtype=np.int8)
            depths = self._depth + np.cumsum(steps, dtype=np.int32)
            self._depth = int(depths[-1])
            if depths.max() > self._max_depth:
                raise InvalidRequest(f"the body is nested deeper than {self._max_depth} levels")
