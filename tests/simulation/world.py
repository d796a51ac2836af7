"""A small server in a simulated machine: daemons, clients, workers and faults."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afferent.builtin.engine.core.main import EngineCore
from afferent.store.daemon import main as daemon_main
from afferent.store.daemon.client_table import table_nbytes
from afferent.store.daemon.launch import DaemonSettings
from afferent.types import ObjectKind
from tests.simulation.oracle import Observed, Oracle
from tests.simulation.plan import NOTHING, TROUBLE_S, Fault, Plan, Task
from tests.simulation.promptness import DAEMON, EVERYBODY
from tests.simulator import socket_calls
from tests.simulator.descriptors import Memory
from tests.simulator.history import History
from tests.simulator.loop import Loop
from tests.simulator.machine import Machine, Process

ADDRESS, CORE = "store", "core"
SHARES = {
    ObjectKind.RAW: 0.3,
    ObjectKind.FEATURES: 0.4,
    ObjectKind.EMBEDDINGS: 0.2,
    ObjectKind.RECORDS: 0.1,
}
BOUND_S = 120.0
"""By then everything has ended after the last fault: a call waits for up to a minute."""


class Child:
    """The supervisor's side of a daemon, which ignores all reports."""

    def report(self, text: str, *, ready: bool = False) -> None:
        """Ignore a report."""

    async def keep_beating(self) -> None:
        await asyncio.Event().wait()


class World:
    """One run of a plan."""

    def __init__(self, plan: Plan, *, keeps: bool = False) -> None:
        self.plan = plan
        self.machine = machine = Machine(
            f"run {plan.seed}",
            rules=plan.rules,
            num_pids=plan.num_pids,
            history=History(keeps=keeps),
        )
        machine.has_peer_pidfds = plan.has_peer_pidfds
        self.supervisor = machine.start_process("supervisor")
        self._arena, self._table = Memory(), Memory()
        self._arena.resize(plan.capacity_nbytes)
        self._table.resize(table_nbytes(plan.table_rows))
        self._arena.on_sent = self._check_written_down
        listener_fd = socket_calls.listen(self.supervisor, ADDRESS)
        self._listener = self.supervisor.fds[listener_fd]
        self.oracle = Oracle(machine, self._arena, plan.validates_every)
        self.core_listener = self.supervisor.fds[socket_calls.listen(self.supervisor, CORE)]
        self.segment = 0
        self.processes: dict[str, Process] = {}
        self.running: dict[int, Process] = {}
        self.waiting = {task.number for task in plan.tasks}
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.ends: Counter[str] = Counter()
        self.seen_handles: list[tuple[Any, int]] = []
        self.numbers: dict[str, int] = {}
        self.mail: dict[str, list[Any]] = {}
        self.core: EngineCore | None = None
        self.vllm: Any = None
        self.is_healed = False
        self._roles: dict[str, Callable[[World, Process], None]] = {}

    # Processes

    def add(self, name: str, role: Callable[[World, Process], None]) -> None:
        self._roles[name] = role
        self._start(name)

    def _start(self, name: str) -> None:
        process = self.machine.start_process(name)
        self.processes[name] = process
        self.numbers.pop(name, None)
        process.on_exit.append(lambda: self._ended(process))
        self._roles[name](self, process)

    def _ended(self, process: Process) -> None:
        """Replace the process after a moment."""
        self.oracle.on_death(process)
        for number in [n for n, owner in self.running.items() if owner is process]:
            del self.running[number]
        delay_s = 0.005 + self.machine.rng.random() ** 2 * 0.2
        self.machine.after(delay_s, self._start, process.name)

    def start_daemon(self, process: Process) -> None:
        self.segment += 1
        machine = self.machine
        settings = DaemonSettings(
            arena_fd=machine.new_fd(process, self._arena),
            listener_fd=machine.new_fd(process, self._listener),
            client_table_fd=machine.new_fd(process, self._table),
            segment=self.segment,
            shares=dict(SHARES),
            job_timeout_s=self.plan.job_timeout_s,
            fetch_timeout_s=self.plan.job_timeout_s / 2 if self.plan.tiers else 60.0,
            recovery_timeout_s=self.plan.recovery_timeout_s,
        )
        loop = Loop(process)
        run: Any = daemon_main._run
        loop.call_soon(lambda: loop.create_task(run(Child(), settings)))

    def _check_written_down(self, process: Process) -> None:
        """Check that a client is in the client table: the next daemon waits only for those."""
        if process.pid not in pids_of(self._table.data):
            self.machine.violate(f"written down: {process.name} gets the arena, and is not yet")

    # Tasks

    def looking_s(self) -> float:
        """Return for how long a client reads a block: a moment, or much longer."""
        return self.machine.rng.choice((1e-3, 1e-3, 1e-3, 0.3))

    def tasks_of(self, name: str) -> list[Task]:
        """Return the tasks that a client has not begun; a restart loses those that it had begun."""
        return [t for t in self.plan.tasks if t.client == name and t.number in self.waiting]

    def begin(self, task: Task, process: Process) -> None:
        self.waiting.discard(task.number)
        self.running[task.number] = process

    def end(self, task: Task, outcome: str) -> None:
        self.running.pop(task.number, None)
        self.ends[outcome] += 1

    # Faults

    def strike(self, fault: Fault) -> None:
        """Inject a fault."""
        machine, process = self.machine, self.processes[fault.target]
        if fault.what == NOTHING or not process.is_alive or process.is_doomed:
            return
        for feature in self.features():
            self.pairs[feature, fault.what] += 1
        machine.note(fault.target, f"fault: {fault.what} for {fault.length_s} s")
        prompt = self.oracle.prompt
        match fault.what:
            case "crash":
                machine.kill(process)
            case "call":
                process.crash_after = 1 + machine.rng.randrange(12)
            case "pause":
                prompt.trouble(process.name, fault.length_s)
                if not process.is_paused and process.pause_after is None:
                    process.pause_after = machine.rng.randrange(6)
                    if not process.pause_after:
                        process.pause()
                    machine.after(fault.length_s, process.resume)
            case "cut" | "mute":
                self._harm_link(fault)
            case "alloc":
                prompt.trouble(EVERYBODY, fault.length_s)
                machine.failure_rates = dict(self.plan.failure_rates)
                machine.after(fault.length_s, machine.failure_rates.clear)
            case "jump":
                process.run_clock(rate=process.clock_rate, jump_s=fault.length_s)
            case "drift":
                process.run_clock(rate=0.7 + 0.8 * machine.rng.random())

    def _harm_link(self, fault: Fault) -> None:
        ends = [
            end
            for end in self.machine.links.values()
            if end.name == fault.target and end.num_open and end.peer.name not in (ADDRESS, CORE)
        ]
        if not ends:
            return
        end = ends[self.machine.rng.randrange(len(ends))]
        if fault.what == "mute":
            end.is_mute = True
            for name in (end.name, end.peer.name):
                self.oracle.prompt.trouble(name, fault.length_s)
            self.machine.note(fault.target, f"is not heard by {end.peer.name}")
            self.machine.after(fault.length_s, end.cut)
        else:
            ends_at = {end.name, end.peer.name}
            if DAEMON in ends_at:
                self.oracle.prompt.disconnected(*(ends_at - {DAEMON}))
            end.cut()

    def features(self) -> list[str]:
        """Return the kinds of state that the daemon is in, for the statistics."""
        state, daemon = self.oracle.state, self.processes.get("daemon")
        if daemon is None or not daemon.is_alive or state is None:
            return ["no daemon"]
        return [name for name, is_so in features_of(state).items() if is_so] or ["idle"]

    def heal(self) -> None:
        """End all faults."""
        self.is_healed = True
        self.machine.note("supervisor", "all trouble is over")
        self.machine.failure_rates = {}
        for end in list(self.machine.links.values()):
            if end.is_mute:
                end.cut()
        self.plan.rules.slow_one_in = 1 << 30
        for process in self.processes.values():
            process.crash_after = process.pause_after = None
            if process.is_paused:
                process.resume()

    # The run

    def run(self) -> None:
        """Run to the end of the plan, or to the first violation."""
        machine = self.machine
        for fault in self.plan.faults:
            machine.after(fault.at_s, self.strike, fault)
        machine.run(until_s=TROUBLE_S)
        self.heal()
        machine.run(until_s=TROUBLE_S + BOUND_S, is_over=self._is_over)
        if not machine.violations:
            self._check_end()

    def close(self) -> None:
        self.oracle.uses.clear()
        self.machine.end_all()
        if self.vllm is not None:
            self.vllm.close()

    def _is_over(self) -> bool:
        return not self.running and not self.waiting and self._is_let_go()

    def _is_let_go(self) -> bool:
        state = self.oracle.state
        return state is not None and not held_by_clients(state) and self._is_connected()

    def _is_connected(self) -> bool:
        """Return whether every process has a connection to the daemon."""
        state = self.oracle.state
        names = {c.name for c in state._clients.values() if c.connected} if state else set()
        return names >= {name for name in self._roles if name != "daemon"}

    def _check_end(self) -> None:
        state = self.oracle.state
        if self.running or self.waiting:
            left = sorted({*self.running, *self.waiting})
            self.machine.violate(f"liveness: tasks {left} do not end")
        elif state is None or not self._is_connected():
            self.machine.violate("liveness: not everybody comes back to the store")
        elif self.core is not None and self.core._loop is not None and self.core._loop._requests:
            self.machine.violate(f"leak: the engine has {list(self.core._loop._requests)}")
        elif held := held_by_clients(state):
            self.machine.violate(f"leak: at the end there is {held}")
        else:
            self.oracle.validate(state)


def pids_of(table: NDArray[np.uint8]) -> list[int]:
    """Return the pids that are listed in a client table."""
    row_nbytes = table_nbytes(1) - table_nbytes(0)
    rows = table[: len(table) - table_nbytes(0)].view(np.uint64).reshape(-1, row_nbytes // 8)
    return [int(row[1]) for row in rows if row[0]]


def features_of(state: Observed) -> dict[str, bool]:
    """Return which kinds of state a daemon is in; several may be true."""
    objects, flights, jobs = list(state.objects), state.flights, state.flights.jobs
    return {
        "recovering": not state._clients,
        "lost client": any(not c.connected for c in state._clients.values()),
        "writing": any(item.state.value == "created" for item in objects),
        "pinned": any(item.pins for item in objects),
        "evictable": any(not item.held for item in objects),
        "doomed": any(item.state.value == "pending_deletion" for item in objects),
        "job queued": jobs.num_queued > 0,
        "job running": len(jobs) > jobs.num_queued,
        "unplaced": bool(flights.unplaced_keys()),
        "awaited": bool(flights.waiters._waiting),
        "worker idle": flights.idle.can_make,
        "struck": bool(len(flights._crashes)),
        "room queued": state.objects.budget.num_queued > 0,
        "room reserved": bool(state.objects.budget._reservations),
        "create waits": bool(state._pending),
        "permit held": bool(state.semaphores._of_lease),
        "permit queued": any(each.queue for each in state.semaphores._semaphores.values()),
        "permit lingers": bool(state.semaphores._lingering),
    }


def held_by_clients(state: Observed) -> list[str]:
    """Return descriptions of all that clients still hold or wait for."""
    budget, flights = state.objects.budget, state.flights
    found = [f"{item.handle} of {item.writer or item.pins}" for item in state.objects if item.held]
    found += [f"reserved by {lease}" for lease in budget._reservations]
    found += [f"queued by {ticket}" for ticket in budget._queue]
    found += [f"permit of {lease}" for lease in state.semaphores._of_lease]
    found += [f"lingering {each}" for each in state.semaphores._lingering]
    found += [f"interest of {lease}" for lease in flights.waiters._interests]
    found += [f"job {job.id}" for job in flights.jobs]
    found += [f"pending {client}" for client, _ in state._pending]
    found += [f"share of {c}" for c, shares in state._shares.items() if shares]
    return found
