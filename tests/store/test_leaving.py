"""Clients that disconnect at awkward moments: no other client and no later daemon is affected."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from afferent.errors import StoreUnavailable
from afferent.runtime import wire
from afferent.store.arena import ArenaMap
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.hello import VERSION, Bye, Hello
from afferent.store.protocol.items import SealItem
from afferent.store.segment import create_segment
from afferent.types import CreateItem, Handle, ObjectKind, encode
from tests.server import wait_until

SHARES = {ObjectKind.RAW: 1.0}


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer(1 << 20, shares=SHARES) as made:
        yield made


@pytest.fixture
def store(server: StoreServer) -> Iterator[DaemonStore]:
    with DaemonStore(server.address, name="store", writable=True) as made:
        yield made


def write(store: DaemonStore) -> Handle:
    (handle,) = store.create("r", [CreateItem(ObjectKind.RAW, 100)])
    store.block(handle)[:] = b"x" * 100
    (sealed,) = store.seal("r", [SealItem(handle, 100)])
    return sealed


def restart(server: StoreServer) -> None:
    os.kill(server.pid, signal.SIGKILL)


def is_back(store: DaemonStore, segment: int = 2) -> bool:
    with suppress(StoreUnavailable):
        return store.stat().segment == segment
    return False


IN_A_CHILD = """
import gc, os, sys
from afferent.errors import NotPermitted
from afferent.store.protocol.items import SealItem
from afferent.types import CreateItem
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import ObjectKind

store = DaemonStore(sys.argv[1], name="parent", writable=True)
(handle,) = store.create("r", [CreateItem(ObjectKind.RAW, 100)])
block = store.block(handle)
block[:] = b"x" * 100
store.seal("r", [SealItem(handle, 100)])
pid = os.fork()
if pid == 0:
    for attempt in (store.stat, lambda: store.block(handle)):
        try:
            attempt()
        except NotPermitted:
            continue
        os._exit(1)
    own = DaemonStore(sys.argv[1], name="child")
    own.get("q", [handle])
    view = own.block(handle)
    store.forget("r")
    store.close()
    del store, block
    gc.collect()
    assert bytes(view) == b"x" * 100  # the parent's map was not there to be unmapped
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0, status
assert [c.num_held for c in store.list_clients() if c.name == "parent"] == [1]
store.get("r", [handle])  # over the same connection as before
"""


def test_a_forked_child_that_closes_its_parents_store_takes_nothing_from_it(
    server: StoreServer,
) -> None:
    command = [sys.executable, "-c", IN_A_CHILD, server.address]
    subprocess.run(command, check=True, timeout=60)


def test_who_closes_while_the_daemon_is_gone_does_not_hold_the_next_one_up(
    server: StoreServer, store: DaemonStore
) -> None:
    leaving = DaemonStore(server.address, name="leaving")
    restart(server)
    leaving.close()
    wait_until(lambda: is_back(store))


def test_a_farewell_that_a_dying_daemon_does_not_read_is_repeated(
    server: StoreServer, store: DaemonStore
) -> None:
    leaving = DaemonStore(server.address, name="leaving")
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(leaving.close)
        wait_until(lambda: num_connections(server.address) > 3)  # connected, to send it
        os.kill(pid, signal.SIGKILL)
        closing.result(60)
    wait_until(lambda: is_back(store))


def num_connections(address: str) -> int:
    """Return the number of sockets of a listener, accepted or pending."""
    return sum(line.endswith(address) for line in Path("/proc/net/unix").read_text().splitlines())


def test_an_async_client_closes_while_the_daemon_is_gone(
    server: StoreServer, store: DaemonStore
) -> None:
    async def main() -> None:
        leaving = await AsyncDaemonStore.connect(server.address, name="leaving")
        restart(server)
        await asyncio.to_thread(wait_until, lambda: not leaving.is_open)
        await leaving.close()

    asyncio.run(main())
    wait_until(lambda: is_back(store))


def test_a_call_that_fails_does_not_keep_its_callers_arrays(server: StoreServer) -> None:
    """No reference cycle keeps an array either: the next daemon would wait for the collector."""
    arrays: list[weakref.ref[NDArray[np.uint8]]] = []

    async def hold(store: AsyncDaemonStore) -> None:
        (handle,) = await store.create("r", [CreateItem(ObjectKind.RAW, 100)])
        array = np.frombuffer(store.block(handle), np.uint8)
        arrays.append(weakref.ref(array))
        os.kill(server.pid, signal.SIGSTOP)
        asyncio.get_running_loop().call_soon(restart, server)
        await store.stat()

    async def main() -> None:
        store = await AsyncDaemonStore.connect(server.address, name="holder", writable=True)
        with suppress(StoreUnavailable):
            await hold(store)
        await asyncio.sleep(0)  # until then, the event loop refers to the exception
        assert arrays[0]() is None
        await store.close()

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_who_was_let_in_by_a_daemon_that_died_before_saying_so(
    server: StoreServer, store: DaemonStore
) -> None:
    """The client does not know that it was accepted, but the client table lists it."""
    hello = wire.pack_frame(encode(Hello(VERSION, False, "unlucky", 7)))
    first = wire.connect(server.address, timeout_s=10)
    first.sendall(hello)
    wait_until(lambda: len(store.list_clients()) == 2)
    restart(server)
    wait_until(lambda: not store.is_open)
    first.close()
    second = wire.connect(server.address, timeout_s=10)
    second.sendall(hello)
    assert second.recv(100), "the new daemon does not wait for the client that it answers"
    second.close()
    wait_until(lambda: is_back(store))


def test_who_gives_up_while_the_daemon_recovers_leaves_nothing(
    server: StoreServer, store: DaemonStore
) -> None:
    array = np.frombuffer(store.block(write(store)), np.uint8)
    restart(server)
    wait_until(lambda: not store.is_open)
    for number in range(20):
        sock = wire.connect(server.address, timeout_s=10)
        sock.sendall(wire.pack_frame(encode(Hello(VERSION, False, "hasty", number))))
        sock.close()
    assert (array == ord("x")).all()
    del array
    wait_until(lambda: is_back(store))
    assert [client.name for client in store.list_clients()] == ["store"]
    restart(server)  # the next daemon waits for none of them
    wait_until(lambda: is_back(store, 3))


def test_nobody_lets_go_of_what_others_hold(server: StoreServer, store: DaemonStore) -> None:
    write(store)
    for number in (0, 1, 2):
        sock = wire.connect(server.address, timeout_s=10)
        sock.sendall(wire.pack_frame(encode(Bye(number))))
        assert sock.recv(100)
        sock.close()
    assert store.stat().held_nbytes == 128


def test_a_call_that_waits_ends_when_another_thread_closes_the_store(
    server: StoreServer, store: DaemonStore
) -> None:
    worker = DaemonStore(server.address, name="worker", writable=True)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(worker.take)
        wait_until(lambda: store.stat().num_workers == 1)
        worker.close()
        with pytest.raises(StoreUnavailable):
            waiting.result(60)
    wait_until(lambda: store.stat().num_clients == 1)


def test_a_process_with_several_connections(server: StoreServer, store: DaemonStore) -> None:
    """Each connection has its own map and pins: closing one, or losing it, affects no other."""
    handle = write(store)
    second = DaemonStore(server.address, name="second")
    second.get("r", [handle])
    view = second.block(handle)
    store.release("r")
    store.close()
    assert bytes(view) == b"x" * 100
    assert second.stat().held_nbytes == 128
    del view
    second.close()


def test_more_connections_than_the_daemon_can_have(server: StoreServer, store: DaemonStore) -> None:
    """Existing connections are served; new ones are accepted after others have closed."""
    daemon = psutil.Process(server.pid)
    store.stat()  # the daemon has opened what it opens for a first connection
    num_fds = daemon.num_fds()
    daemon.rlimit(psutil.RLIMIT_NOFILE, (num_fds + 10, num_fds + 10))
    strangers = [wire.connect(server.address, timeout_s=10) for _ in range(40)]
    assert store.stat().segment == 1
    for stranger in strangers:
        stranger.close()
    with DaemonStore(server.address, name="late") as late:
        assert late.stat().num_clients == 2
    wait_until(lambda: daemon.num_fds() <= num_fds)


def num_kept(pid: int) -> int:
    """Return the number of open descriptors, without the files of the kernel that it reads."""
    names = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            names.append(str(each.readlink()))
    return sum(not name.startswith(("/sys/fs/cgroup", "/proc/")) for name in names)


def test_a_daemon_keeps_no_descriptor_of_who_has_left(
    server: StoreServer, store: DaemonStore
) -> None:
    store.stat()  # the daemon has opened what it opens for a first connection
    before = num_kept(server.pid)
    for number in range(10):
        with DaemonStore(server.address, name=f"{number}"):
            pass
        sock = wire.connect(server.address, timeout_s=10)
        sock.sendall(wire.pack_frame(encode(Hello(VERSION, False, "abrupt", number))))
        sock.shutdown(socket.SHUT_RD)
        sock.close()
    wait_until(lambda: num_kept(server.pid) == before)
    wait_until(lambda: len(store.list_clients()) == 1)


def test_a_client_keeps_no_descriptor_of_a_connection_that_was_lost(
    server: StoreServer, store: DaemonStore
) -> None:
    own = psutil.Process()
    gc.collect()  # close now what earlier tests have left
    before = own.num_fds()
    for segment in (2, 3):
        restart(server)
        wait_until(lambda: is_back(store, segment))  # noqa: B023
    wait_until(lambda: own.num_fds() <= before)
    second = DaemonStore(server.address, name="second")
    restart(server)
    second.close()
    wait_until(lambda: is_back(store, 4))
    wait_until(lambda: own.num_fds() <= before)


def test_a_map_is_in_use_until_its_last_array_is_gone() -> None:
    """Several callers may retire it; each is notified only then."""
    fd = create_segment(4096)
    with ArenaMap(fd, writable=True) as arena:
        os.close(fd)
        block = arena.block(0, 100)
        first, second = threading.Event(), threading.Event()
        arena.retire(first.set)
        arena.retire(second.set)
        assert not first.is_set()
        assert not second.is_set()
        del block
        gc.collect()
        assert first.is_set()
        assert second.is_set()
