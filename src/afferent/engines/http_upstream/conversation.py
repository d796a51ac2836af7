"""Conversation of a request without media: the key of its placement, and its text. Pure."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from afferent import keys

_TAG: Final = b"afferent/conversation-placement/v1"
_MAX_MESSAGES: Final = 64
"""Messages that are searched for the first one of a user."""


class _Message(Struct):
    role: str = ""


class _Body(Struct):
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


_body = msgspec.json.Decoder(_Body)
_list = msgspec.json.Decoder(list[msgspec.Raw])
_message = msgspec.json.Decoder(_Message)


def conversation_of(body: bytes) -> tuple[bytes, bytes]:
    """Return the key of a conversation, 32 bytes, and its text as JSON; both empty without one.

    The key covers the messages up to the first one of a user, so that it is the same for all turns
    of a conversation; for a request without messages it covers the whole text.
    """
    try:
        found = _body.decode(body)
        text = bytes(found.messages or found.input or found.prompt)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return b"", b""
    if not text:
        return b"", b""
    return keys.frame(_TAG, _beginning(text)), text


def _beginning(text: bytes) -> bytes:
    try:
        messages = _list.decode(text)
        for index, message in enumerate(messages[:_MAX_MESSAGES], 1):
            if _message.decode(message).role == "user":
                return b"".join(map(bytes, messages[:index]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # a text, or a list of something else
    return text
