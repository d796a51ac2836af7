"""A chaos test of a store: clients under load are killed, and their logs are checked."""

from __future__ import annotations

import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.items import MAX_ITEMS
from afferent.store.protocol.results import ObjectInfo
from afferent.store.state.allocator import round_up
from tests.server import wait_until


@dataclass(frozen=True, slots=True)
class Victim:
    """A client that will be killed; its ``pidfd`` reports its death even if its pid is reused."""

    role: str
    pid: int
    pidfd: int

    @property
    def is_alive(self) -> bool:
        return not select.select([self.pidfd], [], [], 0)[0]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a client's log."""

    pid: int
    event: str
    value: str


class Storm:
    """Clients of a server, started and killed at random."""

    def __init__(self, server: StoreServer, folder: Path, *, seed: int) -> None:
        print(f"seed {seed}")
        self.rng = random.Random(seed)
        self.clients: list[Victim] = []
        self.killed: list[Victim] = []
        self._server = server
        self._log_path = folder / f"storm-{seed}"
        self._log_path.touch()
        self._log, self._lines, self._begun = self._log_path.open(), list[Line](), ""
        command = [sys.executable, "-m", "tests.store.storm_worker"]
        arguments = [server.address, str(self._log_path), str(os.getpid())]
        # The clients write lost connections to stderr; all that the test needs is in the log file.
        self._nursery = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )

    def start(self, roles: Iterable[str]) -> None:
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        for role in roles:
            self._nursery.stdin.write(f"{role} {self.rng.randrange(1 << 30)}\n".encode())
            self._nursery.stdin.flush()
            pid = int(self._nursery.stdout.readline())
            self.clients.append(Victim(role, pid, os.pidfd_open(pid)))

    def kill_one(self, role: str | None = None) -> Victim:
        """Send SIGKILL to a random client of this role, or of any role; sometimes stop it first."""
        victim = self.rng.choice([it for it in self.clients if role in (it.role, None)])
        assert victim.is_alive, self.complaints() or f"a {victim.role} has ended by itself"
        self.clients.remove(victim)
        self.killed.append(victim)
        if self.rng.random() < 0.2:
            signal.pidfd_send_signal(victim.pidfd, signal.SIGSTOP)
        signal.pidfd_send_signal(victim.pidfd, signal.SIGKILL)
        return victim

    def freeze(self, *, stop: bool) -> None:
        """Stop all clients, or let them continue."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP if stop else signal.SIGCONT)

    def lines(self) -> Sequence[Line]:
        """Return all complete lines that have been logged so far."""
        if not self._log.closed:
            # The last line may be incomplete.
            *whole, self._begun = (self._begun + self._log.read()).split("\n")
            for line in whole:
                pid, event, value = line.split(" ", 2)
                self._lines.append(Line(int(pid), event, value))
        return self._lines

    def complaints(self) -> list[str]:
        """Return the invariant violations that clients have logged."""
        return [line.value for line in self.lines() if line.event == "failed"]

    def processes(self) -> list[psutil.Process]:
        """Return the processes of clients, and their children, that still exist."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                is_ours = self._server.address in process.cmdline()
                if is_ours and process.pid != self._nursery.pid:
                    found.append(process)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill the remaining clients. Their children end soon by themselves."""
        if kind is not None:
            print("\n".join(self.complaints()))
        self.freeze(stop=False)
        for victim in list(self.clients):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(victim.pidfd, signal.SIGKILL)
        self._nursery.kill()
        self._nursery.communicate()
        for victim in (*self.clients, *self.killed):
            os.close(victim.pidfd)
        wait_until(lambda: not self.processes())
        self.lines()
        self._log.close()


def wait_released(watcher: DaemonStore, victim: Victim) -> float:
    """Return the seconds from this call until the store has removed a process.

    Frequent polling costs the store some of its time: the result is an upper bound.
    """
    start_s = time.perf_counter()
    while any(client.pid == victim.pid for client in watcher.list_clients()):
        assert time.perf_counter() - start_s < 60.0, f"a dead {victim.role} holds on"
        time.sleep(0.001)
    return time.perf_counter() - start_s


def check_adds_up(watcher: DaemonStore) -> None:
    """While all clients are stopped: the statistics match the objects that exist."""
    wait_until(lambda: _adds_up(watcher))


def _adds_up(watcher: DaemonStore) -> bool:
    before = watcher.stat()
    objects = watcher.list_objects(limit=MAX_ITEMS)
    reserved = sum(client.reserved_nbytes for client in watcher.list_clients())
    if watcher.stat() != before:  # a late request has arrived in between
        return False
    for kind, figures in before.kinds.items():
        of_kind = [item for item in objects if item.kind == kind]
        held = [item for item in of_kind if item.pins or item.writer is not None]
        assert figures.num_objects == len(of_kind)
        assert figures.used_nbytes == _blocks_nbytes(of_kind)
        assert figures.held_nbytes == _blocks_nbytes(held)
        assert figures.held_nbytes + figures.reserved_nbytes <= figures.capacity_nbytes
    # A reservation may have passed to a job that waits for space; such a reservation is the
    # store's.
    assert reserved <= before.reserved_nbytes
    return True


def _blocks_nbytes(items: Sequence[ObjectInfo]) -> int:
    return sum(round_up(item.handle.nbytes) for item in items)


def check_nothing_held(watcher: DaemonStore) -> None:
    """When all clients are dead: nothing is pinned or reserved, and the arena can be emptied."""
    wait_until(lambda: len(watcher.list_clients()) == 1)
    found = watcher.stat()
    assert (found.held_nbytes, found.reserved_nbytes, found.num_reservations_queued) == (0, 0, 0)
    assert (found.num_jobs_queued, found.num_jobs_running, found.num_workers) == (0, 0, 0)
    check_adds_up(watcher)
    for kind in found.kinds:
        watcher.evict(kind)
    for figures in watcher.stat().kinds.values():
        assert (figures.used_nbytes, figures.num_objects) == (0, 0)
        assert figures.largest_free_nbytes == figures.capacity_nbytes, "it is not one extent again"


class Remains:
    """The system resources of a store, to be checked after it has closed."""

    def __init__(self, server: StoreServer) -> None:
        self._address, self._pid = server.address, server.pid
        self._inode = os.fstat(server.arena_fd).st_ino

    def check_gone(self) -> None:
        assert not psutil.pid_exists(self._pid)
        assert self._address not in Path("/proc/net/unix").read_text()
        assert not list(Path("/dev/shm").glob("*afferent*"))
        # The kernel frees the memory when no process maps it or has a descriptor of it.
        wait_until(lambda: not [pid for pid in psutil.pids() if _uses(pid, self._inode)])


def _uses(pid: int, inode: int) -> bool:
    """Return whether a process maps the arena with this inode, or has a descriptor of it."""
    try:
        fds = list(Path(f"/proc/{pid}/fd").iterdir())
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # the process has ended, or belongs to another user
        return False
    if any(f" {inode} " in line and "afferent-arena" in line for line in maps.splitlines()):
        return True
    for fd in fds:
        with suppress(OSError):
            if "afferent-arena" in str(fd.readlink()) and fd.stat().st_ino == inode:
                return True
    return False


def shared_nbytes() -> int:
    """Return the number of bytes of shared memory in use on this machine."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["Shmem"].split()[0]) << 10


def spread(title: str, seconds: Sequence[float]) -> str:
    """Return a line of statistics about a list of times."""
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    within = sum(second <= 0.1 for second in ordered)
    return (
        f"{title}: median {statistics.median(ordered) * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, "
        f"longest {ordered[-1] * 1e3:.1f} ms; {within} of {len(ordered)} within 100 ms"
    )


def count_reads(lines: Iterable[Line]) -> int:
    """Return the number of objects that were read and verified, less up to 19 for each client."""
    return sum(int(line.value) for line in lines if line.event == "read")


def count_by(lines: Iterable[Line], event: str) -> Counter[str]:
    return Counter(line.value for line in lines if line.event == event)
