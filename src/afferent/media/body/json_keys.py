"""Check for JSON objects with duplicate keys.

Of two programs that read such an object, one may take the first value and the other the last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from afferent.errors import InvalidRequest

_TOKEN: Final = re.compile(
    rb'"(?:[^"\\]++|\\.)*+"?'
    rb"|[\[\]{}]"
    rb'|,[^"\[\]{}]*+',  # with all numbers and commas of a list behind it
    re.DOTALL,
)
_STRING: Final = re.compile(rb'((?:[^"\\]++|\\.)*+)("?)', re.DOTALL)
_QUOTE, _COMMA, _OBJECT, _LIST = b'",{['

_STEP_NBYTES: Final = 8 << 10
_QUICK_NBYTES: Final = 64 << 10
_QUICK_OBJECTS: Final = 512
"""Bounds of a text that a parser in C checks in a few milliseconds; it can't pause in between."""
_MAX_KEY_NBYTES: Final = 64 << 10
_MAX_KEYS: Final = 1 << 18
"""Most keys of one object. A larger set grows in steps that block the event loop."""
_MAX_CHECKED_DEPTH: Final = 1 << 16
"""No parser in Python reads text that is nested deeper; here, each level takes memory."""


def check_keys(text: bytes) -> Iterator[None]:
    """Refuse a document in which an object has a key twice.

    The check continues with each next element; each step takes a few milliseconds at most. Text
    that is not JSON may pass: its parser reports the error.

    Raises:
        InvalidRequest: An object has a key twice; or, in a large text, a key is longer than 64 KiB,
            or an object has more than 262,144 keys.
    """
    if _is_quick(text) and _check_at_once(text):
        return
    check = KeyCheck()
    for start in range(0, len(text), _STEP_NBYTES):
        check.feed(text[start : start + _STEP_NBYTES])
        yield


def _is_quick(text: bytes) -> bool:
    return len(text) <= _QUICK_NBYTES and text.count(b"{") <= _QUICK_OBJECTS


def _check_at_once(text: bytes) -> bool:
    """Check a whole text; return ``False`` if it is nested too deep for that."""
    is_checked = True
    try:
        _pairs_decoder.decode(text.decode())
    except RecursionError:
        is_checked = False
    except ValueError:  # not JSON; a `UnicodeDecodeError` is a `ValueError`
        pass
    return is_checked


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    seen = set[str]()
    if len(dict(pairs)) == len(pairs):
        return
    for key, _ in pairs:
        if key in seen:
            raise _twice(key)
        seen.add(key)


def _twice(key: str) -> InvalidRequest:
    return InvalidRequest(f"the key {key[:100]!r} stands twice in an object")


_pairs_decoder = json.JSONDecoder(object_pairs_hook=_check_pairs)


class KeyCheck:
    """Search for duplicate keys of an object, in text that is fed in pieces.

    Invariants:
        - Each open object has the set of its keys, and each open list ``None``.
        - The bytes of an unfinished string are stored only if it is a key.
    """

    def __init__(self) -> None:
        self._open: list[set[bytes] | None] = []
        self._num_deeper = 0
        self._is_key_due = False
        self._is_in_string = False
        self._key = bytearray()  # its beginning
        self._backslash = b""  # that escapes the next byte

    def feed(self, text: bytes) -> None:
        """Check the next bytes of the text.

        Raises:
            InvalidRequest: As `check_keys` does.
        """
        text, self._backslash = self._backslash + text, b""
        pos = self._go_on(text, 0) if self._is_in_string else 0
        tokens = _TOKEN.findall(text, pos)  # a match object for each would cost more than the rest
        rest = tokens.pop() if tokens and tokens[-1][0] == _QUOTE else b""
        self._pass(tokens)
        if rest:
            self._is_in_string = True
            self._go_on(rest, 1)
            if self._is_in_string and _ends_in_escape(text):
                self._backslash = b"\\"

    def _pass(self, tokens: list[bytes]) -> None:
        """Process tokens with complete strings."""
        opened, is_key_due = self._open, self._is_key_due
        for token in tokens:
            first = token[0]
            if first == _COMMA:
                is_key_due = bool(opened) and opened[-1] is not None and not self._num_deeper
            elif first == _QUOTE:
                if is_key_due:
                    self._take_key(token[1:-1])
                    is_key_due = False
            elif first not in (_OBJECT, _LIST):
                is_key_due = False
                self._close()
            elif len(opened) < _MAX_CHECKED_DEPTH:
                is_key_due = first == _OBJECT
                opened.append(set() if is_key_due else None)
            else:
                self._num_deeper += 1
        self._is_key_due = is_key_due

    def _close(self) -> None:
        if self._num_deeper:
            self._num_deeper -= 1
        elif self._open:
            self._open.pop()

    def _go_on(self, text: bytes, pos: int) -> int:
        """Read a string from within it; return its end."""
        found = _STRING.match(text, pos)
        if found is None:  # never: the pattern matches nothing, too
            return len(text)
        if self._is_key_due:
            self._key += found[1]
            if len(self._key) > _MAX_KEY_NBYTES:
                raise InvalidRequest(f"a key of the JSON has more than {_MAX_KEY_NBYTES} bytes")
        if not found[2]:
            self._backslash = text[found.end() :]  # one backslash at most: pairs are taken
            return len(text)
        self._is_in_string = False
        if self._is_key_due:
            self._take_key(bytes(self._key))
            self._key.clear()
            self._is_key_due = False
        return found.end()

    def _take_key(self, raw: bytes) -> None:
        key = _unescaped(raw) if b"\\" in raw else raw
        keys = self._open[-1]
        if keys is None:
            return
        if key in keys:
            raise _twice(key.decode(errors="replace"))
        keys.add(key)
        if len(keys) > _MAX_KEYS:
            raise InvalidRequest(f"an object of the JSON has more than {_MAX_KEYS} keys")


def _ends_in_escape(text: bytes) -> bool:
    """Return whether the last byte is a backslash that escapes the next one."""
    return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1


def _unescaped(raw: bytes) -> bytes:
    try:
        key: str = json.loads(b'"' + raw + b'"')
    except ValueError:  # not JSON
        return raw
    return key.encode("utf-8", "surrogatepass")
