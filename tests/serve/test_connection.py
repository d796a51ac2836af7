"""Connections of clients that are slow, endless, or gone: real sockets, a small application."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import uvicorn
import uvloop

from afferent.serve.connection import ConnectionLimits, connection_class, guard
from afferent.serve.hang_ups import HangUps
from afferent.types import KiB, MiB
from tests.server import wait_until

LIMITS = ConnectionLimits(header_timeout_s=0.4, discard_timeout_s=0.8)
TAKES_NOTHING_S = 0.5
POST = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"


@dataclass
class App:
    """``/read`` answers with the body's length, ``/refuse`` at once; ``/endless`` never stops.

    ``/pause`` reads no more than what comes first, and waits.
    """

    began: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    sent_nbytes: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.began.append(path)
        try:
            match path:
                case "/refuse":
                    await self.answer(send, 413, b"no")
                case "/pause":
                    await receive()
                    await asyncio.sleep(60)
                case "/endless":
                    await send({"type": "http.response.start", "status": 200, "headers": []})
                    while True:
                        message = {"type": "http.response.body", "body": bytes(16 << 10)}
                        await send({**message, "more_body": True})
                        self.sent_nbytes += 16 << 10
                case _:
                    nbytes, more = 0, True
                    while more:
                        message = await receive()
                        nbytes += len(message["body"])
                        more = message["more_body"]
                    await self.answer(send, 200, str(nbytes).encode())
        finally:
            self.ended.append(path)

    async def answer(self, send: Any, status: int, body: bytes) -> None:
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@dataclass
class Host:
    app: App
    port: int
    log: list[str]

    @contextlib.contextmanager
    def connect(self, data: bytes = b"") -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as sock:
            sock.sendall(data)
            yield sock


@pytest.fixture
def host(caplog: pytest.LogCaptureFixture) -> Iterator[Host]:
    app, started = App(), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    servers: list[uvicorn.Server] = []

    async def main() -> None:
        hang_ups = HangUps()
        guard(listener, timeout_s=TAKES_NOTHING_S)
        http = connection_class(LIMITS, hang_ups)
        config = uvicorn.Config(app, http=http, log_config=None, access_log=False, lifespan="off")
        servers.append(uvicorn.Server(config))
        started.set()
        await servers[0].serve(sockets=[listener])
        hang_ups.close()

    thread = threading.Thread(target=uvloop.run, args=(main(),))
    thread.start()
    started.wait(10)
    try:
        yield Host(app, listener.getsockname()[1], caplog.messages)
    finally:
        servers[0].should_exit = servers[0].force_exit = True
        thread.join(30)
        listener.close()
    assert not [record for record in caplog.records if record.exc_info]


def rest_of(sock: socket.socket) -> bytes:
    """All that comes until the connection ends."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            found += data
    return found


def drip(sock: socket.socket, byte: bytes = b"x") -> bytes:
    """What is answered to a byte every 50 ms, until the connection ends."""
    sock.settimeout(0.05)
    found, deadline = b"", time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            sock.sendall(byte)
            data = sock.recv(1 << 16)
        except TimeoutError:
            continue
        except ConnectionError:
            return found
        if not data:
            return found
        found += data
    raise AssertionError("the connection was not ended")


def test_an_ordinary_client(host: Host) -> None:
    with host.connect() as sock:
        for number in range(5):  # kept open
            sock.sendall(POST % (b"/read", 300_000) + bytes(300_000))
            answer = sock.recv(4096)
            assert answer.endswith(b"300000"), number
    assert host.app.began == host.app.ended == ["/read"] * 5


def test_a_few_requests_ahead_of_their_answers(host: Host) -> None:
    with host.connect((POST % (b"/read", 4) + b"abcd") * 4) as sock:
        answers = b""
        while answers.count(b"200 OK") < 4:
            answers += sock.recv(4096)
    assert answers.count(b"\r\n\r\n4") == 4


def test_thousands_of_requests_ahead_of_their_answers(host: Host) -> None:
    with host.connect() as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"GET /pause HTTP/1.1\r\nHost: a\r\n\r\n" * 20_000)
        assert rest_of(sock).startswith(b"HTTP/1.1 400")
    wait_until(lambda: host.app.ended == host.app.began)
    assert len(host.app.began) <= 1


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"", b""),
        (b"POST /read HTTP/1.1\r\nHost: a", b"HTTP/1.1 408"),
    ],
)
def test_headers_that_do_not_come(host: Host, data: bytes, answer: bytes) -> None:
    start = time.monotonic()
    with host.connect(data) as sock:
        assert rest_of(sock)[:12] == answer
    assert 0.3 < time.monotonic() - start < 5
    with host.connect(data) as sock:  # not for each byte anew
        if data:
            assert drip(sock)[:12] == answer


@pytest.mark.parametrize(
    "endless",
    [b"X: " + b"x" * 100_000, b"a: b\r\n" * 1000, b"x" * 100_000],
    ids=["value", "headers", "name"],
)
def test_endless_headers(host: Host, endless: bytes) -> None:
    with host.connect(b"GET /read HTTP/1.1\r\n") as sock:
        start_nbytes = psutil.Process().memory_info().rss
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 64 * MiB:
                sock.sendall(endless)
                sent += len(endless)
        assert sent < 16 * MiB
        assert psutil.Process().memory_info().rss - start_nbytes < 16 * MiB
    assert not host.app.began


def test_an_endless_url(host: Host) -> None:
    with host.connect(b"GET /") as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"x" * MiB)
        assert rest_of(sock)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")
    assert not host.app.began


def test_a_header_that_is_too_large_is_told_so(host: Host) -> None:
    with host.connect(b"GET /read HTTP/1.1\r\nHost: a\r\n") as sock:
        time_out = time.monotonic() + 5
        while time.monotonic() < time_out and not host.log:
            sock.sendall(b"X: " + b"x" * 40_000)
            sock.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                assert sock.recv(4096).startswith(b"HTTP/1.1 431")
                break
        else:
            raise AssertionError("it was not refused")


def test_the_body_of_a_refused_request_has_an_end(host: Host) -> None:
    """It is discarded, so that the connection can be kept, but not for ever."""
    start = time.monotonic()
    with host.connect(POST % (b"/refuse", 10 * MiB)) as sock:
        assert drip(sock).startswith(b"HTTP/1.1 413")
    assert 0.7 < time.monotonic() - start < 5
    with host.connect(POST % (b"/refuse", 1 * MiB) + bytes(MiB)) as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 413")
        sock.sendall(POST % (b"/read", 3) + b"abc")
        assert sock.recv(4096).endswith(b"3")
    with host.connect(POST % (b"/refuse", 1 * MiB) + bytes(MiB)) as sock:
        assert rest_of(sock).startswith(b"HTTP/1.1 413")  # and then, nothing: it is closed


@pytest.mark.parametrize("nbytes", [10, 200 * KiB])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_client_that_leaves_while_nobody_reads(host: Host, nbytes: int, how: str) -> None:
    with host.connect(POST % (b"/pause", nbytes + 1) + bytes(nbytes)) as sock:
        wait_until(lambda: host.app.began == ["/pause"])
        if how == "half":
            sock.shutdown(socket.SHUT_WR)
        elif how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if how != "half":
            sock.close()
        wait_until(lambda: host.app.ended == ["/pause"], timeout_s=5)


def test_an_answer_that_nobody_reads(host: Host) -> None:
    """What is written ahead is bounded, and the kernel ends the connection after a while."""
    with host.connect(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n") as sock:
        wait_until(lambda: host.app.sent_nbytes > 0)
        sent = settled(lambda: host.app.sent_nbytes)
        assert sent < 16 * MiB
        wait_until(lambda: host.app.ended == ["/endless"], timeout_s=15)
        assert sock.fileno() > 0


def settled(figure: Callable[[], int]) -> int:
    """The figure when it has stayed for a while."""
    last, since = figure(), time.monotonic()
    while time.monotonic() - since < 0.2:
        if (now := figure()) != last:
            last, since = now, time.monotonic()
        time.sleep(0.01)
    return last
