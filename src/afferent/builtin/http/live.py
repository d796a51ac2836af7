"""Live sessions over WebSockets: OpenAI Realtime.

A connection has three tasks. One receives the client's events and begins to make the features of
new items at once, several at a time. One applies all events in their order. One writes an answer,
while further items come.

All state of a session is in its `LiveLog`, so that another frontend can continue it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

from msgspec import structs
from starlette.requests import Request
from starlette.types import Message as AsgiMessage
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from afferent.admission.gate import Gate
from afferent.admission.shares import NAMELESS, Share
from afferent.builtin.apis.realtime import events as ev
from afferent.builtin.apis.realtime import schema as api
from afferent.builtin.apis.realtime.events import REALTIME, ResponseEvents
from afferent.builtin.apis.schema import check_model
from afferent.builtin.pipeline.collector import AnswerCollector
from afferent.builtin.pipeline.conversations import Turn
from afferent.builtin.pipeline.live_log import LiveLog
from afferent.builtin.pipeline.live_sequence import LiveSequence
from afferent.builtin.pipeline.live_session import (
    FIRST,
    RETENTION_RATIO,
    Added,
    Configured,
    LiveItem,
    Removed,
)
from afferent.builtin.pipeline.live_session import Settings as LiveSettings
from afferent.builtin.pipeline.pipeline import Pipeline
from afferent.builtin.pipeline.request import GenerateRequest, Message, Output, TextDelta, TextPart
from afferent.errors import (
    AfferentError,
    InvalidRequest,
    MediaNotCached,
    NoPermitLeft,
    PromptTooLong,
    SessionContinued,
    TooManyItems,
)
from afferent.items.request import ItemRequest, MediaPart
from afferent.media.body.received import ReceivedBody
from afferent.proxy import counting
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.auth import Access
from afferent.proxy.body import BodyReader
from afferent.proxy.failures import failure_of
from afferent.proxy.request_scope import RequestScope, RequestScopes
from afferent.proxy.responses import new_id, refusal
from afferent.telemetry.registry import counter
from afferent.types import Modality

log = logging.getLogger(__name__)

PATH: Final = REALTIME.path
_MOST_PREPARING: Final = 32
"""Items of a connection whose features are being made; further ones are refused at once, so that a
camera that is too fast for the server loses frames and gets no delay."""
_MOST_WAITING: Final = 256
"""Events of a connection that wait for the ones before them; beyond, reading pauses."""
_KEY_PROTOCOL: Final = "openai-insecure-api-key."
"""Start of a subprotocol with a key: browsers can't set the headers of a WebSocket."""
_OPEN_PROTOCOL: Final = "realtime"
_ATTEMPTS: Final = 4
"""Attempts of an answer, each with a shorter conversation."""
_GONE, _TAKEN_OVER, _FAILED = 1001, 4409, 1011

SESSIONS = counter(
    "afferent_live_sessions_total",
    "Live sessions by their begin: new, or continued from a stored one",
    begin=("new", "continued"),
)
LIVE_ITEMS = counter(
    "afferent_live_items_total",
    "Items of live sessions by outcome: added, refused, or removed by the window or the context",
    outcome=("added", "refused", "removed"),
)


class LiveEndpoint:
    """Endpoint for live sessions."""

    def __init__(
        self,
        pipeline: Pipeline,
        gate: Gate,
        settings: AppSettings,
        scopes: RequestScopes,
        access: Access,
        *,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Create it.

        Args:
            now_s: Returns the Unix time.
        """
        self.pipeline, self.gate, self.settings = pipeline, gate, settings
        self.scopes, self.access, self.now_s = scopes, access, now_s
        counting.APIS.add(REALTIME.name)

    async def serve(self, socket: WebSocket) -> None:
        """Serve a client until it leaves."""
        what = f"WebSocket {PATH}"
        with self.scopes.open(
            what, socket.scope["headers"], id_prefix=REALTIME.id_prefix, api=REALTIME.name
        ) as own:
            try:
                session = await self._open(socket, own)
                async with session:
                    await session.run()
            except WebSocketDisconnect:
                own.leave()
            except Exception as error:
                failure = own.fail(error)
                with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # it may be gone
                    if socket.application_state is WebSocketState.CONNECTING:
                        await socket.send_denial_response(refusal(failure, own.id, REALTIME))
                    else:
                        await socket.send_text(ev.error_event(failure, None, request_id=own.id))
                        is_taken = isinstance(failure, SessionContinued)
                        await socket.close(_TAKEN_OVER if is_taken else _FAILED)

    async def _open(self, socket: WebSocket, own: RequestScope) -> _Connection:
        """Return the session of a new connection, which is not accepted yet.

        Raises:
            NotAuthenticated: There is no key, or an unknown one.
            ModelNotFound: The query names another model.
            SessionNotFound: The query names a session that is not stored.
        """
        query, store = socket.query_params, self.pipeline.store
        headers = _headers(socket)
        tenant = self.access.tenant_of(headers)
        name = tenant.name if tenant is not None else ""
        check_model(query.get("model", self.settings.model_name), self.settings.model_names)
        session_id = query.get("session_id")
        if session_id is None:
            state = LiveLog(store, tenant=name, session_id=own.id)
            await state.append(Configured(LiveSettings()))
        else:
            if len(session_id) > 64:
                raise InvalidRequest("a session's id has at most 64 characters", param="session_id")
            state = await LiveLog.resume(store, tenant=name, session_id=session_id)
        SESSIONS.labels("new" if session_id is None else "continued").inc()
        return _Connection(self, socket, headers, state, session_id or own.id)


class _Job:
    """Event of a client that is applied in its turn."""

    def __init__(self, event_id: str | None) -> None:
        self.event_id = event_id
        self.turn = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class _Connection:
    """Connection of a client to a session.

    Invariants:
        - Events are applied one at a time, in their order.
        - One answer at a time is written.
        - An error of an event is an event; it never ends the connection.
    """

    def __init__(
        self,
        endpoint: LiveEndpoint,
        socket: WebSocket,
        headers: Mapping[str, str],
        state: LiveLog,
        session_id: str,
    ) -> None:
        self._endpoint, self._socket, self._headers = endpoint, socket, headers
        self._log, self._session, self._id = state, state.session, session_id
        self._pipeline, self._settings = endpoint.pipeline, endpoint.settings
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue(_MOST_WAITING)
        self._num_preparing = 0
        self._group: asyncio.TaskGroup
        self._audio = bytearray()
        self._response: asyncio.Task[None] | None = None
        self._response_id = ""
        self._sequence: LiveSequence | None = None
        self._has_new = asyncio.Event()
        self._has_new.set()  # items of a session that is continued
        self._share = NAMELESS

    async def __aenter__(self) -> _Connection:
        offered = self._socket.scope.get("subprotocols", ())
        await self._socket.accept(_OPEN_PROTOCOL if _OPEN_PROTOCOL in offered else None)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._log.close()
        if self._sequence is not None:
            self._sequence.close()

    async def run(self) -> None:
        """Apply events until the client leaves."""
        await self._send(ev.event("session.created", session=self._described()))
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                applying = group.create_task(self._apply_all())
                feeding = group.create_task(self._feed_all())
                try:
                    await self._receive_all(group)
                finally:
                    applying.cancel()
                    feeding.cancel()
                    await self._end_response()
        except* WebSocketDisconnect:
            raise WebSocketDisconnect(_GONE) from None
        except* SessionContinued as errors:
            raise errors.exceptions[0] from None

    # Events

    async def _receive_all(self, group: asyncio.TaskGroup) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", _GONE))
            text = message.get("text")
            job = _Job(None)
            work = self._begin(job, None if text is None else text.encode("utf-8", "replace"))
            job.task = group.create_task(self._reporting(job, work))
            await self._jobs.put(job)

    async def _apply_all(self) -> None:
        while True:
            job = await self._jobs.get()
            job.turn.set()
            if job.task is not None:
                await job.task

    async def _reporting(self, job: _Job, work: Awaitable[None]) -> None:
        """Do a job; its error becomes an event."""
        try:
            await work
        except (WebSocketDisconnect, SessionContinued):
            raise
        except Exception as error:
            await self._send(ev.error_event(failure_of(error), job.event_id, request_id=self._id))

    def _begin(self, job: _Job, text: bytes | None) -> Awaitable[None]:
        """Return the work of an event; that of an item begins before its turn."""
        if text is None:
            return self._refuse(job, InvalidRequest("an event is text, not bytes"))
        try:
            head = api.read_head(text)
        except AfferentError as error:
            return self._refuse(job, error)
        job.event_id = head.event_id
        if head.type != api.ItemCreate.__struct_config__.tag:
            return self._apply(job, text)
        if self._num_preparing >= _MOST_PREPARING:
            LIVE_ITEMS.labels("refused").inc()
            job.turn.set()  # an answer at once is the point of it
            why = f"{_MOST_PREPARING} items of this session are being prepared; send it again"
            return self._refuse(job, NoPermitLeft(why))
        self._num_preparing += 1
        return self._create(job, text)

    async def _refuse(self, job: _Job, error: AfferentError) -> None:
        await job.turn.wait()
        raise error

    async def _apply(self, job: _Job, text: bytes) -> None:
        await job.turn.wait()
        match event := api.read_event(text):
            case api.SessionUpdate(session=given):
                await self._update(given)
            case api.ItemRetrieve(item_id=item_id):
                item = ev.item_json(self._item(item_id))
                await self._send(ev.event("conversation.item.retrieved", item=item))
            case api.ItemDelete(item_id=item_id):
                self._item(item_id)
                await self._remove([item_id])
            case api.ItemTruncate(item_id=item_id):
                self._item(item_id)
                why = "the item has no audio of an answer, which alone can be truncated"
                raise InvalidRequest(why, param="item_id")
            case api.ResponseCreate(response=given):
                await self._respond(given or api.ResponseParams())
            case api.ResponseCancel(response_id=response_id):
                await self._cancel(response_id)
            case api.AudioAppend(audio=samples):
                self._hear(samples)
            case api.AudioCommit():
                await self._commit_audio()
            case api.AudioClear():
                self._audio.clear()
                await self._send(ev.event("input_audio_buffer.cleared"))
            case _:
                raise InvalidRequest(f"{type(event).__name__} is not due here")

    async def _send(self, *texts: str) -> None:
        for text in texts:
            await self._socket.send_text(text)

    # The session

    def _described(self) -> dict[str, Any]:
        session = self._session
        return ev.session_json(
            session.settings,
            session_id=self._id,
            model=self._settings.model_name,
            num_items=len(session),
            last_id=session.last_id,
        )

    async def _update(self, given: api.SessionParams) -> None:
        if isinstance(given.model, str):
            check_model(given.model, self._settings.model_names)
        settings = api.updated(self._session.settings, given)
        await self._log.append(Configured(settings))
        await self._send(ev.event("session.updated", session=self._described()))
        await self._trim()

    # Items

    def _item(self, item_id: str) -> LiveItem:
        item = self._session.get(item_id)
        if item is None:
            raise InvalidRequest(f"there is no item {item_id!r}", param="item_id")
        return item

    async def _create(self, job: _Job, text: bytes) -> None:
        """Add an item: its features are made at once, and it is added in its turn."""
        is_prepared = False
        try:
            with self._scope("conversation.item.create", "event-") as own:
                async with self._answering(own):
                    body, share = await self._read(own, text)
                    event = api.read_event(body.json)
                    if not isinstance(event, api.ItemCreate):
                        raise InvalidRequest("an event has one type", param="type")
                    message = api.read_item(event.item, body.media)
                    item = await self._prepared(own, share, event.item.id, message)
                    self._num_preparing -= 1
                    is_prepared = True
                await job.turn.wait()
                await self._add(item, event.previous_item_id)
        except AfferentError:
            LIVE_ITEMS.labels("refused").inc()
            raise
        finally:
            self._num_preparing -= not is_prepared

    async def _prepared(
        self, own: RequestScope, share: Share, item_id: str | None, message: Message
    ) -> LiveItem:
        """Return a new item, with features."""
        self._share = share
        request = GenerateRequest(request_id=own.id, messages=(message,), share=share)
        digests, num_tokens = await self._pipeline.make_known(request, own)
        turn = Turn.of(message, iter(digests))
        return LiveItem(item_id or new_id("item_"), turn, self._endpoint.now_s(), num_tokens)

    async def _add(self, item: LiveItem, previous_id: str | None) -> None:
        session = self._session
        if item.id in session or item.id == FIRST:
            raise InvalidRequest(f"there is an item {item.id!r} already", param="item.id")
        if previous_id not in (None, FIRST) and previous_id not in session:
            raise InvalidRequest(f"there is no item {previous_id!r}", param="previous_item_id")
        most = self._most_tokens
        if not session.settings.may_truncate and session.num_tokens + item.num_tokens > most:
            raise PromptTooLong(
                f"with this item of {item.num_tokens} tokens, the conversation has "
                f"{session.num_tokens + item.num_tokens}; the model has room for {most}, and "
                "truncation is disabled"
            )
        await self._log.append(Added(item, previous_id))
        LIVE_ITEMS.labels("added").inc()
        if self._sequence is not None and item.id != session.last_id:
            self._sequence.inserted()
        before, described = session.before(item.id), ev.item_json(item)
        for kind in ("conversation.item.added", "conversation.item.done"):
            await self._send(ev.event(kind, previous_item_id=before, item=described))
        await self._trim()
        self._has_new.set()

    @property
    def _most_tokens(self) -> int:
        """Limit of the items' tokens: the rest of the context is for instructions and answers."""
        info = self._pipeline.engine.info
        if info is None:
            return 2**62
        settings = self._session.settings
        reserved = len(settings.instructions) + (settings.max_output_tokens or 0)
        return max(info.max_model_len - max(reserved, info.max_model_len // 8), 1)

    async def _trim(self) -> None:
        """Remove the items that the window or the model's context has no room for."""
        now_s = self._endpoint.now_s()
        gone = self._session.overdue(now_s, most_tokens=self._most_tokens)
        if gone:
            await self._remove(gone)
            LIVE_ITEMS.labels("removed").inc(len(gone))

    async def _remove(self, ids: list[str]) -> None:
        await self._log.append(Removed(ids))
        if self._sequence is not None:
            self._sequence.removed(ids)
        await self._send(*(ev.event("conversation.item.deleted", item_id=each) for each in ids))

    # Audio

    def _hear(self, samples: bytes) -> None:
        most = self._settings.limits.max_audio_nbytes
        if len(self._audio) + len(samples) > most:
            raise InvalidRequest(
                f"the audio buffer would have more than {most} bytes (--max-audio-nbytes): "
                "commit or clear it",
                param="audio",
            )
        self._audio += samples

    async def _commit_audio(self) -> None:
        """Add the buffer as an item."""
        file = api.as_wav(self._audio, "audio")
        message = Message("user", (MediaPart(Modality.AUDIO, file),))
        with self._scope("input_audio_buffer.commit", "event-") as own:
            async with self._answering(own):
                share = await own.admit(self._headers, self._socket.scope)
                item = await self._prepared(own, share, None, message)
            self._audio.clear()
            before = self._session.last_id
            await self._send(
                ev.event("input_audio_buffer.committed", previous_item_id=before, item_id=item.id)
            )
            await self._add(item, None)

    # Answers

    async def _respond(self, given: api.ResponseParams) -> None:
        if self._response is not None and not self._response.done():
            raise InvalidRequest(
                f"the response {self._response_id!r} is being written: cancel it, or wait for "
                "response.done",
                param="response",
            )
        settings = api.answered_with(self._session.settings, given)
        has_begun = asyncio.Event()
        self._response = self._group.create_task(self._write(settings, given.metadata, has_begun))
        await has_begun.wait()  # items that come later come behind the answer

    async def _cancel(self, response_id: str | None) -> None:
        task = self._response
        if task is None or task.done() or response_id not in (None, self._response_id):
            raise InvalidRequest("there is no such response to cancel", param="response_id")
        await self._end_response()

    async def _end_response(self) -> None:
        if self._response is not None and not self._response.done():
            self._response.cancel()
            await asyncio.wait([self._response])

    async def _write(
        self, settings: LiveSettings, metadata: dict[str, str] | None, has_begun: asyncio.Event
    ) -> None:
        """Write an answer; its errors are a part of it."""
        try:
            with self._scope("response.create", "resp_") as own:
                await self._write_in(own, settings, metadata, has_begun)
        finally:
            has_begun.set()

    async def _write_in(
        self,
        own: RequestScope,
        settings: LiveSettings,
        metadata: dict[str, str] | None,
        has_begun: asyncio.Event,
    ) -> None:
        session, self._response_id = self._session, own.id
        begun = LiveItem(
            new_id("item_"), Turn("assistant", []), self._endpoint.now_s(), 0, "in_progress"
        )
        events = ResponseEvents(
            own.id, begun, session_id=self._id, settings=settings, metadata=metadata
        )
        await self._send(events.created())
        collector = AnswerCollector()
        before = session.last_id
        session.begin_answer(begun)
        has_begun.set()
        try:
            async with self._answering(own):
                share = await own.admit(self._headers, self._socket.scope)
                async with aclosing(self._outputs(own, share, settings, begun.id)) as outputs:
                    await self._send(*events.begin(before))
                    async for output in outputs:
                        collector.add(output)
                        if isinstance(output, TextDelta) and output.text:
                            await self._send(*events.piece(output.text))
            (answer,) = collector.complete()
            status, details = ev.reason_of(answer)
            usage = answer.end.usage
            item = self._answered(begun, answer.text, usage.completion_tokens)
            before = session.before(begun.id)
            await self._log.append(Added(item, before or FIRST))
            described = ev.usage_json(usage)
            await self._send(
                *events.end(item, answer.text, status, before, usage=described, details=details)
            )
            await self._trim()
            self._has_new.set()
        except asyncio.CancelledError:
            text, _ = collector.text_so_far
            item = self._answered(begun, text, len(text), "incomplete")
            before = session.before(begun.id)
            await self._log.append(Added(item, before or FIRST))
            reason = {"reason": "client_cancelled"}
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                await self._send(
                    *events.end(item, text, "cancelled", before, usage=None, details=reason)
                )
            own.leave()
        except (WebSocketDisconnect, SessionContinued):
            session.drop_answer(begun.id)
            raise
        except Exception as error:
            session.drop_answer(begun.id)
            failure = own.fail(error)
            await self._send(
                ev.event("conversation.item.deleted", item_id=begun.id),
                events.done("failed", details={"error": ev.error_of(failure, own.id)}),
            )

    def _answered(
        self, begun: LiveItem, text: str, num_tokens: int, status: Any = "completed"
    ) -> LiveItem:
        turn = Turn.of(Message("assistant", (TextPart(text),)), iter(()))
        return LiveItem(begun.id, turn, begun.arrived_s, num_tokens, status)

    async def _outputs(
        self, own: RequestScope, share: Share, settings: LiveSettings, answer_id: str
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of an answer to the items before it."""
        for left in reversed(range(_ATTEMPTS)):
            try:
                async with aclosing(self._run(own, share, settings, answer_id)) as outputs:
                    async for output in outputs:
                        yield output
            except (MediaNotCached, PromptTooLong, TooManyItems) as error:
                if not left or not await self._shorten(error, own, share, answer_id):
                    raise
            else:
                break

    def _run(
        self, own: RequestScope, share: Share, settings: LiveSettings, answer_id: str
    ) -> AsyncGenerator[Output, None]:
        """Return the outputs of an answer: of the engine's sequence, or of a request of its own."""
        request = GenerateRequest(
            request_id=own.id,
            max_tokens=settings.max_output_tokens,
            temperature=settings.temperature,
            share=share,
        )
        if (sequence := self._sequence_of_engine()) is not None:
            return sequence.answer(request, own, answer_id, settings.instructions)
        messages = []
        if settings.instructions:
            messages.append(Message("system", (TextPart(settings.instructions),)))
        for item in self._session:
            if item.id == answer_id:
                break
            messages.append(item.turn.message)
        return self._pipeline.run(structs.replace(request, messages=tuple(messages)), own)

    # The engine's sequence

    def _sequence_of_engine(self) -> LiveSequence | None:
        """Return the session's sequence; ``None`` if the engine or the model has none."""
        if self._sequence is None and (engine := self._pipeline.live_engine()) is not None:
            limits = self._settings.limits
            self._sequence = LiveSequence(
                *(self._pipeline, engine, self._session, self._id),
                most_items=lambda modality: limits.of(modality).max_items,
            )
        return self._sequence

    async def _feed_all(self) -> None:
        """Compute items as they come, unless an answer is being written."""
        while True:
            await self._has_new.wait()
            self._has_new.clear()
            sequence = self._sequence_of_engine()
            if sequence is None:
                continue
            try:
                with self._scope("session.compute", "event-") as own:
                    async with self._answering(own):
                        instructions = self._session.settings.instructions
                        await sequence.feed(own, self._share, instructions)
            except AfferentError as error:  # the next answer reports what lasts
                log.debug("items were not computed", extra={"reason": error.code})

    async def _shorten(
        self, error: AfferentError, own: RequestScope, share: Share, answer_id: str
    ) -> bool:
        """Remove items that can't be a part of the prompt; return whether there were any."""
        session = self._session
        if isinstance(error, MediaNotCached):
            with_media = [item for item in session if item.turn.message.media]
            media = tuple(part for item in with_media for part in item.turn.message.media)
            gone = await self._pipeline.missing(ItemRequest(own.id, media, share))
            ids = [item.id for item in with_media if not gone.isdisjoint(item.turn.message.media)]
        elif session.settings.may_truncate:
            # Without a sequence in the engine, the limits of one request are those of a session.
            num_kept = int(RETENTION_RATIO * sum(item.id != answer_id for item in session))
            ids = [item.id for item in session if item.id != answer_id]
            ids = ids[: len(ids) - num_kept]
        else:
            ids = []
        if ids:
            await self._remove(ids)
            LIVE_ITEMS.labels("removed").inc(len(ids))
        return bool(ids)

    # Requests

    def _scope(self, what: str, id_prefix: str) -> Any:
        headers = self._socket.scope["headers"]
        return self._endpoint.scopes.open(what, headers, id_prefix=id_prefix, api=REALTIME.name)

    @contextlib.asynccontextmanager
    async def _answering(self, own: RequestScope) -> AsyncIterator[None]:
        """Context of a request's work: within its time, and with its failure noted."""
        try:
            async with asyncio.timeout_at(own.deadline):
                yield
        except Exception as error:
            raise own.fail(error) from error

    async def _read(self, own: RequestScope, text: bytes) -> tuple[ReceivedBody, Share]:
        """Read an event as a body: its media are cut out, within the limits of a request."""
        share = await own.admit(self._headers, self._socket.scope)
        own.trace.media = "unknown"
        limits = self._settings.limits_of(share)

        async def receive() -> AsgiMessage:
            return {"type": "http.request", "body": text, "more_body": False}

        reader = BodyReader(
            *(self._pipeline.store, self._endpoint.gate, own.id),
            *(limits, api.MEDIA_KEYS),
            tenant=share.tenant,
        )
        length = str(len(text)).encode()
        scope = {"type": "http", "headers": [(b"content-length", length)]}
        return await reader.read(Request(scope, receive)), share


def _headers(socket: WebSocket) -> Mapping[str, str]:
    """Return the headers of a handshake, with the key that a browser sends as a subprotocol."""
    headers = dict(socket.headers)
    for offered in socket.scope.get("subprotocols", ()):
        if offered.startswith(_KEY_PROTOCOL):
            headers.setdefault("authorization", f"Bearer {offered.removeprefix(_KEY_PROTOCOL)}")
    return headers
