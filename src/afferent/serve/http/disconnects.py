"""Clients that hang up while nobody reads what they send, or do not take what is sent to them.

Where reading is paused, an event loop does not see the end of a connection: it stands behind bytes
that it was told to leave where they are. The kernel knows it as soon as it has arrived, and says so
to whoever asks for nothing else.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

from uvicorn.protocols.http.flow_control import FlowControl

from afferent.serve.http.timer import Timer
from afferent.types import KiB

_MIN_NBYTES_PER_S = 32 * KiB
"""Of an answer that stands ready."""
_NO_LINGER = struct.pack("ii", 1, 0)


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
        # Notified once: what was said stays true, and is in nobody's way.
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


def reset(transport: asyncio.Transport) -> None:
    """End a connection, with all that its client has not taken yet.

    To close it in order would wait for that, and the kernel would go on with what it has of it, at
    the client's pace.
    """
    sock: socket.socket = transport.get_extra_info("socket")
    with suppress(OSError, ValueError):  # it may be closed already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()


class WatchedFlow(FlowControl):
    """Flow control of one connection.

    It ends when its client hangs up while reading is paused, or takes too little for so long.
    """

    def __init__(
        self, transport: asyncio.Transport, hang_ups: HangUps, *, untaken_timeout_s: float
    ) -> None:
        super().__init__(transport)
        self._hang_ups, self._untaken_timeout_s = hang_ups, untaken_timeout_s
        self._timer, self._left_nbytes = Timer(), 0
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._has_hung_up = False
        hang_ups.watch(self._fd, self._on_hang_up)

    def pause_reading(self) -> None:
        super().pause_reading()
        if self._has_hung_up:
            self._transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_client()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._timer.stop()

    def end(self) -> None:
        """The connection is lost."""
        self._timer.stop()
        self._hang_ups.forget(self._fd)

    def _wait_for_client(self) -> None:
        self._left_nbytes = self._transport.get_write_buffer_size()
        self._timer.start(self._untaken_timeout_s, self._look)

    def _look(self) -> None:
        taken_nbytes = self._left_nbytes - self._transport.get_write_buffer_size()
        if taken_nbytes < _MIN_NBYTES_PER_S * self._untaken_timeout_s:
            reset(self._transport)
        else:
            self._wait_for_client()

    def _on_hang_up(self) -> None:
        """While its socket is read, what the client sent before comes first."""
        self._has_hung_up = True
        if self.read_paused:
            self._transport.abort()
