"""The store of a daemon, for processes without an event loop."""

from __future__ import annotations

import contextlib
import gc
import select
import socket
import threading
import time

from afferent import wire
from afferent.errors import (
    DeadlineExceeded,
    FormatError,
    StoreRestarted,
    StoreUnavailable,
)
from afferent.store import messages as m
from afferent.store.arena import ArenaMap
from afferent.store.connection import (
    COLLECT_S,
    RECONNECT_S,
    RECONNECT_TIMEOUT_S,
    Address,
    Connection,
    connect,
    leave,
    result_of,
)
from afferent.store.owner import Owner
from afferent.store.verbs import DEFAULT_TIMEOUT_S, Result, Store
from afferent.store.views import Bell, DroppedPins
from afferent.types import Handle, decode, encode

_LOOK_AGAIN_S = 0.02


class DaemonStore(Store):
    """One connection and one map of the arena. Calls are done one at a time: a thread that waits
    for long (`wait`, `take`) has a store of its own.

    When the daemon is lost, calls fail with `StoreUnavailable`, and what was held is lost. A thread
    connects again as soon as this process uses nothing of the arena any more: until all processes
    have come that far, or died, the new daemon can't give out a byte. So let go of arrays over the
    arena when a call fails so.
    """

    def __init__(
        self, address: str, *, name: str, writable: bool = False, timeout_s: float = 30.0
    ) -> None:
        """Connect.

        Raises:
            StoreUnavailable: No daemon answers within ``timeout_s``.
        """
        self._bell: Bell | None = Bell()
        super().__init__(self._bell)
        self._where = Address(address=address, name=name, writable=writable)
        self._owner = Owner()
        self._arena: ArenaMap
        connection, self._arena = connect(self._where, None, timeout_s=timeout_s)
        self._lock = threading.Lock()
        self._connection: Connection | None = connection
        self._client_number = connection.client
        self._channel = wire.SyncChannel(connection.sock)
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
        """This process's map of the arena; another one only if the arena is another."""
        return self._arena

    @property
    def address(self) -> str:
        """Where the daemon is, for other processes."""
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
            if self._connection is connection:  # else it may be of the life that came after
                return block
        raise StoreRestarted("the object was lost with a former life of the store")

    def wait_populated(self) -> None:
        """Wait until the whole arena is in this process's page tables, as a benchmark wants it."""
        self._arena.wait_populated()

    def close(self) -> None:
        """End the connection; calls under way fail. What arrays still use stays pinned until this
        process ends.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        if not self._owner.is_here:  # it is the parent's: only these descriptors are ours
            self._channel.close()
            self._drop_bell()
            return
        self._ring()
        self._watcher.join()
        with contextlib.suppress(OSError):  # a call under way, which may wait for ever, ends
            self._channel.sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._connection = None
            self._channel.close()
            self._drop_bell()
            unused: list[bool] = []
            self._arena.retire(lambda: unused.append(True))
            if unused:  # the store need not wait for this process to die
                leave(self._where)
            self._arena.close()

    def _call(
        self,
        request: m.Request,
        result_type: type[Result],
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> Result:
        self._owner.check()
        self._release_dropped_pins()  # this call may be for their room
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        soon = not isinstance(request, m.WAITING)
        if not self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise DeadlineExceeded("another thread's call took all of the time")
        try:
            if self._connection is None:
                raise StoreUnavailable("the store is gone, or restarts; try again")
            try:
                self._channel.send(encode(request), timeout_s=timeout_s)
                while True:
                    left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                    frame = self._channel.receive(timeout_s=left, soon=soon)
                    reply = decode(m.reply_decoder, frame)
                    if reply.seq == request.seq:  # else the late answer of a call that gave up
                        break
            except (wire.ConnectionClosed, FormatError) as error:
                self._lose()
                raise StoreUnavailable("the store daemon is gone") from error
            finally:
                if self._channel.is_torn:
                    self._lose()
        finally:
            self._lock.release()
        return result_of(reply, result_type)

    def _tell(self, request: m.Request) -> None:
        if not self._owner.is_here:  # a forked child holds nothing
            return
        with self._lock:
            if self._connection is None:
                return
            with contextlib.suppress(wire.ConnectionClosed, DeadlineExceeded):
                self._channel.send(encode(request), timeout_s=1.0)
            if self._channel.is_torn:
                self._lose()

    def _lose(self) -> None:
        """The connection is of no use any more; the thread makes another. The lock is held."""
        if self._connection is not None:
            # The socket stays open: the thread polls it, and must not see its number used again.
            self._connection = None
            self._ring()

    def _ring(self) -> None:
        """Wake the thread."""
        if self._bell is not None:
            self._bell.ring()

    def _drop_bell(self) -> None:
        """It is closed when the last view is gone that may ring it."""
        self._bell, self._dropped_pins = None, DroppedPins()

    # The thread that connects again, and lets go of what views no longer hold

    def _watch(self) -> None:
        bell = self._bell
        while bell is not None:
            # First the call is cleared, then what it was about is looked at: none gets lost.
            bell.silence()
            if self._closed.is_set():
                return
            self._release_dropped_pins()
            connection = self._connection
            if connection is None:
                self._reconnect()
                continue
            poll = select.poll()
            poll.register(connection.sock.fileno(), select.POLLRDHUP)
            poll.register(bell.fd, select.POLLIN)
            if any(fd == connection.sock.fileno() for fd, _ in poll.poll()):
                with self._lock:
                    if self._connection is connection:
                        self._lose()

    def _reconnect(self) -> None:
        """Come back once nothing of the former life is in use."""
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
            except StoreUnavailable:
                self._closed.wait(RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)])
                attempt += 1
                continue
            with self._lock:
                connection, self._arena = found
                self._channel = wire.SyncChannel(connection.sock)
                self._connection, self._client_number = connection, connection.client
            return
