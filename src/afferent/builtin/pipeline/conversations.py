"""Stored conversations that requests can continue; in the store, so all frontends share them.

A conversation is a normal object: it is evicted when it is the least recently used, so the arena
bounds all of them. It contains only digests of its media. Their features are separate objects,
and may be evicted earlier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec
import numpy as np
from msgspec import Struct, structs

from afferent import keys
from afferent.builtin.pipeline.call import Call
from afferent.builtin.pipeline.collector import AnswerCollector
from afferent.builtin.pipeline.request import CallPart, End, Message, Output, Part, TextPart
from afferent.errors import AfferentError, Param, ResponseNotFound
from afferent.items.acquire import handle_if_there
from afferent.items.request import Detail, DocumentPart, MediaPart, PageRange, SeenMedia
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Find, SealItem
from afferent.telemetry.registry import counter
from afferent.types import (
    ContentKey,
    CreateItem,
    KeyBytes,
    KiB,
    Modality,
    ObjectKind,
    decode,
    encode,
)

log = logging.getLogger(__name__)

MAX_NBYTES = 256 * KiB
"""Limit of one conversation; a longer one is answered, and not stored."""
MAX_PARTS = 4096
"""Limit of messages and parts in one conversation: each takes time to parse, even a short one."""
_KEEP_TIMEOUT_S = 2.0
"""Limit of the wait for the store at the end of an answer."""

_WHY = (
    f"it was not to be stored, its conversation has more than {MAX_NBYTES} bytes or {MAX_PARTS} "
    "messages and parts, or it had to make room; send the conversation's messages again"
)


class _Text(Struct, frozen=True, array_like=True, tag="text", forbid_unknown_fields=True):
    text: str


class _Media(Struct, frozen=True, array_like=True, tag="media", forbid_unknown_fields=True):
    modality: Modality
    digest: KeyBytes
    detail: Detail


class _Document(Struct, frozen=True, array_like=True, tag="document", forbid_unknown_fields=True):
    """Document by the digest of its file: its pages are known as long as the store has them."""

    digest: KeyBytes
    first: int
    last: int
    dpi: int
    detail: Detail


class _Call(Struct, frozen=True, array_like=True, tag="call", forbid_unknown_fields=True):
    name: str
    arguments: str


_Kept = _Text | _Media | _Document | _Call


class Turn(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Stored message: its text, and the digests of its media."""

    role: str
    parts: list[_Kept]

    @property
    def message(self) -> Message:
        """Internal message; its media are digests of known items."""
        return Message(self.role, tuple(_part(part) for part in self.parts))

    @classmethod
    def of(cls, message: Message, digests: Iterator[bytes]) -> Turn:
        """Create it from a message, and take the digests of its media."""
        return cls(message.role, [_kept(part, digests) for part in message.parts])


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

    async def resume(self, call: Call) -> Call:
        """Return the call with all messages that precede its own.

        Raises:
            ResponseNotFound: The answer that it continues is not stored.
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
        if not before:
            return call
        return replace(
            call, generate=structs.replace(generate, messages=before + generate.messages)
        )

    async def follow(
        self, call: Call, outputs: AsyncGenerator[Output, None]
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs unchanged; the conversation is stored before the end is yielded.

        A failure to store it is not a failure of the request.

        Args:
            call: As returned by `resume`.
        """
        collector = AnswerCollector()
        async with aclosing(outputs):
            async for output in outputs:
                collector.add(output)
                if isinstance(output, End):
                    await self._keep(call, collector)
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
                await self._write(generate.request_id, key, data)
        except (AfferentError, TimeoutError) as error:
            log.warning("a conversation was not kept", extra={"reason": type(error).__name__})
            CONVERSATIONS.labels("no_room").inc()
        else:
            CONVERSATIONS.labels("kept").inc()
        finally:
            # The engine has its own pins; the request has no others.
            self._store.forget(generate.request_id)

    async def _write(self, request_id: str, key: ContentKey, data: bytes) -> None:
        wanted = CreateItem(ObjectKind.RECORDS, len(data), key)
        (handle,) = await self._store.create(request_id, [wanted])
        np.copyto(np.frombuffer(self._store.block(handle), np.uint8), np.frombuffer(data, np.uint8))
        await self._store.seal(request_id, [SealItem(handle, len(data))])


def not_found(response_id: str, *, param: Param | None = None) -> ResponseNotFound:
    return ResponseNotFound(f"the response {response_id!r} is not kept: {_WHY}", param=param)


def _kept(part: Part, digests: Iterator[bytes]) -> _Kept:
    match part:
        case CallPart(name, arguments):
            return _Call(name, arguments)
        case TextPart(text):
            return _Text(text)
        case MediaPart():
            return _Media(part.modality, next(digests), part.detail)
        case DocumentPart(pages=pages, dpi=dpi, detail=detail):
            return _Document(next(digests), pages.first, pages.last, dpi, detail)


def _part(part: _Kept) -> Part:
    match part:
        case _Call(name, arguments):
            return CallPart(name, arguments)
        case _Text(text):
            return TextPart(text)
        case _Media(modality, digest, detail):
            return MediaPart(modality, SeenMedia(digest), detail)
        case _Document(digest, first, last, dpi, detail):
            return DocumentPart(SeenMedia(digest), PageRange(first, last), dpi, detail)
