"""The watch tells a vLLM that hangs from one that is busy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from afferent.engines.http_upstream import client, health
from afferent.engines.http_upstream import server as one_server
from afferent.engines.http_upstream.client import HttpClient
from afferent.engines.http_upstream.health import ServerWatch
from afferent.engines.http_upstream.sources import Sources, source
from afferent.runtime.heartbeat import Board
from afferent.runtime.proc_stat import ProcStat
from tests.server import wait_until

SERVER = "server"
TIMEOUT_S = 4.0

TWO = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
for line in sys.stdin:
    sum(range(10**7))
    print("computed", flush=True)
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    """Start a process with a child, in a session of their own."""
    command = [sys.executable, "-c", TWO]
    with subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        yield running
        os.killpg(running.pid, signal.SIGKILL)


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create([SERVER], frozen_timeout_s=TIMEOUT_S)
    yield made
    made.close()


def line_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    return server.stdout.readline().strip()


def has_beaten(board: Board, watch: ServerWatch, *, has_answered: bool) -> bool:
    board.rest(SERVER)
    watch.look(has_answered=has_answered)
    return bool(board.read())


def test_who_answers_or_computes_goes_on(server: subprocess.Popen[str], board: Board) -> None:
    child = int(line_of(server))
    wait_until(lambda: is_asleep(server.pid))
    watch = ServerWatch(board, server.pid, name=SERVER)
    watch.look(has_answered=False)  # the first poll records the processor time so far
    assert not has_beaten(board, watch, has_answered=False)
    assert has_beaten(board, watch, has_answered=True)
    assert server.stdin is not None
    print("compute", file=server.stdin, flush=True)
    assert line_of(server) == "computed"
    assert has_beaten(board, watch, has_answered=False)
    os.kill(child, signal.SIGSTOP)  # as if the engine core hung while the API server still answers
    wait_until(lambda: is_stopped(child))
    assert not has_beaten(board, watch, has_answered=True)
    os.kill(child, signal.SIGCONT)
    wait_until(lambda: not is_stopped(child))
    assert has_beaten(board, watch, has_answered=True)


def test_who_goes_on_no_more_is_to_be_replaced(
    server: subprocess.Popen[str], board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(health.time, "monotonic", lambda: now_s)
    child = int(line_of(server))
    watch = ServerWatch(board, server.pid, name=SERVER)
    assert not watch.look(has_answered=True)
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: is_stopped(child))
    num_looks = 0
    while not watch.look(has_answered=True):
        now_s, num_looks = now_s + 1.0, num_looks + 1
    assert num_looks == TIMEOUT_S


def test_an_upstream_that_answers_no_more_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs with open connections and unanswered requests."""
    monkeypatch.setattr(client, "_LOOK_S", 0.01)
    monkeypatch.setattr(one_server, "_LOOK_TIMEOUT_S", 0.1)
    asyncio.run(asyncio.wait_for(until_it_freezes(tmp_path / "vllm.sock"), 30))


async def until_it_freezes(path: Path) -> None:
    frozen = asyncio.Event()
    asked: list[bool] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                asked.append(frozen.is_set())
                if not frozen.is_set():
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    listening = await asyncio.start_unix_server(answer, path)
    async with HttpClient.over(Sources([source(f"unix:{path}")]), title="vLLM") as upstream:
        while not upstream.is_ready:
            await asyncio.sleep(0.01)
        frozen.set()
        while upstream.is_ready:
            await asyncio.sleep(0.01)
    listening.close()
    assert sum(asked) >= one_server._MOST_UNANSWERED


def stat_of(pid: int) -> ProcStat:
    stat = ProcStat.read(pid)
    assert stat is not None
    return stat


def is_stopped(pid: int) -> bool:
    return stat_of(pid).is_stopped


def is_asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
