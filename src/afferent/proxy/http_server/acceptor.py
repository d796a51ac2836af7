"""Batched accept for a listening socket.

An event loop of libuv accepts one connection at each iteration. With hundreds of connections an
iteration takes long. A new connection, such as that of a health probe, would wait for seconds
behind the others.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from afferent.runtime.logs import Seldom

log = logging.getLogger(__name__)

_MOST_AT_A_TIME = 256
_RETRY_S = 0.1


class Acceptor:
    """Accepts all pending connections in one batch, and creates a protocol for each.

    Invariants:
        - A failed accept (no descriptors) pauses the acceptor for `_RETRY_S`; open connections
          stay.
        - `close` returns after all accepted sockets have a protocol or are closed.
    """

    def __init__(self, listener: socket.socket, make: Callable[[], asyncio.BaseProtocol]) -> None:
        listener.setblocking(False)
        self._listener, self._make = listener, make
        self._beginning: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._seldom = Seldom(log)

    def start(self) -> None:
        """Begin to accept connections."""
        self._paused = None
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    async def close(self) -> None:
        """Close the listener; accepted connections stay open and have their protocols."""
        if self._paused is not None:
            self._paused.cancel()
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        await asyncio.gather(*self._beginning)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_MOST_AT_A_TIME):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors, most likely: open connections stay
                self._seldom.warning("a connection can't be accepted", reason=error.strerror)
                loop.remove_reader(self._listener.fileno())
                self._paused = loop.call_later(_RETRY_S, self.start)
                return
            sock.setblocking(False)
            task = loop.create_task(self._begin(sock))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make, sock)
        except OSError:  # the client has left already
            sock.close()
