"""Proxy of WebSockets to an upstream, message by message, in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from afferent.engines.upstream import Upstream, UpstreamRequest, UpstreamSocket
from afferent.errors import EngineUnavailable
from afferent.proxy.auth import Access
from afferent.proxy.dialects import NONE
from afferent.proxy.exchange import OTHER, target_of
from afferent.proxy.live_audio import LiveAudio
from afferent.proxy.request_scope import RequestScope, RequestScopes
from afferent.proxy.socket_end import ending

_NOT_ON_THE_WIRE = frozenset({1005, 1006, 1015})
_GOING_AWAY, _TRY_AGAIN = 1001, 1013
"""Close codes: for the upstream after its client has left, and for a client that has lost it."""


SOCKET_PATHS = frozenset({"/v1/realtime"})
"""Paths of vLLM's WebSockets; on other paths a client's `Upgrade` is ignored."""


ReadAudio = Callable[[RequestScope], LiveAudio]


class SocketPassage:
    """ASGI application for WebSockets; messages are passed on unchanged."""

    def __init__(
        self,
        upstream: Upstream,
        access: Access,
        scopes: RequestScopes,
        audio_of: ReadAudio | None = None,
    ) -> None:
        """Create it.

        Args:
            audio_of: Returns what reads the audio of an admitted client, in vLLM's events; without
                it, messages are not read.
        """
        self._upstream, self._access, self._scopes = upstream, access, scopes
        self._audio_of = audio_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = WebSocket(scope, receive, send)
        with self._scopes.open(
            *(f"WebSocket {scope['path']}", scope["headers"]), id_prefix="socket-", api=OTHER
        ) as own:
            async with ending(client, own, NONE, lambda _failure: client.close(_TRY_AGAIN)):
                await self._pass_on(client, own)

    async def _pass_on(self, client: WebSocket, own: RequestScope) -> None:
        await own.admit(client.headers, client.scope)
        if not self._upstream.is_ready:
            raise EngineUnavailable("the engine is not ready; try again")
        headers = self._access.headers_to_pass_on(
            client.scope["headers"], own.share, is_gateway=not self._upstream.reads_arena
        )
        request = UpstreamRequest(
            method="GET",
            target=target_of(client.scope),
            headers=headers if own.trace.root is None else own.trace.root.carried(headers),
            body=b"",
        )
        async with self._upstream.connect(request, client.scope["subprotocols"]) as upstream:
            await client.accept(upstream.subprotocol)
            audio = None if self._audio_of is None else self._audio_of(own)
            try:
                await _talk(client, upstream, audio)
            finally:
                if audio is not None:
                    audio.end()


async def _talk(client: WebSocket, upstream: UpstreamSocket, audio: LiveAudio | None) -> None:
    """Pass messages on until one side leaves; close the other with its code."""
    sending = asyncio.create_task(_send_all(client, upstream, audio))
    receiving = asyncio.create_task(_receive_all(client, upstream, audio))
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


async def _send_all(client: WebSocket, upstream: UpstreamSocket, audio: LiveAudio | None) -> int:
    """Pass the client's messages on until it leaves; return its close code.

    Messages that are not passed on are answered. While one waits at the gate, the next ones are not
    received.
    """
    while True:
        message = await client.receive()
        if message["type"] == "websocket.disconnect":
            code: int = message.get("code", _GOING_AWAY)
            return _GOING_AWAY if code in _NOT_ON_THE_WIRE else code
        text = message.get("text")
        refusal = await audio.take(text) if audio is not None and text is not None else None
        if refusal is not None:
            await client.send_text(refusal)
            continue
        await upstream.send(text if text is not None else message["bytes"])


async def _receive_all(
    client: WebSocket, upstream: UpstreamSocket, audio: LiveAudio | None
) -> None:
    async for message in upstream.messages():
        if isinstance(message, str):
            if audio is not None:
                audio.hear(message)
            await client.send_text(message)
        else:
            await client.send_bytes(message)
