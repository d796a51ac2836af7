"""The store of a daemon, for an event loop: any number of calls at a time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import threading
from collections.abc import Sequence

from afferent import wire
from afferent.errors import DeadlineExceeded, StoreRestarted, StoreUnavailable
from afferent.series import Sample
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
from afferent.store.verbs import DEFAULT_TIMEOUT_S, Result
from afferent.types import Failure, Handle, ObjectKind, decode, encode

log = logging.getLogger(__name__)


class AsyncDaemonStore:
    """The verbs of `afferent.store.verbs.Store`, but for those of workers; and `discard`.

    When the daemon is lost, calls fail with `StoreUnavailable` and what was held is lost; a task
    connects again as soon as this process uses nothing of the arena any more.
    """

    def __init__(self, where: Address, connection: Connection, arena: ArenaMap) -> None:
        self._where, self._connection, self._arena = where, connection, arena
        self._seq = itertools.count(1)
        self._calls: dict[int, asyncio.Future[m.Reply]] = {}
        self._channel = wire.AsyncChannel(self._on_frame, self._on_close)
        self._is_closed = False
        self._owner = Owner()
        self._reconnecting: asyncio.Task[None] | None = None
        # Set when there is something new for the task that connects again.
        self._stirred = asyncio.Event()

    @classmethod
    async def connect(
        cls, address: str, *, name: str, writable: bool = False, timeout_s: float = 30.0
    ) -> AsyncDaemonStore:
        """Connect.

        Raises:
            StoreUnavailable: No daemon answers within ``timeout_s``.
        """
        where = Address(address=address, name=name, writable=writable)
        connection, arena = await asyncio.to_thread(connect, where, None, timeout_s=timeout_s)
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
    def client_number(self) -> int:
        """See `Store.client_number`."""
        return self._connection.client

    def block(self, handle: Handle) -> memoryview:
        """The object's bytes in the arena, without a copy. Valid while this process holds it.

        Raises:
            StoreRestarted: It was lost with a former life of the store.
            StaleHandle: No handle that the store gave out.
        """
        self._owner.check()
        if not self.is_open or handle.segment != self._connection.segment:
            raise StoreRestarted("the object was lost with a former life of the store")
        return self._arena.block(handle.offset, handle.nbytes)

    async def acquire(self, request: str, items: Sequence[m.AcquireItem]) -> list[m.Outcome]:
        """See `Store.acquire`."""
        return await self._call(m.Acquire(next(self._seq), request, list(items)), list[m.Outcome])

    async def wait(
        self, request: str, keys: Sequence[bytes], *, timeout_s: float = 60.0
    ) -> list[m.Outcome]:
        """See `Store.wait`."""
        message = m.Wait(next(self._seq), request, list(keys))
        return await self._call(message, list[m.Outcome], timeout_s=timeout_s)

    async def create(
        self,
        request: str,
        items: Sequence[m.CreateItem],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[Handle]:
        """See `Store.create`."""
        message = m.Create(next(self._seq), request, list(items))
        return await self._call(message, list[Handle], timeout_s=timeout_s)

    async def seal(self, request: str, items: Sequence[m.SealItem]) -> list[Handle]:
        """See `Store.seal`."""
        return await self._call(m.Seal(next(self._seq), request, list(items)), list[Handle])

    async def abort(
        self, request: str, handles: Sequence[Handle], *, failure: Failure | None = None
    ) -> None:
        """See `Store.abort`."""
        await self._call(m.Abort(next(self._seq), request, list(handles), failure), type(None))

    def discard(self, request: str, handles: Sequence[Handle]) -> None:
        """`abort`, without waiting for the answer; never fails."""
        self._tell(m.Abort(m.NO_REPLY, request, list(handles)))

    async def get(
        self, request: str, handles: Sequence[Handle], *, also_for: Sequence[int] = ()
    ) -> None:
        """See `Store.get`."""
        message = m.Get(next(self._seq), request, list(handles), list(also_for))
        await self._call(message, type(None))

    async def release(self, request: str, handles: Sequence[Handle] | None = None) -> None:
        """See `Store.release`."""
        listed = list(handles) if handles is not None else None
        await self._call(m.Release(next(self._seq), request, listed), type(None))

    def forget(self, request: str) -> None:
        """Drop all that the request holds, without waiting for the answer; never fails.

        A store that is gone holds nothing.
        """
        self._tell(m.Release(m.NO_REPLY, request, None))

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Store.delete`."""
        return await self._call(m.Delete(next(self._seq), list(keys)), list[bool])

    async def evict(self, kind: ObjectKind, nbytes: int | None = None) -> m.Evicted:
        """See `Store.evict`."""
        return await self._call(m.Evict(next(self._seq), kind, nbytes), m.Evicted)

    async def reserve(
        self,
        request: str,
        items: Sequence[m.ReserveItem],
        *,
        queue: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """See `Store.reserve`. A call that is cancelled leaves nothing granted."""
        message = m.Reserve(next(self._seq), request, list(items), queue)
        await self._call(message, type(None), timeout_s=timeout_s)

    async def unreserve(self, request: str, items: Sequence[m.ReserveItem]) -> None:
        """See `Store.unreserve`."""
        await self._call(m.Unreserve(next(self._seq), request, list(items), 0), type(None))

    async def enter(
        self,
        request: str,
        slot: str,
        *,
        limit: int,
        queue: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """See `Store.enter`. A call that is cancelled leaves no place taken."""
        message = m.Enter(next(self._seq), request, slot, limit, queue)
        await self._call(message, type(None), timeout_s=timeout_s)

    def leave(self, request: str, slot: str) -> None:
        """See `Store.leave`."""
        self._tell(m.Leave(m.NO_REPLY, request, slot))

    async def push(self, source: int, samples: Sequence[Sample]) -> None:
        """Say all that this process has counted so far; see `afferent.metrics.Metrics`."""
        await self._call(m.Push(next(self._seq), source, list(samples)), type(None))

    async def figures(self) -> list[Sample]:
        """The sums of what all processes have counted, those that are gone included."""
        return await self._call(m.Figures(next(self._seq)), list[Sample])

    async def stat(self) -> m.Statistics:
        return await self._call(m.Stat(next(self._seq)), m.Statistics)

    async def list_objects(
        self, kind: ObjectKind | None = None, *, limit: int = 100
    ) -> list[m.ObjectInfo]:
        """See `Store.list_objects`."""
        return await self._call(m.List(next(self._seq), kind, limit), list[m.ObjectInfo])

    async def list_clients(self) -> list[m.ClientInfo]:
        """See `Store.list_clients`."""
        return await self._call(m.Clients(next(self._seq)), list[m.ClientInfo])

    async def close(self) -> None:
        """End the connection. What arrays still use stays pinned until this process ends."""
        if self._is_closed or not self._owner.is_here:
            return
        self._is_closed = True
        self._stirred.set()
        if self._reconnecting is not None:
            await self._reconnecting
        await self._channel.close()
        unused: list[bool] = []
        self._arena.retire(lambda: unused.append(True))
        if unused:  # the store need not wait for this process to die
            await asyncio.to_thread(leave, self._where)
        self._arena.close()

    # Inner steps

    async def _call(
        self, request: m.Request, result_type: type[Result], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Result:
        self._owner.check()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[m.Reply] = loop.create_future()
        self._calls[request.seq] = future
        # asyncio.timeout would cost a tenth of the call.
        timer = loop.call_later(timeout_s, _expire, future)
        try:
            self._channel.send(encode(request))
            reply = await future
        except wire.ConnectionClosed as error:
            raise StoreUnavailable("the store is gone, or restarts; try again") from error
        except (DeadlineExceeded, asyncio.CancelledError):
            if (withdrawal := m.withdrawal(request)) is not None:
                self._tell(withdrawal)
            raise
        finally:
            timer.cancel()
            del self._calls[request.seq]
            # Its exception leads to this frame, and to our callers', which may have arrays over
            # the arena: in a cycle they would be in use until a collector comes by.
            del future
        return result_of(reply, result_type)

    def _tell(self, request: m.Request) -> None:
        if not self._owner.is_here:  # a forked child holds nothing
            return
        with contextlib.suppress(wire.ConnectionClosed):
            self._channel.send(encode(request))

    def _on_frame(self, frame: bytes) -> None:
        reply = decode(m.reply_decoder, frame)
        future = self._calls.get(reply.seq)
        if future is not None and not future.done():
            future.set_result(reply)

    def _on_close(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(StoreUnavailable("the store daemon is gone"))
        if not self._is_closed:
            log.warning("the connection to the store has ended")
            self._reconnecting = asyncio.create_task(self._reconnect())

    async def _reconnect(self) -> None:
        """Come back once nothing of the former life is in use."""
        await self._until_unused()
        attempt = 0
        while not self._is_closed:
            try:
                self._connection, self._arena = await asyncio.to_thread(
                    connect, self._where, self._arena, timeout_s=RECONNECT_TIMEOUT_S
                )
            except (StoreUnavailable, OSError, RuntimeError):  # or out of threads, for a moment
                await asyncio.sleep(RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)])
                attempt += 1
                continue
            self._channel = wire.AsyncChannel(self._on_frame, self._on_close)
            await self._channel.attach(self._connection.sock)
            return

    async def _until_unused(self) -> None:
        """Wait until nothing uses the arena, or the store is closed."""
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


def _expire(future: asyncio.Future[m.Reply]) -> None:
    if not future.done():
        future.set_exception(DeadlineExceeded("the store did not answer in time"))
