"""State that all connections of a server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from afferent.proxy.http_server.disconnects import HangUps
from afferent.proxy.http_server.exchange import Application
from afferent.types import KiB

LONGEST_READ_NBYTES = 256 * KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Timeouts for a client, in seconds.

    Attributes:
        header_timeout_s: For the head of a request.
        discard_timeout_s: For the rest of a body that the application did not read.
        write_timeout_s: For an answer that exceeds the event loop's write buffer.
        idle_timeout_s: Between two requests. It is longer than proxies keep idle connections: a
            request that a proxy sends while the server closes the connection is lost.
    """

    header_timeout_s: float
    discard_timeout_s: float
    write_timeout_s: float
    idle_timeout_s: float = 125.0


class Connection(Protocol):
    """Connection of any protocol, as the server sees it."""

    def shut_down(self) -> None:
        """End in order: after the current request, or at once if there is none."""

    def abort(self) -> None:
        """End at once."""


@dataclass(slots=True, kw_only=True)
class Shared:
    """State that all connections of a server share.

    Attributes:
        app: The ASGI application.
        limits: Timeouts of each connection.
        hang_ups: The disconnect watcher of their sockets.
        refuse: Writes the JSON body of a refusal, from its status and a sentence.
        websocket_paths: Paths that accept an upgrade to a WebSocket; all others ignore `Upgrade`,
            as RFC 9110 7.8 allows.
        single_fields: See `afferent.proxy.http_server.head.parse_head`.
        max_connections: Requests of further connections get 503; 0: no limit.
        connections: The open connections.
        tasks: The tasks of running requests.
        on_change: Called when a connection or a task has ended.
        is_ending: No connection serves another request after its current one.
        memory: What the event loop reads into; it is in use during one call alone.
        is_lingering: At the end, an idle connection is not closed at once: its client may have sent
            a request already.
    """

    app: Application
    limits: ConnectionLimits
    hang_ups: HangUps
    refuse: Callable[[int, str], bytes]
    websocket_paths: Collection[str]
    single_fields: Collection[bytes]
    max_connections: int
    on_change: Callable[[], None]
    connections: set[Connection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    is_ending: bool = False
    is_lingering: bool = False
    memory: memoryview = field(default_factory=lambda: memoryview(bytearray(LONGEST_READ_NBYTES)))

    def run(self, task: asyncio.Task[None]) -> None:
        """Register the task of a request until it ends."""
        self.tasks.add(task)
        task.add_done_callback(self._end)

    def leave(self, connection: Connection) -> None:
        """Unregister a lost connection."""
        self.connections.discard(connection)
        self.on_change()

    def _end(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.on_change()
