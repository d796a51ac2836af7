"""End of a connection behind its last answer, without loss of the answer."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from contextlib import suppress
from typing import Final

from afferent.proxy.http_server.disconnects import reset
from afferent.proxy.http_server.flow import MIN_NBYTES_PER_S
from afferent.proxy.http_server.timer import Timer
from afferent.types import MiB

LINGER_S: Final = 2.0
_MAX_DROPPED_NBYTES: Final = 4 * MiB


class Linger:
    """Reads and drops the client's further bytes, until the client has received the last answer.

    A socket that is closed with unread bytes sends a reset, which destroys the part of the answer
    that the client has not received.

    Invariants:
        - The connection ends in one of these cases: the client ends it; `LINGER_S` pass with
          nothing to send; the client receives too little for the write timeout; more than 4 MiB
          were dropped.
    """

    def __init__(
        self, transport: asyncio.Transport, timer: Timer, *, write_timeout_s: float
    ) -> None:
        """Close the write side, and start the timer.

        Args:
            timer: The connection's timer; the connection stops it when it is lost.
        """
        self._transport, self._timer = transport, timer
        self._slow_left_s = write_timeout_s
        self._num_dropped = 0
        transport.write_eof()
        self._left_nbytes = self._untaken_nbytes()
        timer.start(LINGER_S, self._look)

    def drop(self, nbytes: int) -> None:
        """Count dropped bytes; abort the connection when they are too many."""
        self._num_dropped += nbytes
        if self._num_dropped > _MAX_DROPPED_NBYTES:
            self._transport.abort()

    def _look(self) -> None:
        before, self._left_nbytes = self._left_nbytes, self._untaken_nbytes()
        if before - self._left_nbytes < MIN_NBYTES_PER_S * LINGER_S:
            self._slow_left_s -= LINGER_S
        if not self._left_nbytes:
            self._transport.abort()
        elif self._slow_left_s > 0:
            self._timer.start(LINGER_S, self._look)
        else:
            reset(self._transport)

    def _untaken_nbytes(self) -> int:
        """Return how many bytes the client's machine has not received, here and in the kernel."""
        in_kernel = bytearray(4)
        with suppress(OSError, ValueError):  # it is closed already
            fd = self._transport.get_extra_info("socket").fileno()
            fcntl.ioctl(fd, termios.TIOCOUTQ, in_kernel)
        (nbytes,) = struct.unpack("i", in_kernel)
        return self._transport.get_write_buffer_size() + int(nbytes)
