"""A port: one socket that outlives its frontend, or a socket for each frontend."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

import pytest

from afferent.errors import ConfigError
from afferent.runtime.listening import BACKLOG, Port
from tests.server import wait_until


def connect(port: Port) -> socket.socket:
    host, number = port.url.removeprefix("http://").rsplit(":", 1)
    return socket.create_connection((host.strip("[]"), int(number)), timeout=60)


def connect_when_listening(port: Port, listener: socket.socket) -> socket.socket:
    listener.listen(BACKLOG)
    return connect(port)


def number(port: Port) -> int:
    return int(port.url.rsplit(":", 1)[1])


def accept(listeners: Sequence[socket.socket], expected: int) -> list[int]:
    """Count the waiting connections of each listener, until the total is reached."""
    nums = [0] * len(listeners)

    def has_all() -> bool:
        for index, listener in enumerate(listeners):
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    listener.accept()[0].close()
                    nums[index] += 1
        return sum(nums) >= expected

    wait_until(has_all)
    assert sum(nums) == expected
    return nums


def test_who_comes_while_the_only_frontend_is_started_again_waits() -> None:
    port = Port("127.0.0.1", 0, num_listeners=1)
    first = port.open()
    first.close()
    with connect(port), port.open() as second:
        accept([second], 1)
    port.close()
    with pytest.raises(ConnectionRefusedError):
        connect(port)


def test_several_share_connections_and_none_waits_for_the_dead() -> None:
    port = Port("127.0.0.1", 0, num_listeners=3)
    with pytest.raises(ConnectionRefusedError):
        connect(port)
    listeners = [port.open() for _ in range(3)]
    for listener in listeners:
        listener.listen(BACKLOG)
    clients = [connect(port) for _ in range(60)]
    assert min(accept(listeners, 60)) >= 5
    listeners.pop().close()
    clients += [connect(port) for _ in range(30)]
    accept(listeners, 30)
    with port.open() as again:
        again.listen(BACKLOG)
        clients += [connect(port) for _ in range(30)]
        assert accept([again, *listeners], 30)[0] > 0
    for sock in (*clients, *listeners):
        sock.close()
    port.close()


@pytest.mark.parametrize("num_listeners", [1, 2])
def test_a_port_that_is_taken_is_refused(num_listeners: int) -> None:
    for num_of_the_other in (1, 2):
        other = Port("127.0.0.1", 0, num_listeners=num_of_the_other)
        with pytest.raises(ConfigError, match="in use"):  # its frontends are not ready yet
            Port("127.0.0.1", number(other), num_listeners=num_listeners)
        with other.open() as listener:
            listener.listen(BACKLOG)
            with pytest.raises(ConfigError, match="in use"):
                Port("127.0.0.1", number(other), num_listeners=num_listeners)
        other.close()


def test_a_port_of_a_moment_ago_can_be_had_again() -> None:
    """The kernel remembers connections of the previous server for a minute."""
    first = Port("127.0.0.1", 0, num_listeners=1)
    with first.open() as listener, connect_when_listening(first, listener):
        listener.accept()[0].close()
    first.close()
    for num_listeners in (2, 1):
        again = Port("127.0.0.1", number(first), num_listeners=num_listeners)
        with again.open() as listener, connect_when_listening(again, listener):
            listener.accept()[0].close()
        again.close()


def test_ipv6_and_addresses_that_are_not_there() -> None:
    port = Port("::1", 0, num_listeners=2)
    assert port.url.startswith("http://[::1]:")
    port.close()
    with pytest.raises(ConfigError, match="can't listen on 192"):
        Port("192.0.2.1", 0, num_listeners=1)
