"""Tracker of the path through JSON text while it arrives."""

from __future__ import annotations

import re
from typing import Final

import msgspec

ELEMENT: Final = "*"
"""Step of a path: any element of a list."""

_TOKEN: Final = re.compile(rb'"((?:[^"\\]++|\\.)*+)("?)|[\[\]{},]', re.DOTALL)
_REST_OF_STRING: Final = re.compile(rb'((?:[^"\\]++|\\.)*+)("?)', re.DOTALL)
_OPENING: Final = (b"{", b"[")
_CLOSING: Final = (b"}", b"]")
_MAX_KEY_NBYTES: Final = 512
_string = msgspec.json.Decoder(str)


class JsonPath:
    """Path of keys and elements at the end of the text that was fed so far.

    For text that is not JSON the path has no meaning; its parser refuses it afterwards.

    Invariants:
        - A step of an object is the key whose value the text is in, or ``None`` before a key.
        - Beyond ``max_steps``, only the depth of nesting is stored: the state has a bound.
        - At most a key's length of an unfinished string is stored.
    """

    def __init__(self, *, max_steps: int) -> None:
        """Create an empty path.

        Args:
            max_steps: Steps of the longest path that the caller looks for.
        """
        self._max_steps = max_steps
        self._steps: list[str | None] = []
        self._num_deeper = 0
        self._is_in_string = False
        self._string = b""  # its beginning
        self._backslash = b""  # that escapes the next byte

    @property
    def steps(self) -> tuple[str | None, ...] | None:
        """Keys of objects, and `ELEMENT` for each list; ``None`` for more than ``max_steps``."""
        return None if self._num_deeper else tuple(self._steps)

    def feed(self, text: bytes) -> None:
        """Process the next bytes of the text."""
        text, self._backslash = self._backslash + text, b""
        pos = 0
        if self._is_in_string:
            pos = self._go_on(text)
        for token in _TOKEN.finditer(text, pos):
            if token[1] is None:
                self._punctuate(token[0])
            elif token[2]:
                self._take_key(token[1])
            else:
                self._is_in_string, self._string = True, b""
                self._keep(text, token.start(1), token.end(1))

    def _go_on(self, text: bytes) -> int:
        """Read the rest of a string; return its end."""
        rest = _REST_OF_STRING.match(text)
        if rest is None or not rest[2]:
            self._keep(text, 0, len(text) if rest is None else rest.end(1))
            return len(text)
        self._is_in_string = False
        self._take_key((self._string + rest[1])[: _MAX_KEY_NBYTES + 1])
        return rest.end()

    def _keep(self, text: bytes, start: int, end: int) -> None:
        room = _MAX_KEY_NBYTES + 1 - len(self._string)
        self._string += text[start : min(end, start + room)]
        self._backslash = text[end:]  # one backslash at most: the pattern takes pairs

    def _punctuate(self, byte: bytes) -> None:
        if self._num_deeper or len(self._steps) == self._max_steps:
            if byte in _OPENING:
                self._num_deeper += 1
                return
            if self._num_deeper:
                self._num_deeper -= byte in _CLOSING
                return
        match byte:
            case b"{":
                self._steps.append(None)
            case b"[":
                self._steps.append(ELEMENT)
            case b",":
                if self._steps and self._steps[-1] != ELEMENT:
                    self._steps[-1] = None
            case _ if self._steps:
                self._steps.pop()

    def _take_key(self, raw: bytes) -> None:
        if self._num_deeper or not self._steps or self._steps[-1] is not None:
            return  # a value, or too deep
        key = raw.decode(errors="replace")
        if "\\" in key:
            try:
                key = _string.decode(b'"' + raw + b'"')
            except msgspec.MsgspecError:
                key = ""
        # A key of an object may be the word for an element; no location has such a key.
        self._steps[-1] = key if key != ELEMENT else ""
