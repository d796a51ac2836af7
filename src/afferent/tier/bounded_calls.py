"""Calls that may hang: each runs in a thread, and its caller waits until the deadline.

A file system or a name resolver has its own timeouts, or none. So these calls get only private
memory, and a late call is abandoned. Its thread is replaced, so that hanging calls do not block
later calls once the cause is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from queue import SimpleQueue
from typing import TypeVar

from afferent.errors import TierUnavailable

T = TypeVar("T")

MAX_LATE = 64
"""Limit of threads in late calls: at the limit, none is replaced until one of them returns."""


class BoundedCalls:
    """Daemon threads for calls that may hang; a process can end while some of them do.

    Invariants:
        - At most ``num_threads`` threads take calls, and at most `MAX_LATE` are in late calls.
        - A late call has no caller any more; its result is dropped.
    """

    def __init__(self, num_threads: int, *, name: str) -> None:
        self._most, self._name = num_threads, name
        self._queue: SimpleQueue[Callable[[], Future[object] | None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_serving = 0
        self._late: set[Future[object]] = set()
        self._is_closed = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Submit a function; `result` waits for it."""
        future: Future[T] = Future()

        def call() -> Future[object] | None:
            if not future.set_running_or_notify_cancel():
                return None
            try:
                future.set_result(work())
            except BaseException as error:  # the caller gets it
                future.set_exception(error)
            return future  # type: ignore[return-value]

        self._queue.put(call)
        with self._lock:
            self._start()
        return future

    def result(self, future: Future[T], deadline_s: float) -> T:
        """Return the result of a call, or raise its error.

        Raises:
            TierUnavailable: The deadline is over.
        """
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            self.leave(future)
            raise TierUnavailable("the deadline is over")
        try:
            return future.result(timeout=left_s)
        except NotInTime:
            if future.done():  # an error of the call itself
                raise
            self.leave(future)
            raise TierUnavailable("there was no answer in time") from None

    def leave(self, future: Future[T]) -> None:
        """Abandon a call: it is cancelled, or its thread is replaced."""
        if future.cancel():
            return
        with self._lock:
            if future.done() or future in self._late:
                return
            self._late.add(future)  # type: ignore[arg-type]
            self._num_serving -= 1
            self._start()

    def close(self) -> None:
        """End the threads; those in late calls end when the calls return."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._num_serving):
                self._queue.put(None)

    def _start(self) -> None:
        """Start one more thread, if allowed; the lock must be held."""
        if self._num_serving < self._most and len(self._late) < MAX_LATE and not self._is_closed:
            self._num_serving += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            future = call()
            del call
            if future is not None and not self._may_go_on(future):
                return

    def _may_go_on(self, future: Future[object]) -> bool:
        """Whether a thread takes another call: not if its last one was late and it is replaced."""
        with self._lock:
            if future not in self._late:
                return True
            self._late.discard(future)
            if self._num_serving >= self._most or self._is_closed:
                return False
            self._num_serving += 1
            return True
