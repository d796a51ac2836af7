"""OpenAI Conversations: schema of requests, and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from afferent.builtin.apis import schema
from afferent.builtin.apis.parts_json import part_json
from afferent.builtin.apis.responses.input import InputItem
from afferent.builtin.pipeline.named_conversations import ConversationItem, NamedConversation
from afferent.builtin.pipeline.request import CallPart, TextPart

MOST_LISTED: Final = 100
"""Largest page of items."""
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
    """Return an item. Its media were sent by the client and are not sent back."""
    described: dict[str, Any] = {"id": item.id, "type": item.kind, "status": "completed"}
    role, parts = item.turn.role, item.turn.message.parts
    match item.kind, parts:
        case "function_call", (CallPart(name, arguments),):
            return described | {"call_id": item.call_id, "name": name, "arguments": arguments}
        case "function_call_output", (TextPart(text),):
            return described | {"call_id": item.call_id, "output": text}
        case "function_call_output", _:
            output = [part_json(part, role) for part in parts]
            return described | {"call_id": item.call_id, "output": output}
    content = [_content(part_json(part, role)) for part in parts]
    return described | {"role": item.role, "content": content}


def page_json(items: Sequence[ConversationItem], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": list(map(item_json, items)),
        "first_id": items[0].id if items else None,
        "last_id": items[-1].id if items else None,
        "has_more": has_more,
    }


def _content(part: dict[str, Any]) -> dict[str, Any]:
    """Add the fields of an answer's text that its clients expect."""
    return part | {"annotations": []} if part["type"] == "output_text" else part
