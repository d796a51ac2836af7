"""Conversations that have an id of their own, and grow; in the store, so all frontends share them.

A conversation is a normal object, as an answer's is (`conversations`): it contains no media, only
their digests, and it is evicted when it is the least recently used. It changes, and an object does
not: each change writes a new object under the other one of two keys, and deletes the old one.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from msgspec import Struct, structs

from afferent import keys
from afferent.builtin.pipeline.request import CallPart, Message, TextPart
from afferent.builtin.pipeline.stored_turns import MAX_NBYTES, MAX_PARTS, Turn, write_record
from afferent.errors import ConversationNotFound, InvalidRequest, StoreFull
from afferent.items.acquire import handle_if_there
from afferent.items.request import DocumentPart, MediaPart
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Claim, Find
from afferent.store.protocol.results import Failed, Owner, Pending
from afferent.types import ContentKey, ObjectKind, decode, encode

ItemKind = Literal["message", "function_call", "function_call_output"]
_PREFIXES: Final = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_"}
_LOCK_NBYTES: Final = 64
_LOCK_TIMEOUT_S: Final = 5.0
_NO_TEXT: Final = TextPart("")


class ConversationItem(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Stored item.

    Attributes:
        role: Role of a message, as the client wrote it.
        call_id: The client's or the answer's id of a tool call, or of the call with this output.
        turn: The message that it is for the model.
    """

    id: str
    kind: ItemKind
    role: str
    call_id: str
    turn: Turn


@dataclass(frozen=True, slots=True)
class NewItem:
    """Item of a request or an answer, with its media; the attributes are those of its stored form.

    Without an id, it gets one when it is stored.
    """

    kind: ItemKind
    message: Message
    role: str = ""
    call_id: str = ""
    id: str = ""

    def stored(self, digests: Iterator[bytes]) -> ConversationItem:
        """Return its stored form, and take the digests of its media."""
        item_id = self.id or _PREFIXES[self.kind] + secrets.token_hex(16)
        turn = Turn.of(self.message, digests)
        return ConversationItem(item_id, self.kind, self.role, self.call_id, turn)


class NamedConversation(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Conversation with an id; ``number`` is that of its changes."""

    id: str
    created_s: int
    metadata: dict[str, str]
    items: tuple[ConversationItem, ...] = ()
    number: int = 0

    @classmethod
    def new(cls, metadata: dict[str, str], *, now_s: float) -> NamedConversation:
        return cls(f"conv_{secrets.token_hex(24)}", int(now_s), metadata)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Messages for the model; their media are digests of known items."""
        return joined(item.turn.message for item in self.items)

    def with_items(self, items: Iterable[ConversationItem]) -> NamedConversation:
        return structs.replace(self, items=(*self.items, *items))

    def without(self, item_id: str) -> NamedConversation:
        """Return it without an item.

        Raises:
            ConversationNotFound: It has none with this id.
        """
        self.get(item_id)
        return structs.replace(self, items=tuple(i for i in self.items if i.id != item_id))

    def get(self, item_id: str) -> ConversationItem:
        """Return an item.

        Raises:
            ConversationNotFound: It has none with this id.
        """
        for item in self.items:
            if item.id == item_id:
                return item
        raise ConversationNotFound(
            f"the conversation {self.id!r} has no item {item_id!r}", param="item_id"
        )

    def check_room(self, new: Sequence[Message] = ()) -> None:
        """Check that it is not too long to be continued.

        Raises:
            InvalidRequest: It is, with these messages.
        """
        messages = (*(item.turn.message for item in self.items), *new)
        if len(encode(self)) > MAX_NBYTES or sum(1 + len(m.parts) for m in messages) > MAX_PARTS:
            raise InvalidRequest(
                f"the conversation has more than {MAX_NBYTES} bytes or {MAX_PARTS} messages and "
                "parts; delete items, or begin another one",
                param="conversation",
            )


_decoder = msgspec.msgpack.Decoder(NamedConversation)


def joined(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the turns of these messages: the assistant's tool calls belong to the text before."""
    turns: list[tuple[str, list[Message]]] = []
    for message in messages:
        are_calls = bool(message.parts) and all(isinstance(p, CallPart) for p in message.parts)
        if are_calls and turns and turns[-1][0] == message.role == "assistant":
            turns[-1][1].append(message)
        else:
            turns.append((message.role, [message]))
    return tuple(_turn(role, parts) for role, parts in turns)


def _turn(role: str, messages: Sequence[Message]) -> Message:
    first, *calls = messages
    if not calls:
        return first
    text = first.parts[:-1] if first.parts[-1:] == (_NO_TEXT,) else first.parts
    return Message(role, (*text, *(part for call in calls for part in call.parts)))


def num_media(messages: Iterable[Message]) -> int:
    """Return the number of digests that messages have: of items, and of documents."""
    parts = (part for message in messages for part in message.parts)
    return sum(isinstance(part, MediaPart | DocumentPart) for part in parts)


class NamedConversations:
    """Conversations with ids, in one store.

    Invariants:
        - A change is whole or has not happened, whenever the process that makes it is killed.
        - Changes of a conversation happen one after another, on any number of frontends.
    """

    def __init__(self, store: AsyncDaemonStore) -> None:
        self._store = store

    async def add(self, request_id: str, tenant: str, conversation: NamedConversation) -> None:
        """Store a new conversation.

        Raises:
            InvalidRequest: It is too long.
            Unavailable: Try again.
        """
        conversation.check_room()
        async with self._pins(request_id) as own:
            await self._write(own, tenant, conversation)

    async def find(self, request_id: str, tenant: str, conversation_id: str) -> NamedConversation:
        """Return a conversation.

        Raises:
            ConversationNotFound: It is not stored.
            Unavailable: Try again.
        """
        async with self._pins(request_id) as own:
            return await self._read(own, tenant, conversation_id)

    async def change(
        self,
        request_id: str,
        tenant: str,
        conversation_id: str,
        change: Callable[[NamedConversation], NamedConversation],
    ) -> NamedConversation:
        """Replace a conversation by what ``change`` returns for it, and return that.

        Raises:
            ConversationNotFound: It is not stored.
            Unavailable: Nothing was changed; try again.
        """
        async with self._alone(request_id, tenant, conversation_id) as own:
            before = await self._read(own, tenant, conversation_id)
            after = structs.replace(change(before), number=before.number + 1)
            await self._write(own, tenant, after)
            await self._store.delete([_slot(tenant, before)])
            return after

    async def delete(self, request_id: str, tenant: str, conversation_id: str) -> None:
        """Delete a conversation.

        Raises:
            ConversationNotFound: It is not stored.
            Unavailable: Try again.
        """
        async with self._alone(request_id, tenant, conversation_id):
            were_there = await self._store.delete(_slots(tenant, conversation_id))
        if not any(were_there):
            raise _not_found(conversation_id)

    @asynccontextmanager
    async def _pins(self, request_id: str) -> AsyncGenerator[str, None]:
        """Yield an id for pins beside the request's own, and release them at the end."""
        own = f"{request_id}-conversation"
        try:
            yield own
        finally:
            self._store.forget(own)

    @asynccontextmanager
    async def _alone(
        self, request_id: str, tenant: str, conversation_id: str
    ) -> AsyncGenerator[str, None]:
        """Wait until no other request changes the conversation, and keep others waiting.

        The lock is an object that this request creates and never seals: the store hands it on when
        the request ends, or its process.

        Raises:
            DeadlineExceeded: Another change took too long.
            StoreFull: There is no space now.
        """
        lock = _key(tenant, conversation_id, "lock")
        async with self._pins(request_id) as own:
            claim = Claim(lock, ObjectKind.RECORDS, _LOCK_NBYTES)
            (outcome,) = await self._store.acquire(own, [claim])
            if isinstance(outcome, Pending):
                (outcome,) = await self._store.wait(own, [lock], timeout_s=_LOCK_TIMEOUT_S)
            if isinstance(outcome, Failed):
                raise outcome.failure.error()
            if not isinstance(outcome, Owner):
                raise StoreFull("there is no space for a change of the conversation; try again")
            yield own

    async def _read(self, own: str, tenant: str, conversation_id: str) -> NamedConversation:
        outcomes = await self._store.acquire(own, list(map(Find, _slots(tenant, conversation_id))))
        handles = [handle for each in outcomes if (handle := handle_if_there(each)) is not None]
        if not handles:
            raise _not_found(conversation_id)
        found = [decode(_decoder, self._store.block(handle)) for handle in handles]  # copies
        await self._store.release(own, handles)
        return max(found, key=lambda each: each.number)

    async def _write(self, own: str, tenant: str, conversation: NamedConversation) -> None:
        key, data = _slot(tenant, conversation), encode(conversation)
        # A process that was killed after its write may have left the object before the last one.
        await self._store.delete([key])
        await write_record(self._store, own, key, data)


def _not_found(conversation_id: str) -> ConversationNotFound:
    return ConversationNotFound(
        f"the conversation {conversation_id!r} is not kept: it was deleted, or it had to make "
        "room; begin another one with its items",
        param="conversation",
    )


def _slot(tenant: str, conversation: NamedConversation) -> ContentKey:
    return _slots(tenant, conversation.id)[conversation.number % 2]


def _slots(tenant: str, conversation_id: str) -> list[ContentKey]:
    return [_key(tenant, conversation_id, part) for part in ("even", "odd")]


def _key(tenant: str, conversation_id: str, part: str) -> ContentKey:
    return keys.named_conversation_key(tenant=tenant, conversation_id=conversation_id, part=part)
