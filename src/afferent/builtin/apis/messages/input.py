"""Messages of Anthropic Messages: translation of blocks to parts.

A tool result becomes a message of its own; a tool call becomes a part of the assistant's message.
Unknown keys of blocks are ignored: clients send back the content of answers. ``cache_control``
changes nothing, since caching is by content.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from afferent.builtin.apis import schema
from afferent.builtin.apis.tool_calls import ToolCalls
from afferent.builtin.pipeline.request import Message, Part, Role, TextPart
from afferent.errors import InvalidRequest, UnsupportedParameter
from afferent.files.stored_file import StoredFile
from afferent.items import document_parts
from afferent.items.file_kinds import kind_of_stored
from afferent.items.request import MediaPart
from afferent.media.body.raw import RawMedia
from afferent.media.body.received import ReceivedBody
from afferent.types import DOCUMENT, Modality


class Text(Struct, tag="text"):
    text: str


class _Base64(Struct, tag="base64"):
    """Inline media; ``media_type`` is a hint, as the bytes decide."""

    data: str
    media_type: Annotated[str, Meta(pattern="^[a-z]{1,16}/[a-z0-9.+-]{1,64}$")]


class _Url(Struct, tag="url"):
    url: str


class _File(Struct, tag="file"):
    """Stored file, by its id."""

    file_id: str


class _Image(Struct, tag="image"):
    source: _Base64 | _Url | _File


class _PlainText(Struct, tag="text"):
    """Text of a document; its ``media_type`` is ignored."""

    data: str


class _Content(Struct, tag="content"):
    """Document as text and images of its own."""

    content: str | list[Text | _Image]


class _Citations(Struct):
    enabled: bool | None = None


class _Document(Struct, tag="document"):
    """Document; ``pages`` and ``dpi`` choose pages of a PDF, and their resolution."""

    source: _Base64 | _Url | _PlainText | _Content | _File
    title: str | None = None
    context: str | None = None
    citations: _Citations | None = None
    pages: document_parts.Pages | None = None
    dpi: document_parts.Dpi | None = None


class _ToolUse(Struct, tag="tool_use"):
    name: schema.Name
    input: msgspec.Raw


class _Thinking(Struct, tag="thinking"):
    """Thoughts of another model; this one gets none, and a template has no place for them."""


class _RedactedThinking(Struct, tag="redacted_thinking"):
    """The same, encrypted."""


_Results = list[Text | _Image | _Document]


class _ToolResult(Struct, tag="tool_result"):
    content: str | _Results = ""


_Block = Text | _Image | _Document | _ToolUse | _ToolResult | _Thinking | _RedactedThinking
_Blocks = Annotated[list[_Block], Meta(min_length=1)]


class InputMessage(Struct):
    role: Literal["system", "user", "assistant"]
    content: str | _Blocks


def read_messages(
    system: str | Sequence[Text] | None, given: Sequence[InputMessage], body: ReceivedBody
) -> tuple[Message, ...]:
    """Translate the system prompt and the messages.

    Args:
        body: Body with the media that the messages refer to.

    Raises:
        InvalidRequest: A block is not allowed there.
        UnsupportedParameter: A block is known and not supported.
    """
    reader = _Reader(body)
    if system:
        reader.turn("system", _as_blocks(system), "system")
    for index, message in enumerate(given):
        reader.turn(message.role, _as_blocks(message.content), f"messages[{index}].content")
    schema.check_all_taken(reader.media, "messages")
    return tuple(Message(role, tuple(parts)) for role, parts in reader.turns)


def _as_blocks(content: str | Sequence[_Block]) -> Sequence[_Block]:
    return [Text(content)] if isinstance(content, str) else content


class _Reader:
    """Reader of turns; media of a turn are removed from ``media``."""

    def __init__(self, body: ReceivedBody) -> None:
        self.media: dict[str, RawMedia] = dict(body.media)
        self._files = body.files
        self.turns: list[tuple[Role, list[Part]]] = []
        self._calls = ToolCalls()

    def turn(self, role: Role, blocks: Sequence[_Block], where: str) -> None:
        for index, block in enumerate(blocks):
            self._block(role, block, f"{where}[{index}]")

    def _turn_of(self, role: Role) -> list[Part]:
        """Return the turn of this role; consecutive messages of one role are one turn."""
        if not self.turns or self.turns[-1][0] != role:
            self.turns.append((role, []))
        return self.turns[-1][1]

    def _block(self, role: Role, block: _Block, where: str) -> None:
        match block:
            case Text(text):
                self._turn_of(role).append(TextPart(text))
            case _Image() if role in ("user", "tool"):
                self._turn_of(role).append(self._image(block, where))
            case _ToolUse(name, given) if role == "assistant":
                self._calls.write(self._turn_of(role), name, given, where)
            case _Thinking() | _RedactedThinking() if role == "assistant":
                pass
            case _ToolResult(content) if role == "user":
                self.turns.append(("tool", []))  # each of them is a turn
                for index, inner in enumerate(_as_blocks(content)):
                    self._block("tool", inner, f"{where}.content[{index}]")
            case _Document() if role in ("user", "tool"):
                self._turn_of(role).extend(self._document(block, where))
            case _:
                raise InvalidRequest(
                    f"{where}: such a block stands in no message of the {role}", param=where
                )

    def _image(self, image: _Image, where: str) -> MediaPart:
        return MediaPart(Modality.IMAGE, self._source(image.source, where))

    def _source(self, source: _Base64 | _Url | _File, where: str) -> str | RawMedia | StoredFile:
        match source:
            case _Base64(data, media_type):
                url = f"data:{media_type};base64,{data}"  # if it was not cut out
                return self.media.pop(data, url)
            case _Url(url):
                return self.media.pop(url, url)
            case _File(id):
                return self._files.find(id, where)

    def _document(self, block: _Document, where: str) -> Iterator[Part]:
        """Yield the title and the context of a document, and its content."""
        if block.citations is not None and block.citations.enabled:
            raise UnsupportedParameter(
                f"{where}: citations are not supported: the model's answer names no places of a "
                'document; leave them out, or send {"enabled": false}',
                param=where,
            )
        yield from (TextPart(f"{text}\n") for text in (block.title, block.context) if text)
        match block.source:
            case _PlainText(data):
                yield TextPart(f"{data}\n")
            case _Content(content):
                for inner in _as_blocks(content):
                    if isinstance(inner, Text):
                        yield TextPart(f"{inner.text}\n")
                    elif isinstance(inner, _Image):
                        yield self._image(inner, where)
            case source:
                given = self._source(source, where)
                kind = kind_of_stored(given, where) if isinstance(given, StoredFile) else DOCUMENT
                if isinstance(kind, Modality):
                    yield MediaPart(kind, given)
                    return
                yield document_parts.document(given, where, pages=block.pages, dpi=block.dpi)
