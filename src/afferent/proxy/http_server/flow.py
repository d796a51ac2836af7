"""Flow control of one connection, in both directions."""

from __future__ import annotations

import asyncio

from afferent.proxy.http_server.disconnects import HangUps, reset
from afferent.proxy.http_server.timer import Timer
from afferent.types import KiB

MAX_BUFFERED_NBYTES = 32 * KiB
"""With so many bytes of a body that wait for the application, reading pauses."""
MIN_NBYTES_PER_S = 32 * KiB
"""Lowest rate at which a client must read an answer that is ready to be sent."""


class Flow:
    """Pauses and resumes both directions of a connection.

    It ends the connection when the client hangs up while reading is paused, or reads too little of
    an answer for ``write_timeout_s``.

    Invariants:
        - `drain` waits between `pause_writing` and `resume_writing`, and never after `end`.
        - The write timeout runs only while writing is paused.
    """

    def __init__(
        self, transport: asyncio.Transport, hang_ups: HangUps, *, write_timeout_s: float
    ) -> None:
        self._transport, self._hang_ups = transport, hang_ups
        self._write_timeout_s = write_timeout_s
        self._timer, self._left_nbytes = Timer(), 0
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._has_hung_up = self._is_read_paused = False
        self._is_writable = asyncio.Event()
        self._is_writable.set()
        hang_ups.watch(self._fd, self._on_hang_up)

    def pause_reading(self) -> None:
        """Stop reading: the client's bytes stay in the socket."""
        if not self._is_read_paused and not self._transport.is_closing():
            self._is_read_paused = True
            self._transport.pause_reading()
            if self._has_hung_up:
                self._transport.abort()

    def resume_reading(self) -> None:
        """Resume reading."""
        if self._is_read_paused and not self._transport.is_closing():
            self._is_read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Block `drain`; called by the event loop."""
        self._is_writable.clear()
        self._watch_client()

    def resume_writing(self) -> None:
        """Unblock `drain`; called by the event loop."""
        self._is_writable.set()
        self._timer.stop()

    async def drain(self) -> None:
        """Wait while the event loop's write buffer is full."""
        if not self._is_writable.is_set():
            await self._is_writable.wait()

    def end(self) -> None:
        """Stop the timer and the watcher, and unblock `drain`: the connection is lost."""
        self._timer.stop()
        self._hang_ups.forget(self._fd)
        self._is_writable.set()

    def _watch_client(self) -> None:
        self._left_nbytes = self._transport.get_write_buffer_size()
        self._timer.start(self._write_timeout_s, self._check_client)

    def _check_client(self) -> None:
        taken_nbytes = self._left_nbytes - self._transport.get_write_buffer_size()
        if taken_nbytes < MIN_NBYTES_PER_S * self._write_timeout_s:
            reset(self._transport)
        else:
            self._watch_client()

    def _on_hang_up(self) -> None:
        """Note the hang-up, and abort if reading is paused.

        While the socket is read, the bytes that the client sent before its end come first.
        """
        self._has_hung_up = True
        if self._is_read_paused:
            self._transport.abort()
