"""Simulated machine: its time, its processes, and its next events.

All future events are in one heap, ordered by (virtual time, a tie-breaker drawn from the seed).
Only the heap advances the time, so that a minute of waiting costs nothing, and the same seed always
gives the same history.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import greenlet

from tests.simulator import threads
from tests.simulator.history import History
from tests.simulator.sockets import End, LinkRules, Listener
from tests.simulator.threads import Killed, Thread

_WAKE_S = (2e-6, 60e-6)
# No number is reused, not even by another machine: a finalizer may be late.
_fds = itertools.count(3)
_FIRST_PID = 100
_EXIT_SEEN_S = 2e-3
_LOOK_EVERY = 16
_FAILURES: dict[str, Callable[[], OSError]] = {
    "mmap": lambda: OSError(errno.ENOMEM, "cannot allocate memory"),
    "fallocate": lambda: OSError(errno.ENOMEM, "cannot allocate memory"),
    "connect": lambda: BlockingIOError(errno.EAGAIN, "the backlog is full"),
    "recv_fds": lambda: OSError(errno.EMFILE, "too many open files"),
    "accept": lambda: OSError(errno.EMFILE, "too many open files"),
}


class Violation(Exception):
    """A promise was broken; the history shows the events before."""


class Timer:
    """Scheduled event, unless it is cancelled."""

    __slots__ = ("args", "call", "is_cancelled", "process")

    def __init__(
        self, process: Process | None, call: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self.process, self.call, self.args = process, call, args
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Process:
    """Process of the machine: its threads, its descriptors, its clock.

    Invariants: its clock may run at a rate of its own and be ahead; it never goes back.
    """

    def __init__(self, machine: Machine, name: str, pid: int, start_ticks: int) -> None:
        self.machine, self.name, self.pid, self.start_ticks = machine, name, pid, start_ticks
        self.is_alive, self.is_paused = True, False
        self.is_doomed = False
        """Whether it ends as soon as the machine regains control."""
        self.threads: list[Thread] = []
        self.fds: dict[int, Any] = {}
        self.on_exit: list[Callable[[], object]] = []
        self.clock_rate, self._ahead_s, self._since_s = 1.0, 0.0, machine.now_s
        self.on_jump: list[Callable[[], object]] = []
        self.crash_after: int | None = None
        """Number of system calls after which it dies, within a call."""
        self.pause_after: int | None = None
        """Number of system calls after which it is stopped."""
        self.paused_s, self._stopped_s = 0.0, 0.0
        self._held: list[Timer] = []

    @property
    def monotonic_s(self) -> float:
        """Time of its clock."""
        return self._ahead_s + (self.machine.now_s - self._since_s) * self.clock_rate

    def run_clock(self, *, rate: float = 1.0, jump_s: float = 0.0) -> None:
        """Change the rate of its clock from now on, and advance it by ``jump_s``."""
        self._ahead_s = self.monotonic_s + jump_s
        self._since_s, self.clock_rate = self.machine.now_s, rate
        for moved in self.on_jump:
            moved()

    def start_thread(self, target: Callable[[], object], name: str = "") -> Thread:
        """Run ``target`` in a new thread of this process."""
        thread = Thread(self, target, name)
        self.threads.append(thread)
        thread.start()
        return thread

    def system_call(self) -> None:
        """Count a system call.

        Raises:
            Killed: The process is dead, or dies now.
        """
        if self.crash_after is not None:
            self.crash_after -= 1
            if self.crash_after <= 0 and self.is_alive:
                self.crash_after = None
                self.machine.note(self.name, "dies in a system call")
                self.machine.kill(self)
        if self.pause_after is not None:
            self.pause_after -= 1
            if self.pause_after <= 0:
                self.pause()
        if not self.is_alive or self.is_doomed:
            raise Killed

    def pause(self) -> None:
        """Stop it as by SIGSTOP, at its next wait."""
        self.is_paused, self.pause_after = True, None
        self._stopped_s = self.machine.now_s

    def resume(self) -> None:
        """Continue it as by SIGCONT; events that were held back happen now."""
        self.paused_s += self.machine.now_s - self._stopped_s if self.is_paused else 0.0
        self.is_paused, self.pause_after = False, None
        held, self._held = self._held, []
        for timer in held:
            self.machine.push(0.0, timer)

    def hold(self, timer: Timer) -> None:
        self._held.append(timer)


class Machine:
    """Processes, and a heap of future events.

    Attributes:
        rng: Source of every random choice of the machine.
        now_s: The time, from 0.
        listeners: Listening sockets, by path.
    """

    def __init__(
        self,
        seed: int | str,
        *,
        rules: LinkRules | None = None,
        num_pids: int = 100,
        history: History | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.rules = rules or LinkRules()
        self._num_pids = num_pids
        self.now_s = 0.0
        self.history = history or History()
        self.processes: dict[int, Process] = {}
        self.listeners: dict[str, Listener] = {}
        self.links: dict[int, End] = {}
        self.num_links = 0
        self.has_peer_pidfds = True
        self.violations: list[str] = []
        self.num_events = 0
        self.failure_rates: dict[str, float] = {}
        """Probability that a call fails, by its name."""
        self.hub = greenlet.getcurrent()
        self._heap: list[tuple[float, float, int, Timer]] = []
        self._numbers = itertools.count()
        self._owners: dict[int, Process] = {}
        self._next_ticks = itertools.count(1)
        self._next_pid = 0

    # Time

    def after(
        self,
        delay_s: float,
        call: Callable[..., object],
        *args: Any,
        process: Process | None = None,
    ) -> Timer:
        """Schedule ``call``; held back while ``process`` is stopped, and cancelled if it dies."""
        timer = Timer(process, call, args)
        self.push(delay_s, timer)
        return timer

    def push(self, delay_s: float, timer: Timer) -> None:
        entry = (self.now_s + delay_s, self.rng.random(), next(self._numbers), timer)
        heapq.heappush(self._heap, entry)

    def wake_s(self) -> float:
        """Return the delay until a runnable thread runs."""
        least, most = _WAKE_S
        return least + (most - least) * self.rng.random()

    def run(self, *, until_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run events until ``until_s``, until ``is_over``, or until a `Violation`."""
        heap = self._heap
        while heap and not self.violations and heap[0][0] <= until_s:
            if self.num_events % _LOOK_EVERY == 0 and is_over():
                return
            at_s, _, _, timer = heapq.heappop(heap)
            if timer.is_cancelled:
                continue
            self.now_s = max(self.now_s, at_s)
            process = timer.process
            if process is not None:
                if not process.is_alive:
                    continue
                if process.is_paused:
                    process.hold(timer)
                    continue
            self.num_events += 1
            timer.call(*timer.args)
            if process is not None and process.is_doomed:
                self._end(process)
        if not self.violations:
            self.now_s = max(self.now_s, until_s)

    # Processes

    def start_process(self, name: str) -> Process:
        """Start a process. Pids are reused, and soon."""
        while (pid := _FIRST_PID + self._next_pid % self._num_pids) in self.processes:
            self._next_pid += 1
        self._next_pid += 1
        process = Process(self, name, pid, next(self._next_ticks))
        self.processes[pid] = process
        self.note(name, f"starts as {pid}")
        return process

    def kill(self, process: Process) -> None:
        """Kill it as by SIGKILL: no thread continues, and its sockets end."""
        if not process.is_alive or process.is_doomed:
            return
        process.is_doomed = True
        if threads.current_process() is not process:
            self.after(0.0, self._end, process)

    def new_fd(self, process: Process, what: Any) -> int:
        """Open a descriptor. Its number is unique over all processes, so none can be mistaken."""
        fd = next(_fds)
        process.fds[fd] = what
        self._owners[fd] = process
        what.open(process)
        return fd

    def close_fd(self, fd: int) -> None:
        """Close a descriptor.

        Nothing happens if it was closed with its process or is another machine's: a finalizer may
        run at any time.

        Raises:
            OSError: It has been closed.
        """
        owner = self._owners.get(fd)
        if owner is not None and owner.is_alive:
            if fd not in owner.fds:
                raise OSError(errno.EBADF, "bad file descriptor")
            owner.fds.pop(fd).close(owner)

    def _end(self, process: Process) -> None:
        if not process.is_alive:
            return
        process.is_alive = False
        self.note(process.name, "is dead")
        for thread in process.threads:
            thread.unwind()
        fds, process.fds = process.fds, {}
        for what in fds.values():
            what.close(process)
        # The process disappears, and its pid is free, before or after its sockets end for others.
        self.after(self.rng.random() * _EXIT_SEEN_S, self._bury, process)

    def _bury(self, process: Process) -> None:
        del self.processes[process.pid]
        for tell in process.on_exit:
            tell()

    def end_all(self) -> None:
        """End all processes; the machine is not used any more."""
        for process in list(self.processes.values()):
            if process.is_alive:
                process.is_doomed = True
                self._end(process)
        self._heap.clear()

    def fails(self, call: str, process: Process) -> OSError | None:
        """Return the error of this call if it has to fail."""
        rate = self.failure_rates.get(call)
        if not rate or self.rng.random() >= rate:
            return None
        self.note(process.name, f"{call} fails")
        return _FAILURES[call]()

    # Observation

    def note(self, who: str, what: str) -> None:
        """Record an action of a process, or a change of it."""
        self.history.note(self.now_s, who, what)

    def violate(self, what: str) -> None:
        """Record a broken promise: the run ends here."""
        self.note("machine", f"VIOLATION: {what}")
        self.violations.append(what)
