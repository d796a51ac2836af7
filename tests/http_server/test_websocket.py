"""WebSockets: early frames, and clients that read no answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from websockets.frames import Frame, Opcode

from afferent.proxy.http_server import websocket as websocket_module
from afferent.proxy.http_server.server import HttpServer
from afferent.proxy.http_server.shared import ConnectionLimits
from afferent.proxy.http_server.timer import Timer
from afferent.types import MiB
from tests.http_server.test_framing import Wire, connected

LIMITS = ConnectionLimits(header_timeout_s=30.0, discard_timeout_s=30.0, write_timeout_s=30.0)
PATH = "/v1/realtime"
HANDSHAKE = (
    f"GET {PATH} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
).encode()


def frame(opcode: Opcode, data: bytes) -> bytes:
    return Frame(opcode, data).serialize(mask=True)


PING = frame(Opcode.PING, b"p" * 120)
PONG_START = b"\x8a\x78ppp"


class Echo:
    """An application that accepts a WebSocket when `may_accept` is set, and echoes each message."""

    def __init__(self) -> None:
        self.may_accept = asyncio.Event()

    async def __call__(
        self,
        scope: Any,
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        await receive()
        await self.may_accept.wait()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})


async def run_tasks() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def open_wire(app: Any, *pieces: bytes) -> Wire:
    """Feed a connection the handshake and further pieces."""
    connection, wire = connected(app)
    connection.data_received(HANDSHAKE + (pieces[0] if pieces else b""))
    for piece in pieces[1:]:
        wire.protocol.data_received(piece)
    await run_tasks()
    return wire


@pytest.mark.parametrize("is_together", [True, False])
def test_frames_sent_ahead_are_answered_behind_the_101(is_together: bool) -> None:
    async def main() -> tuple[bytes, bool, bytes]:
        app = Echo()
        message = frame(Opcode.TEXT, b"hello")
        wire = await open_wire(app, *((PING + message,) if is_together else (b"", PING, message)))
        before, is_paused = wire.written, wire.is_paused
        app.may_accept.set()
        await run_tasks()
        assert not wire.is_paused
        wire.protocol.connection_lost(None)
        await run_tasks()
        return before, is_paused, wire.written

    before, is_paused, written = asyncio.run(main())
    assert before == b""
    assert is_paused is not is_together  # in one piece, no read is left to pause
    assert written.startswith(b"HTTP/1.1 101 ")
    behind = written.partition(b"\r\n\r\n")[2]
    assert behind.startswith(PONG_START)
    assert behind.endswith(b"hello")


def test_denied_websocket_answers_no_frame() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.close"})

    async def main() -> bytes:
        wire = await open_wire(app, PING)
        wire.protocol.connection_lost(None)
        return wire.written

    written = asyncio.run(main())
    assert written.startswith(b"HTTP/1.1 403 ")
    assert PONG_START not in written


def test_reading_pauses_while_nothing_can_be_written() -> None:
    async def main() -> None:
        app = Echo()
        app.may_accept.set()
        wire = await open_wire(app)
        websocket = wire.protocol
        websocket.data_received(PING)
        assert PONG_START in wire.written
        assert not wire.is_paused
        websocket.pause_writing()
        assert wire.is_paused
        await run_tasks()  # the application waits for a message
        assert wire.is_paused
        websocket.resume_writing()
        assert not wire.is_paused
        websocket.connection_lost(None)
        await run_tasks()

    asyncio.run(main())


def test_reading_pauses_while_a_longest_message_waits() -> None:
    async def main() -> None:
        app = Echo()
        app.may_accept.set()
        wire = await open_wire(app)
        websocket = wire.protocol
        await run_tasks()  # the application waits for a message
        half = frame(Opcode.TEXT, b"a" * (9 * MiB))
        websocket.data_received(half)
        assert not wire.is_paused
        websocket.data_received(half)
        assert wire.is_paused
        await run_tasks()  # it has received both
        assert not wire.is_paused
        websocket.connection_lost(None)
        await run_tasks()

    asyncio.run(main())


def test_application_that_waits_for_another_is_cancelled_when_its_client_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(websocket_module, "_LEAVE_TIMEOUT_S", 0.01)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            begun.set()
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async def main() -> None:
        wire = await open_wire(app)
        await begun.wait()
        wire.protocol.connection_lost(None)
        await asyncio.wait_for(ended.wait(), 30)

    asyncio.run(main())


def test_client_that_pings_after_the_close_gets_no_further_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[float] = []
    start = Timer.start

    def counted(self: Timer, timeout_s: float, call: Callable[[], object]) -> None:
        starts.append(timeout_s)
        start(self, timeout_s, call)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close"})

    async def main() -> None:
        wire = await open_wire(app)
        monkeypatch.setattr(Timer, "start", counted)
        for _ in range(3):
            wire.protocol.data_received(PING)
        assert starts == []
        wire.protocol.connection_lost(None)
        await run_tasks()

    asyncio.run(main())


def test_client_that_takes_no_pongs_is_not_read_without_end() -> None:
    """All pongs were buffered in memory."""

    async def main() -> int:
        app = Echo()
        app.may_accept.set()
        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(
            *(app, listener, LIMITS),
            refuse=lambda *_: b"",
            drain_timeout_s=0.0,
            websocket_paths={PATH},
        )
        address = listener.getsockname()
        serving = asyncio.create_task(server.serve())
        loop, sent = asyncio.get_running_loop(), 0
        with socket.create_connection(address) as client:
            client.setblocking(False)
            await loop.sock_sendall(client, HANDSHAKE)
            assert (await loop.sock_recv(client, 4096)).startswith(b"HTTP/1.1 101 ")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            many = PING * 1000
            with contextlib.suppress(TimeoutError):
                while sent < 24 * MiB:
                    async with asyncio.timeout(2.0):
                        await loop.sock_sendall(client, many)
                    sent += len(many)
        server.end_soon()
        await serving
        return sent

    assert asyncio.run(main()) < 24 * MiB
