"""Daemon store for processes without an event loop."""

from __future__ import annotations

import contextlib
import gc
import select
import socket
import threading
import time
from collections import deque
from typing import Any, NoReturn

from afferent.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    FormatError,
    StoreRestarted,
    StoreUnavailable,
    VersionMismatch,
)
from afferent.runtime import wire
from afferent.store.arena import ArenaMap
from afferent.store.client.handshake import (
    COLLECT_S,
    RECONNECT_S,
    RECONNECT_TIMEOUT_S,
    Address,
    Connection,
    connect,
    leave,
    reported_mismatch,
)
from afferent.store.client.owner import Owner
from afferent.store.client.store import Store
from afferent.store.client.views import DroppedPins, Eventfd
from afferent.store.protocol.replies import Reply, reply_decoder
from afferent.store.protocol.requests import Request
from afferent.types import Handle, decode, encode

_LOOK_AGAIN_S = 0.02
_TOLD_WITHIN_S, _WITHDRAWN_WITHIN_S = 1.0, 0.1


class DaemonStore(Store):
    """Store of a daemon: one connection and one map of the arena.

    Calls run one at a time: a thread that waits for long (`wait`, `take`) needs a store of its own.

    When the daemon is lost, calls fail with `StoreUnavailable`, and all pins are lost. A thread
    reconnects as soon as this process uses nothing of the arena any more. Until all processes have
    done so or died, the new daemon can't allocate a byte. So drop arrays over the arena when a call
    fails like this.

    Examples:
        >>> import numpy as np
        >>> from afferent import DaemonStore, MiB, StoreServer
        >>> with (
        ...     StoreServer(16 * MiB) as server,
        ...     DaemonStore(server.address, name="producer", writable=True) as producer,
        ...     DaemonStore(server.address, name="reader") as reader,
        ... ):
        ...     handle = producer.put("request-1", {"pixels": np.ones(4)})
        ...     with reader.view(handle) as tree:
        ...         print(tree["pixels"].sum())
        ...     del tree
        ...     producer.release("request-1")
        4.0
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        writable: bool = False,
        timeout_s: float = 30.0,
        longest_call_s: float | None = None,
    ) -> None:
        """Connect to a daemon.

        Args:
            address: The daemon's address: the path of its socket.
            name: Name of this client in `list_clients` and ``afferent store``.
            writable: Whether this process may write into the arena.
            timeout_s: Timeout for the connection.
            longest_call_s: Limit of the timeouts of all calls that have one.

        Raises:
            VersionMismatch: The daemon speaks another version of the protocol.
            StoreUnavailable: No daemon answers within ``timeout_s``.
        """
        self._eventfd: Eventfd | None = Eventfd()
        super().__init__(self._eventfd)
        self._where = Address(address=address, name=name, writable=writable)
        self._owner = Owner(f"store = DaemonStore{self._where.arguments}")
        connection, self._arena = connect(self._where, None, timeout_s=timeout_s)
        self._longest_call_s = longest_call_s
        self._lock = threading.Lock()
        # Messages without an answer, until a thread with the lock sends them, in order.
        self._unsent: deque[Request[Any]] = deque()
        self._connection: Connection | None = connection
        self._client_number = connection.client
        self._channel = wire.SyncChannel(connection.sock)
        self._mismatch = ""  # why the next daemon can't be used
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-store", daemon=True)
        self._watcher.start()

    @property
    def capacity_nbytes(self) -> int:
        return self._arena.nbytes

    @property
    def client_number(self) -> int:
        return self._client_number

    @property
    def arena(self) -> ArenaMap:
        """This process's map of the arena; it changes only if the daemon has another arena."""
        return self._arena

    @property
    def address(self) -> str:
        """Address of the daemon, for other processes."""
        return self._where.address

    @property
    def is_open(self) -> bool:
        """Whether there is a connection now."""
        return self._connection is not None

    def block(self, handle: Handle) -> memoryview:
        self._owner.check()
        connection = self._connection
        if connection is not None and connection.segment == handle.segment:
            block = self._arena.block(handle.offset, handle.nbytes)
            if self._connection is connection:  # else it may be from a later epoch
                return block
        raise StoreRestarted("the object was lost with a former life of the store")

    def wait_populated(self) -> None:
        """Wait until the whole arena is in this process's page tables, for benchmarks."""
        self._arena.wait_populated()

    def close(self) -> None:
        """End the connection; running calls fail.

        Memory that arrays still use stays pinned until this process ends.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        if not self._owner.is_here:  # in a forked child: close only its copies of the descriptors
            self._channel.close()
            self._drop_eventfd()
            return
        self._wake()
        self._watcher.join()
        with contextlib.suppress(OSError):  # ends a running call, which may wait without limit
            self._channel.sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._connection = None
            self._channel.close()
            self._drop_eventfd()
            unused: list[bool] = []
            self._arena.retire(lambda: unused.append(True))
            if unused:  # the store need not wait for this process to die
                leave(self._where)
            self._arena.close()

    def __reduce__(self) -> NoReturn:
        self._owner.refuse_pickle()

    def _exchange(self, request: Request[Any], timeout_s: float | None) -> Reply:
        self._owner.check()
        if timeout_s is not None and self._longest_call_s is not None:
            timeout_s = min(timeout_s, self._longest_call_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._unsent.extend(self._dropped_releases())  # this call may need their space
        soon = not request.waits
        if not self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise DeadlineExceeded("another thread's call took all of the time")
        try:
            self._send_unsent(_TOLD_WITHIN_S)
            if self._connection is None:
                raise self._unavailable("the store is gone, or restarts; try again")
            try:
                self._channel.send(encode(request), timeout_s=timeout_s)
                while True:
                    left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                    frame = self._channel.receive(timeout_s=left, soon=soon)
                    reply = decode(reply_decoder, frame)
                    if reply.seq == request.seq:  # else a late answer to a call that timed out
                        break
            except (ConnectionClosed, FormatError) as error:
                self._lose()
                raise self._unavailable("the store daemon is gone") from error
            finally:
                if self._channel.is_torn:
                    self._lose()
        finally:
            try:
                self._send_unsent(_TOLD_WITHIN_S)
            finally:
                self._lock.release()
        return reply

    def _tell(self, request: Request[Any]) -> None:
        self._say(request, timeout_s=_TOLD_WITHIN_S)

    def _withdraw(self, withdrawal: Request[Any]) -> None:
        self._say(withdrawal, timeout_s=_WITHDRAWN_WITHIN_S)

    def _say(self, request: Request[Any], *, timeout_s: float) -> None:
        """Send a message; if another thread's call takes longer, that call sends it at its end."""
        if not self._owner.is_here:  # a forked child has no pins
            return
        self._unsent.append(request)
        if self._lock.acquire(timeout=timeout_s):
            try:
                self._send_unsent(timeout_s)
            finally:
                self._lock.release()

    def _send_unsent(self, timeout_s: float) -> None:
        """Send the messages without an answer. The lock must be held.

        The connection is dropped if the daemon does not read one in time.
        """
        while self._unsent and self._connection is not None:
            request = self._unsent.popleft()
            try:
                with contextlib.suppress(ConnectionClosed, DeadlineExceeded):
                    self._channel.send(encode(request), timeout_s=timeout_s)
            finally:  # also if a signal's handler raises in the middle
                if self._channel.is_torn:
                    self._lose()
        if self._connection is None:  # the pins that they are about were lost with it
            self._unsent.clear()

    def _unavailable(self, why: str) -> StoreUnavailable:
        if self._closed.is_set():
            return StoreUnavailable("this connection is closed")
        return VersionMismatch(self._mismatch) if self._mismatch else StoreUnavailable(why)

    def _lose(self) -> None:
        """Drop a broken connection; the watcher thread makes another. The lock must be held."""
        if self._connection is not None:
            # The socket stays open: the thread polls it, so its number must not be reused yet.
            self._connection = None
            self._wake()

    def _wake(self) -> None:
        """Wake the watcher thread."""
        if self._eventfd is not None:
            self._eventfd.signal()

    def _drop_eventfd(self) -> None:
        """Drop the eventfd; it is closed with the last view that may signal it."""
        self._eventfd, self._dropped_pins = None, DroppedPins()

    # The thread that reconnects and releases the pins of collected views

    def _watch(self) -> None:
        eventfd = self._eventfd
        while eventfd is not None:
            # Clear the event before checking its causes: no signal is lost.
            eventfd.clear()
            if self._closed.is_set():
                return
            self._release_dropped_pins()
            connection = self._connection
            if connection is None:
                self._reconnect()
                continue
            poll = select.poll()
            poll.register(connection.sock.fileno(), select.POLLRDHUP)
            poll.register(eventfd.fd, select.POLLIN)
            if any(fd == connection.sock.fileno() for fd, _ in poll.poll()):
                with self._lock:
                    if self._connection is connection:
                        self._lose()

    def _reconnect(self) -> None:
        """Reconnect once this process uses nothing of the previous connection."""
        self._channel.close()
        # Not an event: the collector may call this while the same thread waits for the event.
        unused: list[bool] = []
        self._arena.retire(lambda: unused.append(True))
        collect_at_s, attempt = time.monotonic() + COLLECT_S, 0
        while not self._closed.is_set():
            if not unused:
                self._closed.wait(_LOOK_AGAIN_S)
                if time.monotonic() > collect_at_s:
                    gc.collect()
                    collect_at_s = time.monotonic() + COLLECT_S
                continue
            try:
                found = connect(self._where, self._arena, timeout_s=RECONNECT_TIMEOUT_S)
            except StoreUnavailable as error:
                self._mismatch = reported_mismatch(error, self._mismatch)
                self._closed.wait(RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)])
                attempt += 1
                continue
            with self._lock:
                self._mismatch = ""
                self._unsent.clear()
                connection, self._arena = found
                self._channel = wire.SyncChannel(connection.sock)
                self._connection, self._client_number = connection, connection.client
            return
