"""Chaos tests: SIGKILL to clients and daemons under load.

A short form is a part of the tests; ``--storm`` (`make storm`) chooses the long one.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from afferent.errors import StoreUnavailable
from afferent.runtime.sockets import own_folder
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.types import MiB, ObjectKind
from tests.server import wait_until
from tests.store import storm
from tests.store.storm import Line, Storm
from tests.store.storm_content import ITEMS

CAPACITY = 16 * MiB
SHARES = {ObjectKind.RAW: 0.3, ObjectKind.FEATURES: 0.5, ObjectKind.EMBEDDINGS: 0.2}
LOAD = ["writer", "reader", "holder", "forker", "loop", "worker", "worker", "requester", "writer"]
LONGEST_RELEASE_S = 10.0  # generous, for a busy machine; the printed statistics are more exact
RETRYABLE = {"store_unavailable", "store_restarted", "deadline_exceeded"}
EXPECTED = {"store_full", "stale_handle", "quarantined", "worker_died", "invalid_media"}


@pytest.fixture
def is_long(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--storm"))


@pytest.fixture
def server() -> Iterator[StoreServer]:
    """Start a store; afterwards, check that no resource of it is left."""
    before = storm.shared_nbytes()
    own_folder()  # opened here: its lock stays open
    gc.collect()  # close now what earlier tests have left
    num_fds = psutil.Process().num_fds()
    with StoreServer(CAPACITY, shares=SHARES) as made:
        remains = storm.Remains(made)
        yield made
        daemon_pid = made.pid
    assert not Path(f"/proc/{daemon_pid}").exists()
    remains.check_gone()
    assert psutil.Process().num_fds() <= num_fds
    # Not asserted: it counts the whole machine, and other programs may be running.
    print(f"shared memory: {(storm.shared_nbytes() - before) / MiB:+.1f} MiB since the start")


@pytest.fixture
def watcher(server: StoreServer) -> Iterator[DaemonStore]:
    with DaemonStore(server.address, name="watcher") as store:
        yield store


def progress(done: int, total: int, what: str) -> None:
    if done % 25 == 0 or done == total:
        print(f"  {done} of {total} {what}", flush=True)


def check_seen(lines: Sequence[Line], *, daemon_dies: bool) -> None:
    """Check that clients have logged only expected errors."""
    assert not storm.count_by(lines, "failed")
    assert storm.count_by(lines, "refused").keys() <= EXPECTED
    retries = storm.count_by(lines, "retry")
    assert retries.keys() <= (RETRYABLE if daemon_dies else {"deadline_exceeded"})


def report(storming: Storm, *more: str) -> None:
    lines = storming.lines()
    kills = Counter(victim.role for victim in storming.killed)
    print(f"killed: {len(storming.killed)} {dict(kills)}")
    print(f"read and found right: {storm.count_reads(lines):,} objects")
    for event in ("retry", "refused"):
        print(f"{event}: {dict(storm.count_by(lines, event))}")
    print(f"calls given up: {storm.count_by(lines, 'cancelled').total():,}")
    print("\n".join(more), flush=True)


def test_clients_are_killed(
    server: StoreServer, watcher: DaemonStore, tmp_path: Path, is_long: bool
) -> None:
    """The other clients read valid content, and the store drops all that a dead client had."""
    num_kills, released = (300 if is_long else 20), []
    with Storm(server, tmp_path, seed=1) as storming:
        storming.start(LOAD)
        wait_until(lambda: num_reads(storming) > 0)
        for number in range(1, num_kills + 1):
            time.sleep(storming.rng.choice([0.0, 0.05, 0.1, 0.3]))  # let the load run
            victim = storming.kill_one()
            released.append(storm.wait_released(watcher, victim))
            storming.start([victim.role])
            progress(number, num_kills, "clients killed")
        wait_until(lambda: num_reads(storming) > num_kills)
        storming.freeze(stop=True)
        storm.check_adds_up(watcher)
    storm.check_nothing_held(watcher)
    report(storming, storm.spread("a dead client's bytes are back", released))
    check_seen(storming.lines(), daemon_dies=False)
    assert max(released) < LONGEST_RELEASE_S


def test_the_daemon_is_killed(
    server: StoreServer, watcher: DaemonStore, tmp_path: Path, is_long: bool
) -> None:
    """Clients see only retryable errors."""
    num_kills, recovered = (20 if is_long else 3), []
    with Storm(server, tmp_path, seed=2) as storming:
        storming.start(LOAD)
        for number in range(1, num_kills + 1):
            reads = num_reads(storming)
            wait_until(lambda: num_reads(storming) > reads + 200)  # noqa: B023
            storming.start([storming.kill_one().role])  # replace a client while the daemon restarts
            recovered.append(restart(server, watcher, times=storming.rng.choice([1, 1, 2])))
            wait_until(lambda: {it.pid for it in storming.clients} <= pids(watcher))
            storming.freeze(stop=True)
            storm.check_adds_up(watcher)
            storming.freeze(stop=False)
            progress(number, num_kills, "daemons killed")
    storm.check_nothing_held(watcher)
    report(storming, storm.spread("the store serves again, when all have let go", recovered))
    check_seen(storming.lines(), daemon_dies=True)


def restart(server: StoreServer, watcher: DaemonStore, *, times: int) -> float:
    """Kill the daemon, and perhaps the next one while clients reconnect to it.

    Returns:
        The seconds from the last kill until the store served again.
    """
    segment, start_s = watcher.stat().segment, 0.0
    for _ in range(times):
        pid, start_s = server.pid, time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: server_pid(server) not in (None, pid))  # noqa: B023
    wait_until(lambda: is_served(watcher, segment + times), timeout_s=60)
    return time.perf_counter() - start_s


def is_served(watcher: DaemonStore, segment: int) -> bool:
    with suppress(StoreUnavailable):
        return watcher.stat().segment == segment
    return False


def server_pid(server: StoreServer) -> int | None:
    with suppress(StoreUnavailable):
        return server.pid
    return None


def pids(watcher: DaemonStore) -> set[int]:
    return {client.pid for client in watcher.list_clients()}


@pytest.mark.parametrize("makers", ["workers", "claims"])
def test_eight_processes_want_the_same_items(tmp_path: Path, is_long: bool, makers: str) -> None:
    for number in range(5 if is_long else 1):
        with StoreServer(CAPACITY, shares={ObjectKind.FEATURES: 1.0}) as server:
            with Storm(server, tmp_path, seed=100 + number) as storming:
                run_eight(storming, makers)
            with DaemonStore(server.address, name="watcher") as watcher:
                storm.check_nothing_held(watcher)
        check_made_once(storming)


def run_eight(storming: Storm, makers: str) -> None:
    """Run until each of eight clients has an answer for each item, and kill makers meanwhile."""
    if makers == "workers":
        storming.start(["maker"] * 4 + ["wants"] * 8)
        victims, num_kills = "maker", 8
    else:
        storming.start(["claims"] * 8)
        victims, num_kills = "claims", 5
    for number in range(num_kills):
        part = len(ITEMS) * (number + 1) // (num_kills + 2)
        wait_until(lambda: num_made(storming) >= part)  # noqa: B023
        storming.start([storming.kill_one(victims).role])
    eight = [it.pid for it in storming.clients if it.role in ("wants", "claims")]
    assert len(eight) == 8
    wait_until(lambda: set(eight) <= {it.pid for it in storming.lines() if it.event == "done"})


def num_reads(storming: Storm) -> int:
    assert not storming.complaints()
    return storm.count_reads(storming.lines())


def num_made(storming: Storm) -> int:
    assert not storming.complaints()
    return len(storm.count_by(storming.lines(), "made"))


def check_made_once(storming: Storm) -> None:
    """Each item is made once, and once more for each maker that was killed while it made it."""
    lines, killed = storming.lines(), {victim.pid for victim in storming.killed}
    by_the_living = [line for line in lines if line.pid not in killed]
    by_the_dead = [line for line in lines if line.pid in killed]
    begun, made = storm.count_by(lines, "begun"), storm.count_by(by_the_dead, "made")
    held = storm.count_by(by_the_dead, "begun") - made  # a maker begins an item once
    claimed = storm.count_by(by_the_dead, "claimed") + held
    # A client may have been killed after the store's answer and before it logged the answer.
    answered = claimed + storm.count_by(by_the_dead, "told")
    claimed += storm.count_by(by_the_dead, "asks") - answered
    got = storm.count_by(by_the_living, "got")
    lost = Counter(line.value for line in by_the_living if line.event == "lost")
    refused = {value.split()[0] for value in lost}
    print(
        f"{len(ITEMS)} items, {len(killed)} makers killed with {held.total()} in their hands: "
        f"begun {begun.total()} times; {len(refused)} refused"
    )
    assert not storming.complaints()
    assert {value.split()[1] for value in lost} <= {"quarantined", "worker_died"}
    assert all(claimed[key] for key in refused), "refused, though no maker of it was killed"
    assert len(refused) <= len(ITEMS) // 10
    for key in (item.hex() for item in ITEMS):
        answers = got[key] + lost[f"{key} quarantined"] + lost[f"{key} worker_died"]
        assert answers == 8
        assert begun[key] or key in refused
        assert begun[key] <= 1 + held[key], "made twice without need"
