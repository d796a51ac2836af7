"""Clients that hang up while nobody reads what they send.

Where reading is paused, an event loop does not see the end of a connection: it stands behind bytes
that it was told to leave where they are. The kernel knows it as soon as it has arrived, and says so
to whoever asks for nothing else.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


class HangUps:
    """Watches sockets for their peers' end only; one for an event loop, which must be running.

    A client that is killed in the middle of a large body leaves what it has written to its own
    kernel, and behind that its end: so it may be seen only after more of the body has been read.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[], None]] = {}
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._on_ready)

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        """Call once when the peer has hung up, or was lost; until the socket is closed."""
        self._calls[fd] = call
        # Told once: what was told stays true, and is in nobody's way.
        self._epoll.register(fd, select.EPOLLRDHUP | select.EPOLLET)

    def forget(self, fd: int) -> None:
        """The socket will be closed, and then the kernel forgets it by itself."""
        self._calls.pop(fd, None)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _on_ready(self) -> None:
        for fd, _ in self._epoll.poll(0):
            if (call := self._calls.pop(fd, None)) is not None:
                call()


class WatchedFlow(FlowControl):
    """Flow control of one connection, which ends when its client hangs up during a pause."""

    def __init__(self, transport: asyncio.Transport, hang_ups: HangUps) -> None:
        super().__init__(transport)
        self._hang_ups = hang_ups
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._has_hung_up = False
        hang_ups.watch(self._fd, self._on_hang_up)

    def pause_reading(self) -> None:
        super().pause_reading()
        if self._has_hung_up:
            self._transport.abort()

    def end(self) -> None:
        """The connection is lost."""
        self._hang_ups.forget(self._fd)

    def _on_hang_up(self) -> None:
        """While its socket is read, what the client sent before comes first."""
        self._has_hung_up = True
        if self.read_paused:
            self._transport.abort()
