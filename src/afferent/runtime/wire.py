"""Messages between processes: msgpack in length-prefixed frames over unix sockets.

Only this user can reach the paths of the sockets (`afferent.runtime.sockets`), and the accepting
process checks that the peer runs under its own uid. A frame is a little-endian ``u32`` length and
that many bytes. A length over the limit ends the connection before a byte of the body is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from afferent.errors import ConfigError, ConnectionClosed, DeadlineExceeded, FormatError
from afferent.runtime.logs import Seldom
from afferent.runtime.sockets import check_length

log = logging.getLogger(__name__)

MAX_FRAME_NBYTES = 4 << 20
_MAX_UNSENT_NBYTES = 32 << 20
_MAX_WHAT = 200
# From 128 KiB on, the receive buffer would be mapped anew for every message.
_RECEIVE_NBYTES = 1 << 16
_LOOK_S = 100e-6
_BACKLOG = 1024
_CONNECT_AGAIN_S = 0.01
_ACCEPT_AGAIN_S = 0.1
_MAX_MISSES = 6
_LENGTH = struct.Struct("<I")
_SO_PEERPIDFD = 77  # since Linux 6.5; not named by the socket module


@dataclass(frozen=True, slots=True)
class Peer:
    pid: int
    uid: int


def listen(path: str) -> socket.socket:
    """Listen at a path that only this user may connect to.

    Raises:
        ConfigError: Another process listens there, or the path can't be used.
    """
    check_length(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind(sock, Path(path))
    except OSError as error:
        sock.close()
        raise ConfigError(f"no socket can be made at {path}: {error.strerror}") from error
    sock.listen(_BACKLOG)
    return sock


def _bind(sock: socket.socket, path: Path) -> None:
    """Bind a path; replace a socket that an ended process has left."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.setblocking(False)  # a listener with a full backlog counts, too
            if other.connect_ex(str(path)) != errno.ECONNREFUSED:
                raise OSError(errno.EADDRINUSE, "somebody listens there")
        path.unlink()
    old = os.umask(0o177)
    try:
        sock.bind(str(path))
    finally:
        os.umask(old)


def connect(path: str, *, timeout_s: float) -> socket.socket:
    """Return a blocking connection to a `listen`-ing process of our own uid.

    Raises:
        ConnectionClosed: No process listens there, or its backlog stays full.
    """
    deadline = time.monotonic() + timeout_s
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        while True:
            try:
                sock.connect(path)
                break
            except BlockingIOError:  # the backlog is full
                if time.monotonic() > deadline:
                    raise
                time.sleep(_CONNECT_AGAIN_S)
    except OSError as error:
        sock.close()
        raise ConnectionClosed("the process to connect to is not there") from error
    check_peer(sock)
    return sock


def check_peer(sock: socket.socket) -> Peer:
    """Return the process on the other side.

    Raises:
        ConnectionClosed: It runs under another uid, or in another pid namespace, where its death
            would not be visible; the socket is closed.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    if pid == 0 or uid != os.getuid():  # 0: it lives in another pid namespace
        sock.close()
        raise ConnectionClosed("the peer runs under another uid")
    return Peer(pid=pid, uid=uid)


async def accept_peers(listener: socket.socket) -> AsyncIterator[tuple[socket.socket, Peer]]:
    """Yield connecting peers until cancelled; processes of other users are refused.

    A connection that comes at the moment of the cancellation stays in the listener's backlog:
    `loop.sock_accept` would lose it, and never close it.
    """
    listener.setblocking(False)
    seldom = Seldom(log)
    while True:
        try:
            sock, _ = listener.accept()
            sock.setblocking(False)
        except BlockingIOError:
            await _until_readable(listener)
            continue
        except OSError as error:  # too many descriptors, most likely: existing connections stay
            seldom.warning("a connection can't be accepted", reason=error.strerror)
            await asyncio.sleep(_ACCEPT_AGAIN_S)
            continue
        try:
            peer = check_peer(sock)
        except ConnectionClosed as error:
            seldom.warning("a connection was refused", reason=error.message)
            continue
        yield sock, peer


async def _until_readable(sock: socket.socket) -> None:
    loop, fd, readable = asyncio.get_running_loop(), sock.fileno(), asyncio.Event()

    def note() -> None:
        loop.remove_reader(fd)  # else it is called again and again
        readable.set()

    loop.add_reader(fd, note)
    try:
        await readable.wait()
    finally:
        if not readable.is_set():
            loop.remove_reader(fd)


def open_peer_pidfd(sock: socket.socket, peer: Peer) -> int:
    """Return a descriptor that becomes readable when the peer process has died."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return os.pidfd_open(peer.pid)


async def receive_frame(sock: socket.socket) -> bytes:
    """Return the single short message with which a peer begins; nothing may follow it yet.

    Raises:
        ConnectionClosed: The peer has left.
        FormatError: It sent something else.
    """
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    cutter = FrameCutter(max_nbytes=4096)
    frames: list[bytes] = []
    while not frames:
        data = await loop.sock_recv(sock, 4096)
        if not data:
            raise ConnectionClosed("the peer left before it said a word")
        frames = list(cutter.feed(data))
    if len(frames) > 1:
        raise FormatError("a peer waits for the answer to its first message")
    return frames[0]


def pack_frame(payload: bytes, *, max_nbytes: int = MAX_FRAME_NBYTES) -> bytes:
    """Return a frame; a payload over the receiver's limit is refused here.

    Raises:
        FormatError: The message is longer than a frame may be.
    """
    if len(payload) > max_nbytes:
        raise FormatError(f"a message of {len(payload)} bytes is over the limit")
    return _LENGTH.pack(len(payload)) + payload


class FrameCutter:
    """Parser that cuts a stream of bytes into frames. Pure."""

    def __init__(self, *, max_nbytes: int = MAX_FRAME_NBYTES) -> None:
        self._max_nbytes = max_nbytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that ``data`` completes; the iterator must be exhausted.

        Raises:
            FormatError: A frame is longer than the limit; the stream is unusable afterwards.
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
    """Frames over a blocking socket; every call has a deadline. For one thread only."""

    def __init__(self, sock: socket.socket, *, max_nbytes: int = MAX_FRAME_NBYTES) -> None:
        self.sock = sock
        self.is_torn = False
        """Whether a frame was sent in part: the peer could not parse what follows."""
        self._cutter = FrameCutter(max_nbytes=max_nbytes)
        self._ready: list[bytes] = []
        self._num_misses = self._num_blind = 0

    def send(self, payload: bytes, *, timeout_s: float | None) -> None:
        try:
            self._limit(timeout_s)
            self.is_torn = True  # also if a signal's handler raises in the middle
            self.sock.sendall(pack_frame(payload))
            self.is_torn = False
        except TimeoutError as error:
            raise DeadlineExceeded("a message could not be sent in time") from error
        except OSError as error:
            raise ConnectionClosed("the connection is gone") from error

    def receive(self, *, timeout_s: float | None, soon: bool = False) -> bytes:
        """Return the next frame; a timeout of ``None`` waits forever.

        Args:
            soon: An answer is expected at once, so that polling is faster than being woken up.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ready:
            try:
                data = self._look() if soon else None
                if data is None:
                    remaining = None if deadline is None else deadline - time.monotonic()
                    if remaining is not None and remaining <= 0:
                        raise DeadlineExceeded("no answer in time")
                    self._limit(remaining)
                    data = self.sock.recv(_RECEIVE_NBYTES)
            except TimeoutError as error:
                raise DeadlineExceeded("no answer in time") from error
            except OSError as error:
                raise ConnectionClosed("the connection is gone") from error
            if not data:
                raise ConnectionClosed("the connection is gone")
            self._ready = list(self._cutter.feed(data))
        return self._ready.pop(0)

    def _limit(self, timeout_s: float | None) -> None:
        if self.sock.gettimeout() != timeout_s:  # setting it is a system call
            self.sock.settimeout(timeout_s)

    def _look(self) -> bytes | None:
        """Poll for data for `_LOOK_S`; after failures, skip the poll for some calls."""
        if self._num_blind:
            self._num_blind -= 1
            return None
        self.sock.setblocking(False)
        end_s = time.monotonic() + _LOOK_S
        while time.monotonic() < end_s:
            with contextlib.suppress(BlockingIOError):
                data = self.sock.recv(_RECEIVE_NBYTES)
                self._num_misses = 0
                return data
        # Other processes need the processor more, perhaps the answering one.
        self._num_misses = min(self._num_misses + 1, _MAX_MISSES)
        self._num_blind = 1 << self._num_misses
        return None

    def close(self) -> None:
        self.sock.close()


class AsyncChannel(asyncio.Protocol):
    """Frames over an asyncio transport.

    ``on_frame`` is called for each frame, ``on_close`` once when the connection ends. A
    `FormatError` raised by ``on_frame`` ends the connection: the peer does not speak our protocol.
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
        self._ended = asyncio.Event()

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
            # Log only the position and type in the message: no bytes, and at most one word.
            what = f": {error.__cause__}"[:_MAX_WHAT] if error.__cause__ else ""
            log.warning("a connection broke the protocol", extra={"reason": error.message + what})
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._ended.set()
        self._on_close()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, payload: bytes, *, max_nbytes: int = MAX_FRAME_NBYTES) -> None:
        """Queue a frame; see `send_packed`.

        Args:
            max_nbytes: The receiver's limit of a frame.

        Raises:
            FormatError: The payload is longer.
        """
        self.send_packed(pack_frame(payload, max_nbytes=max_nbytes), max_nbytes=max_nbytes)

    def send_packed(self, frames: bytes, *, max_nbytes: int = 0) -> None:
        """Queue packed frames in one write.

        A peer that does not read is disconnected before it costs much memory.

        Args:
            max_nbytes: Unsent bytes that are no reason to disconnect it, if more than usual.

        Raises:
            ConnectionClosed: The connection has ended.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionClosed("the connection is gone")
        self._transport.write(frames)
        if self._transport.get_write_buffer_size() > max(_MAX_UNSENT_NBYTES, 2 * max_nbytes):
            self._transport.abort()

    async def close(self) -> None:
        """End the connection after all queued data; return when it has ended."""
        if self._transport is not None:
            self._transport.close()
            await self._ended.wait()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()
