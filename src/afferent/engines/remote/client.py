"""Frontend side of a remote engine: `Engine` over a connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator
from typing import TypeVar

from afferent.engines.protocol import (
    Accepted,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Finished,
    KeptSession,
    Tokens,
)
from afferent.engines.remote import messages as m
from afferent.errors import AfferentError, ConnectionClosed, EngineUnavailable, error_from
from afferent.runtime import wire
from afferent.runtime.tasks import open_in_thread
from afferent.types import encode

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_RECONNECT_S = 0.2
_MAX_RECONNECT_S = 5.0
"""Pause after connections that ended before the engine sent a valid message."""
_STATS_TIMEOUT_S = 0.5
_FIND_TIMEOUT_S = 2.0
_Event = EngineEvent | AfferentError
T = TypeVar("T")


class RemoteEngine:
    """Maintains a connection to the engine; while there is none, requests fail retryably.

    Invariants:
        - ``info`` is ``None`` while there is no connection.
        - A request has an entry in ``_queues`` from its submission to the end of its generator.
        - When the connection closes, all requests get `EngineUnavailable`, and all callers of
          `stats` get ``None``.
    """

    def __init__(self, address: str, *, name: str) -> None:
        self._address, self._name = address, name
        self._channel: wire.AsyncChannel | None = None
        self._closed = asyncio.Event()
        self._is_understood = False
        self._refusal = ""  # why an engine of another version does not serve this frontend
        self._queues: dict[str, asyncio.Queue[_Event]] = {}
        self._asked: list[asyncio.Future[EngineStats | None]] = []
        self._sought: dict[str, list[asyncio.Future[KeptSession | None]]] = {}
        self.info: EngineInfo | None = None

    async def run(self) -> None:
        """Connect, and reconnect whenever the engine went away, until cancelled."""
        pause_s = _RECONNECT_S
        while True:
            try:
                sock = await open_in_thread(self._connect, socket.socket.close)
            except (ConnectionClosed, OSError, RuntimeError):  # or out of threads, for a moment
                await asyncio.sleep(_RECONNECT_S)
                continue
            self._closed.clear()
            self._is_understood = False
            self._channel = wire.AsyncChannel(self._on_frame, self._on_close)
            try:
                await self._channel.attach(sock)
                with contextlib.suppress(ConnectionClosed):  # it has died since
                    self._channel.send(encode(m.FrontendHello(m.VERSION, self._name)))
                await self._closed.wait()
            finally:
                self._channel.abort()
            if not self._refusal:
                log.warning("the engine is gone")
            pause_s = _RECONNECT_S if self._is_understood else min(2 * pause_s, _MAX_RECONNECT_S)
            await asyncio.sleep(pause_s)

    def _connect(self) -> socket.socket:
        return wire.connect(self._address, timeout_s=_CONNECT_TIMEOUT_S)

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """See `Engine.submit`."""
        channel = self._channel
        if channel is None or not channel.is_open or self.info is None:
            raise EngineUnavailable(self._refusal or "the engine is not ready; try again")
        queue: asyncio.Queue[_Event] = asyncio.Queue()
        self._queues[request.request_id] = queue
        finished = False
        try:
            channel.send(encode(m.Submit(request)))
            while not finished:
                event = await queue.get()
                finished = isinstance(event, Finished | AfferentError)
                if isinstance(event, AfferentError):
                    raise event
                yield event
        finally:
            del self._queues[request.request_id]
            if not finished and channel.is_open:
                channel.send(encode(m.Abort(request.request_id)))

    def end_session(self, session_id: str) -> None:
        """See `SessionEngine.end_session`."""
        if self._channel is not None and self._channel.is_open:
            self._channel.send(encode(m.EndSession(session_id)))

    async def find_session(self, session_id: str) -> KeptSession | None:
        """See `SessionEngine.find_session`; ``None`` if the engine does not answer in time."""
        waiting = self._sought.setdefault(session_id, [])
        return await self._ask(m.FindSession(session_id), waiting, _FIND_TIMEOUT_S)

    async def stats(self) -> EngineStats | None:
        """See `Engine.stats`."""
        return await self._ask(m.AskStats(), self._asked, _STATS_TIMEOUT_S)

    async def _ask(
        self,
        question: m.FindSession | m.AskStats,
        waiting: list[asyncio.Future[T | None]],
        timeout_s: float,
    ) -> T | None:
        """Return the answer to a question; ``None`` without a connection, or if it is late."""
        if self._channel is None or not self._channel.is_open:
            return None
        future: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        waiting.append(future)
        self._channel.send(encode(question))
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(future, timeout_s)
        return None

    def _on_frame(self, frame: bytes) -> None:
        message = m.from_engine(frame)
        self._is_understood = True
        match message:
            case m.Health(info=info):
                self.info, self._refusal = info, ""
            case m.Refused():
                self._on_refused(m.refused_by(message))
            case m.Stats(stats=stats):
                _answer(self._asked, stats)
            case m.SessionFound(session_id=session_id, session=session):
                _answer(self._sought.pop(session_id, []), session)
            case _:
                self._on_event(message)

    def _on_refused(self, refusal: str) -> None:
        """Reconnect with growing pauses: an engine of this version may replace the present one."""
        if refusal != self._refusal:
            log.warning(refusal)
        self._refusal, self._is_understood = refusal, False
        if self._channel is not None:
            self._channel.abort()

    def _on_event(self, message: m.RequestEvent) -> None:
        queue = self._queues.get(message.request_id)
        if queue is None:  # aborted meanwhile
            return
        match message:
            case m.RequestAccepted():
                queue.put_nowait(Accepted())
            case m.RequestTokens(_, token_ids, spans, logprobs, num_cached):
                queue.put_nowait(Tokens(token_ids, spans, logprobs, num_cached))
            case m.RequestFinished(_, reason, spans, token_id, num_cached):
                queue.put_nowait(Finished(reason, spans, token_id, num_cached))
            case m.RequestFailed(failure=failure):
                queue.put_nowait(error_from(failure.code, failure.message))

    def _on_close(self) -> None:
        self.info = None
        _answer(self._asked, None)
        for waiting in self._sought.values():
            _answer(waiting, None)
        self._sought.clear()
        for queue in self._queues.values():
            queue.put_nowait(EngineUnavailable("the engine went away; try again"))
        self._closed.set()


def _answer(waiting: list[asyncio.Future[T | None]], answer: T | None) -> None:
    """Resolve all callers that wait for an answer."""
    for future in waiting:
        if not future.done():
            future.set_result(answer)
    waiting.clear()
