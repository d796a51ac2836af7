"""Stored conversations that requests can continue; in the store, so all frontends share them.

A conversation is a normal object: it is evicted when it is the least recently used, so the arena
bounds all of them. It contains only digests of its media. Their features are separate objects,
and may be evicted earlier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec
from msgspec import Struct, structs

from afferent import keys
from afferent.builtin.pipeline.call import Answer, Call
from afferent.builtin.pipeline.collector import AnswerCollector
from afferent.builtin.pipeline.named_conversations import (
    NamedConversations,
    NewItem,
    num_media,
)
from afferent.builtin.pipeline.request import CallPart, End, Message, Output, TextPart
from afferent.builtin.pipeline.stored_turns import MAX_NBYTES, MAX_PARTS, Turn, write_record
from afferent.errors import AfferentError, ConversationNotFound, Param, ResponseNotFound
from afferent.items.acquire import handle_if_there
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Find
from afferent.telemetry.registry import counter
from afferent.types import decode, encode

log = logging.getLogger(__name__)

_KEEP_TIMEOUT_S = 2.0
"""Limit of the wait for the store at the end of an answer."""

_WHY = (
    f"it was not to be stored, its conversation has more than {MAX_NBYTES} bytes or {MAX_PARTS} "
    "messages and parts, or it had to make room; send the conversation's messages again"
)


class Conversation(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All messages with the last answer, and that answer as JSON of the API."""

    turns: list[Turn]
    answer: bytes

    @property
    def messages(self) -> tuple[Message, ...]:
        """Internal messages; their media are digests of known items."""
        return tuple(turn.message for turn in self.turns)

    @classmethod
    def of(
        cls, messages: Sequence[Message], digests: Sequence[bytes], answer: bytes
    ) -> Conversation:
        """Create it from messages.

        Args:
            digests: Digests of the media of all messages, in order.
        """
        left = iter(digests)
        return cls([Turn.of(message, left) for message in messages], answer)


_decoder = msgspec.msgpack.Decoder(Conversation)


CONVERSATIONS = counter(
    "afferent_conversations_total",
    "Conversations by outcome: kept, too_long or no_room; resumed or unknown",
    outcome=("kept", "too_long", "no_room", "resumed", "unknown"),
)


class History:
    """Conversations in one store."""

    def __init__(self, store: AsyncDaemonStore) -> None:
        self._store = store
        self.named = NamedConversations(store)
        """Conversations with an id of their own."""

    async def resume(self, call: Call) -> Call:
        """Return the call with all messages that precede its own.

        Raises:
            ResponseNotFound: The answer that it continues is not stored.
            ConversationNotFound: The conversation that it continues is not stored.
            InvalidRequest: That conversation is too long.
            Unavailable: Try again.
        """
        generate = call.generate
        before: tuple[Message, ...] = (call.instructions,) if call.instructions else ()
        if call.previous_id is not None:
            found = await self.find(generate.request_id, generate.tenant, call.previous_id)
            CONVERSATIONS.labels("unknown" if found is None else "resumed").inc()
            if found is None:
                raise not_found(call.previous_id, param=Param.PREVIOUS_ANSWER)
            before += found.messages
        elif call.conversation_id is not None:
            owner = (generate.request_id, generate.tenant)
            conversation = await self.named.find(*owner, call.conversation_id)
            conversation.check_room(generate.messages)
            before += conversation.messages
        if not before:
            return call
        return replace(
            call, generate=structs.replace(generate, messages=before + generate.messages)
        )

    async def follow(
        self, call: Call, outputs: AsyncGenerator[Output, None]
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs unchanged; the conversation is stored before the end is yielded.

        A failure to store it is not a failure of the request, unless the conversation has an id:
        its client will not send the messages again.

        Args:
            call: As returned by `resume`.

        Raises:
            Unavailable: The conversation with an id is as it was before; try again.
        """
        collector = AnswerCollector()
        async with aclosing(outputs):
            async for output in outputs:
                collector.add(output)
                if isinstance(output, End):
                    if call.is_kept:
                        await self._keep(call, collector)
                    if call.conversation_id is not None:
                        await self._extend(call, call.conversation_id, collector)
                yield output

    async def find(self, request_id: str, tenant: str, response_id: str) -> Conversation | None:
        """Return the conversation that ends with the answer of this id.

        Raises:
            Unavailable: Try again.
        """
        key = keys.conversation_key(tenant=tenant, response_id=response_id)
        wanted = Find(key)
        (outcome,) = await self._store.acquire(request_id, [wanted])
        if (handle := handle_if_there(outcome)) is None:
            return None
        found = decode(_decoder, self._store.block(handle))  # a copy
        await self._store.release(request_id, [handle])
        return found

    def forget(self, request_id: str) -> None:
        """Release the pins of a request that ended within a `find`."""
        self._store.forget(request_id)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a conversation; return whether it existed.

        Raises:
            StoreUnavailable: Try again.
        """
        key = keys.conversation_key(tenant=tenant, response_id=response_id)
        (was_there,) = await self._store.delete([key])
        return was_there

    async def _keep(self, call: Call, collector: AnswerCollector) -> None:
        generate, (answer,) = call.generate, collector.complete()
        said = generate.messages[1:] if call.instructions else generate.messages
        text = (TextPart(answer.text),) if answer.text or not answer.calls else ()
        last = Message("assistant", (*text, *answer.calls))
        if generate.template.continues_last:
            said, begun = said[:-1], said[-1]
            last = Message("assistant", (*begun.parts, *last.parts))
        if sum(1 + len(message.parts) for message in (*said, last)) > MAX_PARTS:
            CONVERSATIONS.labels("too_long").inc()
            return
        body = msgspec.json.encode(call.reply.whole([answer]))
        data = encode(Conversation.of((*said, last), collector.digests, body))
        if len(data) > MAX_NBYTES:
            CONVERSATIONS.labels("too_long").inc()
            return
        key = keys.conversation_key(tenant=generate.tenant, response_id=generate.request_id)
        try:
            async with asyncio.timeout(_KEEP_TIMEOUT_S):
                await write_record(self._store, generate.request_id, key, data)
        except (AfferentError, TimeoutError) as error:
            log.warning("a conversation was not kept", extra={"reason": type(error).__name__})
            CONVERSATIONS.labels("no_room").inc()
        else:
            CONVERSATIONS.labels("kept").inc()
        finally:
            # The engine has its own pins; the request has no others.
            self._store.forget(generate.request_id)

    async def _extend(self, call: Call, conversation_id: str, collector: AnswerCollector) -> None:
        """Append the messages of a request and its answer to a conversation with an id."""
        generate, (answer,) = call.generate, collector.complete()
        num_own = num_media(item.message for item in call.said)
        digests = iter(collector.digests[len(collector.digests) - num_own :])
        new = [item.stored(digests) for item in (*call.said, *_answer_items(call, answer))]
        try:
            await self.named.change(
                *(generate.request_id, generate.tenant, conversation_id),
                lambda conversation: conversation.with_items(new),
            )
        except ConversationNotFound:
            log.info("a conversation ended before its next answer")


def _answer_items(call: Call, answer: Answer) -> list[NewItem]:
    """Return the items of an answer, with the ids that its client knows."""
    return [
        NewItem(
            item["type"],
            Message("assistant", (CallPart(item["name"], item["arguments"]),)),
            call_id=item["call_id"],
            id=item["id"],
        )
        if item["type"] == "function_call"
        else NewItem(
            "message",
            Message("assistant", (TextPart(answer.text),)),
            role="assistant",
            id=item["id"],
        )
        for item in call.reply.whole([answer])["output"]
    ]


def not_found(response_id: str, *, param: Param | None = None) -> ResponseNotFound:
    return ResponseNotFound(f"the response {response_id!r} is not kept: {_WHY}", param=param)
