"""Parser of Redis and Valkey replies that reads values into given memory.

The parsers of `redis` copy a value three times, and have a timeout for each read, not one for all
reads. A connection of `redis` gets this parser as its ``parser_class``. Connecting, TLS, login and
packing of commands stay with the package.
"""

from __future__ import annotations

import select
import socket
import time
from typing import Any, Final

from redis.exceptions import ConnectionError as ServerGone
from redis.exceptions import InvalidResponse, ResponseError
from redis.exceptions import TimeoutError as ServerSlow

Reply = bytes | int | None | list["Reply"] | ResponseError

_BUFFER_NBYTES: Final = 64 << 10
MAX_REPLY_NBYTES: Final = 4 << 20
"""Limit of all strings in a reply together."""
_MAX_ITEMS: Final = 1 << 16
"""Limit of all lists in a reply together."""
_MAX_DEPTH: Final = 4
_END: Final = b"\r\n"
_NOTHING: Final = b"$-1\r\n"


class ReplyReader:
    """RESP 2 over one socket; every read ends by ``deadline_s``."""

    def __init__(self) -> None:
        self.deadline_s = 0.0
        self._sock: socket.socket | None = None
        self._buffer = bytearray(_BUFFER_NBYTES)
        self._start = self._end = 0
        self._left_nbytes = self._left_items = 0

    # Interface for `redis`

    def on_connect(self, connection: Any) -> None:
        self._sock, self._start, self._end = connection._sock, 0, 0

    def on_disconnect(self) -> None:
        self._sock = None

    def can_read(self, timeout: float = 0) -> bool:
        return self._end > self._start

    def read_response(self, disable_decoding: bool = False, timeout: object = None) -> Reply:
        """Read the next reply; an error of the server is returned, not raised."""
        return self.read()

    # Interface for the tier

    @property
    def is_clean(self) -> bool:
        """Whether nothing has arrived since the last reply, not even the connection's end."""
        if self._sock is None or self._end > self._start:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def arm(self) -> socket.socket:
        """Return the socket, with its timeout set to the deadline.

        Raises:
            ServerSlow: The deadline is over.
            ServerGone: There is no connection.
        """
        if self._sock is None:
            raise ServerGone("there is no connection")
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise ServerSlow("the deadline is over")
        self._sock.settimeout(left_s)
        return self._sock

    def read(self, *, max_nbytes: int = MAX_REPLY_NBYTES) -> Reply:
        """Read the next reply, with this memory limit.

        Raises:
            InvalidResponse: It is no reply, or longer than any requested one.
        """
        self._left_nbytes, self._left_items = max_nbytes, _MAX_ITEMS
        return self._read(0)

    def _read(self, depth: int) -> Reply:
        if self._buffer.startswith(_NOTHING, self._start, self._end):
            self._start += len(_NOTHING)  # the most common reply to look-ups
            return None
        kind, rest = self._line()
        match kind:
            case b"+":
                return rest
            case b"-":
                return ResponseError(rest.decode("utf-8", errors="replace"))
            case b":":
                return _number(rest)
            case b"$":
                nbytes = _number(rest)
                if nbytes == -1:
                    return None
                self._left_nbytes -= _checked(nbytes, self._left_nbytes)
                data = bytearray(nbytes)
                self._fill(memoryview(data))
                self._skip_end()
                return bytes(data)
            case b"*":
                number = _number(rest)
                if number == -1:
                    return None
                if depth >= _MAX_DEPTH:
                    raise InvalidResponse("a reply is too deep")
                self._left_items -= _checked(number, self._left_items)
                return [self._read(depth + 1) for _ in range(number)]
        raise InvalidResponse("a reply is of no known kind")

    def read_into(self, target: memoryview) -> bool | None:
        """Read the next reply, a string of which ``len(target) + 1`` bytes at most were requested.

        Returns:
            Whether it has the length of ``target``, and is there now; ``None`` if it is absent.

        Raises:
            ResponseError: The server refuses it, and not because it is no string.
        """
        kind, rest = self._line()
        if kind == b"-":
            error = ResponseError(rest.decode("utf-8", errors="replace"))
            if is_wrong_type(error):
                return False
            raise error
        if kind != b"$":
            raise InvalidResponse("a value was asked for, and something else came")
        nbytes = _number(rest)
        if nbytes == -1:
            return None
        if nbytes != len(target):
            self._fill(memoryview(bytearray(_checked(nbytes, len(target) + 1))))
            self._skip_end()
            return None if nbytes == 0 else False
        self._fill(target)
        self._skip_end()
        return True

    # Inner steps

    def _line(self) -> tuple[bytes, bytes]:
        while (at := self._buffer.find(_END, self._start, self._end)) < 0:
            self._more()
        line = bytes(self._buffer[self._start : at])
        self._start = at + len(_END)
        return line[:1], line[1:]

    def _skip_end(self) -> None:
        while self._end - self._start < len(_END):
            self._more()
        if self._buffer[self._start : self._start + len(_END)] != _END:
            raise InvalidResponse("a value does not end where it should")
        self._start += len(_END)

    def _more(self) -> None:
        """Read more bytes into the buffer, after its current ones."""
        if self._start:
            rest = self._buffer[self._start : self._end]
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        if self._end == len(self._buffer):
            raise InvalidResponse("a line is too long")
        self._end += self._receive(memoryview(self._buffer)[self._end :])

    def _fill(self, target: memoryview) -> None:
        """Fill the target: first from the buffer, then directly from the socket."""
        num = min(len(target), self._end - self._start)
        target[:num] = self._buffer[self._start : self._start + num]
        self._start += num
        while num < len(target):
            num += self._receive(target[num:])

    def _receive(self, target: memoryview) -> int:
        try:
            nbytes = self.arm().recv_into(target)
        except TimeoutError as error:
            raise ServerSlow("no reply in time") from error
        if nbytes == 0:
            raise ServerGone("the server has closed the connection")
        return nbytes


def is_wrong_type(error: ResponseError) -> bool:
    """Whether the requested value exists and is no string."""
    return str(error).startswith("WRONGTYPE")


def _number(text: bytes) -> int:
    """Parse an integer.

    Raises:
        InvalidResponse: It is none.
    """
    try:
        return int(text)
    except ValueError:
        raise InvalidResponse("a length is no number") from None


def _checked(number: int, most: int) -> int:
    if not 0 <= number <= most:
        raise InvalidResponse("a reply is longer than anything that was asked for")
    return number
