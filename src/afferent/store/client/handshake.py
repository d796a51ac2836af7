"""How a process comes to a store daemon and its arena, comes back when it was lost, and leaves."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from dataclasses import dataclass, field

import msgspec

from afferent.errors import AfferentError, ConnectionClosed, StoreUnavailable, VersionMismatch
from afferent.runtime import logs, wire
from afferent.store.arena import ArenaMap
from afferent.store.protocol.hello import VERSION, Bye, Hello, Welcome, read_welcome

log = logging.getLogger(__name__)

RECONNECT_S = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Pauses between attempts; the last one is repeated."""
RECONNECT_TIMEOUT_S = 2.0
"""For one attempt. A daemon that waits for others to let go answers none, however long it takes."""
COLLECT_S = 1.0
"""After so long it may be a cycle of references that keeps arrays over the arena: many an exception
has its frames in one. A program that waits for the store does little that would have it collected.
"""
_AGAIN_S = 0.02
_LEAVE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a store is, and who we say we are.

    ``token`` is one client's for its life, through all of its connections: a daemon knows by it
    what a client, or a client that it never came to answer, has let go of.
    """

    address: str
    name: str
    writable: bool
    token: int = field(default_factory=lambda: secrets.randbits(62))

    @property
    def arguments(self) -> str:
        """The arguments that open such a store, as code."""
        writable = ", writable=True" if self.writable else ""
        return f"({self.address!r}, name={self.name!r}{writable})"


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """One life of the connection; ``segment`` is the store's epoch, ``client`` our number in it."""

    sock: socket.socket
    segment: int
    client: int


def connect(
    where: Address, arena: ArenaMap | None, *, timeout_s: float
) -> tuple[Connection, ArenaMap]:
    """Say hello, and map the arena that comes with the welcome, unless it is mapped already.

    Nothing that was held under an earlier connection may be in use any more.

    Raises:
        VersionMismatch: The daemon speaks another version of the protocol.
        StoreUnavailable: No daemon answers within ``timeout_s``, or it is not one of ours.
    """
    logs.show_unconfigured()
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            found = _say_hello(where, arena, timeout_s=left_s)
        except StoreUnavailable:
            raise
        except (AfferentError, msgspec.MsgspecError, OSError) as error:
            raise StoreUnavailable(f"no store answers at {where.address!r:.200}") from error
        if found is not None:
            return found
        # The daemon has died meanwhile, and the next one will answer.
        if time.monotonic() + _AGAIN_S > deadline:
            raise StoreUnavailable("the store has closed the connection")
        time.sleep(_AGAIN_S)


def reported_mismatch(error: Exception, last: str) -> str:
    """Return the message of a `VersionMismatch`, empty for another error; log a new one.

    An exception kept instead would keep frames, and with them arrays over the arena.
    """
    found = error.message if isinstance(error, VersionMismatch) else ""
    if found and found != last:
        log.warning(found, extra={"code": VersionMismatch.code})
    return found


def leave(where: Address) -> None:
    """Tell the store that this client uses nothing of it any more, under any connection.

    It takes an answer: what a daemon had not read when it died would keep the next one waiting.
    """
    deadline = time.monotonic() + _LEAVE_TIMEOUT_S
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with wire.connect(where.address, timeout_s=left_s) as sock:
                sock.sendall(wire.pack_frame(msgspec.msgpack.encode(Bye(where.token))))
                if sock.recv(4096):
                    return
        except ConnectionClosed:  # nobody listens, so nobody waits for us
            return
        except OSError:
            pass
        time.sleep(_AGAIN_S)


def _say_hello(
    where: Address, arena: ArenaMap | None, *, timeout_s: float
) -> tuple[Connection, ArenaMap] | None:
    """`connect`, once; ``None`` if the daemon closes the connection without a word."""
    fds: list[int] = []
    sock = wire.connect(where.address, timeout_s=timeout_s)
    try:
        hello = Hello(VERSION, where.writable, where.name, where.token)
        sock.sendall(wire.pack_frame(msgspec.msgpack.encode(hello)))
        data, fds, _, _ = socket.recv_fds(sock, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            sock.close()
            return None
        welcome = _read_welcome(data, fds)
        if arena is None or not arena.is_of(fds[0]):
            arena = ArenaMap(fds[0], writable=where.writable)
        else:
            arena.renew()
        return Connection(sock, welcome.segment, welcome.client), arena
    except (ConnectionResetError, BrokenPipeError):
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)


def _read_welcome(data: bytes, fds: list[int]) -> Welcome:
    frames = list(wire.FrameCutter(max_nbytes=4096).feed(data))
    if len(frames) != 1:
        raise StoreUnavailable("what answers is not a store")
    welcome = read_welcome(frames[0])
    if not fds:
        raise StoreUnavailable("the store's memory did not come: too many open files?")
    return welcome
