"""Connection of a process to a store daemon and its arena: connect, reconnect and leave."""

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
"""Timeout of one attempt. A daemon that waits for old clients answers no new one meanwhile."""
COLLECT_S = 1.0
"""Delay before a garbage collection that may free arrays over the arena.

Many exceptions are in a reference cycle with their frames. A program that waits for the store
triggers few collections itself.
"""
_AGAIN_S = 0.02
_LEAVE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of a store, and the identity of this client.

    ``token`` is constant for the life of one client, across its connections. By it, a daemon knows
    the earlier connections of a client, under an earlier daemon, too, that are no longer in use.
    """

    address: str
    name: str
    writable: bool
    token: int = field(default_factory=lambda: secrets.randbits(62))

    @property
    def arguments(self) -> str:
        """Arguments that open such a store, as code."""
        writable = ", writable=True" if self.writable else ""
        return f"({self.address!r}, name={self.name!r}{writable})"


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """One connection; ``segment`` is the store's epoch, ``client`` this client's number in it."""

    sock: socket.socket
    segment: int
    client: int


def connect(
    where: Address, arena: ArenaMap | None, *, timeout_s: float
) -> tuple[Connection, ArenaMap]:
    """Send hello, and map the arena from the welcome, unless it is already mapped.

    The process must not use anything from an earlier connection.

    Raises:
        VersionMismatch: The daemon speaks another version of the protocol.
        StoreUnavailable: No daemon answers within ``timeout_s``, or the answer is invalid.
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

    Storing the exception instead would keep its frames, and with them arrays over the arena.
    """
    found = error.message if isinstance(error, VersionMismatch) else ""
    if found and found != last:
        log.warning(found, extra={"code": VersionMismatch.code})
    return found


def leave(where: Address) -> None:
    """Report that this client uses nothing of the store any more, under any connection.

    It waits for an answer: a message that a dying daemon had not read would make the next one wait.
    """
    deadline = time.monotonic() + _LEAVE_TIMEOUT_S
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with wire.connect(where.address, timeout_s=left_s) as sock:
                sock.sendall(wire.pack_frame(msgspec.msgpack.encode(Bye(where.token))))
                if sock.recv(4096):
                    return
        except ConnectionClosed:  # no daemon listens, so none waits for this client
            return
        except OSError:
            pass
        time.sleep(_AGAIN_S)


def _say_hello(
    where: Address, arena: ArenaMap | None, *, timeout_s: float
) -> tuple[Connection, ArenaMap] | None:
    """Connect once; ``None`` if the daemon closes the connection without an answer."""
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
