"""Tool calls in a conversation's history, for all APIs."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from afferent.builtin.pipeline.request import CallPart, Part, TextPart
from afferent.errors import InvalidRequest

_MAX_CALLS: Final = 1024
_NO_TEXT = TextPart("")
_NOTHING = (b"null", b'""')
_QUOTE = ord('"')

_encode = msgspec.json.Encoder().encode
_string = msgspec.json.Decoder(str)


class ToolCalls:
    """Tool calls of one request, with a limit on their number."""

    def __init__(self) -> None:
        self._num = 0

    def write(self, turn: list[Part], name: str, arguments: Raw | UnsetType, where: str) -> None:
        """Append a call to an assistant's turn.

        Args:
            arguments: JSON, or a string with a model's output: if it is not JSON, it stays a
                string. Unset, ``null`` and ``""`` are no arguments.

        Raises:
            InvalidRequest: They are no text, or too deep; or there are too many calls.
        """
        self._num += 1
        if self._num > _MAX_CALLS:
            raise InvalidRequest(f"there are more than {_MAX_CALLS} calls of tools", param=where)
        try:
            given = "{}" if arguments is UNSET else _as_json(bytes(arguments))
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest("the body is not valid JSON", param=where) from error
        if turn and turn[-1] == _NO_TEXT:
            del turn[-1]
        turn.append(CallPart(name, given))


def _as_json(arguments: bytes) -> str:
    """Format on one line, with spaces after colons and commas; numbers and strings unchanged."""
    if arguments in _NOTHING:
        return "{}"
    if arguments[0] != _QUOTE:
        return msgspec.json.format(arguments, indent=0).decode()
    text = _string.decode(arguments)
    try:
        return msgspec.json.format(text, indent=0)
    except (msgspec.DecodeError, RecursionError):
        return _encode(text).decode()
