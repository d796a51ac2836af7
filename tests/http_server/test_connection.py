"""Slow, endless and disconnected clients: real sockets, and a small application."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import pytest
import uvloop

from afferent.builtin.apis.chat.api import OpenAIChat
from afferent.builtin.http.sse import EventStream
from afferent.builtin.pipeline.request import Output, TextDelta
from afferent.media.body.received import ReceivedBody
from afferent.proxy.http_server.connection import guard
from afferent.proxy.http_server.server import HttpServer
from afferent.proxy.http_server.shared import ConnectionLimits
from afferent.proxy.responses import refusal_body
from afferent.types import KiB, MiB
from tests.server import wait_until

PATIENT = ConnectionLimits(header_timeout_s=120.0, discard_timeout_s=120.0, write_timeout_s=120.0)
HASTY = ConnectionLimits(
    header_timeout_s=0.4, discard_timeout_s=0.8, write_timeout_s=1.5, idle_timeout_s=0.4
)
TAKES_NOTHING_S = 0.5
DEADLINE_S = 1.0
STREAM = b'{"model": "shapes", "messages": [{"role": "user", "content": "What?"}], "stream": true}'
POST = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"


@dataclass
class App:
    """An application with one behaviour for each path.

    - ``/read`` answers with the length of the body, ``/digest`` with its digest.
    - ``/refuse`` answers at once; ``/pause`` reads the first piece only, and waits.
    - ``/endless`` never stops; ``/events`` is an endless stream with a deadline.
    - ``/silent`` is a stream without events, ``/short`` is an empty one; ``/large`` has 8 MiB.
    """

    began: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
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
                case "/large":
                    await self.answer(send, 200, bytes(8 * MiB))
                case "/events" | "/silent" | "/short":
                    await self.stream(scope, receive, send)
                case _:
                    nbytes, digest, more = 0, hashlib.sha256(), True
                    while more:
                        message = await receive()
                        nbytes += len(message["body"])
                        digest.update(message["body"])
                        more = message["more_body"]
                    read = digest.hexdigest() if path == "/digest" else str(nbytes)
                    await self.answer(send, 200, read.encode())
        finally:
            self.ended.append(path)

    async def stream(self, scope: Any, receive: Any, send: Any) -> None:
        async def outputs() -> AsyncGenerator[Output, None]:
            while scope["path"] != "/short":
                await asyncio.sleep(60 if scope["path"] == "/silent" else 0)
                self.sent_nbytes += 16 << 10
                yield TextDelta("x" * (16 << 10))

        reply = OpenAIChat().parse(
            ReceivedBody(json=STREAM, media={}, nbytes=len(STREAM)), request_id="1", model="shapes"
        )
        deadline = asyncio.get_running_loop().time() + DEADLINE_S
        headers: dict[str, str] = {}
        events = EventStream(
            reply.reply, [], outputs(), deadline=deadline, headers=headers, on_end=self.ends.append
        )
        await events(scope, receive, send)

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
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as sock:
            sock.sendall(data)
            yield sock

    @contextlib.contextmanager
    def connect_with_little_room(
        self, data: bytes, *, nbytes: int = KiB
    ) -> Iterator[socket.socket]:
        """Connect with a small receive buffer."""
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)
            sock.settimeout(60)
            sock.connect(("127.0.0.1", self.port))
            sock.sendall(data)
            yield sock


@pytest.fixture
def host(caplog: pytest.LogCaptureFixture) -> Iterator[Host]:
    """Run a server with long timeouts."""
    with serving(PATIENT, 120.0, caplog) as running:
        yield running


@pytest.fixture
def hasty_host(caplog: pytest.LogCaptureFixture) -> Iterator[Host]:
    with serving(HASTY, TAKES_NOTHING_S, caplog) as running:
        yield running


@contextlib.contextmanager
def serving(
    limits: ConnectionLimits, takes_nothing_s: float, caplog: pytest.LogCaptureFixture
) -> Iterator[Host]:
    app, started = App(), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    servers: list[HttpServer] = []

    async def main() -> None:
        guard(listener, timeout_s=takes_nothing_s)
        server = HttpServer(app, listener, limits, refuse=refusal_body, drain_timeout_s=30.0)
        servers.append(server)
        started.set()
        await server.serve()

    thread = threading.Thread(target=uvloop.run, args=(main(),))
    thread.start()
    started.wait(60)
    try:
        yield Host(app, listener.getsockname()[1], caplog.messages)
    finally:
        servers[0].end_now()
        thread.join(30)
        listener.close()
    assert not [record for record in caplog.records if record.exc_info]


def rest_of(sock: socket.socket) -> bytes:
    """Return everything up to the end of the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            found += data
    return found


def answer_to(sock: socket.socket, end: bytes) -> bytes:
    """Return the received bytes up to this end."""
    found = b""
    while not found.endswith(end):
        data = sock.recv(4096)
        assert data, found
        found += data
    return found


def drain(sock: socket.socket) -> None:
    """Read until the connection ends.

    Raises:
        ConnectionError: The connection was reset.
    """
    while sock.recv(1 << 16):
        pass


def drip_from(sock: socket.socket) -> None:
    """Read a few bytes every 2 ms until the connection ends.

    Raises:
        ConnectionError: The connection was reset.
    """
    while sock.recv(16):
        time.sleep(0.002)


def drip(sock: socket.socket, byte: bytes = b"x") -> bytes:
    """Send a byte every 50 ms until the connection ends; return the answer."""
    sock.settimeout(0.05)
    found, deadline = b"", time.monotonic() + 60
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
        for _ in range(5):  # the connection is reused
            sock.sendall(POST % (b"/read", 300_000) + bytes(300_000))
            answer_to(sock, b"300000")
    assert host.app.began == host.app.ended == ["/read"] * 5


@pytest.mark.parametrize("sizes", [[300_000], [10, 200_000, 10], [70_000] * 8, [1, 65_537, 1] * 5])
def test_a_body_comes_whole_and_in_order(host: Host, sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    pieces = [rng.bytes(size) for size in sizes]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    header = b"POST /digest HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"".join(pieces)
    for data in (POST % (b"/digest", len(body)) + body, header + chunks + b"0\r\n\r\n"):
        with host.connect(data) as sock:
            answer = b""
            while len(answer.partition(b"\r\n\r\n")[2]) < 64:
                answer += sock.recv(4096)
        assert answer.endswith(hashlib.sha256(body).hexdigest().encode())


def test_a_few_requests_ahead_of_their_answers(host: Host) -> None:
    with host.connect((POST % (b"/read", 4) + b"abcd") * 4) as sock:
        answers = b""
        while answers.count(b"200 OK") < 4:
            answers += sock.recv(4096)
    assert answers.count(b"\r\n\r\n4") == 4


def test_thousands_of_requests_ahead_of_their_answers(host: Host) -> None:
    """They wait in the socket: the server reads only as much as fits into one read."""
    with host.connect() as sock:
        sock.settimeout(0.5)
        sent, request = 0, b"GET /pause HTTP/1.1\r\nHost: a\r\n\r\n" * 1000
        with contextlib.suppress(TimeoutError):
            while sent < 64 * MiB:
                sent += sock.send(request)
        assert sent < 32 * MiB
        assert host.app.began == ["/pause"]


def test_a_client_that_leaves_behind_requests_ahead_of_their_answers(host: Host) -> None:
    with host.connect(b"GET /pause HTTP/1.1\r\nHost: a\r\n\r\n" * 2000):
        wait_until(lambda: host.app.began == ["/pause"])
    wait_until(lambda: host.app.ended == ["/pause"], timeout_s=30)  # before the pause ends


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"", b""),
        (b"POST /read HTTP/1.1\r\nHost: a", b"HTTP/1.1 408"),
    ],
)
def test_headers_that_do_not_come(hasty_host: Host, data: bytes, answer: bytes) -> None:
    start = time.monotonic()
    with hasty_host.connect(data) as sock:
        assert rest_of(sock)[:12] == answer
    assert 0.3 < time.monotonic() - start < 30
    with hasty_host.connect(data) as sock:  # the timeout does not start again with each byte
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


def test_each_request_of_a_connection_may_have_a_header(host: Host) -> None:
    header = b"X: " + b"x" * 8 * KiB
    with host.connect() as sock:
        for _ in range(20):
            sock.sendall(b"GET /read HTTP/1.1\r\nHost: a\r\n" + header + b"\r\n\r\n")
            answer_to(sock, b"\r\n\r\n0")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /read HTTP/1.1",
        b"GET /read HTTP/1.1\r\nHost: a\r\nHost: b",
        b"GET /read HTTP/1.1\r\nHost: a\r\nhost: a",
        b"GET /read HTTP/1.0\r\nHost: a\r\nHost: b",
        b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked",
        b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
        b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, chunked",
        b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3",
        b"GET /read HTTP/7.1\r\nHost: a",
        b"nothing like a request",
    ],
)
def test_what_others_may_read_differently_is_refused(host: Host, head: bytes) -> None:
    """The refusal has the usual format, and nothing behind the header is read as a request."""
    behind = b"0\r\n\r\nGET /read HTTP/1.1\r\nHost: a\r\n\r\n"
    with host.connect(head + b"\r\n\r\n" + behind) as sock:
        status, _, body = rest_of(sock).partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"connection: close" in status
    assert json.loads(body)["error"]["code"] == "invalid_request"
    assert not host.app.began


@pytest.mark.parametrize(
    "end", [b"%0A", b"%0a", b"%0D", b"%00", b"%1f/x", b"%7F", b"%09", b"%C2%85", b"%c2%9f?a=b"]
)
def test_path_with_control_character_is_refused(host: Host, end: bytes) -> None:
    """Starlette's router matches ``/read%0A`` with ``/read``."""
    for target in (b"/read" + end, b"http://a/read" + end):
        with host.connect(b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n") as sock:
            assert rest_of(sock).startswith(b"HTTP/1.1 400")
    assert not host.app.began


def test_path_with_other_encoded_characters_is_read(host: Host) -> None:
    with host.connect() as sock:
        for target in (b"/a%20b", b"/a%2Fb", b"/%C3%A9", b"/%250A", b"/read?a=%0A"):
            sock.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n")
            answer_to(sock, b"\r\n\r\n0")
    assert host.app.began == ["/a b", "/a/b", "/é", "/%0A", "/read"]


def test_old_clients_name_no_host(host: Host) -> None:
    with host.connect(b"GET /read HTTP/1.0\r\n\r\n") as sock:
        assert rest_of(sock).startswith(b"HTTP/1.1 200")


def test_an_endless_url(host: Host) -> None:
    with host.connect(b"GET /") as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"x" * MiB)
        assert rest_of(sock)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")
    assert not host.app.began


def test_a_header_that_is_too_large_is_told_so(host: Host) -> None:
    with host.connect(b"GET /read HTTP/1.1\r\nHost: a\r\n") as sock:
        time_out = time.monotonic() + 60
        sock.settimeout(0.05)
        while time.monotonic() < time_out and not host.log:
            with contextlib.suppress(TimeoutError, ConnectionError):
                sock.sendall(b"X: " + b"x" * 40_000)
            with contextlib.suppress(TimeoutError):
                assert sock.recv(4096).startswith(b"HTTP/1.1 431")
                break
        else:
            raise AssertionError("it was not refused")


def test_the_body_of_a_refused_request_has_an_end(hasty_host: Host, host: Host) -> None:
    """The body is discarded so that the connection can be reused, but only for a limited time."""
    start = time.monotonic()
    with hasty_host.connect(POST % (b"/refuse", 10 * MiB)) as sock:
        assert drip(sock).startswith(b"HTTP/1.1 413")
    assert 0.7 < time.monotonic() - start < 30
    with host.connect(POST % (b"/refuse", 1 * MiB) + bytes(MiB)) as sock:
        assert answer_to(sock, b"no").startswith(b"HTTP/1.1 413")
        sock.sendall(POST % (b"/read", 3) + b"abc")
        answer_to(sock, b"\r\n\r\n3")
    with hasty_host.connect(POST % (b"/refuse", 1 * MiB) + bytes(MiB)) as sock:
        assert rest_of(sock).startswith(b"HTTP/1.1 413")  # the connection is closed


@pytest.mark.parametrize("nbytes", [10, 100 * KiB])
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
        wait_until(lambda: host.app.ended == ["/pause"], timeout_s=30)  # before the pause ends


def test_an_answer_that_nobody_reads(hasty_host: Host) -> None:
    """The buffered bytes are limited, and the kernel ends the connection after a timeout."""
    with hasty_host.connect(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n") as sock:
        app = hasty_host.app
        wait_until(lambda: app.sent_nbytes > 0)
        sent = settled(lambda: app.sent_nbytes)
        assert sent < 16 * MiB
        wait_until(lambda: app.ended == ["/endless"])
        assert sock.fileno() > 0


def test_a_stream_that_is_read_a_byte_at_a_time(host: Host) -> None:
    """The deadline ends the stream and the connection, although the client always reads."""
    start = time.monotonic()
    with host.connect_with_little_room(b"GET /events HTTP/1.1\r\nHost: a\r\n\r\n") as sock:
        while not host.app.ended:
            assert sock.recv(16)  # the kernel sees progress for a long time
            time.sleep(0.002)
        took_s = time.monotonic() - start
        with pytest.raises(ConnectionResetError):  # the kernel's buffer is dropped, too
            drain(sock)
    assert DEADLINE_S < took_s < 30
    assert host.app.ends == ["deadline_exceeded"]
    assert host.app.sent_nbytes < 16 * MiB


def test_an_answer_that_is_read_a_byte_at_a_time(hasty_host: Host) -> None:
    """The server has written the whole answer; the timeout drops the unread rest."""
    start = time.monotonic()
    asked = b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n"
    with hasty_host.connect_with_little_room(asked) as sock, pytest.raises(ConnectionResetError):
        drip_from(sock)
    assert 1.0 < time.monotonic() - start < 30
    wait_until(lambda: hasty_host.app.ended == ["/large"])
    with hasty_host.connect(asked) as sock:
        nbytes = 0
        while nbytes < 8 * MiB:
            nbytes += len(sock.recv(1 << 16))


@pytest.mark.alone
def test_an_answer_that_is_taken_slowly_and_steadily(hasty_host: Host) -> None:
    """A steady client may take longer than the write timeout."""
    with hasty_host.connect_with_little_room(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n") as sock:
        start, nbytes = time.monotonic(), 0
        while nbytes < 8 * MiB:
            data = sock.recv(64 * KiB)
            assert data, nbytes
            nbytes += len(data)
            # Sleep by the clock, so that the inaccuracies of the sleeps do not add up.
            time.sleep(max(0.0, start + nbytes / (2 * MiB) - time.monotonic()))
        assert time.monotonic() - start > 2 * HASTY.write_timeout_s


LAST_ANSWERS = {
    "HTTP/1.0, body unfinished": b"POST /large HTTP/1.0\r\nContent-Length: 9\r\n\r\n",
    "body unfinished": (
        b"POST /large HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 9\r\n\r\n"
    ),
    "HTTP/1.0, more behind": b"GET /large HTTP/1.0\r\n\r\n" + bytes(MiB),
    "more behind": b"GET /large HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" + bytes(MiB),
}


@pytest.mark.parametrize("name", LAST_ANSWERS)
def test_last_answer_that_is_taken_slowly_is_whole(host: Host, name: str) -> None:
    with host.connect_with_little_room(LAST_ANSWERS[name], nbytes=64 * KiB) as sock:
        start, answer = time.monotonic(), b""
        while data := sock.recv(64 * KiB):
            answer += data
            time.sleep(max(0.0, start + len(answer) / (3 * MiB) - time.monotonic()))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert len(body) == 8 * MiB


def test_last_answer_that_is_not_taken_is_dropped(hasty_host: Host) -> None:
    data = LAST_ANSWERS["HTTP/1.0, body unfinished"]
    with hasty_host.connect_with_little_room(data) as sock, pytest.raises(ConnectionResetError):
        drip_from(sock)
    wait_until(lambda: hasty_host.app.ended == ["/large"])


def test_a_client_that_leaves_while_its_next_request_is_worked_on(host: Host) -> None:
    """The request followed one that was answered with a stream."""
    stream = b"GET /short HTTP/1.1\r\nHost: a\r\n\r\n"
    with host.connect(stream + POST % (b"/pause", 1) + b"x") as sock:
        answer_to(sock, b"0\r\n\r\n")
        wait_until(lambda: host.app.ended == ["/short"] and host.app.began[-1] == "/pause")
    wait_until(lambda: host.app.ended == ["/short", "/pause"], timeout_s=30)  # long before its end


def test_a_stream_that_is_read_hears_of_its_deadline(host: Host) -> None:
    with host.connect(b"GET /silent HTTP/1.1\r\nHost: a\r\n\r\n") as sock:
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += sock.recv(4096)
        assert b'"code":"deadline_exceeded"' in answer
        sock.sendall(POST % (b"/read", 3) + b"abc")  # the connection is reused
        assert sock.recv(4096).endswith(b"3")
    wait_until(lambda: len(host.app.ended) == 2)
    assert host.app.ends == ["deadline_exceeded"]


def settled(figure: Callable[[], int]) -> int:
    """Return the value when it has not changed for a while."""
    last, since = figure(), time.monotonic()
    while time.monotonic() - since < 0.2:
        if (now := figure()) != last:
            last, since = now, time.monotonic()
        time.sleep(0.01)
    return last
