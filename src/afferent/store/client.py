"""Clients of the store daemon: one for threads, one for an event loop.

A client holds one connection and one map of the arena. What a request holds is named by the
request's id; `release` without handles drops it all, and the death of the process drops everything.
Every call has a deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from afferent import wire
from afferent.errors import AfferentError, DeadlineExceeded, StoreUnavailable, error_from
from afferent.store import messages as m
from afferent.store.arena import ArenaMap
from afferent.types import Failure, Handle, Span, decode, encode

Result = TypeVar("Result")

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 10.0


def _connect(
    address: str, *, name: str, writable: bool, timeout_s: float
) -> tuple[socket.socket, ArenaMap]:
    """Say hello, and map the arena that comes with the welcome."""
    try:
        sock = wire.connect(address, timeout_s=timeout_s)
        sock.sendall(wire.pack_frame(encode(m.Hello(m.VERSION, writable, name))))
        data, fds, _, _ = socket.recv_fds(sock, 4096, 1)
    except (wire.ConnectionClosed, OSError) as error:
        raise StoreUnavailable("the store does not answer") from error
    try:
        frames = list(wire.FrameCutter(max_nbytes=4096).feed(data))
        if not frames:
            raise StoreUnavailable("the store has closed the connection")
        welcome = msgspec.msgpack.decode(frames[0], type=m.Welcome)
        if welcome.version != m.VERSION or not fds:
            raise StoreUnavailable(
                f"the store speaks version {welcome.version} of the protocol, we {m.VERSION}"
            )
        return sock, ArenaMap(fds[0], writable=writable)
    except AfferentError:
        sock.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)


async def exit_without(store: AsyncDaemonStore) -> None:
    """End this process when its connection to the store ends: the supervisor starts it afresh."""
    await store.closed.wait()
    log.error("the connection to the store has ended")
    os._exit(1)


def _result(reply: m.Reply, result_type: type[Result]) -> Result:
    if reply.failure is not None:
        raise error_from(reply.failure.code, reply.failure.message)
    return msgspec.msgpack.decode(reply.result, type=result_type)


class DaemonStore:
    """The store for processes without an event loop; one thread, one call at a time."""

    def __init__(
        self, address: str, *, name: str, writable: bool = False, timeout_s: float = 30.0
    ) -> None:
        """Connect.

        Raises:
            StoreUnavailable: No daemon answers within ``timeout_s``.
        """
        sock, self._arena = _connect(address, name=name, writable=writable, timeout_s=timeout_s)
        self._channel = wire.SyncChannel(sock)
        self._seq = itertools.count(1)

    def block(self, handle: Handle) -> memoryview:
        """The object's bytes in the arena. Valid while this process holds it."""
        return self._arena.block(handle.offset, handle.nbytes)

    def get(self, request: str, handles: Sequence[Handle]) -> None:
        """Pin sealed objects, all or none.

        Raises:
            StaleHandle: One of them is gone.
        """
        self._call(m.Get(next(self._seq), request, list(handles)), type(None))

    def release(self, request: str, handles: Sequence[Handle] | None = None) -> None:
        """Take back one pin of each, or drop all that the request holds."""
        listed = list(handles) if handles is not None else None
        self._call(m.Release(next(self._seq), request, listed), type(None))

    def take(self) -> m.Order:
        """Wait for a job, for ever if need be."""
        return self._call(m.Take(next(self._seq)), m.Order, timeout_s=None)

    def finish(
        self,
        order: m.Order,
        *,
        used_nbytes: int = 0,
        failure: Failure | None = None,
        spans: Sequence[Span] = (),
    ) -> None:
        """End a job: the object is sealed, or has failed."""
        seq = next(self._seq)
        self._call(m.Finish(seq, order.job, used_nbytes, failure, list(spans)), type(None))

    def stat(self) -> m.Statistics:
        return self._call(m.Stat(next(self._seq)), m.Statistics)

    def close(self) -> None:
        self._channel.close()

    def _call(
        self,
        request: m.Request,
        result_type: type[Result],
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> Result:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._channel.send(encode(request), timeout_s=timeout_s)
            while True:
                left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                reply = decode(m.reply_decoder, self._channel.receive(timeout_s=left))
                if reply.seq == request.seq:  # else the late answer of a call that gave up
                    return _result(reply, result_type)
        except wire.ConnectionClosed as error:
            raise StoreUnavailable("the store daemon is gone") from error


class AsyncDaemonStore:
    """The store for an event loop; any number of calls at a time."""

    def __init__(self, arena: ArenaMap) -> None:
        self._arena = arena
        self._channel = wire.AsyncChannel(self._on_frame, self._on_close)
        self._seq = itertools.count(1)
        self._calls: dict[int, asyncio.Future[m.Reply]] = {}
        self.closed = asyncio.Event()

    @classmethod
    async def connect(
        cls, address: str, *, name: str, writable: bool = False, timeout_s: float = 30.0
    ) -> AsyncDaemonStore:
        """Connect.

        Raises:
            StoreUnavailable: No daemon answers within ``timeout_s``.
        """
        sock, arena = await asyncio.to_thread(
            _connect, address, name=name, writable=writable, timeout_s=timeout_s
        )
        store = cls(arena)
        await store._channel.attach(sock)
        return store

    @property
    def is_open(self) -> bool:
        return self._channel.is_open

    @property
    def capacity_nbytes(self) -> int:
        return self._arena.nbytes

    def block(self, handle: Handle) -> memoryview:
        """The object's bytes in the arena. Valid while this process holds it."""
        return self._arena.block(handle.offset, handle.nbytes)

    async def create(self, request: str, items: Sequence[m.CreateItem]) -> list[Handle]:
        """Blocks to write, all or none.

        Raises:
            StoreFull: There is no room.
        """
        return await self._call(m.Create(next(self._seq), request, list(items)), list[Handle])

    async def seal(self, request: str, items: Sequence[m.SealItem]) -> list[Handle]:
        """End the writing; the request keeps a pin on each."""
        return await self._call(m.Seal(next(self._seq), request, list(items)), list[Handle])

    async def abort(self, request: str, handles: Sequence[Handle]) -> None:
        """Give up the writing of created objects."""
        await self._call(m.Abort(next(self._seq), request, list(handles)), type(None))

    async def acquire(self, request: str, items: Sequence[m.AcquireItem]) -> list[m.Outcome]:
        """Pin what exists, and have made what does not; follow with `wait` for the latter."""
        return await self._call(m.Acquire(next(self._seq), request, list(items)), list[m.Outcome])

    async def wait(
        self, request: str, keys: Sequence[bytes], *, timeout_s: float
    ) -> list[m.Outcome]:
        """What became of the keys that were busy or missed, once all of them have an end."""
        message = m.Wait(next(self._seq), request, list(keys))
        return await self._call(message, list[m.Outcome], timeout_s=timeout_s)

    async def get(self, request: str, handles: Sequence[Handle]) -> None:
        """Pin sealed objects, all or none.

        Raises:
            StaleHandle: One of them is gone.
        """
        await self._call(m.Get(next(self._seq), request, list(handles)), type(None))

    async def release(self, request: str, handles: Sequence[Handle] | None = None) -> None:
        """Take back one pin of each, or drop all that the request holds."""
        listed = list(handles) if handles is not None else None
        await self._call(m.Release(next(self._seq), request, listed), type(None))

    def forget(self, request: str) -> None:
        """Drop all that the request holds, without waiting for the answer; never fails.

        A store that is gone holds nothing.
        """
        if self.is_open:
            self._channel.send(encode(m.Release(next(self._seq), request, None)))

    async def stat(self) -> m.Statistics:
        return await self._call(m.Stat(next(self._seq)), m.Statistics)

    def close(self) -> None:
        self._channel.abort()

    async def _call(
        self, request: m.Request, result_type: type[Result], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Result:
        future: asyncio.Future[m.Reply] = asyncio.get_running_loop().create_future()
        self._calls[request.seq] = future
        try:
            self._channel.send(encode(request))
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError as error:
            raise DeadlineExceeded("the store did not answer in time") from error
        except wire.ConnectionClosed as error:
            raise StoreUnavailable("the store daemon is gone") from error
        finally:
            del self._calls[request.seq]
        return _result(reply, result_type)

    def _on_frame(self, frame: bytes) -> None:
        reply = decode(m.reply_decoder, frame)
        future = self._calls.get(reply.seq)
        if future is not None and not future.done():
            future.set_result(reply)

    def _on_close(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(StoreUnavailable("the store daemon is gone"))
        self.closed.set()
