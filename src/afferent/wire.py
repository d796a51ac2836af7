"""Messages between processes: msgpack in length-prefixed frames over abstract unix sockets.

An abstract socket has no file, so nothing is left when its owner dies. Whoever accepts a connection
checks that the peer runs under its own uid. A frame is a little-endian ``u32`` length and that many
bytes; a length over the limit ends the connection before a byte of the body is read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from afferent.errors import DeadlineExceeded, FormatError, Unavailable

log = logging.getLogger(__name__)

MAX_FRAME_NBYTES = 4 << 20
_MAX_UNSENT_NBYTES = 32 << 20
_LENGTH = struct.Struct("<I")
_SO_PEERPIDFD = 77  # since Linux 6.5; not named by the socket module


class ConnectionClosed(Unavailable):
    """The process on the other side is gone."""

    code = "connection_closed"


@dataclass(frozen=True, slots=True)
class Peer:
    pid: int
    uid: int


def new_address(name: str) -> str:
    """An abstract address that nobody guesses, such as ``"\\0afferent-store-3f..."``."""
    return f"\0afferent-{name}-{secrets.token_hex(16)}"


def listen(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(address)
    sock.listen(1024)
    return sock


def connect(address: str, *, timeout_s: float) -> socket.socket:
    """A blocking connection to a `listen`-ing process of our own uid."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(address)
    except OSError as error:
        sock.close()
        raise ConnectionClosed("the process to connect to is not there") from error
    check_peer(sock)
    return sock


def check_peer(sock: socket.socket) -> Peer:
    """Who is on the other side.

    Raises:
        ConnectionClosed: It runs under another uid; the socket is closed.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        sock.close()
        raise ConnectionClosed("the peer runs under another uid")
    return Peer(pid=pid, uid=uid)


def open_peer_pidfd(sock: socket.socket, peer: Peer) -> int:
    """A descriptor that becomes readable when the process that connected has died."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return os.pidfd_open(peer.pid)


def pack_frame(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


class FrameCutter:
    """Cuts a stream of bytes into frames; pure."""

    def __init__(self, *, max_nbytes: int = MAX_FRAME_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that ``data`` completes; to be read to the end.

        Raises:
            FormatError: A frame is longer than the limit; the stream can't be used any more.
        """
        pending = self._pending
        pending += data
        while len(pending) >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(pending)
            if nbytes > self._max_nbytes:
                raise FormatError(f"a message of {nbytes} bytes is over the limit")
            end = _LENGTH.size + nbytes
            if len(pending) < end:
                return
            frame = bytes(pending[_LENGTH.size : end])
            del pending[:end]
            yield frame


class SyncChannel:
    """Frames over a blocking socket; every call has a deadline. Not for use by several threads."""

    def __init__(self, sock: socket.socket, *, max_nbytes: int = MAX_FRAME_NBYTES) -> None:
        self.sock = sock
        self._cutter = FrameCutter(max_nbytes=max_nbytes)
        self._ready: list[bytes] = []

    def send(self, payload: bytes, *, timeout_s: float | None) -> None:
        self.sock.settimeout(timeout_s)
        try:
            self.sock.sendall(pack_frame(payload))
        except TimeoutError as error:
            raise DeadlineExceeded("a message could not be sent in time") from error
        except OSError as error:
            raise ConnectionClosed("the connection is gone") from error

    def receive(self, *, timeout_s: float | None) -> bytes:
        """The next frame; ``None`` waits for ever."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ready:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise DeadlineExceeded("no answer in time")
            self.sock.settimeout(remaining)
            try:
                data = self.sock.recv(1 << 18)
            except TimeoutError as error:
                raise DeadlineExceeded("no answer in time") from error
            except OSError as error:
                raise ConnectionClosed("the connection is gone") from error
            if not data:
                raise ConnectionClosed("the connection is gone")
            self._ready = list(self._cutter.feed(data))
        return self._ready.pop(0)

    def close(self) -> None:
        self.sock.close()


class AsyncChannel(asyncio.Protocol):
    """Frames over an asyncio transport.

    ``on_frame`` is called for each frame, ``on_close`` once when the connection ends. An exception
    of `FormatError` in ``on_frame`` ends the connection: the peer does not speak our protocol.
    """

    def __init__(
        self,
        on_frame: Callable[[bytes], None],
        on_close: Callable[[], None],
        *,
        max_nbytes: int = MAX_FRAME_NBYTES,
    ) -> None:
        self._on_frame, self._on_close = on_frame, on_close
        self._cutter = FrameCutter(max_nbytes=max_nbytes)
        self._transport: asyncio.Transport | None = None

    async def attach(self, sock: socket.socket) -> None:
        """Take over a connected or accepted socket; frames may arrive before this returns."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=sock)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._cutter.feed(data):
                self._on_frame(frame)
        except FormatError as error:
            log.warning("a connection broke the protocol", extra={"reason": error.message})
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_close()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, payload: bytes) -> None:
        """Queue a frame; a peer that does not read is cut off before it costs much memory.

        Raises:
            ConnectionClosed: The connection has ended.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionClosed("the connection is gone")
        self._transport.write(pack_frame(payload))
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_NBYTES:
            self._transport.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
