"""Hundreds of concurrent connections are accepted at once."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from typing import cast

import pytest
import uvloop

from afferent.proxy.http_server.acceptor import Acceptor

NUM_CLIENTS = 200


class Door:
    """An acceptor, its connections, and the iteration of the loop that accepted each."""

    def __init__(self, listener: socket.socket) -> None:
        self.acceptor = Acceptor(listener, lambda: Echo(self))
        self.turn = 0
        self.turns: list[int] = []
        self.inside: list[asyncio.Transport] = []

    async def until(self, num_inside: int) -> None:
        while len(self.turns) < num_inside:
            self.turn += 1
            await asyncio.sleep(0)

    async def close(self) -> None:
        await self.acceptor.close()
        for transport in self.inside:
            transport.abort()
        await asyncio.sleep(0.01)  # the loop closes them


class Echo(asyncio.Protocol):
    def __init__(self, door: Door) -> None:
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._door.inside.append(self._transport)
        self._door.turns.append(self._door.turn)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        yield listening


async def let_in(listener: socket.socket) -> list[int]:
    door = Door(listener)
    door.acceptor.start()
    try:
        await door.until(NUM_CLIENTS)
    finally:
        await door.close()
    return door.turns


def test_who_waits_is_let_in_at_once(listener: socket.socket) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_CLIENTS):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        turns = uvloop.run(asyncio.wait_for(let_in(listener), 30))
    assert max(turns) - min(turns) < 10


async def run_out_of_descriptors(
    listener: socket.socket,
    early: socket.socket,
    late: socket.socket,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, door = asyncio.get_running_loop(), Door(listener)
    door.acceptor.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        await loop.sock_connect(early, listener.getsockname())
        await door.until(1)
        with socket.socket() as lowest_free:
            limit = lowest_free.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        await loop.sock_connect(late, listener.getsockname())
        while not caplog.messages:
            await asyncio.sleep(0.001)
        await loop.sock_sendall(early, b"still here")
        assert await loop.sock_recv(early, 100) == b"still here"
        assert len(door.inside) == 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await door.until(2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await door.close()


def test_without_descriptors_those_who_are_here_stay(
    listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as early, socket.socket() as late:
        early.setblocking(False)
        late.setblocking(False)
        running = run_out_of_descriptors(listener, early, late, caplog)
        uvloop.run(asyncio.wait_for(running, 30))
    assert caplog.messages == ["a connection can't be accepted"]
