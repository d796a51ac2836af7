"""State that the parts of a live session's connection share, and the scopes of their work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Message as AsgiMessage
from starlette.websockets import WebSocket, WebSocketDisconnect

from afferent.admission.gate import Gate
from afferent.admission.shares import NAMELESS, Share
from afferent.builtin.apis.realtime import schema as api
from afferent.builtin.apis.realtime.events import REALTIME
from afferent.builtin.pipeline.live_log import LiveLog
from afferent.builtin.pipeline.live_sequence import LiveSequence
from afferent.builtin.pipeline.pipeline import Pipeline
from afferent.media.body.received import ReceivedBody
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.body import BodyReader
from afferent.proxy.request_scope import RequestScope, RequestScopes


@dataclass(slots=True, eq=False)
class LiveContext:
    """State of a connection.

    Attributes:
        now_s: Returns the Unix time.
        log: The session and its changes.
        sequence: The session's sequence in the engine, if it has one.
        has_new: Set when there are items that the sequence may lack.
        share: Share of the last request.
    """

    pipeline: Pipeline
    gate: Gate
    settings: AppSettings
    scopes: RequestScopes
    now_s: Callable[[], float]
    socket: WebSocket
    headers: Mapping[str, str]
    log: LiveLog
    id: str
    sequence: LiveSequence | None = None
    has_new: asyncio.Event = field(default_factory=asyncio.Event)
    share: Share = NAMELESS

    async def send(self, *texts: str) -> None:
        for text in texts:
            await self.socket.send_text(text)

    @contextlib.asynccontextmanager
    async def request(self, what: str, id_prefix: str = "event-") -> AsyncIterator[RequestScope]:
        """Open the scope of a request: within its time, and with its failure noted."""
        headers = self.socket.scope["headers"]
        with self.scopes.open(what, headers, id_prefix=id_prefix, api=REALTIME.name) as own:
            try:
                async with asyncio.timeout_at(own.deadline):
                    yield own
            except WebSocketDisconnect:
                own.leave()
                raise
            except Exception as error:
                raise own.fail(error) from error

    async def admit(self, own: RequestScope) -> Share:
        """See `RequestScope.admit`."""
        self.share = await own.admit(self.headers, self.socket.scope)
        return self.share

    async def read(self, own: RequestScope, text: bytes) -> ReceivedBody:
        """Read an event as a body: its media are cut out, within the limits of a request."""
        share = await self.admit(own)
        own.trace.media = "unknown"

        async def receive() -> AsgiMessage:
            return {"type": "http.request", "body": text, "more_body": False}

        reader = BodyReader(
            *(self.pipeline.store, self.gate, own.id),
            *(self.settings.limits_of(share), api.MEDIA_KEYS),
            tenant=share.tenant,
        )
        length = str(len(text)).encode()
        scope = {"type": "http", "headers": [(b"content-length", length)]}
        return await reader.read(Request(scope, receive))
