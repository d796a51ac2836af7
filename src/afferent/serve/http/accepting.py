"""Who connects is let in at once.

An event loop of libuv lets in one connection each time around. With hundreds of connections each
time takes long, so that a new one, such as a probe's, would wait for seconds behind others that
have come before it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import uvicorn

from afferent.runtime.logs import Seldom
from afferent.serve.http.calm import CalmServer
from afferent.serve.http.connection import ClientConnection

log = logging.getLogger(__name__)

_MOST_AT_A_TIME = 256
_AGAIN_S = 0.1


class PromptServer(CalmServer):
    """A server that accepts by an `Acceptor`, from one listening socket."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._acceptor = Acceptor(listener, self._protocol)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._acceptor.close()
        await super().shutdown([])

    def leave(self) -> None:
        """End in favour of a successor that accepts from the same socket: nobody who is connected
        loses a request by it.
        """
        protocol = self.config.http_protocol_class
        if issubclass(protocol, ClientConnection):
            protocol.lingers = True
        self.end_soon()

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )


class Acceptor:
    """Lets in all that wait, and hands each to a protocol of its own."""

    def __init__(self, listener: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        listener.setblocking(False)
        self._listener, self._make = listener, make
        self._beginning: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._seldom = Seldom(log)

    def start(self) -> None:
        self._paused = None
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Nobody is let in any more; those who are here stay."""
        if self._paused is not None:
            self._paused.cancel()
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_MOST_AT_A_TIME):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # too many descriptors, most likely: those who are here stay
                self._seldom.warning("a connection can't be accepted", reason=error.strerror)
                loop.remove_reader(self._listener.fileno())
                self._paused = loop.call_later(_AGAIN_S, self.start)
                return
            sock.setblocking(False)
            task = loop.create_task(self._begin(sock))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make, sock)
        except OSError:  # it has left already
            sock.close()
