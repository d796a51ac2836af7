"""Messages of chat completions, as vLLM reads them: the basis of the prompts of all APIs.

Source: ``vllm.renderers.chat_utils`` of vLLM 0.32. Other APIs' messages are translated to these
first, as in vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from afferent.builtin.apis import schema
from afferent.builtin.apis.chat.input import read_content
from afferent.builtin.apis.chat.schema import Content
from afferent.builtin.pipeline.request import Message, Part, TextPart
from afferent.errors import InvalidRequest, UnsupportedParameter
from afferent.items.request import MediaPart
from afferent.media.body.raw import RawMedia

BILLING_HEADER: Final = "x-anthropic-billing-header"
"""Start of a line that Claude Code changes with each request; vLLM drops it."""
_TEXTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of text parts, and the key of the text."""
_MEDIA: Final = ("image_url", "video_url", "audio_url", "input_audio")
_IMAGE: Final = "input_image"


class Turn(Struct, kw_only=True):
    """Message of a chat completion; unknown keys are ignored."""

    role: schema.Name
    content: str | list[Any] | None = None
    name: Any = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Any = msgspec.UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None
    tools: Any = None


def messages_of(turns: Sequence[Turn], media: dict[str, RawMedia]) -> tuple[Message, ...]:
    """Return the messages for the chat template.

    Args:
        media: Media of the body, by the marker in the JSON; those of the messages are removed.

    Raises:
        InvalidRequest: A part or a tool call is invalid.
        UnsupportedParameter: A part has an unknown type.
    """
    return tuple(
        Message(
            turn.role,
            tuple(_parts(turn, media, f"messages[{index}]")),
            _extra(turn, f"messages[{index}]"),
        )
        for index, turn in enumerate(turns)
    )


def _parts(turn: Turn, media: dict[str, RawMedia], where: str) -> Iterable[Part]:
    content = [turn.content] if isinstance(turn.content, str) else turn.content or ()
    for given in content:
        part = _part(given, media, where)
        if turn.role == "system" and isinstance(part, TextPart):
            part = _without_billing_header(part)
        if part is not None:
            yield part


def _part(given: Any, media: dict[str, RawMedia], where: str) -> Part | None:
    if isinstance(given, str):
        return TextPart(given)
    if not isinstance(given, dict):
        raise InvalidRequest(f"a part of {where} is neither text nor an object", param=where)
    kind = given.get("type") or next((each for each in (*_MEDIA, *_TEXTS) if each in given), None)
    if not isinstance(kind, str | None):
        raise InvalidRequest(f"the type of a part of {where} is no string", param=where)
    if kind in _TEXTS:
        text = given.get(_TEXTS[kind])
        if not isinstance(text, str | None):
            raise InvalidRequest(f"the text of a part of {where} is no string", param=where)
        return None if text is None else TextPart(text)
    if kind == _IMAGE:
        given, kind = {"image_url": {"url": given.get("image_url")}}, "image_url"
    if kind not in _MEDIA:
        known = ", ".join((*_TEXTS, *_MEDIA, _IMAGE))
        raise UnsupportedParameter(
            f"{where} has a part of type {str(kind)[:64]!r}; known types: {known}", param=where
        )
    try:
        content = msgspec.convert({**given, "type": kind}, Content)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"a part of {where}: {error}", param=where) from error
    part = read_content(content, media, where)
    # vLLM has no use for the detail of an image.
    return replace(part, detail="auto") if isinstance(part, MediaPart) else part


def _without_billing_header(part: TextPart) -> TextPart | None:
    if not part.text.startswith(BILLING_HEADER):
        return part
    rest = part.text.partition("\n")[2]
    return TextPart(rest) if rest else None


def _extra(turn: Turn, where: str) -> dict[str, Any]:
    """Return the keys of a message beside its role and content."""
    extra: dict[str, Any] = {}
    if turn.role == "assistant":
        if turn.tool_calls:
            extra["tool_calls"] = [_call(call, where) for call in turn.tool_calls]
        reasoning = turn.reasoning if turn.reasoning is not None else turn.reasoning_content
        if reasoning is not None:
            extra |= {"reasoning": reasoning, "reasoning_content": reasoning}
    elif turn.role == "tool" and turn.tool_call_id is not msgspec.UNSET:
        extra["tool_call_id"] = turn.tool_call_id
    if isinstance(turn.name, str):
        extra["name"] = turn.name
    if turn.role == "developer":
        extra["tools"] = turn.tools
    return extra


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, which chat templates expect."""
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequest(f"{where} has a tool call that is no function's", param=where)
    given = function.get("arguments")
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):  # of a model's answer: the conversation goes on
            given = None
    arguments = given if isinstance(given, dict) else {}
    return {**call, "function": {**function, "arguments": arguments}}


def in_order_of_chat(turn: Turn) -> Turn:
    """Return a message whose tool calls have their keys in the order of vLLM's schema.

    A chat template may write a call as JSON.
    """
    if turn.tool_calls is None:
        return turn
    return structs.replace(turn, tool_calls=[_in_order(call) for call in turn.tool_calls])


def _in_order(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, dict):
        call = {**call, "function": _first(function, ("arguments", "name"))}
    return _first(call, ("id", "function", "type"))


def _first(given: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given} | given
