"""Calls of tools in a conversation's past, whichever API they came by.

Tools are not served, but what was asked of them elsewhere may be sent. It is written into the text
of the assistant's turn, in the form that Qwen's and many other models know.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, UnsetType

from afferent.errors import InvalidRequest
from afferent.serve.flow.request import Part, TextPart

_MAX_CALLS = 1024
_NO_TEXT = TextPart("")
_NOTHING = (b"null", b'""')
_QUOTE = ord('"')

_encode = msgspec.json.Encoder().encode
_string = msgspec.json.Decoder(str)


class ToolCalls:
    """Those of one request, of which there may be so many."""

    def __init__(self) -> None:
        self._num = 0

    def write(self, turn: list[Part], name: str, arguments: Raw | UnsetType, where: str) -> None:
        """At the end of an assistant's turn.

        Args:
            arguments: JSON, or a string with what a model wrote: that is JSON as a rule, else it
                stays a string. Nothing, ``null`` and ``""`` are no arguments.

        Raises:
            InvalidRequest: They are no text, or too deep; or this is one too many.
        """
        self._num += 1
        if self._num > _MAX_CALLS:
            raise InvalidRequest(f"there are more than {_MAX_CALLS} calls of tools", param=where)
        try:
            given = "{}" if arguments is UNSET else _as_json(bytes(arguments))
        except (UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest("the body is not valid JSON", param=where) from error
        call = f'{{"name": {_encode(name).decode()}, "arguments": {given}}}'
        before = "" if not turn or turn[-1] == _NO_TEXT else "\n"
        turn.append(TextPart(f"{before}<tool_call>\n{call}\n</tool_call>"))


def _as_json(arguments: bytes) -> str:
    """On one line, with spaces after colons and commas; numbers and strings as they are."""
    if arguments in _NOTHING:
        return "{}"
    if arguments[0] != _QUOTE:
        return msgspec.json.format(arguments, indent=0).decode()
    text = _string.decode(arguments)
    try:
        return msgspec.json.format(text, indent=0)
    except (msgspec.DecodeError, RecursionError):
        return _encode(text).decode()
