"""Host of any `Engine`: serves it from its own process to all frontends.

await EngineHost(engine).serve(socket.socket(fileno=settings.listener_fd))
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine
from typing import Any

from afferent.engines.protocol import (
    Accepted,
    Engine,
    EngineEvent,
    EngineRequest,
    Finished,
    SessionEngine,
    Tokens,
    check_engine,
)
from afferent.engines.remote import messages as m
from afferent.errors import AfferentError, ConnectionClosed, FormatError, InternalError
from afferent.runtime import wire
from afferent.runtime.logs import Seldom
from afferent.types import Failure, decode, encode

log = logging.getLogger(__name__)
_seldom = Seldom(log)

_FAILED = Failure(InternalError.code, "the engine failed on this request")


class EngineHost:
    """Serves an engine to frontends, which come and go.

    Invariants:
        - When a frontend disconnects, its requests are aborted, and its sessions end.
        - `announce` reaches all frontends that have sent a valid hello.
    """

    def __init__(self, engine: Engine) -> None:
        """Check the engine.

        Raises:
            ConfigError: It lacks a part of `Engine`.
        """
        check_engine(engine)
        self.engine = engine
        self._frontends: set[_Frontend] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Accept frontends until cancelled."""
        async for sock, _ in wire.accept_peers(listener):
            await _Frontend(self.engine, self._frontends).channel.attach(sock)

    def announce(self) -> None:
        """Send the engine's changed `info` to all frontends."""
        for frontend in self._frontends:
            frontend.send(m.Health(self.engine.info))


class _Frontend:
    """Connection of one frontend, and the requests that came over it."""

    def __init__(self, engine: Engine, others: set[_Frontend]) -> None:
        self._engine, self._others = engine, others
        self.channel = wire.AsyncChannel(self._on_frame, self._on_close)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._sessions: set[str] = set()

    def send(self, message: m.ToFrontend) -> None:
        with contextlib.suppress(ConnectionClosed):
            self.channel.send(encode(message))

    def _on_frame(self, frame: bytes) -> None:
        if self not in self._others and (refusal := m.refusal_of(frame)):
            _seldom.warning(refusal)
            self.send(m.Refused(m.VERSION))
            return
        message = decode(m.from_frontend_decoder, frame)
        if self not in self._others and not isinstance(message, m.FrontendHello):
            raise FormatError("a connection begins with a hello")
        match message:
            case m.FrontendHello():
                self._others.add(self)
                self.send(m.Health(self._engine.info))
            case m.Submit(request=request):
                self._submit(request)
            case m.Abort(request_id=request_id):
                if request_id in self._running:
                    self._running[request_id].cancel()
            case m.EndSession(session_id=session_id):
                if isinstance(self._engine, SessionEngine):
                    self._sessions.discard(session_id)
                    self._engine.end_session(session_id)
            case m.FindSession(session_id=session_id):
                self._spawn(self._tell_session(session_id))
            case m.AskStats():
                self._spawn(self._tell_stats())

    def _spawn(self, answering: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(answering)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _submit(self, request: EngineRequest) -> None:
        request_id = request.request_id
        if request_id in self._running:
            raise FormatError("two requests have one id")
        task = asyncio.create_task(self._run(request))
        self._running[request_id] = task
        if request.session_id:
            self._sessions.add(request.session_id)
        task.add_done_callback(lambda _: self._end(request_id, task))

    def _end(self, request_id: str, task: asyncio.Task[None] | None) -> None:
        if self._running.get(request_id) is task:
            del self._running[request_id]

    async def _run(self, request: EngineRequest) -> None:
        """Run a request from its submission to its end; cancelling the task aborts the request."""
        request_id = request.request_id
        try:
            async with contextlib.aclosing(self._engine.submit(request)) as events:
                async for event in events:
                    self.send(_message(request_id, event))
        except AfferentError as error:
            self._fail(request_id, Failure(error.code, error.message))
        except Exception:
            log.exception("a request failed", extra={"request_id": request_id})
            self._fail(request_id, _FAILED)

    def _fail(self, request_id: str, failure: Failure) -> None:
        # End it before the reply: a refused request may come again under the same id, at once.
        self._end(request_id, asyncio.current_task())
        self.send(m.RequestFailed(request_id, failure))

    async def _tell_session(self, session_id: str) -> None:
        engine, found = self._engine, None
        if isinstance(engine, SessionEngine):
            found = await engine.find_session(session_id)
            self._sessions.add(session_id)
        self.send(m.SessionFound(session_id, found))

    async def _tell_stats(self) -> None:
        self.send(m.Stats(await self._engine.stats()))

    def _on_close(self) -> None:
        self._others.discard(self)
        for task in self._running.values():
            task.cancel()
        if isinstance(self._engine, SessionEngine):
            for session_id in self._sessions:
                self._engine.end_session(session_id)


def _message(request_id: str, event: EngineEvent) -> m.RequestEvent:
    match event:
        case Accepted():
            return m.RequestAccepted(request_id)
        case Tokens(token_ids, spans, logprobs, num_cached):
            return m.RequestTokens(request_id, token_ids, spans, logprobs, num_cached)
        case Finished(reason, spans, token_id, num_cached):
            return m.RequestFinished(request_id, reason, spans, token_id, num_cached)
