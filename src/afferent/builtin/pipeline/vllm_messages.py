"""Messages in the format in which vLLM hands them to a chat template that reads lists of parts.

Source: ``vllm.renderers.chat_utils`` and ``vllm.renderers.hf`` of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Written = dict[str, Any]
"""Message for a chat template; ``content`` is a list of parts."""


def as_vllm(messages: Sequence[Written], *, has_developer_role: bool) -> Sequence[Written]:
    """Return messages with the text of tools as strings, and with roles that the template knows.

    Args:
        has_developer_role: Whether the template knows the role ``developer``. If not, such messages
            become the system's, and all of the system's become one at the start.
    """
    written = [_tool_text(message) for message in messages]
    if has_developer_role or all(message["role"] != "developer" for message in written):
        return written
    return _system_first([_from_developer(message) for message in written])


def _tool_text(message: Written) -> Written:
    content = message["content"]
    if message["role"] != "tool" or any(part["type"] != "text" for part in content):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _from_developer(message: Written) -> Written:
    if message["role"] != "developer":
        return message
    return {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}


def _system_first(messages: list[Written]) -> list[Written]:
    system = [number for number, message in enumerate(messages) if message["role"] == "system"]
    if system in ([], [0]):
        return messages
    texts = [
        "\n".join(part["text"] for part in messages[number]["content"] if "text" in part)
        for number in system
    ]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]
