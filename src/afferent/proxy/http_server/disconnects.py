"""Detection of disconnected clients while their sockets are not read.

While reading is paused, an event loop does not see the end of a connection: the end is behind bytes
that stay in the socket. The kernel sees it as soon as it arrives, and reports it to a poll that
requests no other event.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

_NO_LINGER = struct.pack("ii", 1, 0)


class HangUps:
    """Disconnect watcher: watches sockets for the end of their peers only; one for each event loop.

    The event loop must run when the watcher is created. A client that is killed in the middle of a
    large body leaves its unsent bytes in its own kernel, and its end behind them: the watcher may
    see the end only after more of the body was read.

    Invariants:
        - Each callback runs at most once, and never after `forget`.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[], None]] = {}
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._on_ready)

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        """Call ``call`` once when the peer has hung up or was lost, until the socket is closed."""
        self._calls[fd] = call
        # Edge-triggered: the state is permanent, so one notification is enough.
        self._epoll.register(fd, select.EPOLLRDHUP | select.EPOLLET)

    def forget(self, fd: int) -> None:
        """Drop the callback; the kernel forgets the socket itself when it is closed."""
        self._calls.pop(fd, None)

    def close(self) -> None:
        """Stop watching all sockets."""
        asyncio.get_running_loop().remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _on_ready(self) -> None:
        for fd, _ in self._epoll.poll(0):
            if (call := self._calls.pop(fd, None)) is not None:
                call()


def reset(transport: asyncio.Transport) -> None:
    """End a connection, and drop all bytes that its client has not received.

    An orderly close would wait for them, and the kernel would continue to send at the client's
    pace.
    """
    sock: socket.socket = transport.get_extra_info("socket")
    with suppress(OSError, ValueError):  # it may be closed already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
