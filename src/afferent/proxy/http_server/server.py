"""HTTP server for an ASGI application on a listening socket; it ends without losing a request."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Collection

from afferent.proxy.http_server.acceptor import Acceptor
from afferent.proxy.http_server.connection import HttpConnection
from afferent.proxy.http_server.disconnects import HangUps
from afferent.proxy.http_server.exchange import Application
from afferent.proxy.http_server.shared import ConnectionLimits, Shared

_ABORT_TIMEOUT_S = 5.0


class HttpServer:
    """Serves until SIGTERM, or until one of its end methods is called. It has no timer of its own.

    Attributes:
        is_ending: Set when the server begins to end.

    Invariants:
        - At the end, the listener is closed before the connections are drained.
        - Running requests get ``drain_timeout_s``; then their connections are aborted and their
          tasks are cancelled.
    """

    def __init__(
        self,
        app: Application,
        listener: socket.socket,
        limits: ConnectionLimits,
        *,
        refuse: Callable[[int, str], bytes],
        drain_timeout_s: float,
        websocket_paths: Collection[str] = (),
        single_fields: Collection[bytes] = (),
        max_connections: int = 0,
    ) -> None:
        """Store the settings; `serve` starts the server.

        Args:
            refuse: Writes the JSON body of a refusal, from its status and a sentence.
            drain_timeout_s: Time for the requests that run when the server ends.
            websocket_paths: Paths that accept WebSockets; all others ignore `Upgrade`.
            single_fields: Names, in lower case, of fields that may occur at most once in a request.
            max_connections: Further connections get 503; 0: no limit.
        """
        self._app, self._listener, self._limits = app, listener, limits
        self._refuse, self._drain_timeout_s = refuse, drain_timeout_s
        self._websocket_paths, self._single_fields = websocket_paths, single_fields
        self._max_connections = max_connections
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shared: Shared | None = None
        self._changed = asyncio.Event()
        self.is_ending = asyncio.Event()

    async def serve(self) -> None:
        """Serve, and return when the last request has ended or its drain timeout is over."""
        self._loop = asyncio.get_running_loop()
        hang_ups = HangUps()
        self._shared = shared = Shared(
            app=self._app,
            limits=self._limits,
            hang_ups=hang_ups,
            refuse=self._refuse,
            websocket_paths=self._websocket_paths,
            single_fields=self._single_fields,
            max_connections=self._max_connections,
            on_change=self._changed.set,
        )
        acceptor = Acceptor(self._listener, lambda: HttpConnection(shared))
        acceptor.start()
        with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread
            self._loop.add_signal_handler(signal.SIGTERM, self.end_soon)
        try:
            await self.is_ending.wait()
        finally:
            await acceptor.close()
        await self._drain(shared)
        hang_ups.close()

    def end_soon(self) -> None:
        """End after the running requests; idle connections are closed."""
        self.is_ending.set()

    def leave(self) -> None:
        """End in favour of a successor that accepts from the same socket.

        An idle connection stays open for a moment, so that a request in transit is answered.
        """
        if self._shared is not None:
            self._shared.is_lingering = True
        self.is_ending.set()

    def end_now(self) -> None:
        """End at once, also during requests; may be called from any thread."""
        self._drain_timeout_s = 0.0
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.is_ending.set)

    async def _drain(self, shared: Shared) -> None:
        shared.is_ending = True
        for connection in list(shared.connections):
            connection.shut_down()
        await self._until_empty(shared, self._drain_timeout_s)
        for connection in list(shared.connections):
            connection.abort()
        for task in list(shared.tasks):
            task.cancel()
        await self._until_empty(shared, _ABORT_TIMEOUT_S)

    async def _until_empty(self, shared: Shared, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while shared.connections or shared.tasks:
                    self._changed.clear()
                    await self._changed.wait()
