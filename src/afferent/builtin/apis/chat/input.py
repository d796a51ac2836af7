"""Messages of OpenAI's chat completions: translation of their content parts."""

from __future__ import annotations

from collections.abc import Sequence

from afferent.builtin.apis import openai, schema
from afferent.builtin.apis.chat import schema as openai_schema
from afferent.builtin.apis.tool_calls import ToolCalls
from afferent.builtin.pipeline.request import Message, Part, Role, TextPart
from afferent.errors import InvalidRequest, UnsupportedParameter
from afferent.items.request import DocumentPart, MediaPart
from afferent.media.body.raw import RawMedia
from afferent.media.body.received import ReceivedBody
from afferent.types import Modality

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def read_messages(
    given: Sequence[openai_schema.ChatMessage], body: ReceivedBody
) -> tuple[Message, ...]:
    """Translate the messages of a request.

    Args:
        body: Body with the media that the messages refer to.

    Raises:
        InvalidRequest: A part is not allowed there, or invalid.
    """
    media, calls = dict(body.media), ToolCalls()
    messages = tuple(_message(i, each, media, body, calls) for i, each in enumerate(given))
    schema.check_all_taken(media, "messages")
    return messages


def _message(
    index: int,
    message: openai_schema.ChatMessage,
    media: dict[str, RawMedia],
    body: ReceivedBody,
    calls: ToolCalls,
) -> Message:
    where, role, content = f"messages[{index}]", _ROLES[message.role], message.content
    if isinstance(content, str):
        parts: list[Part] = [TextPart(content)]
    else:
        parts = [read_content(part, media, where, body=body) for part in content or ()]
    if role not in ("user", "tool") and any(
        isinstance(part, MediaPart | DocumentPart) for part in parts
    ):
        raise InvalidRequest(
            f"media stand in messages of the user and of tools, and {where} is the {role}'s",
            param=where,
        )
    if role == "assistant":
        _add_calls(calls, parts, message, where)
    if content is None and not parts:
        raise InvalidRequest(f"{where} needs content", param=where)
    return Message(role, tuple(parts))


def _add_calls(
    calls: ToolCalls, turn: list[Part], message: openai_schema.ChatMessage, where: str
) -> None:
    """Write the assistant's tool calls as text; an entry without a name is not a call."""
    asked = schema.read_part(
        openai_schema.tool_calls_decoder, message.tool_calls, f"{where}.tool_calls"
    )
    old = schema.read_part(
        openai_schema.function_call_decoder, message.function_call, f"{where}.function_call"
    )
    for call in [*(each.function or each.custom for each in asked or ()), old]:
        if isinstance(call, openai_schema.AnyCall) and call.name is not None:
            calls.write(turn, call.name, call.arguments, where)


def read_content(
    part: openai_schema.Content,
    media: dict[str, RawMedia],
    where: str,
    *,
    body: ReceivedBody | None = None,
) -> Part:
    """Translate a part; its media are removed from ``media``.

    Args:
        body: Body of a request that may have files.

    Raises:
        InvalidRequest: It is an item without data, URL and id.
        FileNotFound: There is no file with its id.
        UnsupportedMedia: It is a file of no supported kind.
    """
    match part:
        case openai_schema.TextContent(text) | openai_schema.RefusalContent(text):
            return TextPart(text)
        case openai_schema.ImageContent(image, uuid):
            url = image.url if image else None
            detail = openai.detail_of(image.detail if image else None)
            found = MediaPart(Modality.IMAGE, _source(url, media), detail, uuid)
        case openai_schema.VideoContent(video, uuid):
            url = video.url if video else None
            found = MediaPart(Modality.VIDEO, _source(url, media), uuid=uuid)
        case openai_schema.AudioUrlContent(audio_url, uuid):
            url = audio_url.url if audio_url else None
            found = MediaPart(Modality.AUDIO, _source(url, media), uuid=uuid)
        case openai_schema.AudioContent(audio, uuid):
            found = MediaPart(Modality.AUDIO, _audio_source(audio, media), uuid=uuid)
        case openai_schema.FileContent(file):
            if body is None:
                raise UnsupportedParameter(f"{where} has a file", param=where)
            return openai.read_file(file, media, body, where)
    if found.source is None and found.uuid is None:
        raise InvalidRequest(f"an item of {where} has no url, no data and no uuid", param=where)
    return found


def _source(url: str | None, media: dict[str, RawMedia]) -> str | RawMedia | None:
    return None if url is None else media.pop(url, url)


def _audio_source(
    audio: openai_schema.InputAudio | None, media: dict[str, RawMedia]
) -> str | RawMedia | None:
    if audio is None or audio.data is None:
        return None
    # Data too short to be cut out of the body are handled like a URL.
    return media.pop(audio.data, f"data:audio/{audio.format};base64,{audio.data}")
