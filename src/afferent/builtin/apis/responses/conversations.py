"""OpenAI Conversations: schema of requests, and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from afferent.builtin.apis import schema
from afferent.builtin.apis.openai import name_of
from afferent.builtin.apis.responses.input import InputItem
from afferent.builtin.pipeline.named_conversations import ConversationItem, NamedConversation
from afferent.builtin.pipeline.request import CallPart, Part, TextPart
from afferent.items.request import ALL_PAGES, DocumentPart, MediaPart, SeenMedia
from afferent.types import DOCUMENT, FileKind, Modality

MOST_LISTED: Final = 100
"""Largest page of items."""
_FILE_NAMES: Final[dict[FileKind, str]] = {
    Modality.AUDIO: "audio.wav",
    Modality.VIDEO: "video.mp4",
    DOCUMENT: "document.pdf",
}
"""Names from which a request learns the kind of a file."""
_Items = Annotated[list[InputItem], Meta(max_length=20)]


class NewConversation(Struct):
    """Body of a request for a new conversation."""

    items: _Items | None = None
    metadata: schema.Metadata | None = None


class NewMetadata(Struct):
    """Body of a request that changes a conversation."""

    metadata: schema.Metadata | None


class NewItems(Struct):
    """Body of a request that adds items to a conversation."""

    items: Annotated[_Items, Meta(min_length=1)]


def conversation_json(conversation: NamedConversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_s,
        "metadata": conversation.metadata,
    }


def item_json(item: ConversationItem) -> dict[str, Any]:
    """Return an item in the form in which a request may repeat it, with media by their names."""
    described: dict[str, Any] = {"id": item.id, "type": item.kind, "status": "completed"}
    parts = item.turn.message.parts
    match item.kind, parts:
        case "function_call", (CallPart(name, arguments),):
            return described | {"call_id": item.call_id, "name": name, "arguments": arguments}
        case "function_call_output", (TextPart(text),):
            return described | {"call_id": item.call_id, "output": text}
        case "function_call_output", _:
            output = [_part_json(part, "input_text") for part in parts]
            return described | {"call_id": item.call_id, "output": output}
    text_kind = "output_text" if item.role == "assistant" else "input_text"
    content = [_part_json(part, text_kind) for part in parts]
    return described | {"role": item.role, "content": content}


def _part_json(part: Part, text_kind: str) -> dict[str, Any]:
    match part:
        case TextPart(text) if text_kind == "output_text":  # with a key that its clients expect
            return {"type": text_kind, "text": text, "annotations": []}
        case TextPart(text):
            return {"type": text_kind, "text": text}
        case MediaPart(Modality.IMAGE, SeenMedia(digest), detail):
            return {"type": "input_image", "image_url": name_of(digest), "detail": detail}
        case MediaPart(modality, SeenMedia(digest), detail):
            file = {"file_url": name_of(digest), "filename": _FILE_NAMES[modality]}
            return {"type": "input_file", "detail": detail, **file}
        case DocumentPart(SeenMedia(digest), pages, dpi, detail):
            file = {"file_url": name_of(digest), "filename": _FILE_NAMES[DOCUMENT]}
            chosen: dict[str, Any] = {} if pages == ALL_PAGES else {"pages": str(pages)}
            chosen |= {"dpi": dpi} if dpi else {}
            return {"type": "input_file", "detail": detail, **file, **chosen}
    raise TypeError(f"a {type(part).__name__} is no part of a stored item")


def page_json(items: Sequence[ConversationItem], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": list(map(item_json, items)),
        "first_id": items[0].id if items else None,
        "last_id": items[-1].id if items else None,
        "has_more": has_more,
    }
