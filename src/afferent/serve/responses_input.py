"""The input of OpenAI Responses: items with their parts, to messages.

Keys of items and parts that nobody knows are ignored: clients send back what answers held.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from afferent.errors import InvalidRequest, UnsupportedMedia, UnsupportedParameter
from afferent.ingest.raw import RawMedia
from afferent.serve import schema
from afferent.serve.body import ReceivedBody
from afferent.serve.file_kinds import kind_of_file, kind_of_name
from afferent.serve.request import Detail, MediaPart, Message, Part, Role, TextPart
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
    detail: Detail | Literal["original"] | None = None


class _InputFile(Struct, tag="input_file"):
    file_data: str | None = None
    file_url: str | None = None
    file_id: str | None = None
    filename: Annotated[str, Meta(max_length=1024)] | None = None
    detail: Detail | None = None


class _AudioData(Struct):
    """``format`` is a hint: the bytes decide."""

    data: str
    format: Annotated[str, Meta(pattern="^[a-z0-9]{1,8}$")]


class _InputAudio(Struct, tag="input_audio"):
    input_audio: _AudioData


_Part = _InputText | _OutputText | _Refusal | _InputImage | _InputFile | _InputAudio


class InputItem(Struct):
    """A message, which need not say that it is one; or something else, which does."""

    type: Annotated[str, Meta(max_length=64)] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Annotated[list[_Part], Meta(max_length=schema.MAX_PARTS)] | None = None


_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


def read_input(given: str | list[InputItem], body: ReceivedBody) -> tuple[Message, ...]:
    """
    Args:
        body: Whose media the items refer to.

    Raises:
        InvalidRequest: An item is not of the schema, or stands where it can't.
        UnsupportedParameter: An item, or a part of one, is known and not served.
    """
    if isinstance(given, str):
        messages: tuple[Message, ...] = (Message("user", (TextPart(given),)),)
        left = dict(body.media)
    else:
        reader = _Reader(body)
        messages = tuple(reader.message(index, item) for index, item in enumerate(given))
        left = reader.media
    schema.check_all_taken(left, "input")
    return messages


class _Reader:
    """Reads items; ``media`` loses what they refer to."""

    def __init__(self, body: ReceivedBody) -> None:
        self.media: dict[str, RawMedia] = dict(body.media)
        self._media_types = body.media_types

    def message(self, index: int, item: InputItem) -> Message:
        where = f"input[{index}]"
        if item.type != "message":
            raise UnsupportedParameter(
                f"items of type {item.type!r} are not supported", param=where
            )
        if item.role is None or item.content is None:
            raise InvalidRequest("a message has a role and content", param=where)
        role, content = _ROLES[item.role], item.content
        if isinstance(content, str):
            return Message(role, (TextPart(content),))
        parts = tuple(self._part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
        if role != "user" and any(isinstance(part, MediaPart) for part in parts):
            raise InvalidRequest("media stand in messages of the user", param=where)
        return Message(role, parts)

    def _part(self, part: _Part, where: str) -> Part:
        match part:
            case _InputText(text) | _OutputText(text) | _Refusal(text):
                return TextPart(text)
            case _InputImage():
                return self._image(part, where)
            case _InputFile():
                return self._file(part, where)
            case _InputAudio(audio):
                url = f"data:audio/{audio.format};base64,{audio.data}"  # too short to be cut out
                return MediaPart(Modality.AUDIO, self.media.pop(audio.data, url))

    def _image(self, part: _InputImage, where: str) -> MediaPart:
        detail = part.detail or "auto"
        if detail == "original":
            raise UnsupportedParameter("the detail 'original' is not supported", param=where)
        url = _only(where, image_url=part.image_url, file_id=part.file_id)
        return MediaPart(Modality.IMAGE, self.media.pop(url, url), detail)

    def _file(self, part: _InputFile, where: str) -> MediaPart:
        url = _only(where, file_data=part.file_data, file_url=part.file_url, file_id=part.file_id)
        if part.file_data is None:
            kind = kind_of_name(part.filename or "") or kind_of_name(url)
        else:
            kind = kind_of_file(self._media_type(url, where), part.filename)
        if kind is None:
            raise UnsupportedMedia(
                "a file is an image, a sound or a video, by its media type or by its name",
                param=where,
            )
        return MediaPart(kind, self.media.pop(url, url), part.detail or "auto")

    def _media_type(self, url: str, where: str) -> str:
        if url in self._media_types:
            return self._media_types[url]
        head, comma, _ = url.partition(",")
        if not comma or head[:5].lower() != "data:":
            raise InvalidRequest("file_data is a data: URL of base64", param=where)
        return head[5:].partition(";")[0]


def _only(where: str, *, file_id: str | None, **urls: str | None) -> str:
    """The one of them that is there.

    Raises:
        UnsupportedParameter: It is a file's id.
        InvalidRequest: There is none, or more than one.
    """
    if file_id is not None:
        raise UnsupportedParameter("files by id are not supported", param=f"{where}.file_id")
    given = [url for url in urls.values() if url is not None]
    if len(given) != 1:
        raise InvalidRequest(f"one of {', '.join(urls)} is needed", param=where)
    return given[0]
