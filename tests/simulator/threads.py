"""Threads of a simulated machine: greenlets, of which one runs at a time."""

from __future__ import annotations

import asyncio.events
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import greenlet

if TYPE_CHECKING:
    from tests.simulator.machine import Process

TIMED_OUT = object()
_LEAST_WAIT_S = 1e-7


class Killed(BaseException):
    """The process of this thread is dead. No later action of the thread has an effect."""


class _Running:
    thread: Thread | None = None


_running = _Running()


def current() -> Thread:
    """Return the running thread.

    Raises:
        RuntimeError: No thread of a simulated machine runs.
    """
    if _running.thread is None:
        raise RuntimeError("this is only to be called by a process of a simulated machine")
    return _running.thread


def current_process() -> Process | None:
    return _running.thread.process if _running.thread is not None else None


class Thread:
    """Thread of a simulated process."""

    def __init__(self, process: Process, target: Callable[[], object], name: str) -> None:
        self.process, self.name = process, name
        self.has_ended = False
        self.error: BaseException | None = None
        self.running_loop: asyncio.AbstractEventLoop | None = None
        self._target = target
        self._greenlet = greenlet.greenlet(self._run, parent=process.machine.hub)
        self._turn = 0
        self._joining: list[tuple[Thread, int]] = []

    def start(self) -> None:
        machine = self.process.machine
        machine.after(machine.wake_s(), self._resume, self._turn, None, process=self.process)

    # Called by the thread itself

    def wait(self, timeout_s: float | None = None) -> Any:
        """Let others run until a call of `wake`; return its value, or `TIMED_OUT`.

        Args:
            timeout_s: By the clock of this process; ``None``: no timeout.
        """
        process = self.process
        timer = None
        if timeout_s is not None:
            # At least a moment: a thread that polls the clock must see it advance.
            delay_s = max(timeout_s, _LEAST_WAIT_S) / process.clock_rate
            timer = process.machine.after(
                delay_s, self._resume, self._turn, TIMED_OUT, process=process
            )
        found = process.machine.hub.switch()
        if timer is not None:
            timer.cancel()
        return found

    def take_time(self, delay_s: float | None = None) -> None:
        """Let others run for a moment."""
        process = self.process
        process.system_call()
        machine = process.machine
        machine.after(
            machine.wake_s() if delay_s is None else delay_s,
            *(self._resume, self._turn, None),
            process=process,
        )
        machine.hub.switch()

    # Called by others

    @property
    def turn(self) -> int:
        """Number of the current wait, for `wake`."""
        return self._turn

    def wake(self, turn: int, value: object = None) -> None:
        """End a wait, if it still lasts."""
        if turn == self._turn:
            machine = self.process.machine
            machine.after(machine.wake_s(), self._resume, turn, value, process=self.process)

    def _resume(self, turn: int, value: object) -> None:
        """Run until it waits again."""
        if turn != self._turn or self.has_ended:
            return
        self._turn += 1
        loop, _running.thread = self.running_loop, self
        if loop is not None:
            asyncio.events._set_running_loop(loop)
        try:
            self._greenlet.switch(value)
        finally:
            _running.thread = None
            if loop is not None:
                asyncio.events._set_running_loop(None)

    def unwind(self) -> None:
        """Unwind all frames of a thread whose process is dead."""
        self._turn += 1
        _running.thread = self
        try:
            if self._greenlet and not self.has_ended:
                self._greenlet.throw(Killed)
            self.has_ended = True
            if self.running_loop is not None:
                self.running_loop.close()
        finally:
            _running.thread = None

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for its end."""
        if not self.has_ended:
            me = current()
            self._joining.append((me, me.turn))
            me.wait(timeout_s)

    def _run(self, _: object) -> None:
        try:
            self._target()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
            self.process.machine.violate(f"exception: {self.process.name}: {error!r} in a thread")
        self.has_ended = True
        del self._target
        for thread, turn in self._joining:
            thread.wake(turn)


class Lock:
    """Stand-in for `threading.Lock`."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[tuple[Thread, int]] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = current()
        me.process.system_call()
        while self._is_held:
            if not blocking:
                return False
            self._waiting.append((me, me.turn))
            if me.wait(None if timeout < 0 else timeout) is TIMED_OUT:
                self._wake_one()  # it may just have been woken for the lock
                return False
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False
        self._wake_one()

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _wake_one(self) -> None:
        """Wake the next waiting thread, if the lock is free."""
        while self._waiting and not self._is_held:
            thread, turn = self._waiting.popleft()
            if thread.turn == turn and not thread.has_ended:
                thread.wake(turn)
                return


class Event:
    """Stand-in for `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[tuple[Thread, int]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for thread, turn in waiting:
            thread.wake(turn)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            me = current()
            me.process.system_call()
            self._waiting.append((me, me.turn))
            me.wait(timeout)
        return self._is_set
