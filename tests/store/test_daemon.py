"""A real daemon, real clients in processes of their own, and `kill -9`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from afferent import wire
from afferent.errors import (
    ArenaTooSmall,
    DeadlineExceeded,
    NotPermitted,
    StaleHandle,
    StoreFull,
    StoreUnavailable,
)
from afferent.process import LogSettings, spawn
from afferent.store import codec, daemon
from afferent.store import messages as m
from afferent.store.arena import ArenaMap, create_segment, reopen_read_only
from afferent.store.client import AsyncDaemonStore, DaemonStore
from afferent.types import Handle, ObjectKind, encode
from tests.server import wait_until

CAPACITY = 1 << 22


@pytest.fixture
def daemon_process() -> Iterator[tuple[str, int]]:
    """A daemon in a process of its own: its address and pid. It ends with the test."""
    name = wire.new_address("test")
    listener, arena_fd = wire.listen(name), create_segment(CAPACITY)
    settings = daemon.Settings(
        arena_fd=arena_fd, listener_fd=listener.fileno(), segment=1, job_timeout_s=1.0
    )
    log = LogSettings(level="warning", format="text")
    child = spawn("store", daemon.__name__, settings, log=log, fds=(arena_fd, listener.fileno()))
    listener.close()
    os.close(arena_fd)
    yield name, child.pid
    child.popen.kill()
    child.popen.wait()
    child.close()


@pytest.fixture
def address(daemon_process: tuple[str, int]) -> str:
    return daemon_process[0]


@pytest.fixture
def watcher(address: str) -> Iterator[DaemonStore]:
    store = DaemonStore(address, name="watcher")
    yield store
    store.close()


CLIENT = """
import asyncio, os, sys
import numpy as np
from afferent.store import messages as m
from afferent.store.client import AsyncDaemonStore
from afferent.types import ObjectKind

async def main():
    store = await AsyncDaemonStore.connect(chr(0) + sys.argv[1], name="victim", writable=True)
    item = m.CreateItem(ObjectKind.FEATURES, 1 << 20, b"k" * 32)
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
        [sys.executable, "-c", code, address[1:]], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    assert child.stdout is not None
    child.stdout.close()


@pytest.mark.parametrize("body", ["", "await store.seal('r', [m.SealItem(handle, 1 << 20)])"])
def test_a_dead_client_leaves_nothing_held(address: str, watcher: DaemonStore, body: str) -> None:
    """Killed in the middle of writing, and killed while it holds a pin."""
    child = start_client(address, body)
    assert watcher.stat().pinned_nbytes == 1 << 20
    kill(child)
    wait_until(lambda: watcher.stat().pinned_nbytes == 0, timeout_s=5)
    statistics = watcher.stat()
    assert statistics.num_objects == (1 if body else 0)
    assert statistics.num_clients == 1


def test_a_forked_child_that_keeps_the_socket_open_does_not_hide_the_death(
    address: str, watcher: DaemonStore
) -> None:
    """The socket stays open in the child, so there is no EOF; the pidfd tells all the same."""
    body = """
    if os.fork() == 0:
        import time
        time.sleep(60)
        os._exit(0)
    """
    child = start_client(address, body)
    kill(child)
    wait_until(lambda: watcher.stat().pinned_nbytes == 0, timeout_s=5)


def test_a_reader_cannot_write(address: str) -> None:
    async def main() -> None:
        writer = await AsyncDaemonStore.connect(address, name="writer", writable=True)
        (handle,) = await writer.create("r", [m.CreateItem(ObjectKind.RAW, 100)])
        await writer.seal("r", [m.SealItem(handle, 100)])
        reader = await AsyncDaemonStore.connect(address, name="reader")
        await reader.get("r", [handle])
        block = reader.block(handle)
        assert block.readonly
        with pytest.raises(TypeError, match="read-only"):
            block[0] = 1
        writer.close()
        reader.close()

    asyncio.run(main())


def test_a_read_only_descriptor_cannot_be_mapped_for_writing() -> None:
    fd = create_segment(4096)
    read_only = reopen_read_only(fd)
    with pytest.raises(PermissionError):
        ArenaMap(read_only, writable=True)
    with ArenaMap(fd, writable=True) as writer, ArenaMap(read_only, writable=False) as reader:
        writer.block(0, 5)[:] = b"hello"
        assert bytes(reader.block(0, 5)) == b"hello"
        for offset, nbytes in ((-1, 5), (0, -1), (4095, 2), (1 << 40, 1)):
            with pytest.raises(ValueError, match="outside"):
                reader.block(offset, nbytes)
    os.close(fd)
    os.close(read_only)


def test_a_tree_crosses_without_a_copy(address: str) -> None:
    async def main() -> None:
        tree = {"pixel_values": np.arange(1000, dtype=np.float32).reshape(10, 100), "n": 3}
        writer = await AsyncDaemonStore.connect(address, name="writer", writable=True)
        nbytes = codec.plan(tree).nbytes
        (handle,) = await writer.create("r", [m.CreateItem(ObjectKind.FEATURES, nbytes)])
        codec.write_into(tree, writer.block(handle))
        await writer.seal("r", [m.SealItem(handle, nbytes)])
        reader = await AsyncDaemonStore.connect(address, name="reader")
        await reader.get("r", [handle])
        viewed: Any = codec.view(reader.block(handle))
        assert np.array_equal(viewed["pixel_values"], tree["pixel_values"])
        base = np.frombuffer(reader.block(handle), np.uint8).ctypes.data
        assert base <= viewed["pixel_values"].ctypes.data < base + nbytes
        writer.close()
        reader.close()

    asyncio.run(main())


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
        wire.pack_frame(encode(m.Hello(1, True, "two at once"))) * 2,
        os.urandom(4000),
    ],
)
def test_strangers_are_turned_away(address: str, watcher: DaemonStore, garbage: bytes) -> None:
    sock = wire.connect(address, timeout_s=10)
    sock.sendall(garbage)
    sock.shutdown(socket.SHUT_WR)
    data, fds, _, _ = socket.recv_fds(sock, 4096, 4)
    assert not fds, "the arena is not given to strangers"
    if data:
        assert sock.recv(1) == b""
    sock.close()
    assert watcher.stat().num_clients == 1


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        encode(["create", 1, "r", [["features", -5, None]]]),
        encode(["create", 1, "r", [["features", 2**60, None]]]),
        encode(["create", 1, "", []]),
        encode(["get", 1, "r", [[1, 2**63, 1, 1]]]),
        encode(["get", 1, "r", [[1, 0, 0, 0]] * 5000]),
        encode(["acquire", 1, "r", [[b"short", "features", 1, [[], b""]]]]),
        encode(["stat", 1, "too", "much"]),
        encode(["explode", 1]),
    ],
)
def test_a_client_that_breaks_the_protocol_is_cut_off(
    address: str, watcher: DaemonStore, message: bytes
) -> None:
    sock = wire.connect(address, timeout_s=10)
    sock.sendall(wire.pack_frame(encode(m.Hello(m.VERSION, False, "bad"))))
    _, fds, _, _ = socket.recv_fds(sock, 4096, 1)
    os.close(fds[0])
    sock.sendall(wire.pack_frame(message))
    assert sock.recv(1) == b""
    sock.close()
    wait_until(lambda: watcher.stat().num_clients == 1, timeout_s=5)


def test_handles_that_nobody_gave_out(address: str, watcher: DaemonStore) -> None:
    for handle in (Handle(1, 0, 64, 1), Handle(2, 0, 64, 1), Handle(1, 2**50, 2**50, 2**50)):
        with pytest.raises(StaleHandle):
            watcher.get("r", [handle])


def test_the_store_is_full(address: str) -> None:
    async def main() -> None:
        store = await AsyncDaemonStore.connect(address, name="writer", writable=True)
        with pytest.raises(ArenaTooSmall):
            await store.create("r", [m.CreateItem(ObjectKind.RAW, CAPACITY + 1)])
        await store.create("r", [m.CreateItem(ObjectKind.RAW, CAPACITY)])
        with pytest.raises(StoreFull):
            await store.create("r2", [m.CreateItem(ObjectKind.RAW, 1)])
        store.forget("r")
        (handle,) = await store.create("r2", [m.CreateItem(ObjectKind.RAW, CAPACITY)])
        with pytest.raises(NotPermitted):
            await store.abort("r", [handle])
        await store.abort("r2", [handle])
        assert (await store.stat()).used_nbytes == 0
        store.close()

    asyncio.run(main())


def test_a_daemon_that_dies_or_hangs(daemon_process: tuple[str, int]) -> None:
    address, pid = daemon_process

    async def main() -> None:
        store = await AsyncDaemonStore.connect(address, name="waiter")
        sync = DaemonStore(address, name="sync")
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            await store._call(m.Stat(0), m.Statistics, timeout_s=0.05)
        waiting = asyncio.create_task(store.stat())
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            await waiting
        with pytest.raises(StoreUnavailable):
            await asyncio.to_thread(sync.stat)
        with pytest.raises(StoreUnavailable):
            await store.stat()
        store.forget("r")
        sync.close()

    asyncio.run(main())
    with pytest.raises(StoreUnavailable):
        DaemonStore(address, name="late", timeout_s=2)
