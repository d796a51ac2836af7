"""A real daemon, real clients in processes of their own, and SIGKILL."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from afferent.errors import (
    ClientGone,
    ConfigError,
    DeadlineExceeded,
    NotPermitted,
    StaleHandle,
    StoreRestarted,
    StoreUnavailable,
)
from afferent.runtime import wire
from afferent.store.arena import ArenaMap
from afferent.store.block import codec
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.client.item_cache import ItemCache
from afferent.store.client.local_store import LocalStore
from afferent.store.client.verbs import Call
from afferent.store.daemon import server as store_server
from afferent.store.daemon.client_table import ClientTable, Entry, create_client_table
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol import requests
from afferent.store.protocol.hello import VERSION, Hello
from afferent.store.protocol.items import Claim, SealItem
from afferent.store.protocol.replies import reply_decoder
from afferent.store.protocol.results import Owner
from afferent.store.segment import allocate, create_segment, open_segment, reopen_read_only
from afferent.types import ContentKey, CreateItem, Handle, ObjectKind, ReserveItem, decode, encode
from tests.server import wait_until
from tests.store.stores import SharedDaemon

CAPACITY = 1 << 22
SHARES = {ObjectKind.RAW: 0.5, ObjectKind.FEATURES: 0.5}


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer(CAPACITY, shares=SHARES, job_timeout_s=1.0) as made:
        yield made


@pytest.fixture
def address(server: StoreServer) -> str:
    return server.address


@pytest.fixture
def watcher(address: str) -> Iterator[DaemonStore]:
    with DaemonStore(address, name="watcher") as store:
        yield store


@pytest.fixture
def lender(daemon: SharedDaemon) -> Iterator[DaemonStore]:
    """Connect to a daemon that other tests use too, for clients that only send invalid messages."""
    with DaemonStore(daemon.address, name="lender") as store, daemon.lent(store):
        yield store


CLIENT = """
import asyncio, os, sys
import numpy as np
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import SealItem
from afferent.types import CreateItem, ReserveItem
from afferent.types import ObjectKind

async def main():
    store = await AsyncDaemonStore.connect(sys.argv[1], name="victim", writable=True)
    item = CreateItem(ObjectKind.FEATURES, 1 << 20, b"k" * 32)
    (handle,) = await store.create("r", [item])
    np.frombuffer(store.block(handle), np.uint8)[:] = 7
{body}
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def start_client(address: str, body: str) -> subprocess.Popen[str]:
    code = CLIENT.format(body=textwrap.indent(textwrap.dedent(body), "    "))
    child = subprocess.Popen(
        [sys.executable, "-c", code, address], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait(60)
    assert child.stdout is not None
    child.stdout.close()


@pytest.mark.parametrize("body", ["", "await store.seal('r', [SealItem(handle, 1 << 20)])"])
def test_a_dead_client_leaves_nothing_held(address: str, watcher: DaemonStore, body: str) -> None:
    """A client is killed while it writes, or while it has a pin."""
    child = start_client(address, body)
    assert watcher.stat().held_nbytes == 1 << 20
    kill(child)
    wait_until(lambda: watcher.stat().held_nbytes == 0)
    assert watcher.stat().num_objects == (1 if body else 0)
    wait_until(lambda: watcher.stat().num_clients == 1)


READER = """
import sys
from afferent.store.block import codec
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import Handle
import msgspec

with DaemonStore(sys.argv[1], name="reader") as store:
    print(store.client_number, flush=True)
    for line in sys.stdin:
        handle = msgspec.json.decode(line, type=Handle)
        print(int(codec.view(store.block(handle))["pixels"].sum()), flush=True)
        store.forget("r")
"""


def start_reader(address: str) -> tuple[subprocess.Popen[str], int]:
    child = subprocess.Popen(
        [sys.executable, "-c", READER, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    return child, int(child.stdout.readline())


def test_one_round_trip_pins_for_other_processes(address: str, watcher: DaemonStore) -> None:
    """Each process reads the block under its own pin; the pin of a killed process is dropped."""
    pixels = np.full(1000, 3, np.uint8)
    readers = [start_reader(address) for _ in range(2)]
    numbers = [number for _, number in readers]
    assert len({*numbers, watcher.client_number}) == 3
    with DaemonStore(address, name="producer", writable=True) as producer:
        handle = producer.put("made", {"pixels": pixels})
        producer.get("r", [handle], also_for=numbers)
        producer.release("made")
        producer.release("r")
    (info,) = watcher.list_objects()
    assert sorted(info.pins) == sorted(numbers), "its own are gone, and it is"
    (first, _), (second, gone) = readers
    assert first.stdin is not None
    assert first.stdout is not None
    first.stdin.write(f"{msgspec.json.encode(handle).decode()}\n")
    first.stdin.flush()
    assert first.stdout.readline() == "3000\n"
    wait_until(lambda: watcher.list_objects()[0].pins == [gone])
    second.kill()
    wait_until(lambda: watcher.stat().used_nbytes == 0)
    with pytest.raises(ClientGone):
        watcher.get("r", [], also_for=[gone])
    for child, _ in readers:
        child.communicate(timeout=60)


def test_a_number_is_never_given_twice(server: StoreServer, watcher: DaemonStore) -> None:
    """A client id is never reused, even by the next daemon: a pin for an old id is refused."""
    with DaemonStore(server.address, name="gone") as store:
        gone, mine = store.client_number, watcher.client_number
    os.kill(server.pid, signal.SIGKILL)
    wait_until_back(watcher)
    with DaemonStore(server.address, name="new") as store:
        assert store.client_number > gone
    assert watcher.client_number > gone
    with pytest.raises(ClientGone):
        watcher.get("r", [], also_for=[mine])


def test_a_forked_child_that_keeps_the_socket_open_does_not_hide_the_death(
    address: str, watcher: DaemonStore
) -> None:
    """The child keeps the socket open, so there is no EOF; the pidfd reports the death."""
    body = """
    if os.fork() == 0:
        import time
        time.sleep(60)
        os._exit(0)
    """
    child = start_client(address, body)
    kill(child)
    wait_until(lambda: watcher.stat().held_nbytes == 0, timeout_s=30)  # the child is still alive


def test_a_reader_cannot_write(address: str) -> None:
    with (
        DaemonStore(address, name="writer", writable=True) as writer,
        DaemonStore(address, name="reader") as reader,
    ):
        (handle,) = writer.create("r", [CreateItem(ObjectKind.RAW, 100)])
        writer.seal("r", [SealItem(handle, 100)])
        reader.get("r", [handle])
        block = reader.block(handle)
        assert block.readonly
        with pytest.raises(TypeError, match="read-only"):
            block[0] = 1
        with pytest.raises(NotPermitted, match="open the store with writable=True"):
            codec.write_into({"x": 1}, block)
        del block
        for attempt in (
            lambda: reader.put("r", {"x": np.ones(8)}),
            lambda: ItemCache(reader).set_data("r", {ContentKey(b"k" * 32): {"x": np.ones(8)}}),
        ):
            with pytest.raises(NotPermitted, match="open the store with writable=True"):
                attempt()
        assert writer.stat().num_objects == 1


def test_a_read_only_descriptor_cannot_be_mapped_for_writing() -> None:
    fd = create_segment(4096)
    read_only = reopen_read_only(fd)
    with pytest.raises(PermissionError):
        ArenaMap(read_only, writable=True)
    with ArenaMap(fd, writable=True) as writer, ArenaMap(read_only, writable=False) as reader:
        writer.block(0, 5)[:] = b"hello"
        assert bytes(reader.block(0, 5)) == b"hello"
        for offset, nbytes in ((-1, 5), (0, -1), (4095, 2), (1 << 40, 1)):
            with pytest.raises(StaleHandle, match="outside"):
                reader.block(offset, nbytes)
    os.close(fd)
    os.close(read_only)


def test_an_arena_is_allocated_step_by_step() -> None:
    nbytes = 80 << 20
    fd = open_segment(nbytes)
    allocated = [_allocated_nbytes(fd), *(_allocated_nbytes(fd) for _ in allocate(fd))]
    os.close(fd)
    assert allocated[0] == 0
    assert allocated[-1] == nbytes
    assert len(set(allocated)) == len(allocated) > 2


def _allocated_nbytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff",
        wire.pack_frame(b"\xc1"),
        wire.pack_frame(b"\x93\xa5hello\x01\xff"),
        wire.pack_frame(encode(["hello", 1, True, "x" * 1000])),
        wire.pack_frame(encode(["hello", 99, True, "from the future"])),
        wire.pack_frame(encode(["stat", 1])),
        wire.pack_frame(encode(Hello(1, True, "two at once", 1))) * 2,
        os.urandom(4000),
    ],
)
def test_strangers_are_turned_away(lender: DaemonStore, garbage: bytes) -> None:
    sock = wire.connect(lender.address, timeout_s=10)
    sock.sendall(garbage)
    sock.shutdown(socket.SHUT_WR)
    data, fds, _, _ = socket.recv_fds(sock, 4096, 4)
    assert not fds, "the arena is not given to strangers"
    if data:
        assert sock.recv(1) == b""
    sock.close()
    assert lender.stat().num_clients == 1


def bad_client(address: str, message: bytes) -> socket.socket:
    """Return an accepted connection that has sent an invalid message."""
    sock = wire.connect(address, timeout_s=10)
    sock.sendall(wire.pack_frame(encode(Hello(VERSION, False, "bad", 1))))
    _, fds, _, _ = socket.recv_fds(sock, 4096, 1)
    os.close(fds[0])
    sock.sendall(wire.pack_frame(message))
    return sock


@pytest.mark.parametrize(
    "message",
    [
        encode(["create", 7, "r", [["features", -5, None]]]),
        encode(["create", 7, "r", [["features", 2**60, None]]]),
        encode(["create", 7, "", []]),
        encode(["get", 7, "r", [[1, 2**63, 1, 1]]]),
        encode(["get", 7, "r", [[1, 0, 0, 0]] * 5000]),
        encode(["acquire", 7, "r", [[b"short", "features", 1, [[], b""]]]]),
        encode(["stat", 7, "too", "much"]),
        encode(["explode", 7]),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(lender: DaemonStore, message: bytes) -> None:
    """The connection stays open: closing it would drop all pins of the process."""
    with bad_client(lender.address, message) as sock:
        channel = wire.SyncChannel(sock)
        reply = decode(reply_decoder, channel.receive(timeout_s=10))
        assert reply.failure is not None
        assert (reply.seq, reply.failure.code) == (7, "format_error")
        channel.send(encode(requests.Stat(8)), timeout_s=10)
        assert decode(reply_decoder, channel.receive(timeout_s=10)).failure is None


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        b"",
        encode(None),
        encode({"create": 1}),
        encode(["create"]),
        encode(["create", "1", "r", []]),
        encode([[]] * 100),
        b"\x91" * 100_000,
    ],
)
def test_a_client_that_breaks_the_protocol_is_cut_off(lender: DaemonStore, message: bytes) -> None:
    with bad_client(lender.address, message) as sock:
        assert sock.recv(1) == b""
    wait_until(lambda: lender.stat().num_clients == 1)


def test_a_daemon_that_hangs(server: StoreServer) -> None:
    async def main() -> None:
        store = await AsyncDaemonStore.connect(server.address, name="waiter")
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            await store._call(Call(requests.Stat(0), 0.05))
        os.kill(server.pid, signal.SIGCONT)
        assert (await store.stat()).num_clients == 1
        await store.close()

    asyncio.run(main())


def test_an_arena_larger_than_memory_is_refused() -> None:
    """Our own check refuses it, before the kernel's OOM killer would act."""
    with pytest.raises(ConfigError, match="memory that are free"):
        StoreServer(1 << 50)


def test_daemon_that_can_not_be_forked_is_started_a_moment_later(
    monkeypatch: pytest.MonkeyPatch, server: StoreServer
) -> None:
    failures = [OSError(11, "Resource temporarily unavailable")]
    real = store_server.spawn

    def spawn(*args: Any, **more: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*args, **more)

    monkeypatch.setattr(store_server, "spawn", spawn)
    before = server.pid
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not failures)

    def serves() -> bool:
        try:
            with DaemonStore(server.address, name="me") as store:
                return store.capacity_nbytes == CAPACITY
        except StoreUnavailable:
            return False

    wait_until(serves)
    assert server.pid != before
    assert not server.has_ended


@pytest.mark.parametrize("make", [StoreServer, LocalStore])
@pytest.mark.parametrize("nbytes", [0, -1, 0.5, "64MiB"])
def test_what_is_no_size_is_refused(make: Callable[[Any], object], nbytes: object) -> None:
    with pytest.raises(ConfigError, match="a number of bytes, such as 64 \\* MiB, not"):
        make(nbytes)


def test_shares_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="shares"):
        StoreServer(CAPACITY, shares={ObjectKind.RAW: 0.7, ObjectKind.FEATURES: 0.7})


def test_nobody_answers() -> None:
    with StoreServer(CAPACITY) as server:
        address = server.address
    with pytest.raises(StoreUnavailable):
        DaemonStore(address, name="late", timeout_s=2)


def test_a_reservation_waits_its_turn(address: str, watcher: DaemonStore) -> None:
    room = [ReserveItem(ObjectKind.RAW, CAPACITY // 2)]
    with (
        DaemonStore(address, name="first") as first,
        DaemonStore(address, name="second") as second,
        ThreadPoolExecutor(1) as thread,
    ):
        first.reserve("r", room)
        waiting = thread.submit(second.reserve, "r", room)
        wait_until(lambda: watcher.stat().num_reservations_queued == 1)
        assert not waiting.done()
        first.close()
        waiting.result(60)
        assert watcher.stat().reserved_nbytes == CAPACITY // 2


def test_a_call_that_is_cancelled_leaves_nothing_granted(
    address: str, watcher: DaemonStore
) -> None:
    room = [ReserveItem(ObjectKind.RAW, CAPACITY // 2)]

    async def main() -> None:
        store = await AsyncDaemonStore.connect(address, name="waiter")
        await store.reserve("r", room)
        waiting = asyncio.create_task(store.reserve("s", room))
        while (await store.stat()).num_reservations_queued == 0:
            assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await store.release("r")
        statistics = await store.stat()
        assert (statistics.num_reservations_queued, statistics.reserved_nbytes) == (0, 0)
        # And one that is cancelled when its reservation may be granted already.
        task = asyncio.create_task(store.reserve("s", room))
        await asyncio.sleep(0)
        await asyncio.to_thread(lambda: wait_until(lambda: watcher.stat().reserved_nbytes > 0))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            assert (await store.stat()).reserved_nbytes == 0
        await store.close()

    asyncio.run(main())


def test_who_closes_in_order_holds_nothing(address: str, watcher: DaemonStore) -> None:
    """A closed client has no pins, though its process is still alive."""
    store = DaemonStore(address, name="writer", writable=True)
    (handle,) = store.create("r", [CreateItem(ObjectKind.RAW, 100)])
    store.seal("r", [SealItem(handle, 100)])
    store.close()
    wait_until(lambda: len(watcher.list_clients()) == 1)
    assert watcher.stat().held_nbytes == 0


def test_who_closes_with_arrays_in_use_keeps_its_pins(address: str, watcher: DaemonStore) -> None:
    store = DaemonStore(address, name="writer", writable=True)
    (handle,) = store.create("r", [CreateItem(ObjectKind.RAW, 100)])
    block = store.block(handle)
    block[:] = bytes(range(100))
    store.seal("r", [SealItem(handle, 100)])
    store.close()
    wait_until(lambda: watcher.stat().num_clients == 1)
    (left,) = [client for client in watcher.list_clients() if not client.connected]
    assert (left.name, left.pid, left.held_nbytes) == ("writer", os.getpid(), 128)
    assert bytes(block) == bytes(range(100))


FORKED = """
import os, sys
from afferent.errors import NotPermitted
from afferent.types import CreateItem
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import ObjectKind

store = DaemonStore(sys.argv[1], name="parent", writable=True)
(handle,) = store.create("r", [CreateItem(ObjectKind.RAW, 100)])
block = store.block(handle)
pid = os.fork()
if pid == 0:
    try:
        store.stat()
    except NotPermitted:
        block[0]  # not mapped here: nobody would keep it from changing
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert os.WTERMSIG(status) == 11, status
pid = os.fork()
if pid == 0:
    with DaemonStore(sys.argv[1], name="child") as own:
        os._exit(0 if own.stat().num_clients == 2 else 1)
_, status = os.waitpid(pid, 0)
assert status == 0, status
assert bytes(block) == bytes(100)
"""


def test_a_forked_process_has_no_map_and_makes_its_own_connection(address: str) -> None:
    subprocess.run([sys.executable, "-c", FORKED, address], check=True, timeout=60)


# Restarts


def kill_daemon(server: StoreServer) -> None:
    pid = server.pid
    os.kill(pid, signal.SIGKILL)


def epoch_of(store: DaemonStore) -> int:
    try:
        return store.stat().segment
    except StoreUnavailable:
        return 0


def wait_until_back(*stores: DaemonStore) -> None:
    """Wait until the stores are connected to the second daemon."""
    wait_until(lambda: all(epoch_of(store) == 2 for store in stores))


def test_a_daemon_that_dies_is_replaced(server: StoreServer, watcher: DaemonStore) -> None:
    with DaemonStore(server.address, name="writer", writable=True) as store:
        (handle,) = store.create("r", [CreateItem(ObjectKind.RAW, 100)])
        store.seal("r", [SealItem(handle, 100)])
        kill_daemon(server)
        with pytest.raises(StoreUnavailable):
            store.stat()
        wait_until_back(store, watcher)
        statistics = store.stat()
        assert (statistics.segment, statistics.num_objects, statistics.num_clients) == (2, 0, 2)
        for attempt in (lambda: store.get("r", [handle]), lambda: store.block(handle)):
            with pytest.raises(StoreRestarted):
                attempt()
        (new,) = store.create("r", [CreateItem(ObjectKind.RAW, 100)])
        store.seal("r", [SealItem(new, 100)])
        # The handle differs from the one of the earlier epoch only in the epoch.
        assert new == Handle(2, handle.offset, handle.nbytes, handle.generation)
        for attempt in (lambda: store.get("r", [handle]), lambda: store.block(handle)):
            with pytest.raises(StoreRestarted):
                attempt()


def test_calls_under_way_fail_when_the_daemon_dies(server: StoreServer) -> None:
    item = Claim(b"k" * 32, ObjectKind.FEATURES, 1000)

    async def main() -> None:
        store = await AsyncDaemonStore.connect(server.address, name="waiter")
        await store.acquire("r", [item])
        await store.acquire("s", [item])
        waiting = [
            asyncio.create_task(store.wait("s", [item.key])),
            asyncio.create_task(
                store.reserve("s", [ReserveItem(ObjectKind.FEATURES, CAPACITY // 2)])
            ),
        ]
        while (await store.stat()).num_reservations_queued == 0:
            pass
        kill_daemon(server)
        for task in waiting:
            with pytest.raises(StoreUnavailable):
                await task
        with pytest.raises(StoreUnavailable):
            await store.stat()
        store.forget("r")
        await asyncio.to_thread(wait_until, lambda: store.is_open)
        (outcome,) = await store.acquire("r", [item])
        assert isinstance(outcome, Owner)
        await store.close()

    asyncio.run(main())


def test_the_arena_is_not_reused_while_a_client_still_looks_at_it(
    server: StoreServer, watcher: DaemonStore
) -> None:
    with DaemonStore(server.address, name="reader", writable=True) as store:
        (handle,) = store.create("r", [CreateItem(ObjectKind.RAW, 100)])
        array = np.frombuffer(store.block(handle), np.uint8)
        array[:] = 7
        kill_daemon(server)
        wait_until(lambda: not store.is_open and not watcher.is_open)
        with pytest.raises(StoreUnavailable):
            DaemonStore(server.address, name="new", timeout_s=0.5)
        assert not watcher.is_open
        assert (array == 7).all()
        del array
        wait_until_back(store, watcher)


def test_a_dead_client_does_not_hold_a_restart_up(
    server: StoreServer, watcher: DaemonStore
) -> None:
    child = start_client(server.address, "")
    os.kill(server.pid, signal.SIGSTOP)
    pid = server.pid
    kill(child)  # the stopped daemon does not notice the death
    os.kill(pid, signal.SIGKILL)
    wait_until_back(watcher)
    assert watcher.stat().num_clients == 1


def test_who_does_not_let_go_in_time_is_killed_if_so_asked() -> None:
    with (
        StoreServer(CAPACITY, recovery_timeout_s=3.0) as server,
        DaemonStore(server.address, name="watcher") as watcher,
    ):
        child = start_client(server.address, "block = store.block(handle)")
        os.kill(child.pid, signal.SIGSTOP)
        kill_daemon(server)
        assert child.wait(60) == -signal.SIGKILL
        assert child.stdout is not None
        child.stdout.close()
        wait_until_back(watcher)
        assert watcher.stat().num_clients == 1


def test_a_client_table_remembers_who_is_connected() -> None:
    fd = create_client_table()
    first = ClientTable(fd)
    assert list(first) == []
    first.add(1, os.getpid(), 10)
    first.add(2, os.getpid(), 20)
    first.remove(1)
    first.add(3, 2**22 - 1, 30)  # no such process
    second = ClientTable(fd)
    living = {entry.client: entry.open_pidfd() for entry in second}
    assert living[3] is None
    assert living[2] is not None
    os.close(living[2])
    second.remove(2)
    second.remove(3)
    third = ClientTable(fd)
    assert list(third) == []
    assert [third.new_client(), third.new_client(), ClientTable(fd).new_client()] == [1, 2, 3]
    reused = Entry(client=4, pid=os.getpid(), start_time=1, token=40)
    assert reused.open_pidfd() is None, "another process has got the pid since"
    os.close(fd)
