"""Request and answer, as an ASGI application sees them."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final

from afferent.proxy.http_server.flow import MAX_BUFFERED_NBYTES, Flow
from afferent.proxy.http_server.head import Fields, Head

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Application = Callable[
    [Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_HANG_UP: Final = "afferent.hang_up"
_OWN_FIELDS: Final = frozenset((b"connection", b"keep-alive", b"transfer-encoding"))
"""The server writes these itself; an application ends the connection with ``connection: close``."""
_BREAK: Final = re.compile(rb"[\r\n\0]")
_FAR_NBYTES: Final = 2 * MAX_BUFFERED_NBYTES - 4096
"""Two first reads, without a head."""
_LARGE_NBYTES: Final = 16 << 10
"""From this size on, a separate write costs less than a copy."""


class ClientGone(OSError):
    """Raised by ``send`` when the connection has ended, as ASGI 2.4 requires."""


@functools.lru_cache(maxsize=64)
def status_line(status: int) -> bytes:
    """Return the first line of an answer."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())


def date_field() -> bytes:
    """Return the ``date`` field, formatted once per second."""
    return _date_field(int(time.time()))


@functools.lru_cache(maxsize=1)
def _date_field(now: int) -> bytes:
    return b"date: " + formatdate(now, usegmt=True).encode() + b"\r\n"


def hang_up(scope: Scope) -> None:
    """End the connection of a request, and drop the part of its answer that was not received."""
    if (call := scope.get("state", {}).get(_HANG_UP)) is not None:  # else another server runs it
        call()


class Exchange:
    """Request that an application answers.

    Invariants:
        - ``is_answered`` is set once, after the last byte of the answer was written.
        - The application gets each byte of the body once, and `Flow` pauses reading while
          `MAX_BUFFERED_NBYTES` or more of one that is not complete wait for it.
        - After ``is_gone`` nothing is written.
    """

    def __init__(
        self,
        head: Head,
        transport: asyncio.Transport,
        flow: Flow,
        *,
        on_answered: Callable[[], None],
        hang_up: Callable[[], None],
    ) -> None:
        self._head, self._transport, self._flow = head, transport, flow
        self._on_answered, self._hang_up = on_answered, hang_up
        self._pieces: list[bytes] = []
        self._waiting_nbytes = self._fed_nbytes = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._is_body_taken = False
        self._owes_continue = head.expects_continue
        self._start: tuple[int, Fields] | None = None
        self._is_chunked = self._has_no_body = False
        self._left_nbytes = 0  # of an answer that announced its length
        self._task: asyncio.Task[None] | None = None
        self.is_body_complete = self.is_begun = self.is_answered = self.is_gone = False
        self.keep_alive = head.keep_alive

    def start(self, app: Application, scope: Scope) -> asyncio.Task[None]:
        """Run the application in a task."""
        scope["state"] = {_HANG_UP: self._hang_up}
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(app, scope))
        return self._task

    # Called by the connection

    def feed(self, pieces: list[bytes], *, is_complete: bool) -> None:
        """Add a part of the body; pause reading when much of it waits."""
        self._owes_continue = False
        self.is_body_complete = is_complete
        if not self.is_answered:
            self._pieces += pieces
            nbytes = sum(map(len, pieces))
            self._waiting_nbytes += nbytes
            self._fed_nbytes += nbytes
            if self._waiting_nbytes >= MAX_BUFFERED_NBYTES and not is_complete:
                self._flow.pause_reading()
        self._wake()

    @property
    def has_come_far(self) -> bool:
        """Whether so much of the body has come that longer reads are worth their memory, and the
        application waits for more of it.
        """
        return bool(self._waiters) and self._fed_nbytes >= _FAR_NBYTES

    def end(self) -> None:
        """Cancel the application if it has not answered: the connection is lost."""
        self.is_gone = True
        self._wake()
        if self._task is not None and not self.is_answered:
            self._task.cancel()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # Called by the application

    async def _receive(self) -> Message:
        if self._owes_continue and not self.is_gone and not self.is_begun:
            self._owes_continue = False
            self._transport.write(CONTINUE)
        while not self.is_gone and not (self._pieces or self._is_end_due):
            self._flow.resume_reading()
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)
        if self.is_gone:
            return {"type": "http.disconnect"}
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._waiting_nbytes = 0
        self._is_body_taken = self.is_body_complete
        return {"type": "http.request", "body": body, "more_body": not self.is_body_complete}

    @property
    def _is_end_due(self) -> bool:
        """Whether the application has yet to be notified that the body is complete."""
        return self.is_body_complete and not self._is_body_taken

    async def _send(self, message: Message) -> None:
        if self.is_gone:
            raise ClientGone("the client has gone")
        if message["type"] == "http.response.start":
            self._start = (message["status"], list(message.get("headers", ())))
            return
        if message["type"] != "http.response.body" or self._start is None or self.is_answered:
            raise RuntimeError(f"{message['type']} is not due in an answer")
        body, has_more = message.get("body", b""), message.get("more_body", False)
        head = b""
        if not self.is_begun:
            self.is_begun = True
            head = self._write_head(*self._start, None if has_more else len(body))
        self._write(head, body, is_last=not has_more)
        if not has_more:
            self.is_answered = True
            self._on_answered()
        await self._flow.drain()

    def _write_head(self, status: int, fields: Fields, nbytes: int | None) -> bytes:
        """Return the head of the answer, and decide how its body ends.

        Args:
            nbytes: Size of the whole body, where it is known.
        """
        lines, length, has_date = [status_line(status)], None, False
        for name, value in fields:
            name = bytes(name).lower()
            if _BREAK.search(name) or _BREAK.search(value):
                raise RuntimeError("a field of the answer has a line break")
            if name == b"connection" and b"close" in bytes(value).lower():
                self.keep_alive = False
            if name in _OWN_FIELDS:
                continue
            length = int(value) if name == b"content-length" else length
            has_date = has_date or name == b"date"
            lines.append(b"%b: %b\r\n" % (name, value))
        if not has_date:
            lines.append(date_field())
        self._has_no_body = self._head.method == "HEAD" or status in (204, 304) or status < 200
        if length is None and not self._has_no_body:
            length = self._announce(lines, nbytes)
        self._left_nbytes = -1 if length is None else length
        if self._owes_continue or (self._left_nbytes < 0 and not self._ends_itself):
            self.keep_alive = False
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _announce(self, lines: list[bytes], nbytes: int | None) -> int | None:
        """Add the field that announces the end of an answer without a length."""
        if nbytes is not None:
            lines.append(b"content-length: %d\r\n" % nbytes)
        elif self._head.version == "1.1":
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        return nbytes

    @property
    def _ends_itself(self) -> bool:
        """Whether a client finds the end of an answer without a length."""
        return self._is_chunked or self._has_no_body

    def _write(self, head: bytes, body: bytes, *, is_last: bool) -> None:
        parts = [head] if head else []
        if self._has_no_body:
            pass
        elif self._is_chunked:
            if body:
                parts += [b"%x\r\n" % len(body), body, b"\r\n"]
            if is_last:
                parts.append(b"0\r\n\r\n")
        else:
            self._count(len(body), is_last=is_last)
            parts.append(body)
        if len(body) < _LARGE_NBYTES:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)

    def _count(self, nbytes: int, *, is_last: bool) -> None:
        """Check the size of the body against the announced length.

        Raises:
            RuntimeError: The answer is longer or shorter than announced.
        """
        if self._left_nbytes < 0:
            return
        self._left_nbytes -= nbytes
        if self._left_nbytes < 0 or (is_last and self._left_nbytes):
            raise RuntimeError("the answer does not have the length that it announced")

    async def _run(self, app: Application, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._send)
            self._check_answered()
        except asyncio.CancelledError:
            if not self.is_gone:
                raise
        except ClientGone:
            pass
        except Exception:
            log.exception("an application failed")
            await self._fail()
        finally:
            del scope["state"][_HANG_UP]  # a reference cycle

    def _check_answered(self) -> None:
        if not self.is_answered and not self.is_gone:
            raise RuntimeError("the application did not answer")

    async def _fail(self) -> None:
        """Answer 500; abort an answer that has begun, so that no client takes it for complete."""
        if self.is_begun or self.is_gone:
            self._hang_up()
            return
        self.keep_alive = False
        await self._send({"type": "http.response.start", "status": 500, "headers": []})
        await self._send({"type": "http.response.body", "body": b""})
