"""Redis replies from a socket: whole or in pieces, valid or not."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from redis.exceptions import ConnectionError as ServerGone
from redis.exceptions import InvalidResponse, ResponseError
from redis.exceptions import TimeoutError as ServerSlow

from afferent.tier.redis_replies import Reply, ReplyReader


class Server:
    """The server's end of a reader's socket."""

    def __init__(self) -> None:
        self.reader = ReplyReader()
        self._ours, self._theirs = socket.socketpair()
        self.reader.on_connect(SimpleNamespace(_sock=self._theirs))
        self.reader.deadline_s = time.monotonic() + 20.0

    def says(self, data: bytes) -> Server:
        self._ours.sendall(data)
        return self

    def hangs_up(self) -> Server:
        self._ours.close()
        return self

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_replies_of_every_kind(server: Server) -> None:
    server.says(b"+OK\r\n:42\r\n:-1\r\n$5\r\na\r\nbc\r\n$0\r\n\r\n$-1\r\n*-1\r\n")
    server.says(b"*3\r\n$1\r\nx\r\n*1\r\n:7\r\n$-1\r\n-ERR no\r\n")
    expected: list[Reply] = [b"OK", 42, -1, b"a\r\nbc", b"", None, None, [b"x", [7], None]]
    assert [server.reader.read() for _ in expected] == expected
    error = server.reader.read()
    assert isinstance(error, ResponseError)
    assert str(error) == "ERR no"
    assert server.reader.is_clean


def test_a_value_goes_to_its_place(server: Server) -> None:
    target = memoryview(bytearray(12))
    server.says(b"$10\r\n0123456789\r\n$-1\r\n$2\r\nab\r\n-WRONGTYPE x\r\n")
    assert server.reader.read_into(target[1:11])
    assert bytes(target) == b"\0" + b"0123456789" + b"\0"
    assert server.reader.read_into(target[:2]) is None, "absent"
    assert server.reader.read_into(target[:2])
    assert server.reader.read_into(target[:2]) is False, "there, and no value"


def test_read_into_refused_by_the_server_raises_and_goes_on(server: Server) -> None:
    """The error of a server that loads its data, or forbids the command, is not about the value."""
    server.says(b"-NOPERM x\r\n$0\r\n\r\n+PONG\r\n")
    with pytest.raises(ResponseError, match="NOPERM"):
        server.reader.read_into(memoryview(bytearray(2)))
    assert server.reader.read_into(memoryview(bytearray(2))) is None, "an empty range is absent"
    assert server.reader.read() == b"PONG"


@pytest.mark.parametrize(
    "said",
    [
        b"*2\r\n$9\r\n123456789\r\n$9\r\n",
        b"$11\r\n",
        b"*2\r\n*40000\r\n" + b":1\r\n" * 40000 + b"*40000\r\n",
    ],
    ids=["strings together", "one string", "items together"],
)
def test_read_longer_than_what_was_requested_is_refused(server: Server, said: bytes) -> None:
    """The announced length is enough: the reader does not wait for the data."""
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(server.says, said)
        with pytest.raises(InvalidResponse):
            server.reader.read(max_nbytes=10)
        sent.result()


def test_read_into_longer_than_the_target_is_refused(server: Server) -> None:
    server.says(b"$7\r\n")
    with pytest.raises(InvalidResponse):
        server.reader.read_into(memoryview(bytearray(5)))


@pytest.mark.parametrize("nbytes", [3, 5])
def test_what_has_another_length_is_read_over(server: Server, nbytes: int) -> None:
    target = memoryview(bytearray(nbytes))
    server.says(b"$4\r\nabcd\r\n:1\r\n")
    assert not server.reader.read_into(target)
    assert bytes(target) == bytes(nbytes)
    assert server.reader.read() == 1


def test_it_comes_in_pieces(server: Server) -> None:
    data = b"$6\r\nab\r\ncd\r\n*2\r\n:1\r\n$1\r\n\n\r\n"
    target = memoryview(bytearray(6))
    for byte in data:
        server.says(bytes([byte]))
    assert server.reader.read_into(target)
    assert bytes(target) == b"ab\r\ncd"
    assert server.reader.read() == [1, b"\n"]


@pytest.mark.parametrize(
    "said",
    [
        b"hello\r\n",
        b"\r\n",
        b"$x\r\n",
        b"$99999999999999\r\n",
        b"$-2\r\n",
        b"*99999999999\r\n",
        b"$1\r\nabc",
        b"*1\r\n" * 100 + b":1\r\n",
        b"+" + b"x" * (1 << 17),
    ],
)
def test_nonsense_is_refused(server: Server, said: bytes) -> None:
    server.says(said)
    with pytest.raises(InvalidResponse):
        server.reader.read()


@pytest.mark.parametrize("said", [b":1\r\n", b"+OK\r\n", b"*1\r\n$1\r\nx\r\n", b"$5\r\nabcdefg"])
def test_what_is_no_value_is_not_taken_for_one(server: Server, said: bytes) -> None:
    server.says(said)
    with pytest.raises(InvalidResponse):
        server.reader.read_into(memoryview(bytearray(5)))


def test_who_hangs_up_is_gone(server: Server) -> None:
    server.says(b"$5\r\nab").hangs_up()
    with pytest.raises(ServerGone):
        server.reader.read()


def test_one_deadline_for_all_that_is_read(server: Server) -> None:
    """A server that sends single bytes does not extend the deadline."""
    server.reader.deadline_s = time.monotonic() + 0.05
    with pytest.raises(ServerSlow):
        server.reader.read()
    server.says(b":1\r\n")
    with pytest.raises(ServerSlow):
        server.reader.read()
    server.reader.deadline_s = time.monotonic() + 20.0
    assert server.reader.read() == 1


def test_a_connection_that_says_more_than_it_was_asked_is_not_clean(server: Server) -> None:
    server.says(b"+OK\r\n")
    assert server.reader.read() == b"OK"
    assert server.reader.is_clean
    server.says(b"+MORE\r\n")
    assert not server.reader.is_clean
    server.reader.on_disconnect()
    assert not server.reader.is_clean
    with pytest.raises(ServerGone):
        server.reader.read()
