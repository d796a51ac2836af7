"""Daemon store for an event loop: any number of concurrent calls."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Self, TypeVar

from afferent.admission.shares import Share
from afferent.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    StoreRestarted,
    StoreUnavailable,
    VersionMismatch,
)
from afferent.runtime import wire
from afferent.runtime.tasks import open_in_thread
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
from afferent.store.client.verbs import Call, Verbs
from afferent.store.client.views import VIEWS
from afferent.store.protocol import requests
from afferent.store.protocol.replies import Reply, reply_decoder, result_of
from afferent.store.protocol.requests import NO_REPLY, Request
from afferent.types import Handle, decode, encode

Result = TypeVar("Result")

log = logging.getLogger(__name__)

_ENDS = requests.Release | requests.Accept | requests.ReleasePermit
"""Messages that take something back, and are not sent for a request that has got nothing."""
_SOON_S = 1e-3
"""Delay of messages that may be late; they are sent earlier with the next message.

Sending takes longer than answering, and each separate message wakes the daemon.
"""


class AsyncDaemonStore(Verbs):
    """Store of a daemon, with the `Verbs` as coroutines.

    When the daemon is lost, calls fail with `StoreUnavailable` and all pins are lost. A task
    reconnects as soon as this process uses nothing of the arena any more.

    Examples:
        >>> import asyncio
        >>> from afferent import AsyncDaemonStore, MiB, ObjectKind, ReserveItem, StoreServer
        >>> async def main(address: str) -> int:
        ...     async with await AsyncDaemonStore.connect(address, name="frontend") as store:
        ...         await store.reserve("request-1", [ReserveItem(ObjectKind.FEATURES, MiB)])
        ...         statistics = await store.stat()
        ...         await store.release("request-1")
        ...     return statistics.reserved_nbytes
        >>> with StoreServer(16 * MiB) as server:
        ...     asyncio.run(main(server.address))
        1048576

    Invariants:
        - Messages are sent in the order of the calls.
        - ``_calls`` has exactly the calls in progress.
        - ``_shares`` has the requests of which the daemon has got no message yet.
    """

    def __init__(self, where: Address, connection: Connection, arena: ArenaMap) -> None:
        super().__init__()
        self._where, self._connection, self._arena = where, connection, arena
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._channel = wire.AsyncChannel(self._on_frame, self._on_close)
        self._unsent: list[bytes] = []
        self._shares: dict[str, Share] = {}
        self._is_flush_due = self._is_closed = False
        self._owner = Owner(f"store = await AsyncDaemonStore.connect{where.arguments}")
        self._reconnecting: asyncio.Task[None] | None = None
        self._mismatch = ""  # why the next daemon can't be used
        # Wakes the task that reconnects.
        self._stirred = asyncio.Event()

    @classmethod
    async def connect(
        cls, address: str, *, name: str, writable: bool = False, timeout_s: float = 30.0
    ) -> AsyncDaemonStore:
        """Connect to a daemon.

        Raises:
            VersionMismatch: The daemon speaks another version of the protocol.
            StoreUnavailable: No daemon answers within ``timeout_s``.
        """
        where = Address(address=address, name=name, writable=writable)
        connection, arena = await open_in_thread(
            lambda: connect(where, None, timeout_s=timeout_s), lambda found: _close(*found)
        )
        store = cls(where, connection, arena)
        await store._channel.attach(connection.sock)
        return store

    @property
    def is_open(self) -> bool:
        """Whether there is a connection now."""
        return self._channel.is_open

    @property
    def capacity_nbytes(self) -> int:
        return self._arena.nbytes

    @property
    def address(self) -> str:
        """Address of the daemon, for other processes."""
        return self._where.address

    @property
    def client_number(self) -> int:
        return self._connection.client

    def introduce(self, request: str, share: Share) -> None:
        """See `Verbs.introduce`; the share is sent with the request's first message, if any.

        A request without media needs nothing of the store.
        """
        self._shares[request] = share

    def block(self, handle: Handle) -> memoryview:
        self._owner.check()
        connection = self._connection
        if self.is_open and handle.segment == connection.segment:
            block = self._arena.block(handle.offset, handle.nbytes)
            if self._connection is connection:  # else, in a thread, it may be from a later epoch
                return block
        raise StoreRestarted("the object was lost with a former life of the store")

    async def close(self) -> None:
        """End the connection. Memory that arrays still use stays pinned until this process ends."""
        if self._is_closed or not self._owner.is_here:
            return
        self._is_closed = True
        self._stirred.set()
        if self._reconnecting is not None:
            await self._reconnecting
        with contextlib.suppress(ConnectionClosed):
            self._flush()
        await self._channel.close()
        unused: list[bool] = []
        self._arena.retire(lambda: unused.append(True))
        if unused:  # the store need not wait for this process to die
            await asyncio.to_thread(leave, self._where)
        self._arena.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        self._owner.refuse_pickle()

    # Inner steps

    def _pin_dropper(self) -> Callable[[Handle], None]:
        return functools.partial(_drop_pin, asyncio.get_running_loop(), weakref.ref(self))

    async def _call(self, call: Call[Result]) -> Result:
        self._owner.check()
        request, loop = call.request, asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        self._calls[request.seq] = future
        # asyncio.timeout would cost a tenth of the call.
        timer = None
        if call.timeout_s is not None:
            timer = loop.call_later(call.timeout_s, _expire, future)
        try:
            self._add(request)
            self._flush()
            reply = await future
        except ConnectionClosed as error:
            raise self._unavailable("the store is gone, or restarts; try again") from error
        except (DeadlineExceeded, asyncio.CancelledError):
            if (withdrawal := request.withdrawal()) is not None:
                self._tell(withdrawal)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            del self._calls[request.seq]
            # Its exception references this frame and the callers' frames, which may have arrays
            # over the arena. In a cycle they would stay pinned until a garbage collection.
            del future
        return result_of(request, reply)

    def _tell(self, request: Request[Any]) -> None:
        if isinstance(request, _ENDS) and request.request in self._shares:
            if isinstance(request, requests.Release):
                del self._shares[request.request]
            return
        if not self._owner.is_here or not self.is_open:  # a forked child has no pins
            return
        self._add(request)
        if not _may_be_late(request):
            with contextlib.suppress(ConnectionClosed):
                self._flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_later(_SOON_S, self._flush_late)

    def _add(self, request: Request[Any]) -> None:
        """Let a message wait, behind the share of its request if that is new to the daemon."""
        name = getattr(request, "request", None)
        if name in self._shares:
            share = requests.Introduce(NO_REPLY, name, self._shares.pop(name))
            self._unsent.append(wire.pack_frame(encode(share)))
        self._unsent.append(wire.pack_frame(encode(request)))

    def _flush(self) -> None:
        """Send the waiting messages in order."""
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._channel.send_packed(b"".join(unsent))

    def _flush_late(self) -> None:
        self._is_flush_due = False
        with contextlib.suppress(ConnectionClosed):
            self._flush()

    def _unavailable(self, why: str) -> StoreUnavailable:
        if self._is_closed:
            return StoreUnavailable("this connection is closed")
        return VersionMismatch(self._mismatch) if self._mismatch else StoreUnavailable(why)

    def _on_frame(self, frame: bytes) -> None:
        reply = decode(reply_decoder, frame)
        future = self._calls.get(reply.seq)
        if future is not None and not future.done():
            future.set_result(reply)

    def _on_close(self) -> None:
        self._unsent.clear()  # all pins are lost, and need no release
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._unavailable("the store daemon is gone"))
        if not self._is_closed:
            log.warning(
                "the connection of %r to the store %s has ended; it connects again when this "
                "process uses no array over the arena any more",
                self._where.name,
                self._where.address,
            )
            self._reconnecting = asyncio.create_task(self._reconnect())

    async def _reconnect(self) -> None:
        """Reconnect once this process uses nothing of the previous connection."""
        await self._until_unused()
        attempt = 0
        while not self._is_closed:
            try:
                self._connection, self._arena = await open_in_thread(
                    lambda: connect(self._where, self._arena, timeout_s=RECONNECT_TIMEOUT_S),
                    lambda found: _close(*found, keep=self._arena),
                )
            except (StoreUnavailable, OSError, RuntimeError) as error:  # or out of threads, for now
                self._mismatch = reported_mismatch(error, self._mismatch)
                await asyncio.sleep(RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)])
                attempt += 1
                continue
            self._mismatch = ""
            self._channel = wire.AsyncChannel(self._on_frame, self._on_close)
            await self._channel.attach(self._connection.sock)
            return

    async def _until_unused(self) -> None:
        """Wait until the arena is unused, or the store is closed."""
        loop, unused = asyncio.get_running_loop(), threading.Event()

        def on_unused() -> None:  # in any thread; the loop may have ended long before
            unused.set()
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._stirred.set)

        self._stirred.clear()
        self._arena.retire(on_unused)
        while not unused.is_set() and not self._is_closed:
            try:
                await asyncio.wait_for(self._stirred.wait(), COLLECT_S)
            except TimeoutError:
                gc.collect()
            self._stirred.clear()


def _close(connection: Connection, arena: ArenaMap, keep: ArenaMap | None = None) -> None:
    connection.sock.close()
    if arena is not keep:
        arena.close()


def _drop_pin(
    loop: asyncio.AbstractEventLoop, store: weakref.ref[AsyncDaemonStore], handle: Handle
) -> None:
    """Drop the pin of a collected array; works in any thread, also after the loop has ended."""
    if (found := store()) is not None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(found.unpin, VIEWS, [handle])


def _may_be_late(request: Request[Any]) -> bool:
    """Whether a message may be delayed.

    A message that ends a request or returns a permit may not: other requests may wait for it, and
    this event loop may be blocked.
    """
    if isinstance(request, requests.Release):
        return request.handles is not None
    return isinstance(request, requests.Abort)


def _expire(future: asyncio.Future[Reply]) -> None:
    if not future.done():
        future.set_exception(DeadlineExceeded("the store did not answer in time"))
