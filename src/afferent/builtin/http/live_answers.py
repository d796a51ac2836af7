"""Answers of a live session: written one at a time, over the engine's sequence if it has one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from msgspec import structs
from starlette.websockets import WebSocketDisconnect

from afferent.builtin.apis.realtime import events as ev
from afferent.builtin.apis.realtime import schema as api
from afferent.builtin.apis.realtime.events import ResponseEvents
from afferent.builtin.http.live_context import LiveContext
from afferent.builtin.http.live_items import LiveItems
from afferent.builtin.pipeline.collector import AnswerCollector
from afferent.builtin.pipeline.live_sequence import LiveSequence
from afferent.builtin.pipeline.live_session import FIRST, RETENTION_RATIO, Added, LiveItem
from afferent.builtin.pipeline.live_session import Settings as LiveSettings
from afferent.builtin.pipeline.request import GenerateRequest, Message, Output, TextDelta, TextPart
from afferent.builtin.pipeline.stored_turns import Turn
from afferent.errors import (
    AfferentError,
    InvalidRequest,
    MediaNotCached,
    PromptTooLong,
    SessionContinued,
    TooManyItems,
)
from afferent.items.request import ItemRequest
from afferent.proxy.request_scope import RequestScope
from afferent.proxy.responses import new_id
from afferent.proxy.statuses import failure_of

log = logging.getLogger(__name__)

_ATTEMPTS: Final = 4
"""Attempts of an answer, each with a shorter conversation."""


class LiveAnswers:
    """Writer of one connection's answers.

    Invariants:
        - One answer at a time is written, until its last events are about to be sent.
    """

    def __init__(self, context: LiveContext, items: LiveItems) -> None:
        self._context, self._items = context, items
        self._session, self._pipeline = context.log.session, context.pipeline
        self._task: asyncio.Task[None] | None = None
        self._events: ResponseEvents | None = None
        self._is_writing = False

    @property
    def _id(self) -> str:
        """Id of the last answer."""
        return "" if self._events is None else self._events.id

    async def respond(self, given: api.ResponseParams, group: asyncio.TaskGroup) -> None:
        """Begin an answer; items that come later come behind it.

        Raises:
            InvalidRequest: Another one is being written.
        """
        if self._is_writing:
            raise InvalidRequest(
                f"the response {self._id!r} is being written: cancel it, or wait for response.done",
                param="response",
            )
        if self._task is not None:
            await asyncio.wait([self._task])  # the client has its end already
        settings, has_begun = api.answered_with(self._session.settings, given), asyncio.Event()
        self._is_writing = True
        self._task = group.create_task(self._write(settings, given.metadata, has_begun))
        await has_begun.wait()

    async def cancel(self, response_id: str | None) -> None:
        """Cancel the answer.

        Raises:
            InvalidRequest: There is none, or it has another id.
        """
        if not self._is_writing or response_id not in (None, self._id):
            raise InvalidRequest("there is no such response to cancel", param="response_id")
        await self.end()

    async def end(self) -> None:
        """Cancel the answer, if there is one."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def feed_all(self) -> None:
        """Compute items as they come, unless an answer is being written."""
        has_new = self._context.has_new
        while await has_new.wait():
            has_new.clear()
            if (sequence := self._sequence()) is None:
                continue
            try:
                async with self._context.request("session.compute") as own:
                    instructions = self._session.settings.instructions
                    await sequence.feed(own, self._context.share, instructions)
            except AfferentError as error:  # the next answer reports what lasts
                log.debug("items were not computed", extra={"reason": error.code})

    # Inner steps

    async def _write(
        self, settings: LiveSettings, metadata: dict[str, str] | None, has_begun: asyncio.Event
    ) -> None:
        """Write an answer; its errors are a part of it."""
        now_s, session, send = self._context.now_s(), self._session, self._context.send
        begun = LiveItem(new_id("item_"), Turn("assistant", []), now_s, 0, "in_progress")
        collector = AnswerCollector()
        try:
            async with self._context.request("response.create", "resp_") as own:
                events = ResponseEvents(own.id, begun, self._context.id, settings, metadata)
                self._events = events
                await send(events.created())
                session.begin_answer(begun)
                has_begun.set()
                await self._write_in(own, settings, events, begun, collector)
        except asyncio.CancelledError:
            if not self._is_writing:
                return
            self._is_writing = False
            text, _ = collector.text_so_far
            item = _answered(begun, text, len(text), "incomplete")
            try:
                before = await self._keep(item)
            except SessionContinued:
                session.drop_answer(begun.id)
                raise
            except AfferentError as error:  # such as a full store: the connection goes on
                await self._give_up(error, begun, events)
                return
            item = self._items.get(begun.id)  # it may have been complete already
            reason = {"reason": "client_cancelled"}
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                await send(*events.end(item, text, "cancelled", before, None, reason))
        except (WebSocketDisconnect, SessionContinued):
            session.drop_answer(begun.id)
            raise
        except Exception as error:
            await self._give_up(error, begun, events)
        finally:
            self._is_writing = False
            has_begun.set()

    async def _give_up(self, error: Exception, begun: LiveItem, events: ResponseEvents) -> None:
        """End an answer that failed, and report it."""
        self._is_writing = False
        if self._context.log.has(begun.id):  # its time was over while it was stored
            await self._items.remove([begun.id])
        else:
            self._session.drop_answer(begun.id)
            await self._context.send(ev.event("conversation.item.deleted", item_id=begun.id))
        details = {"error": ev.error_of(failure_of(error), events.id)}
        await self._context.send(events.done("failed", details=details))

    async def _write_in(
        self,
        own: RequestScope,
        settings: LiveSettings,
        events: ResponseEvents,
        begun: LiveItem,
        collector: AnswerCollector,
    ) -> None:
        """Write an answer up to its end."""
        send = self._context.send
        await self._context.admit(own)
        async with aclosing(self._outputs(own, settings, begun.id)) as outputs:
            await send(*events.begin(self._session.before(begun.id)))
            async for output in outputs:
                collector.add(output)
                if isinstance(output, TextDelta) and output.text:
                    await send(*events.piece(output.text))
        (answer,) = collector.complete()
        usage = answer.end.usage
        item = _answered(begun, answer.text, usage.completion_tokens)
        before = await self._keep(item)
        status, details = ev.reason_of(answer)
        described = ev.usage_json(usage)
        self._is_writing = False
        await send(*events.end(item, answer.text, status, before, described, details))
        self._context.has_new.set()
        try:
            await self._items.trim()
        except SessionContinued:
            raise
        except AfferentError as error:  # the next item or answer tries again
            log.debug("items were not removed", extra={"reason": error.code})

    async def _keep(self, item: LiveItem) -> str | None:
        """Add an answer to the log; return the id of the item before it."""
        before = self._session.before(item.id)
        await self._context.log.append(Added(item, before or FIRST))
        return before

    async def _outputs(
        self, own: RequestScope, settings: LiveSettings, answer_id: str
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of an answer to the items before it."""
        for left in reversed(range(_ATTEMPTS)):
            try:
                async with aclosing(self._run(own, settings, answer_id)) as outputs:
                    async for output in outputs:
                        yield output
            except (MediaNotCached, PromptTooLong, TooManyItems) as error:
                if not left or not await self._shorten(error, own, answer_id):
                    raise
            else:
                break

    def _run(
        self, own: RequestScope, settings: LiveSettings, answer_id: str
    ) -> AsyncGenerator[Output, None]:
        """Return the outputs of an answer: of the engine's sequence, or of a request of its own."""
        request = GenerateRequest(
            request_id=own.id,
            max_tokens=settings.max_output_tokens,
            temperature=settings.temperature,
            share=own.share,
        )
        if (sequence := self._sequence()) is not None:
            return sequence.answer(request, own, answer_id, settings.instructions)
        messages = []
        if settings.instructions:
            messages.append(Message("system", (TextPart(settings.instructions),)))
        for item in self._session:
            if item.id == answer_id:
                break
            messages.append(item.turn.message)
        return self._pipeline.run(structs.replace(request, messages=tuple(messages)), own)

    def _sequence(self) -> LiveSequence | None:
        """Return the session's sequence; ``None`` if the engine or the model has none."""
        context = self._context
        if context.sequence is None and (engine := self._pipeline.live_engine()) is not None:
            limits = context.settings.limits
            context.sequence = LiveSequence(
                *(self._pipeline, engine, self._session, context.id),
                most_items=lambda modality: limits.of(modality).max_items,
            )
        return context.sequence

    async def _shorten(self, error: AfferentError, own: RequestScope, answer_id: str) -> bool:
        """Remove items that can't be a part of the prompt; return whether there were any."""
        session, ids = self._session, list[str]()
        if isinstance(error, MediaNotCached):
            with_media = [item for item in session if item.turn.message.media]
            media = tuple(part for item in with_media for part in item.turn.message.media)
            gone = await self._pipeline.missing(ItemRequest(own.id, media, own.share))
            ids = [item.id for item in with_media if not gone.isdisjoint(item.turn.message.media)]
        elif session.settings.may_truncate:
            # Without a sequence in the engine, the limits of one request are those of a session.
            ids = [item.id for item in session if item.id != answer_id]
            ids = ids[: len(ids) - int(RETENTION_RATIO * len(ids))]
        await self._items.forget(ids)
        return bool(ids)


def _answered(begun: LiveItem, text: str, num_tokens: int, status: Any = "completed") -> LiveItem:
    turn = Turn.of(Message("assistant", (TextPart(text),)), iter(()))
    return LiveItem(begun.id, turn, begun.arrived_s, num_tokens, status)
