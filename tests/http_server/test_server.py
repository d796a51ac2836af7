"""A server finishes its running requests before it ends, and writes dates."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import httpx2 as httpx
import pytest
import uvloop
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from afferent.proxy.http_server.server import HttpServer
from afferent.proxy.http_server.shared import ConnectionLimits

pytestmark = pytest.mark.timeout(60)

LIMITS = ConnectionLimits(header_timeout_s=30.0, discard_timeout_s=30.0, write_timeout_s=30.0)
REQUEST = b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n"
_PROGRAM = """
import asyncio, socket, uvloop
from starlette.responses import PlainTextResponse
from afferent.proxy.http_server.server import HttpServer
from afferent.proxy.http_server.shared import ConnectionLimits

async def main():
    limits = ConnectionLimits(header_timeout_s=9, discard_timeout_s=9, write_timeout_s=9)
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(
        PlainTextResponse("here"), listener, limits, refuse=lambda *_: b"", drain_timeout_s=9
    )
    serving = asyncio.create_task(server.serve())
    await asyncio.sleep(0)
    print("started", flush=True)
    await serving

uvloop.run(main())
print("ended", flush=True)
"""


def test_server_ends_in_order_on_sigterm() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"started\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
        assert child.stdout.read() == b"ended\n"


class Slow:
    """An application that waits before it answers."""

    def __init__(self) -> None:
        self.began, self.may_answer = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            self.began.set()
            await self.may_answer.wait()
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            self.began.set()
            await self.may_answer.wait()
            await send({"type": "http.response.body", "body": b"b"})
            return
        await PlainTextResponse("here")(scope, receive, send)


class Running:
    """A server in this event loop."""

    def __init__(self, *, drain_timeout_s: float = 30.0, max_connections: int = 0) -> None:
        self.app = Slow()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.server = HttpServer(
            self.app,
            listener,
            LIMITS,
            refuse=lambda *_: b"{}",
            drain_timeout_s=drain_timeout_s,
            max_connections=max_connections,
        )
        self.serving = asyncio.create_task(self.server.serve())

    async def connect(self, path: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(REQUEST % path)
        return reader, writer


def test_answer_has_date() -> None:
    async def main() -> str:
        running = Running()
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://127.0.0.1:{running.address[1]}/")
        running.server.end_soon()
        await running.serving
        return answer.headers["date"]

    assert asyncio.run(main()).endswith("GMT")


def test_end_soon_waits_for_running_request_and_closes_idle_connection() -> None:
    async def main() -> tuple[bytes, bytes]:
        running = Running()
        idle, idle_writer = await running.connect(b"/")
        answer = await idle.readuntil(b"here")
        busy, busy_writer = await running.connect(b"/slow")
        await running.app.began.wait()
        running.server.end_soon()
        assert await idle.read() == b""
        assert not running.serving.done()
        running.app.may_answer.set()
        slow_answer = await busy.read()
        await running.serving
        for writer in (idle_writer, busy_writer):
            writer.close()
        return answer, slow_answer

    answer, slow_answer = asyncio.run(main())
    assert b"connection: close" not in answer
    assert slow_answer.endswith(b"here")
    assert b"connection: close" in slow_answer


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("num_iterations", range(6))
def test_end_soon_closes_connection_that_is_being_accepted(
    new_loop: Callable[[], asyncio.AbstractEventLoop], num_iterations: int
) -> None:
    """The server ends after any number of the loop's iterations that accept a connection."""
    errors: list[dict[str, object]] = []

    async def main() -> bytes:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        running = Running()
        await asyncio.sleep(0)  # starts the server
        with socket.create_connection(running.address) as client:
            for _ in range(num_iterations):
                await asyncio.sleep(0)
            running.server.end_soon()
            await running.serving
            client.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                return client.recv(1)
            return b""

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(main()) == b""
    assert errors == []


def test_leave_serves_a_request_that_was_on_its_way() -> None:
    async def main() -> bytes:
        running = Running()
        reader, writer = await running.connect(b"/")
        await reader.readuntil(b"here")
        running.server.leave()
        await running.server.is_ending.wait()
        writer.write(REQUEST % b"/")
        answer = await reader.read()
        await running.serving
        writer.close()
        return answer

    answer = asyncio.run(main())
    assert answer.endswith(b"here")
    assert b"connection: close" in answer


def test_leave_serves_a_request_behind_a_stream_that_promised_to_keep_the_connection() -> None:
    async def main() -> tuple[bytes, bytes]:
        running = Running()
        reader, writer = await running.connect(b"/stream")
        await running.app.began.wait()
        running.server.leave()
        await running.server.is_ending.wait()
        await asyncio.sleep(0.01)  # the connection is notified
        running.app.may_answer.set()
        stream = await reader.readuntil(b"0\r\n\r\n")
        writer.write(REQUEST % b"/")
        answer = await reader.read()
        await running.serving
        writer.close()
        return stream, answer

    stream, answer = asyncio.run(main())
    assert b"connection: close" not in stream
    assert answer.endswith(b"here")
    assert b"connection: close" in answer


def test_end_after_drain_timeout_cancels_running_request() -> None:
    async def main() -> bytes:
        running = Running(drain_timeout_s=0.05)
        reader, writer = await running.connect(b"/slow")
        await running.app.began.wait()
        running.server.end_soon()
        await running.serving
        writer.close()
        try:
            return await reader.read()
        except ConnectionError:
            return b""

    assert asyncio.run(main()) == b""


def test_more_than_max_connections_get_503() -> None:
    async def main() -> bytes:
        running = Running(max_connections=1)
        first, first_writer = await running.connect(b"/")
        await first.readuntil(b"here")
        second, second_writer = await running.connect(b"/")
        refused = await second.read()
        running.server.end_soon()
        await running.serving
        for writer in (first_writer, second_writer):
            writer.close()
        return refused

    assert asyncio.run(main()).startswith(b"HTTP/1.1 503 ")
