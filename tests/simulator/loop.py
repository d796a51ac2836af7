"""asyncio event loop with the time and sockets of a simulated machine.

Callbacks run in asyncio's order, and readable descriptors are handled first, as in uvloop. Between
two iterations of the loop other processes run. Tasks, futures, timeouts and transports are
asyncio's own, or equivalent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, cast

from tests.simulator.machine import Process
from tests.simulator.sockets import End
from tests.simulator.threads import Killed, Thread
from tests.simulator.watching import Watched

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_READ_NBYTES = 1 << 16


class Loop(asyncio.AbstractEventLoop):
    """Event loop of one process, in a thread of its own."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._ready: deque[asyncio.Handle] = deque()
        self._readable: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._readers: dict[int, tuple[Watched, int]] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._is_asleep = False
        self.thread = Thread(process, self._run, "loop")
        self.thread.running_loop = self
        process.threads.append(self.thread)
        process.on_jump.append(self._wake)
        self.thread.start()

    # Iterations

    def _run(self) -> None:
        ready, readable, thread = self._ready, self._readable, self.thread
        while True:
            for _ in range(len(readable)):
                ready.appendleft(asyncio.Handle(readable.pop(), (), self))
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
                    if not self.process.is_alive or self.process.is_doomed:
                        raise Killed
            self._fire()
            if ready or readable:
                thread.take_time()
            else:
                timers = self._timers
                left_s = timers[0][0] - self.time() if timers else None
                self._is_asleep = True
                thread.wait(left_s)
                self._is_asleep = False
                self._fire()

    def _fire(self) -> None:
        now_s = self.time() + 1e-9
        while self._timers and (self._timers[0][0] <= now_s or self._timers[0][2].cancelled()):
            _, _, handle = heapq.heappop(self._timers)
            if not handle.cancelled():
                self._ready.append(handle)

    def _wake(self) -> None:
        if self._is_asleep:
            self._is_asleep = False
            self.thread.wake(self.thread.turn)

    def close(self) -> None:
        """Close the coroutines of all tasks of a dead process."""
        for task in reversed(list(self._tasks)):
            task._log_destroy_pending = False
            with contextlib.suppress(BaseException):
                cast(Any, task.get_coro()).close()
        self._tasks.clear()
        self._ready.clear()
        self._readable.clear()
        self._timers.clear()

    def call_first(self, callback: Callable[[], object]) -> None:
        """Handle a readable descriptor: ``callback`` runs before all waiting callbacks."""
        self._readable.append(callback)
        if self._is_asleep:
            self._wake()

    # Interface of asyncio's loops

    def time(self) -> float:
        return self.process.monotonic_s

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return not self.process.is_alive

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if self._is_asleep:
            self._wake()
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        if not self.process.is_alive:
            raise RuntimeError("the loop's process is dead")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        if self._is_asleep and self._timers[0][2] is handle:
            self._wake()
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is skipped when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def run_in_executor(
        self, executor: Any, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def call() -> None:
            try:
                found, error = func(*args), None
            except Exception as raised:
                found, error = None, raised
            self.call_soon(_settle, future, found, error)

        self.process.start_thread(call, "executor")
        return future

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Do nothing: no process of a simulation gets a signal that it handles."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Killed) or not self.process.is_alive:
            return
        what = f"exception: {self.process.name}: {context.get('message')}: {error!r}"
        self.process.machine.violate(what)

    # Descriptors

    def add_reader(self, fd: Any, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        self.remove_reader(fd)
        watched = cast(Watched, self.process.fds[fd])

        def stirred() -> None:
            if watched.is_readable and fd in self._readers:
                self.call_first(once)

        def once() -> None:
            if fd in self._readers and watched.is_readable:
                callback(*args)
                stirred()  # as long as it is readable

        self._readers[fd] = (watched, watched.watch(stirred))
        stirred()

    def remove_reader(self, fd: Any) -> bool:
        found = self._readers.pop(fd, None)
        if found is None:
            return False
        found[0].unwatch(found[1])
        return True

    async def sock_recv(self, sock: Any, nbytes: int) -> bytes:
        end = cast(End, sock.what)
        while True:
            self.process.system_call()
            found = end.read(nbytes)
            if found is not None:
                return found[0]
            await self._until_readable(end)

    async def _until_readable(self, watched: Watched) -> None:
        while not watched.is_readable:
            future = self.create_future()
            number = watched.watch(functools.partial(_settle, future, None, None))
            try:
                await future
            finally:
                watched.unwatch(number)

    async def create_unix_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], path: Any = None, **how: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        protocol = protocol_factory()
        transport = Transport(self, how["sock"], protocol)
        ready = self.create_future()
        self.call_soon(protocol.connection_made, transport)
        self.call_soon(transport.begin)
        self.call_soon(_settle, ready, None, None)
        await ready
        return transport, protocol


def _settle(future: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(found)


class Transport(asyncio.Transport):
    """Connection, as an asyncio transport."""

    def __init__(self, loop: Loop, sock: Any, protocol: Any) -> None:
        super().__init__()
        self._loop, self._sock, self._protocol = loop, sock, protocol
        self._end = cast(End, sock.what)
        self._unsent = bytearray()
        self._is_closing = self._is_lost = False
        self._number = 0
        self._is_looking = False

    def begin(self) -> None:
        """Begin to read."""
        if not self._is_lost:
            self._number = self._end.watch(self._stirred)
            self._stirred()

    def _stirred(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._loop.call_first(self._look)

    def _look(self) -> None:
        self._is_looking = False
        if self._is_lost:
            return
        try:
            self._flush()
            found = None if self._is_closing else self._end.read(_READ_NBYTES)
        except OSError as error:
            self._lose(error)
            return
        if found is None:
            return
        if not found[0]:
            self.close()
            return
        self._protocol.data_received(found[0])
        if self._end.is_readable:
            self._stirred()

    def write(self, data: Any) -> None:
        process = self._loop.process
        if self._is_lost or not process.is_alive:  # a late generator may write
            return
        process.system_call()
        self._unsent += data
        try:
            self._flush()
        except OSError as error:
            self._lose(error)

    def _flush(self) -> None:
        if self._unsent:
            sent = self._end.write(bytes(self._unsent))
            del self._unsent[:sent]
        if self._is_closing and not self._unsent:
            self._lose(None)

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def close(self) -> None:
        """Close the connection after all unsent data."""
        if not self._is_closing:
            self._is_closing = True
            if not self._unsent:
                self._lose(None)

    def abort(self) -> None:
        """Close the connection at once."""
        self._lose(None)

    def _lose(self, error: OSError | None) -> None:
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        self._unsent.clear()
        self._end.unwatch(self._number)
        self._loop.call_soon(self._end_it, error)

    def _end_it(self, error: OSError | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._sock.close()
