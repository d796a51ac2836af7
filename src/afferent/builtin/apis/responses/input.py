"""Input of OpenAI Responses: translation of items and their parts to messages.

Unknown keys of items and parts are ignored: clients send back the content of answers.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from afferent.builtin.apis import openai, schema
from afferent.builtin.apis.tool_calls import ToolCalls
from afferent.builtin.pipeline.named_conversations import NewItem
from afferent.builtin.pipeline.request import Message, Part, Role, TextPart
from afferent.errors import InvalidRequest, UnsupportedParameter
from afferent.items.request import DocumentPart, MediaPart
from afferent.media.body.raw import RawMedia
from afferent.media.body.received import ReceivedBody
from afferent.types import Modality


class _InputText(Struct, tag="input_text"):
    text: str


class _OutputText(Struct, tag="output_text"):
    text: str


class _Refusal(Struct, tag="refusal"):
    refusal: str


class _InputImage(Struct, tag="input_image"):
    image_url: str | None = None
    file_id: str | None = None
    detail: openai.ImageDetail | None = None


class _InputFile(openai.InputFile, tag="input_file"):
    """See `openai.InputFile`."""


class _AudioData(Struct):
    """Audio data; ``format`` is a hint, as the bytes decide."""

    data: str
    format: Annotated[str, Meta(pattern="^[a-z0-9]{1,8}$")]


class _InputAudio(Struct, tag="input_audio"):
    input_audio: _AudioData


_Part = _InputText | _OutputText | _Refusal | _InputImage | _InputFile | _InputAudio


_Content = str | list[_Part]


class InputItem(Struct):
    """Message, for which ``type`` may be omitted; or another item, with its type."""

    type: Annotated[str, Meta(max_length=64)] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _Content | None = None
    # For tool calls and tool results. In other items they have other meanings.
    call_id: Raw | UnsetType = UNSET
    name: Raw | UnsetType = UNSET
    arguments: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    output: Raw | UnsetType = UNSET


_name_decoder = msgspec.json.Decoder(schema.Name | None)
_call_id_decoder = msgspec.json.Decoder(Annotated[str, Meta(max_length=256)] | None)
_output_decoder = msgspec.json.Decoder(_Content | None)


_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


def read_input(
    given: str | list[InputItem], body: ReceivedBody, param: str = "input"
) -> list[NewItem]:
    """Translate the input of a request; `joined` makes the turns of its messages.

    Args:
        body: Body with the media that the items refer to.
        param: The request's parameter with the items.

    Raises:
        InvalidRequest: An item is not of the schema, or not allowed there.
        UnsupportedParameter: An item, or a part of one, is known and not supported.
    """
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    reader = _Reader(body)
    for index, item in enumerate(given):
        reader.item(item, f"{param}[{index}]")
    schema.check_all_taken(reader.media, param)
    return reader.items


class _Reader:
    """Reader of items; media of an item are removed from ``media``."""

    def __init__(self, body: ReceivedBody) -> None:
        self.media: dict[str, RawMedia] = dict(body.media)
        self._body = body
        self.items: list[NewItem] = []
        self._calls = ToolCalls()

    def item(self, item: InputItem, where: str) -> None:
        match item.type:
            case "message":
                self._message(item, where)
            case "function_call":
                self._call(item, item.arguments, where)
            case "custom_tool_call":
                self._call(item, item.input, where)
            case "function_call_output" | "custom_tool_call_output":
                self._output(item, where)
            case "reasoning":
                pass  # clients send back those of other models; none is a part of a prompt here
            case _:
                raise UnsupportedParameter(
                    f"items of type {item.type!r} are not supported", param=where
                )

    def _message(self, item: InputItem, where: str) -> None:
        if item.role is None or item.content is None:
            raise InvalidRequest("a message has a role and content", param=where)
        role, parts = _ROLES[item.role], self._parts(item.content, f"{where}.content")
        if role != "user" and any(isinstance(part, MediaPart | DocumentPart) for part in parts):
            raise InvalidRequest("media stand in messages of the user", param=where)
        self.items.append(NewItem("message", Message(role, tuple(parts)), role=item.role))

    def _call(self, item: InputItem, arguments: Raw | UnsetType, where: str) -> None:
        called = schema.read_part(_name_decoder, item.name, f"{where}.name")
        if called is None:
            raise InvalidRequest("a call of a tool has a name", param=where)
        parts: list[Part] = []
        self._calls.write(parts, called, arguments, where)
        message = Message("assistant", tuple(parts))
        self.items.append(NewItem("function_call", message, call_id=_call_id(item, where)))

    def _output(self, item: InputItem, where: str) -> None:
        said = schema.read_part(_output_decoder, item.output, f"{where}.output")
        if said is None:
            raise InvalidRequest("what a tool said is its output", param=where)
        message = Message("tool", tuple(self._parts(said, f"{where}.output")))
        self.items.append(NewItem("function_call_output", message, call_id=_call_id(item, where)))

    def _parts(self, content: _Content, where: str) -> list[Part]:
        if isinstance(content, str):
            return [TextPart(content)]
        return [self._part(part, f"{where}[{i}]") for i, part in enumerate(content)]

    def _part(self, part: _Part, where: str) -> Part:
        match part:
            case _InputText(text) | _OutputText(text) | _Refusal(text):
                return TextPart(text)
            case _InputImage():
                return self._image(part, where)
            case _InputFile():
                return openai.read_file(part, self.media, self._body, where)
            case _InputAudio(audio):
                url = f"data:audio/{audio.format};base64,{audio.data}"  # it was not cut out
                return MediaPart(Modality.AUDIO, self.media.pop(audio.data, url))

    def _image(self, part: _InputImage, where: str) -> MediaPart:
        url = openai.only(where, image_url=part.image_url, file_id=part.file_id)
        detail = openai.detail_of(part.detail)
        if part.file_id is not None:
            return MediaPart(Modality.IMAGE, self._body.files.find(url, f"{where}.file_id"), detail)
        return MediaPart(Modality.IMAGE, openai.source_of(url, self.media), detail)


def _call_id(item: InputItem, where: str) -> str:
    return schema.read_part(_call_id_decoder, item.call_id, f"{where}.call_id") or ""
