"""HTTP/1.1 connection of a client: its successive requests, their limits in time and size, its end.

The parser stops at the end of each request: pipelined bytes stay in the client's socket.
"""

from __future__ import annotations

import asyncio
import enum
import socket
from typing import Any, Final, cast
from urllib.parse import unquote

from afferent.proxy.http_server.disconnects import reset
from afferent.proxy.http_server.exchange import Exchange, Scope, date_field, status_line
from afferent.proxy.http_server.flow import Flow
from afferent.proxy.http_server.framing import Framing, framing_of
from afferent.proxy.http_server.head import (
    END,
    MAX_HEAD_NBYTES,
    BadRequest,
    Head,
    has_bare_lf,
    parse_head,
)
from afferent.proxy.http_server.linger import LINGER_S, Linger
from afferent.proxy.http_server.reads import ReadingProtocol
from afferent.proxy.http_server.shared import LONGEST_READ_NBYTES, Shared
from afferent.proxy.http_server.timer import Timer
from afferent.proxy.http_server.websocket import WebSocketConnection

_TCP_KEEPALIVE_S: Final = 10


def guard(listener: socket.socket, *, timeout_s: float) -> None:
    """Have the kernel end accepted connections whose client receives nothing for ``timeout_s``.

    This ends unread streams and connections of hosts that vanished.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _TCP_KEEPALIVE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _TCP_KEEPALIVE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))


class _Phase(enum.Enum):
    HEAD = enum.auto()
    """Between requests, or in a head."""
    BODY = enum.auto()
    """In the body of a request that is not answered."""
    ANSWER = enum.auto()
    """Behind the body of a request that is not answered."""
    DISCARD = enum.auto()
    """In the body of a request that was answered."""
    LINGER = enum.auto()
    """Behind the last answer; later bytes are dropped."""


class HttpConnection(ReadingProtocol):
    """HTTP/1.1 connection of one client.

    Invariants:
        - At most one request of a connection is processed at a time; answers leave in order.
        - In ``ANSWER``, reading is paused once the client has sent more bytes.
        - When the connection is lost, the task of its request is cancelled.
        - ``_exchange`` and ``_framing`` are ``None`` between requests.
        - The timer limits a head, a discarded body, an idle connection or a linger; it is stopped
          while a request is processed.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._timer = Timer()
        self._phase = _Phase.HEAD
        self._rest: bytes | bytearray = b""  # received, not parsed
        self._num_searched = 0  # leading bytes of `_rest` in which no head ends
        self._may_skip_line = True
        self._is_idle = False
        self._lingering: Linger | None = None
        self._framing: Framing | None = None
        self._exchange: Exchange | None = None

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        limits = self._shared.limits
        self._flow = Flow(
            self._transport, self._shared.hang_ups, write_timeout_s=limits.write_timeout_s
        )
        self._shared.connections.add(self)
        self._timer.start(limits.header_timeout_s, self._on_time)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.stop()
        self._flow.end()
        if self._exchange is not None:
            self._exchange.end()
        self._shared.leave(self)

    def pause_writing(self) -> None:
        self._flow.pause_writing()

    def resume_writing(self) -> None:
        self._flow.resume_writing()

    def shut_down(self) -> None:
        """Close the connection after its current request, or at once if it is idle."""
        if self._phase is not _Phase.HEAD:
            exchange = self._exchange
            if exchange is not None and not (exchange.is_begun and self._shared.is_lingering):
                # The exception: a client that has read a head that allows another request.
                exchange.keep_alive = False
        elif self._shared.is_lingering:
            if not self._rest:
                self._timer.start(LINGER_S, self._on_time)
        elif not self._rest:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once, also during a request."""
        self._transport.abort()

    @property
    def most_nbytes(self) -> int:
        exchange = self._exchange
        is_long = self._phase is _Phase.BODY and exchange is not None and exchange.has_come_far
        return LONGEST_READ_NBYTES if is_long else super().most_nbytes

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            self._lingering.drop(len(data))
        elif not self._rest:
            self._parse(data)
        elif self._phase is not _Phase.HEAD:
            self._parse(bytes(self._rest) + data)
        else:
            self._grow_head(data)

    def _grow_head(self, data: bytes) -> None:
        """Append to an incomplete head; parse it once it may be complete, or must be refused."""
        if not isinstance(self._rest, bytearray):
            self._rest = bytearray(self._rest)
        self._rest += data
        start = max(self._num_searched - len(END) + 1, 0)
        self._num_searched = len(self._rest)
        if (
            self._rest.find(END, start) >= 0
            or has_bare_lf(self._rest, start)
            or len(self._rest) > MAX_HEAD_NBYTES
            or self._rest == b"\r\n"  # no head
        ):
            self._parse(bytes(self._rest))

    def _parse(self, data: bytes) -> None:
        """Parse as much of ``data`` as possible, and store the rest in ``_rest``."""
        pos, before = 0, -1
        self._rest = b""
        try:
            while before < pos < len(data):
                before = pos
                if self._phase is _Phase.HEAD:
                    pos = self._read_head(data, pos)
                elif self._framing is not None and self._phase in (_Phase.BODY, _Phase.DISCARD):
                    pos = self._read_body(self._framing, data, pos)
        except BadRequest as error:
            self._refuse(error.status, error.message)
            return
        if self._phase is _Phase.LINGER or self._transport.get_protocol() is not self:
            return
        self._rest = data[pos:]
        self._num_searched = len(self._rest)
        if self._rest and self._phase is _Phase.ANSWER:
            self._flow.pause_reading()

    # A request

    def _read_head(self, data: bytes, pos: int) -> int:
        if self._is_idle:
            self._is_idle = False
            self._timer.start(self._shared.limits.header_timeout_s, self._on_time)
        if self._may_skip_line and data.startswith(b"\r\n", pos):
            self._may_skip_line = False  # RFC 9112 2.2: one empty line, sent by old clients
            return pos + 2
        end = data.find(END, pos)
        if (len(data) if end < 0 else end) - pos > MAX_HEAD_NBYTES:
            raise BadRequest(f"the head has more than {MAX_HEAD_NBYTES} bytes", status=431)
        if end < 0:
            if has_bare_lf(data[pos:], 0):
                raise BadRequest("a line of the head does not end with CRLF")
            return pos
        raw = data[pos:end]
        head = parse_head(raw, single=self._shared.single_fields)
        self._timer.stop()
        self._may_skip_line = True
        if 0 < self._shared.max_connections < len(self._shared.connections):
            raise BadRequest("there are too many connections; try again", status=503)
        end += len(END)
        if head.is_websocket and _path(head) in self._shared.websocket_paths:
            self._become_websocket(head, data[pos:])
            return len(data)
        self._begin(head)
        return end

    def _begin(self, head: Head) -> None:
        self._framing = framing_of(head.length)
        self._exchange = Exchange(
            head, self._transport, self._flow, on_answered=self._on_answered, hang_up=self._hang_up
        )
        if self._shared.is_ending:
            self._exchange.keep_alive = False
        if self._framing.is_complete:
            self._exchange.feed([], is_complete=True)
        self._phase = _Phase.ANSWER if self._framing.is_complete else _Phase.BODY
        scope = {"type": "http", "method": head.method, **_scope_of(head, self._transport)}
        self._shared.run(self._exchange.start(self._shared.app, scope))

    def _read_body(self, framing: Framing, data: bytes, pos: int) -> int:
        pieces: list[bytes] = []
        pos = framing.feed(data, pos, pieces)
        if self._phase is _Phase.BODY:
            if self._exchange is not None and (pieces or framing.is_complete):
                self._exchange.feed(pieces, is_complete=framing.is_complete)
            if framing.is_complete:
                self._phase = _Phase.ANSWER
        elif framing.is_complete:
            self._await_next()
        return pos

    def _on_answered(self) -> None:
        """Handle the end of an answer; its request may still be incomplete."""
        exchange = self._exchange
        if exchange is None or self._transport.is_closing():
            return
        if self._phase is _Phase.BODY:
            if exchange.keep_alive:
                self._phase = _Phase.DISCARD
                self._timer.start(self._shared.limits.discard_timeout_s, self._on_time)
                self._flow.resume_reading()
            else:
                self._linger()
        elif exchange.keep_alive:
            self._await_next()
            if self._rest:
                # The task of the previous request must not run the next one.
                asyncio.get_running_loop().call_soon(self._go_on)
            else:
                self._flow.resume_reading()
        else:
            self._end()

    def _await_next(self) -> None:
        self._phase, self._framing, self._exchange = _Phase.HEAD, None, None
        if self._shared.is_ending and not self._shared.is_lingering:
            self._end()
            return
        self._is_idle = True
        idle_s = LINGER_S if self._shared.is_ending else self._shared.limits.idle_timeout_s
        self._timer.start(idle_s, self._on_time)

    def _end(self) -> None:
        """End the connection behind a last answer; drop pipelined requests."""
        if self._rest:
            self._linger()
        else:
            self._transport.close()

    def _go_on(self) -> None:
        """Parse the pipelined request."""
        if self._phase is not _Phase.HEAD or self._transport.is_closing():
            return
        self._flow.resume_reading()
        self._parse(bytes(self._rest))

    def _become_websocket(self, head: Head, data: bytes) -> None:
        self._shared.connections.discard(self)
        scope = {"type": "websocket", **_scope_of(head, self._transport)}
        websocket = WebSocketConnection(self._shared, self._transport, self._flow, scope)
        self._shared.connections.add(websocket)
        self._transport.set_protocol(websocket)
        websocket.start(data)

    # Its end

    def _hang_up(self) -> None:
        if self._exchange is not None:
            self._exchange.is_gone = True  # `connection_lost` follows a little later
        reset(self._transport)

    def _on_time(self) -> None:
        if self._transport.is_closing():
            return
        if self._phase is _Phase.HEAD and self._rest:
            self._refuse(408, "the head did not arrive in time")
        else:
            self._transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer a request that no application sees, or end an answer that has begun."""
        if (exchange := self._exchange) is not None and self._phase is not _Phase.HEAD:
            has_begun = exchange.is_begun
            exchange.end()
            if has_begun:
                self._transport.close()
                return
        body = self._shared.refuse(status, message)
        lines = (
            status_line(status),
            date_field(),
            b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body),
            b"connection: close\r\n\r\n",
            body,
        )
        self._transport.write(b"".join(lines))
        self._linger()

    def _linger(self) -> None:
        """Close the write side; read and drop bytes until the client closes its own."""
        self._phase, self._rest, self._framing = _Phase.LINGER, b"", None
        self._flow.resume_reading()
        self._lingering = Linger(
            self._transport, self._timer, write_timeout_s=self._shared.limits.write_timeout_s
        )


def _path(head: Head) -> str:
    path = head.path.decode("ascii")
    return unquote(path) if "%" in path else path


def _scope_of(head: Head, transport: asyncio.Transport) -> Scope:
    """Return the common part of ASGI scopes of HTTP and of WebSockets."""
    scope: dict[str, Any] = {
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": head.version,
        "scheme": "http",
        "path": _path(head),
        "raw_path": head.path,
        "query_string": head.query,
        "root_path": "",
        "headers": head.fields,
        "client": _address(transport, "peername"),
        "server": _address(transport, "sockname"),
    }
    return scope


def _address(transport: asyncio.Transport, name: str) -> tuple[str, int] | None:
    found = transport.get_extra_info(name)
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) else None
