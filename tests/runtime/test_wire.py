from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import os
import select
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from afferent.errors import ConfigError, ConnectionClosed, DeadlineExceeded, FormatError
from afferent.runtime import wire
from afferent.runtime.sockets import new_address


@given(st.lists(st.binary(max_size=200), max_size=12), st.data())
def test_frames_survive_any_cutting(frames: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(wire.pack_frame, frames))
    cutter, found, start = wire.FrameCutter(), [], 0
    while start < len(stream):
        end = data.draw(st.integers(start + 1, len(stream)))
        found += list(cutter.feed(stream[start:end]))
        start = end
    assert found == frames


def test_a_frame_over_the_limit_is_refused_by_its_length() -> None:
    cutter = wire.FrameCutter(max_nbytes=100)
    assert list(cutter.feed(wire.pack_frame(b"x" * 100))) == [b"x" * 100]
    with pytest.raises(FormatError):
        list(cutter.feed((101).to_bytes(4, "little")))


def test_deadlines_and_closed_connections() -> None:
    ours, theirs = socket.socketpair()
    channel = wire.SyncChannel(ours)
    with pytest.raises(DeadlineExceeded):
        channel.receive(timeout_s=0.01)
    theirs.sendall(wire.pack_frame(b"one") + wire.pack_frame(b"two"))
    assert channel.receive(timeout_s=1) == b"one"
    theirs.close()
    assert channel.receive(timeout_s=1) == b"two"
    with pytest.raises(ConnectionClosed):
        channel.receive(timeout_s=1)
    with pytest.raises(ConnectionClosed):
        channel.send(b"three", timeout_s=1)
    channel.close()


def test_nobody_listens() -> None:
    with pytest.raises(ConnectionClosed):
        wire.connect(new_address("nobody"), timeout_s=1)


def test_a_peer_of_another_uid_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    assert wire.check_peer(ours) == wire.Peer(pid=os.getpid(), uid=os.getuid())
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConnectionClosed):
        wire.check_peer(ours)
    assert ours.fileno() == -1
    theirs.close()


def test_who_finds_no_room_waits_for_it() -> None:
    """The queue of the listener is full."""
    address = new_address("test")
    with wire.listen(address) as listener, contextlib.ExitStack() as stack:
        listener.listen(0)
        while True:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.setblocking(False)
            if sock.connect_ex(address) == errno.EAGAIN:
                break
        with pytest.raises(ConnectionClosed):
            wire.connect(address, timeout_s=0.05)
        with pytest.raises(ConfigError, match="somebody listens there"):
            wire.listen(address)
        with ThreadPoolExecutor(1) as thread:
            connected = thread.submit(wire.connect, address, timeout_s=30)
            while not connected.done():
                listener.accept()[0].close()
                concurrent.futures.wait([connected], 0.02)
            connected.result().close()


async def _refuse(listener: socket.socket, num_refused: int) -> None:
    """Accept until this many connections were refused and one was accepted."""
    own = os.getuid()
    refused = 0

    def getuid() -> int:
        nonlocal refused
        refused += 1
        return own + (refused <= num_refused)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getuid", getuid)
        async for sock, _ in wire.accept_peers(listener):
            sock.close()
            return


def test_refusals_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    address = new_address("test")
    with wire.listen(address) as listener, contextlib.ExitStack() as stack:
        for _ in range(51):
            stack.enter_context(contextlib.closing(wire.connect(address, timeout_s=5)))
        asyncio.run(asyncio.wait_for(_refuse(listener, 50), 30))
    assert [record.message for record in caplog.records] == ["a connection was refused"]


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("num_turns", range(5))
def test_connection_that_comes_as_accepting_ends_is_not_lost(runner: Any, num_turns: int) -> None:
    address = new_address("test")
    accepted: list[socket.socket] = []

    async def accept() -> None:
        async for sock, _ in wire.accept_peers(listener):
            accepted.append(sock)

    async def main() -> None:
        accepting = asyncio.create_task(accept())
        await asyncio.sleep(0)
        stack.enter_context(contextlib.closing(wire.connect(address, timeout_s=5)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        accepting.cancel()
        await asyncio.wait([accepting])
        if not accepted:
            async for sock, _ in wire.accept_peers(listener):
                accepted.append(sock)
                break

    with wire.listen(address) as listener, contextlib.ExitStack() as stack:
        runner(asyncio.wait_for(main(), 30))
        for sock in accepted:
            sock.close()
    assert len(accepted) == 1


def test_a_pidfd_tells_of_the_peers_death() -> None:
    address = new_address("test")
    with wire.listen(address) as listener:
        code = (
            "import sys; from afferent.runtime import wire; "
            "s = wire.connect(sys.argv[1], timeout_s=5); "
            "s.recv(1); sys.exit()"
        )
        child = subprocess.Popen([sys.executable, "-c", code, address])
        sock, _ = listener.accept()
        peer = wire.check_peer(sock)
        assert peer.pid == child.pid
        pidfd = wire.open_peer_pidfd(sock, peer)
        sock.close()
        child.wait(60)
        assert select.select([pidfd], [], [], 60)[0]
        os.close(pidfd)


async def _echo_until_garbage() -> tuple[list[bytes], bool]:
    ours, theirs = socket.socketpair()
    got: list[bytes] = []
    closed = asyncio.Event()
    channel = wire.AsyncChannel(got.append, closed.set, max_nbytes=1000)
    await channel.attach(ours)
    theirs.sendall(wire.pack_frame(b"hello"))
    channel.send(b"answer")
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    assert await loop.sock_recv(theirs, 100) == wire.pack_frame(b"answer")
    theirs.sendall(b"\xff\xff\xff\xff")
    async with asyncio.timeout(60):
        await closed.wait()
    still_open = channel.is_open
    with pytest.raises(ConnectionClosed):
        channel.send(b"too late")
    theirs.close()
    return got, still_open


def test_a_stream_that_breaks_the_protocol_is_cut_off() -> None:
    assert asyncio.run(_echo_until_garbage()) == ([b"hello"], False)


def test_a_path_is_taken_from_the_dead_and_not_from_the_living(tmp_path: Path) -> None:
    path = tmp_path / "store.sock"
    with wire.listen(str(path)):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="no socket can be made"):
            wire.listen(str(path))
    assert path.exists(), "nobody took it away"
    with wire.listen(str(path)) as again:
        wire.connect(str(path), timeout_s=5).close()
        again.accept()[0].close()
    with pytest.raises(ConfigError):
        wire.listen(str(tmp_path / "no" / "folder"))
