"""A client's connection: what it may cost before, between and after requests, and how it ends.

When a client goes away, the task that works on its request is cancelled, whatever it waits for.

This reaches into private parts of `uvicorn`: its version is bounded, and a test says what to look
at when it changes (`tests/serve/test_uvicorn.py`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from afferent.errors import BodyTooLarge, InvalidRequest
from afferent.serve.http.disconnects import HangUps, WatchedFlow, reset
from afferent.serve.http.responses import new_id, refusal
from afferent.serve.http.timer import Timer
from afferent.types import KiB

_MAX_HEADER_NBYTES = 64 * KiB
_MAX_HEADERS = 256
_MAX_PIPELINED = 8
_KEEPALIVE_S = 10
_HANG_UP = "afferent.hang_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """How long a client may take for a request's header, for what of its body is not wanted, and
    for an answer of which more is ready than is written ahead.
    """

    header_timeout_s: float
    discard_timeout_s: float
    untaken_timeout_s: float


def guard(listener: socket.socket, *, timeout_s: float) -> None:
    """Have the kernel end connections whose client takes nothing, or is not there, for so long.

    It holds for all that are accepted: a stream that nobody reads, and a host that vanished.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))


def connection_class(limits: ConnectionLimits, hang_ups: HangUps) -> type[ClientConnection]:
    """What `uvicorn` makes for each connection."""
    return type(
        ClientConnection.__name__,
        (ClientConnection,),
        {"limits": limits, "hang_ups": hang_ups},
    )


def hang_up(scope: MutableMapping[str, Any]) -> None:
    """End the connection of a request, with all that its client has not taken yet."""
    if (call := scope.get("state", {}).get(_HANG_UP)) is not None:  # else it is not one of ours
        call()


class ClientConnection(HttpToolsProtocol):
    """Headers are bounded in size, number and time, and so is a refused body that still comes."""

    limits: ClassVar[ConnectionLimits]
    hang_ups: ClassVar[HangUps]
    lingers: ClassVar[bool] = False
    """At a shutdown, a connection without a request is not closed, but serves one more or times
    out: a request may be on its way.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pieces: list[bytes] = []  # of a body, in what was read last
        super().__init__(*args, **kwargs)
        self._working: tuple[asyncio.Task[Any], RequestResponseCycle] | None = None
        self._timer = Timer()
        self._is_in_header = self._is_in_message = False
        self._header_nbytes = 0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: WatchedFlow = WatchedFlow(
            transport, self.hang_ups, untaken_timeout_s=self.limits.untaken_timeout_s
        )
        self._timer.start(self.limits.header_timeout_s, self._on_time)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.stop()
        self.flow.end()
        super().connection_lost(exc)
        if self._working is not None:
            task, cycle = self._working
            cycle.disconnected = True  # `super` says so to the latest only
            if not cycle.response_complete:
                task.cancel()

    def shutdown(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if not (is_idle and self.lingers):
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        began_before = self._is_in_header
        super().data_received(data)
        self._hand_over()
        # A value that does not end is not seen by `on_header`.
        if began_before and self._is_in_header:
            self._header_nbytes += len(data)
            if self._header_nbytes > _MAX_HEADER_NBYTES and not self.transport.is_closing():
                self._refuse(b"431 Request Header Fields Too Large", "the header is too large")

    # A message; an exception in one of these is answered with 400, and ends the connection

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise BodyTooLarge("too many requests ahead of their answers")
        super().on_message_begin()
        self._is_in_header = self._is_in_message = True
        self._header_nbytes = 0
        self._timer.start(self.limits.header_timeout_s, self._on_time)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_header = False
        self._timer.stop()
        self._check_framing()
        super().on_headers_complete()
        if self.lingers and self.cycle is not None:
            self.cycle.keep_alive = False  # and the client is told so

    def handle_websocket_upgrade(self) -> None:
        """From here on another protocol has the connection."""
        self._timer.stop()
        self.flow.end()
        super().handle_websocket_upgrade()

    @property
    def on_body(self) -> Callable[[bytes], None]:
        """Each of some 40,000 chunks, at worst, in one read: no more than noted for each."""
        return self._pieces.append

    def _hand_over(self) -> None:
        if not self._pieces:
            return
        body, cycle = b"".join(self._pieces), self.cycle
        self._pieces.clear()
        if len(body) > HIGH_WATER_LIMIT and not cycle.body and not cycle.response_complete:
            # `super` would copy it into a buffer, and `receive` out of it.
            cycle.body, body = body, b""  # type: ignore[assignment]
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._hand_over()
        self._is_in_message = False
        super().on_message_complete()
        # There is none for what becomes a WebSocket.
        if self.cycle is not None and self.cycle.response_complete:
            # It was refused before it was complete.
            self._timer.start(self.limits.header_timeout_s, self._on_time)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_message and not self.transport.is_closing():
            self._timer.start(self.limits.discard_timeout_s, self._on_time)

    def _check_framing(self) -> None:
        """What a proxy in between may understand in another way is not understood at all.

        Raises:
            InvalidRequest: Not one host, or a coding that is not simply chunked.
        """
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) != 1 and (hosts or self.parser.get_http_version() != "1.0"):
            raise InvalidRequest("a request names one host")
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and codings != [b"chunked"]:
            raise InvalidRequest("a body is chunked, or has a length")

    def send_400_response(self, _: str) -> None:
        self._refuse(b"400 Bad Request", "this is no HTTP request that is served here")

    def _count(self, nbytes: int) -> None:
        self._header_nbytes += nbytes
        if self._header_nbytes > _MAX_HEADER_NBYTES or len(self.headers) >= _MAX_HEADERS:
            raise BodyTooLarge("the header is too large")

    # Its task

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        async def work(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
            state = scope.setdefault("state", {})
            state[_HANG_UP] = partial(self._hang_up, cycle)
            mine = None
            if (task := asyncio.current_task()) is not None:
                self._working = mine = (task, cycle)
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                if not cycle.disconnected:
                    raise
            finally:
                if self._working is mine:  # else the next one has begun
                    self._working = None
                del state[_HANG_UP]  # or the request would hold on to itself

        super()._start_asgi_task(cycle, work)

    def _hang_up(self, cycle: RequestResponseCycle) -> None:
        cycle.disconnected = True  # `connection_lost` says so a little later
        reset(self.transport)

    # Its time

    def _on_time(self) -> None:
        if self.transport.is_closing():
            return
        if self._is_in_header:
            self._refuse(b"408 Request Timeout", "the header did not arrive in time")
        else:
            self.transport.close()

    def _refuse(self, status: bytes, why: str) -> None:
        body = bytes(refusal(InvalidRequest(why), new_id("request-")).body)
        lines = (
            b"HTTP/1.1 " + status,
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        )
        self.transport.write(b"\r\n".join((*lines, b"", body)))
        self.transport.close()
