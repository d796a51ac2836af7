"""Proxy of WebSockets to an upstream, message by message, in both directions."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from afferent.engines.upstream import Upstream, UpstreamRequest, UpstreamSocket
from afferent.errors import EngineUnavailable
from afferent.proxy.auth import Access, headers_to_pass_on
from afferent.proxy.exchange import OTHER, target_of
from afferent.proxy.failures import failure_of
from afferent.proxy.finish import IN_FLIGHT, tell
from afferent.proxy.responses import new_id, refusal
from afferent.runtime import logs
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.telemetry.journal import JOURNAL
from afferent.telemetry.trace import Trace

_NOT_ON_THE_WIRE = frozenset({1005, 1006, 1015})
_GOING_AWAY, _TRY_AGAIN = 1001, 1013
"""Close codes: for the upstream after its client has left, and for a client that has lost it."""


SOCKET_PATHS = frozenset({"/v1/realtime"})
"""Paths of vLLM's WebSockets; on other paths a client's `Upgrade` is ignored."""


class SocketPassage:
    """ASGI application for WebSockets; messages are not interpreted."""

    def __init__(self, store: AsyncDaemonStore, upstream: Upstream, access: Access) -> None:
        self._store, self._upstream, self._access = store, upstream, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client, request_id = WebSocket(scope, receive, send), new_id("socket-")
        logs.request_id.set(request_id)
        trace = Trace(request_id, f"WebSocket {scope['path']}")
        JOURNAL.begin(trace)
        outcome = "client_gone"
        try:
            with IN_FLIGHT.labels().track():
                await self._pass_on(client, request_id)
            outcome = "ok"
        except WebSocketDisconnect:
            pass
        except Exception as error:
            failure = failure_of(error)
            outcome = failure.code
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the client may be gone
                if client.application_state is WebSocketState.CONNECTING:
                    await client.send_denial_response(refusal(failure, request_id))
                else:
                    await client.close(_TRY_AGAIN)
        finally:
            self._access.leave(request_id)
            self._store.forget(request_id)
            tell(trace, OTHER, outcome, None)

    async def _pass_on(self, client: WebSocket, request_id: str) -> None:
        await self._access.enter(request_id, client.headers)
        if not self._upstream.is_ready:
            raise EngineUnavailable("the engine is not ready; try again")
        request = UpstreamRequest(
            method="GET",
            target=target_of(client.scope),
            headers=headers_to_pass_on(client.scope["headers"], self._access),
            body=b"",
        )
        async with self._upstream.connect(request, client.scope["subprotocols"]) as upstream:
            await client.accept(upstream.subprotocol)
            await _talk(client, upstream)


async def _talk(client: WebSocket, upstream: UpstreamSocket) -> None:
    """Pass messages on until one side leaves; close the other with its code."""
    sending = asyncio.create_task(_send_all(client, upstream))
    receiving = asyncio.create_task(_receive_all(client, upstream))
    try:
        done, _ = await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sending, receiving):
            task.cancel()
        await asyncio.wait({sending, receiving})
    if sending in done:
        await upstream.close(sending.result())
    else:
        receiving.result()
        await client.close(upstream.close_code)


async def _send_all(client: WebSocket, upstream: UpstreamSocket) -> int:
    """Pass the client's messages on until it leaves; return its close code."""
    while True:
        message = await client.receive()
        if message["type"] == "websocket.disconnect":
            code: int = message.get("code", _GOING_AWAY)
            return _GOING_AWAY if code in _NOT_ON_THE_WIRE else code
        text = message.get("text")
        await upstream.send(text if text is not None else message["bytes"])


async def _receive_all(client: WebSocket, upstream: UpstreamSocket) -> None:
    async for message in upstream.messages():
        if isinstance(message, str):
            await client.send_text(message)
        else:
            await client.send_bytes(message)
