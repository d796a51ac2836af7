"""Live sessions over WebSockets, OpenAI Realtime: connections, and their events in order.

A connection has three tasks. One receives the client's events and begins to make the features of
new items at once, several at a time. One applies all events in their order. One writes an answer,
while further items come.

All state of a session is in its `LiveLog`, so that another frontend can continue it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from starlette.websockets import WebSocket, WebSocketDisconnect

from afferent.admission.gate import Gate
from afferent.builtin.apis.realtime import events as ev
from afferent.builtin.apis.realtime import schema as api
from afferent.builtin.apis.realtime.events import REALTIME
from afferent.builtin.apis.schema import check_model
from afferent.builtin.http.live_answers import LiveAnswers
from afferent.builtin.http.live_context import LiveContext
from afferent.builtin.http.live_items import LIVE_ITEMS, LiveItems
from afferent.builtin.pipeline.live_log import LiveLog
from afferent.builtin.pipeline.live_session import Configured
from afferent.builtin.pipeline.live_session import Settings as LiveSettings
from afferent.builtin.pipeline.pipeline import Pipeline
from afferent.errors import AfferentError, InvalidRequest, NoPermitLeft, SessionContinued
from afferent.proxy import counting
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.auth import Access
from afferent.proxy.request_scope import RequestScope, RequestScopes
from afferent.proxy.socket_end import ending
from afferent.proxy.statuses import failure_of
from afferent.telemetry.registry import counter
from afferent.types import MiB

_MOST_WAITING: Final = 256
"""Events of a connection that wait for the ones before them; beyond, reading pauses."""
_MOST_WAITING_NBYTES: Final = 32 * MiB
_MAX_EVENT_NBYTES: Final = MiB
"""Limit of an event without media, which is decoded at once."""
_WITH_MEDIA: Final = frozenset(
    each.__struct_config__.tag for each in (api.ItemCreate, api.AudioAppend)
)
_OPEN_PROTOCOL: Final = "realtime"
_KEY_PROTOCOL: Final = "openai-insecure-api-key."
"""Start of a subprotocol with a key: browsers can't set the headers of a WebSocket."""
_GONE, _TAKEN_OVER, _FAILED = 1001, 4409, 1011

SESSIONS = counter(
    "afferent_live_sessions_total",
    "Live sessions by their begin: new, or continued from a stored one",
    begin=("new", "continued"),
)


class _Job:
    """Event of a client that is applied in its turn."""

    def __init__(self, nbytes: int) -> None:
        self.event_id: str | None = None
        self.nbytes = nbytes
        self.turn = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class LiveConnection:
    """Connection of a client to a session.

    Invariants:
        - Events are applied one at a time, in their order.
        - An error of an event is an event; it never ends the connection.
    """

    def __init__(self, context: LiveContext, newest: dict[str, LiveConnection]) -> None:
        """Create it.

        Args:
            newest: The newest connection of each session in this process.
        """
        self._context, self._newest = context, newest
        self._items = LiveItems(context)
        self._answers = LiveAnswers(context, self._items)
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue(_MOST_WAITING)
        self._waiting_nbytes, self._applied = 0, asyncio.Event()
        self._group: asyncio.TaskGroup
        context.has_new.set()  # items of a session that is continued

    async def __aenter__(self) -> LiveConnection:
        offered = self._context.socket.scope.get("subprotocols", ())
        await self._context.socket.accept(_OPEN_PROTOCOL if _OPEN_PROTOCOL in offered else None)
        self._newest[self._context.id] = self
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.log.close()
        if self._newest.get(self._context.id) is not self:
            return  # another one continues the session
        del self._newest[self._context.id]
        # The engine may have a sequence of an earlier connection.
        if (engine := self._context.pipeline.live_engine()) is not None:
            engine.end_session(self._context.id)

    async def run(self) -> None:
        """Apply events until the client leaves."""
        await self._context.send(ev.event("session.created", session=self._described()))
        try:
            async with asyncio.TaskGroup() as self._group:
                applying = self._group.create_task(self._apply_all())
                feeding = self._group.create_task(self._answers.feed_all())
                try:
                    await self._receive_all()
                finally:
                    applying.cancel()
                    feeding.cancel()
                    await self._answers.end()
        except* WebSocketDisconnect:
            raise WebSocketDisconnect(_GONE) from None
        except* SessionContinued as errors:
            raise errors.exceptions[0] from None

    # Order of events

    async def _receive_all(self) -> None:
        while True:
            message = await self._context.socket.receive()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", _GONE))
            text = message.get("text")
            job = _Job(0 if text is None else len(text))
            work = self._begin(job, None if text is None else text.encode("utf-8", "replace"))
            job.task = self._group.create_task(self._reporting(job, work))
            self._waiting_nbytes += job.nbytes
            await self._jobs.put(job)
            while self._waiting_nbytes > _MOST_WAITING_NBYTES:
                self._applied.clear()
                await self._applied.wait()

    async def _apply_all(self) -> None:
        while True:
            job = await self._jobs.get()
            job.turn.set()
            if job.task is not None:
                await job.task
            self._waiting_nbytes -= job.nbytes
            self._applied.set()

    async def _reporting(self, job: _Job, work: Awaitable[None]) -> None:
        """Do a job; its error becomes an event."""
        try:
            await work
        except (WebSocketDisconnect, SessionContinued):
            raise
        except Exception as error:
            failure, session_id = failure_of(error), self._context.id
            await self._context.send(ev.error_event(failure, job.event_id, request_id=session_id))

    def _begin(self, job: _Job, text: bytes | None) -> Awaitable[None]:
        """Return the work of an event; that of an item begins before its turn."""
        try:
            if text is None:
                raise InvalidRequest("an event is text, not bytes")
            head = api.read_head(text)
            job.event_id = head.event_id
            if head.type not in _WITH_MEDIA and len(text) > _MAX_EVENT_NBYTES:
                raise InvalidRequest(f"the event has more than {_MAX_EVENT_NBYTES} bytes")
            if head.type != api.ItemCreate.__struct_config__.tag:
                return self._apply(job, text, head.type)
            self._items.begin()
        except AfferentError as error:
            if isinstance(error, NoPermitLeft):
                job.turn.set()  # an answer at once is the point of it
            return self._refuse(job, error)
        return self._create(job, text)

    async def _refuse(self, job: _Job, error: AfferentError) -> None:
        await job.turn.wait()
        raise error

    async def _create(self, job: _Job, text: bytes) -> None:
        """Add an item: its features are made at once, and it is added in its turn."""
        try:
            item, previous_id = await self._items.prepared(text)
            await job.turn.wait()
            await self._items.add(item, previous_id)
        except AfferentError:
            LIVE_ITEMS.labels("refused").inc()
            raise

    async def _apply(self, job: _Job, text: bytes, kind: str) -> None:
        await job.turn.wait()
        items, send = self._items, self._context.send
        match event := api.read_event(text, kind):
            case api.SessionUpdate(session=given):
                await self._update(given)
            case api.ItemRetrieve(item_id=item_id):
                item = ev.item_json(items.get(item_id))
                await send(ev.event("conversation.item.retrieved", item=item))
            case api.ItemDelete(item_id=item_id):
                await items.remove([items.get(item_id).id])
            case api.ItemTruncate(item_id=item_id):
                items.get(item_id)
                why = "the item has no audio of an answer, which alone can be truncated"
                raise InvalidRequest(why, param="item_id")
            case api.ResponseCreate(response=given):
                await self._answers.respond(given or api.ResponseParams(), self._group)
            case api.ResponseCancel(response_id=response_id):
                await self._answers.cancel(response_id)
            case api.AudioAppend(audio=samples):
                items.hear(samples)
            case api.AudioCommit():
                await items.commit_audio()
            case api.AudioClear():
                items.clear_audio()
                await send(ev.event("input_audio_buffer.cleared"))
            case _:
                raise InvalidRequest(f"{type(event).__name__} is not due here")

    # The session

    def _described(self) -> dict[str, Any]:
        session, settings = self._context.log.session, self._context.settings
        return ev.session_json(
            session.settings,
            session_id=self._context.id,
            model=settings.model_name,
            num_items=len(session),
            last_id=session.last_id,
        )

    async def _update(self, given: api.SessionParams) -> None:
        if isinstance(given.model, str):
            check_model(given.model, self._context.settings.model_names)
        settings = api.updated(self._context.log.session.settings, given)
        await self._context.log.append(Configured(settings))
        await self._context.send(ev.event("session.updated", session=self._described()))
        await self._items.trim()


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
        self._parts = (pipeline, gate, settings, scopes, now_s)
        self._store, self._settings = pipeline.store, settings
        self._scopes, self._access = scopes, access
        self._newest: dict[str, LiveConnection] = {}
        counting.APIS.add(REALTIME.name)

    async def serve(self, socket: WebSocket) -> None:
        """Serve a client until it leaves."""
        what, headers = f"WebSocket {REALTIME.path}", socket.scope["headers"]
        with self._scopes.open(
            what, headers, id_prefix=REALTIME.id_prefix, api=REALTIME.name
        ) as own:

            async def close(failure: AfferentError) -> None:
                await socket.send_text(ev.error_event(failure, None, request_id=own.id))
                is_taken = isinstance(failure, SessionContinued)
                await socket.close(_TAKEN_OVER if is_taken else _FAILED)

            async with (
                ending(socket, own, REALTIME, close),
                await self._open(socket, own) as connection,
            ):
                await connection.run()

    async def _open(self, socket: WebSocket, own: RequestScope) -> LiveConnection:
        """Return the session of a new connection, which is not accepted yet.

        Raises:
            NotAuthenticated: There is no key, or an unknown one.
            ModelNotFound: The query names another model.
            SessionNotFound: The query names a session that is not stored.
        """
        query, settings = socket.query_params, self._settings
        store, headers = self._store, _headers(socket)
        tenant = self._access.tenant_of(headers)
        name = tenant.name if tenant is not None else ""
        check_model(query.get("model", settings.model_name), settings.model_names)
        session_id = query.get("session_id")
        if session_id is None:
            log = LiveLog(store, tenant=name, session_id=own.id, lease=own.id)
            await log.append(Configured(LiveSettings()))
        else:
            if len(session_id) > 64:
                raise InvalidRequest("a session's id has at most 64 characters", param="session_id")
            log = await LiveLog.resume(store, tenant=name, session_id=session_id, lease=own.id)
        SESSIONS.labels("new" if session_id is None else "continued").inc()
        context = LiveContext(*self._parts, socket, headers, log, session_id or own.id)
        return LiveConnection(context, self._newest)


def _headers(socket: WebSocket) -> Mapping[str, str]:
    """Return the headers of a handshake, with the key that a browser sends as a subprotocol."""
    headers = dict(socket.headers)
    for offered in socket.scope.get("subprotocols", ()):
        if offered.startswith(_KEY_PROTOCOL):
            headers.setdefault("authorization", f"Bearer {offered.removeprefix(_KEY_PROTOCOL)}")
    return headers
