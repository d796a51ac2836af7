"""WebSocket for an ASGI application, on the public sans-I/O protocol of `websockets`."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from afferent.proxy.http_server.exchange import ClientGone, Message, Scope, date_field, status_line
from afferent.proxy.http_server.flow import Flow
from afferent.proxy.http_server.head import END
from afferent.proxy.http_server.reads import ReadingProtocol
from afferent.proxy.http_server.shared import LONGEST_READ_NBYTES, Shared
from afferent.proxy.http_server.timer import Timer
from afferent.types import MiB

log = logging.getLogger(__name__)

_MAX_MESSAGE_NBYTES: Final = 16 * MiB
_MAX_WAITING: Final = 16
"""Most messages that the application has not received; beyond, or beyond the bytes of a longest
message, reading pauses."""
_PING_S: Final = 20.0
"""Proxies end connections that are silent for a minute."""
_CLOSE_TIMEOUT_S: Final = 10.0
_LEAVE_TIMEOUT_S: Final = 10.0
"""Time for the application to notice that its client has left, before it is cancelled."""
_NO_CODE, _ABNORMAL, _RESTART = 1005, 1006, 1012


class WebSocketConnection(ReadingProtocol):
    """WebSocket of one client, from its request on.

    Invariants:
        - The application decides whether the WebSocket is opened: before, nothing is written, and
          frames that the client sent ahead are not parsed.
        - Reading is paused while the client does not read: each ping causes an answer.
        - The application gets ``websocket.disconnect`` once, however the connection ends.
    """

    def __init__(
        self, shared: Shared, transport: asyncio.Transport, flow: Flow, scope: Scope
    ) -> None:
        self._shared, self._transport, self._flow, self._scope = shared, transport, flow, scope
        self._protocol = ServerProtocol(max_size=_MAX_MESSAGE_NBYTES)
        self._timer = Timer()
        self._response: Response | None = None
        self._denial: Message | None = None
        self._fragments = bytearray()
        self._opcode = Opcode.TEXT
        self._events: deque[tuple[Message, int]] = deque([({"type": "websocket.connect"}, 0)])
        self._arrived = asyncio.Event()
        self._early = b""  # frames that came before the WebSocket was open
        self._waiting_nbytes = 0
        self._is_gone = self._is_over = self._is_write_paused = self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self, data: bytes) -> None:
        """Answer the handshake.

        Args:
            data: The request's head, and the bytes received behind it.
        """
        end = data.index(END) + len(END)
        self._early = data[end:]
        self._protocol.receive_data(data[:end])
        events = self._protocol.events_received()
        accepted = events and isinstance(events[0], Request) and self._protocol.accept(events[0])
        if not isinstance(accepted, Response) or accepted.status_code != 101:
            body = self._shared.refuse(400, "the WebSocket's handshake is malformed")
            self._deny(400, [(b"content-type", b"application/json")], body)
            return
        self._response = accepted
        self._scope["subprotocols"] = _subprotocols(self._scope["headers"])
        self._scope["extensions"] = {"websocket.http.response": {}}
        self._scope["scheme"], self._scope["state"] = "ws", {}
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._shared.run(self._task)

    # The connection

    @property
    def most_nbytes(self) -> int:
        is_open = self._protocol.state is not State.CONNECTING
        return LONGEST_READ_NBYTES if is_open else super().most_nbytes

    def data_received(self, data: bytes) -> None:
        if self._protocol.state is State.CONNECTING:
            self._early += data
            self._flow.pause_reading()
            return
        self._protocol.receive_data(data)
        self._take(self._protocol.events_received())
        self._flush()

    def eof_received(self) -> None:
        if self._protocol.state is State.CONNECTING:
            return  # the connection is closed
        self._protocol.receive_eof()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_gone = True
        self._timer.stop()
        self._flow.end()
        self._end(_ABNORMAL, "")
        self._shared.leave(self)
        if self._task is not None and not self._task.done():
            self._timer.start(_LEAVE_TIMEOUT_S, self._task.cancel)
            self._task.add_done_callback(lambda _: self._timer.stop())

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self._flow.pause_writing()
        self._flow.pause_reading()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._flow.resume_writing()
        self._resume_reading()

    def _resume_reading(self) -> None:
        """Resume reading, if there is space for further messages and for the answers to them."""
        is_connecting = self._protocol.state is State.CONNECTING
        if not (is_connecting or self._is_write_paused or self._is_full):
            self._flow.resume_reading()

    @property
    def _is_full(self) -> bool:
        """Whether the application has to receive messages before further ones are read."""
        return len(self._events) > _MAX_WAITING or self._waiting_nbytes > _MAX_MESSAGE_NBYTES

    def shut_down(self) -> None:
        """Notify the client that the server restarts."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(_RESTART)
            self._flush()

    def abort(self) -> None:
        """End the connection."""
        self._transport.abort()

    def _take(self, events: Sequence[Any]) -> None:
        for event in events:
            if isinstance(event, Frame):
                self._take_frame(event)
        if self._is_full:
            self._flow.pause_reading()

    def _take_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            close = self._protocol.close_rcvd
            self._end(
                _NO_CODE if close is None else close.code, "" if close is None else close.reason
            )
            return
        if frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            return
        if frame.opcode is not Opcode.CONT:
            self._opcode, self._fragments = frame.opcode, bytearray()
        self._fragments += frame.data
        if not frame.fin:
            return
        data, self._fragments = bytes(self._fragments), bytearray()
        if self._opcode is Opcode.BINARY:
            self._add({"type": "websocket.receive", "bytes": data}, len(data))
            return
        try:
            self._add({"type": "websocket.receive", "text": data.decode()}, len(data))
        except UnicodeDecodeError:
            self._protocol.fail(1007, "the text is not UTF-8")

    def _add(self, event: Message, nbytes: int = 0) -> None:
        self._events.append((event, nbytes))
        self._waiting_nbytes += nbytes
        self._arrived.set()

    def _end(self, code: int, reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._add({"type": "websocket.disconnect", "code": code, "reason": reason})

    def _flush(self) -> None:
        """Write the protocol's pending bytes."""
        for data in self._protocol.data_to_send():
            if self._transport.is_closing():
                return
            if data:
                self._transport.write(data)
            elif self._transport.can_write_eof():
                self._transport.write_eof()
        if self._protocol.close_expected() and not self._is_closing:
            self._is_closing = True  # further frames of the client give it no further time
            self._timer.start(_CLOSE_TIMEOUT_S, self._transport.abort)
        if self._protocol.state is State.CLOSED:
            self._transport.close()

    def _ping(self) -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_ping(b"")
            self._flush()
            self._timer.start(_PING_S, self._ping)

    # The application

    async def _run(self) -> None:
        try:
            await self._shared.app(self._scope, self._receive, self._send)
        except ClientGone:
            pass
        except Exception:
            log.exception("an application failed")
        if not self._is_gone:
            await self._leave()

    async def _leave(self) -> None:
        """End a WebSocket that the application left open."""
        if self._protocol.state is State.CONNECTING:
            await self._send({"type": "websocket.http.response.start", "status": 500})
            await self._send({"type": "websocket.http.response.body", "body": b""})
        elif self._protocol.state is State.OPEN:
            self._protocol.send_close(1011)
            self._flush()

    async def _receive(self) -> Message:
        while not self._events:
            self._arrived.clear()
            self._resume_reading()
            await self._arrived.wait()
        event, nbytes = self._events.popleft()
        self._waiting_nbytes -= nbytes
        return event

    async def _send(self, message: Message) -> None:
        if self._is_gone or self._protocol.state in (State.CLOSING, State.CLOSED):
            raise ClientGone("the client has gone")
        try:
            self._write(message)
        except ConnectionClosed as error:
            raise ClientGone("the client has gone") from error
        await self._flow.drain()

    def _write(self, message: Message) -> None:
        match message["type"]:
            case "websocket.accept":
                self._accept(message)
            case "websocket.send" if message.get("text") is not None:
                self._protocol.send_text(message["text"].encode())
                self._flush()
            case "websocket.send":
                self._protocol.send_binary(message["bytes"])
                self._flush()
            case "websocket.close" if self._protocol.state is State.CONNECTING:
                self._deny(403, [], b"")
            case "websocket.close":
                self._end(message.get("code", 1000), "")
                self._protocol.send_close(message.get("code", 1000), message.get("reason") or "")
                self._flush()
            case "websocket.http.response.start":
                self._denial = message
            case "websocket.http.response.body" if self._denial is not None:
                denial = self._denial
                self._deny(denial["status"], denial.get("headers", ()), message.get("body", b""))
            case other:
                raise RuntimeError(f"{other} is not due on a WebSocket")

    def _accept(self, message: Message) -> None:
        if self._response is None:
            raise RuntimeError("there is no handshake to accept")
        response, self._response = self._response, None
        if subprotocol := message.get("subprotocol"):
            response.headers["Sec-WebSocket-Protocol"] = subprotocol
        for name, value in message.get("headers", ()):
            response.headers[name.decode("latin-1")] = value.decode("latin-1")
        self._protocol.send_response(response)
        self._flush()
        self._timer.start(_PING_S, self._ping)
        early, self._early = self._early, b""
        if early:
            self.data_received(early)
        self._resume_reading()

    def _deny(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Answer with HTTP, in one piece, and end the connection."""
        kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
        fields = [b"%b: %b\r\n" % field for field in kept]
        length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self._end(_ABNORMAL, "")
        self._transport.write(b"".join((status_line(status), date_field(), *fields, length, body)))
        self._is_gone = True
        self._transport.close()


def _subprotocols(fields: Sequence[tuple[bytes, bytes]]) -> list[str]:
    found = [value.decode("latin-1") for name, value in fields if name == b"sec-websocket-protocol"]
    return [each.strip() for value in found for each in value.split(",")]
