"""Replies of a Redis or Valkey, read into memory that is given: `redis`'s own parsers copy a value
three times, and know only a time-out for each read, not one for all.

This is the parser that a connection of `redis` is given (its ``parser_class``); connecting, TLS,
logging in and packing of commands stay the package's.
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
"""Of all strings in a reply together."""
_MAX_ITEMS: Final = 1 << 16
"""Of all lists in a reply together."""
_MAX_DEPTH: Final = 4
_END: Final = b"\r\n"
_NOTHING: Final = b"$-1\r\n"


class ReplyReader:
    """RESP 2 over one socket. Nothing is read that is not there by ``deadline_s``."""

    def __init__(self) -> None:
        self.deadline_s = 0.0
        self._sock: socket.socket | None = None
        self._buffer = bytearray(_BUFFER_NBYTES)
        self._start = self._end = 0
        self._left_nbytes = self._left_items = 0

    # What `redis` calls

    def on_connect(self, connection: Any) -> None:
        self._sock, self._start, self._end = connection._sock, 0, 0

    def on_disconnect(self) -> None:
        self._sock = None

    def can_read(self, timeout: float = 0) -> bool:
        return self._end > self._start

    def read_response(self, disable_decoding: bool = False, timeout: object = None) -> Reply:
        """The next reply; what the server refuses is an error that is returned."""
        return self.read()

    # What we call

    @property
    def is_clean(self) -> bool:
        """Whether nothing has come since the last reply, the connection's end neither."""
        if self._sock is None or self._end > self._start:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def arm(self) -> socket.socket:
        """The socket; what is done with it ends by the deadline.

        Raises:
            ServerSlow: That is over.
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
        """The next reply, which takes this much memory at most.

        Raises:
            InvalidResponse: It is no reply, or longer than any that was asked for.
        """
        self._left_nbytes, self._left_items = max_nbytes, _MAX_ITEMS
        return self._read(0)

    def _read(self, depth: int) -> Reply:
        if self._buffer.startswith(_NOTHING, self._start, self._end):
            self._start += len(_NOTHING)  # what is most often said, when many are looked for
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
        """The next reply, a string of which ``len(target) + 1`` bytes at most were requested.

        Returns:
            Whether it has the length of ``target``, and is there now; ``None`` if it is absent.

        Raises:
            ResponseError: The server refuses it for another reason than that it is no string.
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
        """More bytes behind those that there are."""
        if self._start:
            rest = self._buffer[self._start : self._end]
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        if self._end == len(self._buffer):
            raise InvalidResponse("a line is too long")
        self._end += self._receive(memoryview(self._buffer)[self._end :])

    def _fill(self, target: memoryview) -> None:
        """What was read too much of comes first; the rest goes from the socket to its place."""
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
    """Whether what was requested is there, and no string."""
    return str(error).startswith("WRONGTYPE")


def _number(text: bytes) -> int:
    """
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
