"""Endpoints of OpenAI's Conversations API: conversations with an id, and their items."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct, structs
from starlette.responses import Response
from starlette.routing import Route

from afferent.builtin.apis import openai, schema
from afferent.builtin.apis.responses import conversations as api
from afferent.builtin.apis.responses.input import InputItem, read_input
from afferent.builtin.http.body_receiver import BodyReceiver
from afferent.builtin.pipeline.named_conversations import (
    ConversationItem,
    NamedConversation,
    NamedConversations,
    joined,
)
from afferent.builtin.pipeline.pipeline import Pipeline
from afferent.builtin.pipeline.request import GenerateRequest
from afferent.media.body.received import ReceivedBody
from afferent.proxy import counting, file_answers
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.dialects import CONVERSATIONS
from afferent.proxy.request_scope import RequestScopes
from afferent.proxy.scoped_endpoint import Call, ScopedEndpoint

Body = TypeVar("Body")

_DEFAULT_PAGE: Final = 20
_new_decoder = msgspec.json.Decoder(api.NewConversation)
_metadata_decoder = msgspec.json.Decoder(api.NewMetadata)
_items_decoder = msgspec.json.Decoder(api.NewItems)


@dataclass(frozen=True, slots=True)
class ConversationApi:
    """Endpoints over one store of conversations."""

    conversations: NamedConversations
    pipeline: Pipeline
    receiver: BodyReceiver
    scopes: RequestScopes
    settings: AppSettings

    def routes(self) -> list[Route]:
        counting.APIS.add(CONVERSATIONS.name)
        path = CONVERSATIONS.path
        one = f"{path}/{{conversation_id}}"
        items, item = f"{one}/items", f"{one}/items/{{item_id}}"
        return [
            self._route("POST", path, self._create, body=api.NewConversation),
            self._route("GET", one, self._get),
            self._route("POST", one, self._set_metadata, body=api.NewMetadata),
            self._route("DELETE", one, self._delete),
            self._route("GET", items, self._list),
            self._route("POST", items, self._add, body=api.NewItems),
            self._route("GET", item, self._get_item),
            self._route("DELETE", item, self._delete_item),
        ]

    async def _create(self, call: Call) -> Response:
        """Begin a conversation."""
        body, given = await self._read(call, _new_decoder)
        items = await self._made(call, given.items or (), body)
        new = NamedConversation.new(given.metadata or {}, now_s=time.time()).with_items(items)
        await self.conversations.add(call.own.id, call.tenant, new)
        return call.answer(api.conversation_json(new))

    async def _get(self, call: Call) -> Response:
        """Describe a conversation."""
        return call.answer(api.conversation_json(await self._found(call)))

    async def _set_metadata(self, call: Call) -> Response:
        """Replace the metadata of a conversation."""
        _, given = await self._read(call, _metadata_decoder)
        metadata = given.metadata or {}
        after = await self._change(call, lambda old: structs.replace(old, metadata=metadata))
        return call.answer(api.conversation_json(after))

    async def _delete(self, call: Call) -> Response:
        """Delete a conversation."""
        conversation_id = call.id("conversation_id")
        await self.conversations.delete(call.own.id, call.tenant, conversation_id)
        return call.answer(
            {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
        )

    async def _list(self, call: Call) -> Response:
        """List the items of a conversation."""
        query = call.request.query_params
        is_ascending = file_answers.is_ascending(query.get("order"))
        most = api.MOST_LISTED
        limit = file_answers.number(query.get("limit"), default=_DEFAULT_PAGE, most=most)
        conversation = await self._found(call)
        items = conversation.items if is_ascending else conversation.items[::-1]
        if after := query.get("after"):
            items = items[items.index(conversation.get(after)) + 1 :]
        return call.answer(api.page_json(items[:limit], has_more=len(items) > limit))

    async def _add(self, call: Call) -> Response:
        """Add items to a conversation."""
        body, given = await self._read(call, _items_decoder)
        await self._found(call)  # before media are decoded for it
        items = await self._made(call, given.items, body)

        def added(conversation: NamedConversation) -> NamedConversation:
            longer = conversation.with_items(items)
            longer.check_room()
            return longer

        await self._change(call, added)
        return call.answer(api.page_json(items, has_more=False))

    async def _get_item(self, call: Call) -> Response:
        """Return an item of a conversation."""
        conversation = await self._found(call)
        return call.answer(api.item_json(conversation.get(call.id("item_id"))))

    async def _delete_item(self, call: Call) -> Response:
        """Delete an item of a conversation."""
        after = await self._change(call, lambda old: old.without(call.id("item_id")))
        return call.answer(api.conversation_json(after))

    # Inner steps

    def _route(
        self,
        method: str,
        path: str,
        work: Callable[[Call], Coroutine[Any, Any, Response]],
        *,
        body: type[Struct] | None = None,
    ) -> Route:
        endpoint = ScopedEndpoint(self.scopes, work, body=body, dialect=CONVERSATIONS)
        return Route(path, endpoint, methods=[method])

    async def _found(self, call: Call) -> NamedConversation:
        return await self.conversations.find(call.own.id, call.tenant, call.id("conversation_id"))

    async def _change(
        self, call: Call, change: Callable[[NamedConversation], NamedConversation]
    ) -> NamedConversation:
        return await self.conversations.change(
            call.own.id, call.tenant, call.id("conversation_id"), change
        )

    async def _read(
        self, call: Call, decoder: msgspec.json.Decoder[Body]
    ) -> tuple[ReceivedBody, Body]:
        body = await self.receiver.receive(
            call.request, call.own, openai.MEDIA_KEYS, begins_early=True
        )
        call.own.trace.media = "none"  # until features are made
        return body, schema.decode(decoder, body.json or b"{}", None)

    async def _made(
        self, call: Call, given: Sequence[InputItem], body: ReceivedBody
    ) -> tuple[ConversationItem, ...]:
        """Return the items of a request as they are stored; the features of their media exist."""
        items = read_input(list(given), body, "items")
        messages = joined(item.message for item in items)
        share = call.own.share
        schema.check_parts(messages, self.settings.limits_of(share).max_parts)
        request = GenerateRequest(request_id=call.own.id, messages=messages, share=share)
        digests = iter(
            await self.pipeline.prompts.make_known(request, call.own) if request.files else ()
        )
        return tuple(item.stored(digests) for item in items)
