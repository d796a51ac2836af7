"""The JSON of a request without its media: bounded while it arrives."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from afferent.errors import BodyTooLarge, InvalidRequest

_STEPS = bytes(1 if byte in b"[{" else 255 if byte in b"]}" else 0 for byte in range(256))
"""By byte: how the nesting changes, as signed 8-bit numbers."""

_PLAIN = bytes(byte for byte in range(256) if byte not in b'"[]{}')
_CHECKED_NBYTES = 4096
_MAX_VALUES = 1 << 16


def check_keys(text: bytes) -> None:
    """Refuse a document in which an object has a key twice: of two programs that read it, one may
    take the first value and the other the last.

    Text that is not JSON passes: its parser says what is wrong with it.

    Raises:
        InvalidRequest: A key stands twice in an object.
    """
    try:
        _pairs_decoder.decode(text.decode("utf-8", "surrogatepass"))  # as Python's own parser does
    except (ValueError, RecursionError):  # not JSON; a `UnicodeDecodeError` is a `ValueError`
        return


def check_encoding(text: bytes) -> None:
    """Refuse text that a JSON parser would read in another encoding than UTF-8.

    Raises:
        InvalidRequest: It is UTF-16 or UTF-32, or begins with a byte order mark.
    """
    if b"\0" in text[:4] or text.startswith((b"\xef\xbb\xbf", b"\xfe\xff", b"\xff\xfe")):
        raise InvalidRequest("the body must be JSON in UTF-8, without a byte order mark")


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    seen = set[str]()
    if len(dict(pairs)) == len(pairs):
        return
    for key, _ in pairs:
        if key in seen:
            raise InvalidRequest(f"the key {key[:100]!r} stands twice in an object")
        seen.add(key)


_pairs_decoder = json.JSONDecoder(object_pairs_hook=_check_pairs)


class JsonText:
    """Collects JSON text, of which media have been cut out.

    Parsing takes up to a hundred times the text's length in memory, time for each string, list and
    object, and a stack as deep as they are nested; so all are limited before anything is parsed.
    """

    def __init__(self, *, max_nbytes: int, is_parsed: bool = True, max_depth: int) -> None:
        """
        Args:
            is_parsed: Else only ``max_nbytes`` counts: the text is searched, and passed on.
        """
        self._max_nbytes, self._max_depth = max_nbytes, max_depth
        self._is_parsed = is_parsed
        self._text = bytearray()
        self._markers_nbytes = 0
        self._checked = 0  # how much of the text the nesting is known for
        self._depth = 0
        self._num_marks = 0  # quotes and brackets
        self._in_string = False
        self._backslash = b""

    def append(self, piece: bytes) -> None:
        """Text as the client sent it.

        Raises:
            BodyTooLarge: There is more than ``max_nbytes`` of it.
            InvalidRequest: It is nested deeper than ``max_depth``, or is of too many small parts.
        """
        self._text += piece
        if len(self._text) - self._markers_nbytes > self._max_nbytes:
            raise BodyTooLarge(f"the body has more than {self._max_nbytes} bytes besides its media")
        if self._is_parsed and len(self._text) - self._checked >= _CHECKED_NBYTES:
            self._check_shape()

    def append_marker(self, marker: bytes) -> None:
        """Text of our own, which counts towards no limit."""
        self._text += marker
        self._markers_nbytes += len(marker)

    def finish(self) -> bytes:
        """All of it. Raises as `append` does."""
        if self._is_parsed:
            self._check_shape()
        return bytes(self._text)

    def _check_shape(self) -> None:
        piece = self._backslash + self._text[self._checked :]
        self._checked = len(self._text)
        # Of each run of backslashes one remains if it is odd: that one escapes what follows.
        piece = piece.replace(b"\\\\", b"")
        self._backslash = b"\\" if piece.endswith(b"\\") else b""
        strings = piece.replace(b'\\"', b"").translate(None, _PLAIN).split(b'"')
        brackets = b"".join(strings[self._in_string :: 2])
        # Each string has two quotes, each list and object two brackets.
        self._num_marks += len(strings) - 1 + len(brackets)
        if self._num_marks > 2 * _MAX_VALUES:
            raise InvalidRequest(f"the body has more than {_MAX_VALUES} strings, lists and objects")
        self._in_string ^= len(strings) % 2 == 0
        num_opened = brackets.count(b"[") + brackets.count(b"{")
        if self._depth + num_opened <= self._max_depth:  # in whatever order they are
            self._depth += 2 * num_opened - len(brackets)
        else:
            steps = np.frombuffer(brackets.translate(_STEPS), dtype=np.int8)
            depths = self._depth + np.cumsum(steps, dtype=np.int32)
            self._depth = int(depths[-1])
            if depths.max() > self._max_depth:
                raise InvalidRequest(f"the body is nested deeper than {self._max_depth} levels")
