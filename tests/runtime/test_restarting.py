"""Restarts with successors that end, hang or can't be started, with real idle processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from afferent.config import ServeConfig
from afferent.errors import ConfigError
from afferent.operations.supervisor import supervisor as supervising
from afferent.operations.supervisor.parts import Part
from afferent.operations.supervisor.restarting import Restarts
from afferent.operations.supervisor.supervisor import Supervisor
from afferent.runtime import heartbeat
from afferent.runtime.listening import Port
from tests.runtime.starter import StarterSettings, What
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)

CAN_NOT_FORK = OSError(11, "Resource temporarily unavailable")


class House:
    """A supervisor with a frontend and an engine, and the behaviour of their next processes."""

    def __init__(self, supervisor: Any, port: Port) -> None:
        self.supervisor = supervisor
        self.next: dict[str, What] = {"front": "ready", "engine": "ready"}
        for name in self.next:
            supervisor._parts[name] = Part(
                name,
                "tests.runtime.starter",
                partial(self._settings, name),
                port=port if name == "front" else None,
                is_frontend=name == "front",
                is_engine=name == "engine",
            )
        self.board = heartbeat.Board.create(list(self.next), frozen_timeout_s=60)

    def _settings(self, name: str) -> StarterSettings:
        return StarterSettings(what=self.next[name])

    def part(self, name: str) -> Part:
        part: Part = self.supervisor._parts[name]
        return part

    def pid(self, name: str) -> int:
        child = self.part(name).child
        assert child is not None
        return child.pid

    async def restart(self, what: Any, *, start_timeout_s: float = 30) -> str:
        """Restart; return the reason of a failure, or an empty text."""
        restarts = Restarts(
            self.supervisor,
            self.board,
            drain_timeout_s=5,
            engine_start_timeout_s=start_timeout_s,
            frontend_start_timeout_s=start_timeout_s,
        )
        try:
            await restarts.restart(what, lambda _: None)
        except ConfigError as error:
            return error.message
        return ""


def fds() -> set[str]:
    return {each.name for each in Path("/proc/self/fd").iterdir()}


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


@contextlib.asynccontextmanager
async def house() -> AsyncIterator[House]:
    """Run both processes until they are ready; kill them at the end."""
    supervisor: Any = Supervisor(SimpleNamespace(config=ServeConfig()))  # type: ignore[arg-type]
    others = children()
    port = Port("127.0.0.1", 0, num_listeners=2)
    found = House(supervisor, port)
    try:
        for part in list(supervisor.parts.values()):
            supervisor._start(part)
        await until(lambda: all(part.is_ready for part in supervisor.parts.values()))
        yield found
    finally:
        supervisor._stop.set()
        await supervisor._kill_all()
        port.close()
        found.board.close()
        assert children() <= others


def break_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(*_: object, **__: object) -> None:
        raise CAN_NOT_FORK

    monkeypatch.setattr(supervising, "spawn", spawn)


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("end", "ended before it was ready: can't find what it needs; the old one goes on"),
        ("hang", "was not ready within 1 s; the old one goes on"),
        ("fork", "can't be started (Resource temporarily unavailable); the old one goes on"),
    ],
)
def test_restart_frontends_without_successor_keeps_old_process(
    monkeypatch: pytest.MonkeyPatch, trouble: Any, message: str
) -> None:
    async def run() -> None:
        async with house() as server:
            part, pid = server.part("front"), server.pid("front")
            before, processes = fds(), children()
            for _ in range(2):  # the second failure leaves no more than the first
                with monkeypatch.context() as patched:
                    if trouble == "fork":
                        break_spawn(patched)
                    server.next["front"] = trouble
                    limit_s = 1 if trouble == "hang" else 30
                    failure = await server.restart("frontends", start_timeout_s=limit_s)
                assert failure.startswith(f"a new front {message}")
                assert server.part("front") is part
                assert (server.pid("front"), part.is_ready) == (pid, True)
                assert part.listener is not None, "or who waits at it would be sent away"
                assert (fds(), children()) == (before, processes)
            server.next["front"] = "ready"
            assert await server.restart("frontends") == ""
            assert server.pid("front") != pid
            assert server.part("front").is_ready
            assert not psutil.pid_exists(pid)
            assert len(children()) == len(processes)
            assert len(fds()) == len(before)

    asyncio.run(run())


def test_restart_frontends_old_process_dies_meanwhile_one_is_left() -> None:
    async def run() -> None:
        async with house() as server:
            old = server.part("front")
            num_processes = len(children())
            assert old.child is not None
            starting = asyncio.create_task(server.restart("frontends"))
            await until(lambda: server.supervisor._extra)
            old.child.popen.kill()
            assert await starting == ""
            await until(lambda: len(children()) == num_processes)
            assert server.part("front") is not old
            assert server.part("front").is_ready
            assert server.supervisor._extra == []

    asyncio.run(run())


def test_successor_listens_at_the_same_socket() -> None:
    """A waiting connection survives a restart, even after a failed restart."""

    async def run() -> None:
        async with house() as server:
            listener = server.part("front").listener
            assert listener is not None
            listener.listen()
            os.set_blocking(listener.fileno(), False)  # as the accepting process does
            host, port = listener.getsockname()[:2]
            with socket.create_connection((host, port), timeout=5) as waiting:
                for what in ("end", "ready"):
                    server.next["front"] = what
                    await server.restart("frontends")
                    if what == "end":
                        assert not os.get_blocking(listener.fileno())
                after = server.part("front").listener
                assert after is not None
                accepted, _ = after.accept()
                with accepted:
                    accepted.sendall(b"hello")
                    assert waiting.recv(5) == b"hello"

    asyncio.run(run())


def test_old_process_that_dies_beside_a_hung_successor_keeps_its_socket() -> None:
    """A hung successor shares the socket but accepts nothing: connections would wait forever."""

    async def run() -> None:
        async with house() as server:
            part = server.part("front")
            assert part.listener is not None
            assert part.child is not None
            socket_number = os.fstat(part.listener.fileno()).st_ino
            old = part.child
            server.next["front"] = "hang"
            starting = asyncio.create_task(server.restart("frontends", start_timeout_s=3))
            await until(lambda: server.supervisor._extra)
            server.next["front"] = "ready"
            old.popen.kill()
            await until(lambda: part.child is not None and part.child is not old and part.is_ready)
            assert "was not ready within 3 s" in await starting
            assert server.part("front") is part
            assert part.listener is not None
            assert os.fstat(part.listener.fileno()).st_ino == socket_number

    asyncio.run(run())


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("end", "engine: did not start; the server tries again"),
        ("hang", "engine: not ready within 1 s, and killed; the server tries again"),
        ("fork", "engine: did not start; the server tries again"),
    ],
)
def test_restart_engine_without_successor_opens_doors(
    monkeypatch: pytest.MonkeyPatch, trouble: Any, message: str
) -> None:
    async def run() -> None:
        async with house() as server:
            pid = server.pid("engine")
            with monkeypatch.context() as patched:
                if trouble == "fork":
                    break_spawn(patched)
                server.next["engine"] = trouble
                limit_s = 1 if trouble == "hang" else 30
                failure = await server.restart("engine", start_timeout_s=limit_s)
                assert failure.startswith(message), failure
                assert not server.board.are_doors_closed
                assert not psutil.pid_exists(pid)
                assert (await server.restart("frontends")).startswith("not ready: engine")
            server.next["engine"] = "ready"
            assert await server.restart("engine") == "", "it is what mends an engine that hangs"
            assert server.part("engine").is_ready
            assert not server.board.are_doors_closed

    asyncio.run(run())


def test_restart_engine_waits_for_counts_written_after_doors_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A count of 0 may be the last word of a frontend that was replaced: its successor is busy."""

    async def run() -> None:
        async with house() as server:
            pid, looks = server.pid("engine"), []
            read = server.board.read
            monkeypatch.setattr(server.board, "read", lambda names: looks.append(0) or read(names))
            server.board.beat("front")
            server.board.count_inside("front", 0)
            restarting = asyncio.create_task(server.restart("engine"))
            await until(lambda: len(looks) > 2)
            assert server.pid("engine") == pid, "the frontend has not counted yet"
            server.board.count_inside("front", 1)
            server.board.beat("front")
            looks.clear()
            await until(lambda: len(looks) > 2)
            assert server.pid("engine") == pid, "a request is in flight"
            server.board.count_inside("front", 0)
            assert await restarting == ""
            assert server.pid("engine") != pid

    asyncio.run(run())
