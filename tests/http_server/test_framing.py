"""A request has the same body for any spelling and in any pieces."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import Any, cast

import h11
import httptools
import pytest

from afferent.proxy.http_server.connection import HttpConnection
from afferent.proxy.http_server.head import MAX_HEAD_NBYTES, BadRequest, Head, parse_head
from afferent.proxy.http_server.shared import ConnectionLimits, Shared
from tests.callbacks import measured
from tests.http_server.framing_cases import ACCEPTED, CASES, REFUSED, Case

LIMITS = ConnectionLimits(header_timeout_s=60.0, discard_timeout_s=60.0, write_timeout_s=60.0)
SEED = 20261123
NUM_MUTATIONS = 20_000


class NoHangUps:
    """A stand-in for the disconnect watcher: there are no sockets."""

    def watch(self, fd: int, call: Any) -> None: ...

    def forget(self, fd: int) -> None: ...


class Wire(asyncio.Transport):
    """A transport that records the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = self.has_ended = False
        self.is_paused = False
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, parts: Any) -> None:
        self.written += b"".join(parts)

    def write_eof(self) -> None:
        self.has_ended = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_protocol(self) -> Any:
        return self.protocol

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def fileno(self) -> int:
        return -1


@dataclass
class App:
    """An application that reads each body to its end, and answers with its length."""

    bodies: list[tuple[str, bytes]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, has_more = b"", True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            has_more = message["more_body"]
        self.bodies.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % len(body)})


@dataclass
class Outcome:
    """The result of one connection."""

    bodies: list[tuple[str, bytes]]
    written: bytes
    has_ended: bool


def connected(app: App) -> tuple[HttpConnection, Wire]:
    """Open a connection without data."""
    wire = Wire()
    shared = Shared(
        app=app,
        limits=LIMITS,
        hang_ups=cast(Any, NoHangUps()),
        refuse=lambda *_: b"{}",
        websocket_paths=frozenset({"/v1/realtime"}),
        single_fields=(),
        max_connections=0,
        on_change=lambda: None,
    )
    connection = wire.protocol = HttpConnection(shared)
    connection.connection_made(wire)
    return connection, wire


async def fed(pieces: list[bytes]) -> Outcome:
    """Feed a connection piece by piece; the application runs after each of them."""
    app = App()
    connection, wire = connected(app)
    shared = connection._shared
    for piece in pieces:
        if wire.is_closed:
            break
        connection.data_received(piece)
        for _ in range(4):
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    ended = wire.is_closed or wire.has_ended
    connection.connection_lost(None)
    for task in list(shared.tasks):
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return Outcome(app.bodies, wire.written, ended)


def check(case: Case, outcome: Outcome) -> None:
    assert all(path == "/read" for path, _ in outcome.bodies), "a body was read as a request"
    if case.nbytes is None:
        assert not outcome.bodies
        assert outcome.written.startswith((b"HTTP/1.1 4", b"HTTP/1.1 100"))
        assert outcome.has_ended
    else:
        assert [len(body) for _, body in outcome.bodies] == [case.nbytes]
        assert outcome.written.count(b"HTTP/1.1 200 OK") == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_is_framed_as_required_whole_and_cut_at_every_position(case: Case) -> None:
    async def main() -> None:
        whole = await fed([case.data])
        check(case, whole)
        for cut in range(1, len(case.data)):
            parted = await fed([case.data[:cut], case.data[cut:]])
            check(case, parted)
            assert parted.bodies == whole.bodies, cut
        check(case, await fed([bytes([byte]) for byte in case.data]))

    asyncio.run(main())


def test_request_behind_an_accepted_one_is_read() -> None:
    """The body ends at the right place, so the next request is read."""
    following = b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"

    async def main() -> None:
        for case in ACCEPTED:
            outcome = await fed([case.data + following])
            expected = [case.nbytes, 3] if b"HTTP/1.0" not in case.data else [case.nbytes]
            assert [len(body) for _, body in outcome.bodies] == expected, case.name

    asyncio.run(main())


def test_trailer_never_becomes_a_header() -> None:
    seen: list[Any] = []

    async def main() -> None:
        data = (
            b"POST /read HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"0\r\nAuthorization: Bearer secret\r\n\r\n"
        )
        original = App.__call__

        async def watch(self: App, scope: Any, receive: Any, send: Any) -> None:
            await original(self, scope, receive, send)
            seen.extend(scope["headers"])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(App, "__call__", watch)
            await fed([data])

    asyncio.run(main())
    assert {name for name, _ in seen} == {b"host", b"transfer-encoding"}


# Oracles: two other parsers read the same body of each request that this server accepts


def of_h11(data: bytes) -> int | None:
    """Return the length of the body that h11 reads; ``None`` where it refuses."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    nbytes = 0
    try:
        connection.receive_data(data)
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Data):
                nbytes += len(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return nbytes
            elif event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                return None
    except h11.RemoteProtocolError:
        return None


class _Parsed:
    def __init__(self) -> None:
        self.nbytes, self.is_complete = 0, False

    def on_body(self, body: bytes) -> None:
        if not self.is_complete:
            self.nbytes += len(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


def of_httptools(data: bytes) -> int | None:
    """Return the length of the body that llhttp reads; ``None`` where it refuses.

    At an upgrade llhttp stops; other tests check that this server does not.
    """
    parsed = _Parsed()
    parser = httptools.HttpRequestParser(parsed)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        return -1
    except httptools.HttpParserError:
        pass
    return parsed.nbytes if parsed.is_complete else None


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Change a few bytes or pieces of a request."""
    bits = (b"\r\n", b"\n", b" ", b"\t", b":", b"0", b"5", b";", b",", b"\0", b"\x0b", b"chunked")
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[at : at + 1] = b""
            case 1:
                changed[at:at] = rng.choice(bits)
            case 2:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 3:
                until = min(len(changed), at + rng.randrange(30))
                changed[at:at] = changed[at:until]
    return bytes(changed)


def test_mutated_request_that_is_accepted_has_the_same_body_for_others() -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    num_accepted = 0

    async def main() -> None:
        nonlocal num_accepted
        for _ in range(NUM_MUTATIONS):
            data = mutated(rng.choice(CASES).data, rng)
            outcome = await fed([data])
            if not outcome.bodies:
                continue
            num_accepted += 1
            nbytes = len(outcome.bodies[0][1])
            if (other := of_httptools(data.removeprefix(b"\r\n"))) not in (None, -1):
                assert other == nbytes, data
            if (other := of_h11(data.removeprefix(b"\r\n"))) is not None:
                assert other == nbytes, data

    asyncio.run(main())
    assert num_accepted > NUM_MUTATIONS // 20


def test_refused_heads_are_refused_by_the_parser_alone_or_by_the_framing() -> None:
    assert len(CASES) >= 87
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.nbytes for case in REFUSED} == {None}


def test_head_is_parsed() -> None:
    head = parse_head(b"GET /a%20b?c=d HTTP/1.1\r\nHost: a:80\r\nX-A:  b \r\nX-A: c")
    assert head == Head(
        method="GET",
        path=b"/a%20b",
        query=b"c=d",
        version="1.1",
        fields=[(b"host", b"a:80"), (b"x-a", b"b"), (b"x-a", b"c")],
        length=0,
        keep_alive=True,
        expects_continue=False,
        is_websocket=False,
    )


@pytest.mark.parametrize("method", ["post", "Post", "head", "TRACE", "CONNECT"])
def test_method_that_others_could_read_as_another_is_refused(method: str) -> None:
    """`aiohttp` sends ``post`` as ``POST``; the rules for bodies compare with ``POST``."""
    with pytest.raises(BadRequest, match="method"):
        parse_head(f"{method} /a HTTP/1.1\r\nHost: a".encode())


def test_head_in_small_pieces_is_searched_once() -> None:
    """Each byte searched the whole header again."""
    head = b"GET /read HTTP/1.1\r\nHost: a\r\nX: " + b"a: b\r\n" * 10_000 + b"x" * 2_000

    async def main() -> None:
        connection, wire = connected(App())
        connection.data_received(head)
        with measured() as cost:
            for _ in range(2_000):
                connection.data_received(b"x")
        assert not wire.is_closed
        connection.connection_lost(None)
        assert cost.thread_s < 0.2 * cost.slowness

    asyncio.run(main())


def test_reading_pauses_until_the_application_asks_for_more() -> None:
    """An application that waits holds all that was read of its client."""
    first, more = asyncio.Event(), asyncio.Event()

    class Waiting(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await receive()
            first.set()
            await more.wait()
            await super().__call__(scope, receive, send)

    async def main() -> None:
        app = Waiting()
        connection, wire = connected(app)
        head = b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n"
        connection.data_received(head + bytes(200_000))
        await first.wait()
        assert wire.is_paused
        more.set()
        await turns()
        assert not wire.is_paused
        connection.data_received(bytes(100_000))
        await turns()
        assert app.bodies == [("/read", bytes(100_000))]
        connection.connection_lost(None)

    async def turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    asyncio.run(main())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_heads_in_pieces_of_any_size_are_read(size: int) -> None:
    data = b"GET /read HTTP/1.1\r\nHost: a\r\n\r\n\r\nGET /read HTTP/1.1\r\nHost: b\r\n\r\n"
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    assert len(asyncio.run(fed(pieces)).bodies) == 2
    refused = asyncio.run(fed([b"GET /read HTTP/1.1", b"\r", b"\nHost: a", b"\n"]))
    assert refused.written.startswith(b"HTTP/1.1 400")


def test_request_behind_a_large_body_has_a_limit_of_its_own() -> None:
    body = bytes(MAX_HEAD_NBYTES)
    first = b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    second = b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"

    async def main() -> None:
        outcome = await fed([first + body + second])
        assert [len(read) for _, read in outcome.bodies] == [len(body), 3]

    asyncio.run(main())


@pytest.mark.parametrize(("body", "is_websocket"), [(0, True), (5, False)])
def test_request_with_a_body_is_no_websocket(body: int, is_websocket: bool) -> None:
    fields = "Host: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    head = parse_head(f"GET /v1/realtime HTTP/1.1\r\n{fields}Content-Length: {body}".encode())
    assert head.is_websocket is is_websocket
