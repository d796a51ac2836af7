"""Heartbeats: late processes, and the heartbeat table that other processes read."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from afferent.runtime import heartbeat, process
from afferent.runtime.heartbeat import PERIOD_S, Board, Watch
from afferent.runtime.proc_stat import ProcStat
from tests.server import wait_until

TIMEOUT_S = 15.0

BEATS = """
import signal
from afferent.runtime.process import ChildProcess
child = ChildProcess.start()
child.report("about to beat")
child.beat_in_thread()
signal.pause()
"""


@pytest.fixture
def board() -> Iterator[Board]:
    names = ["one", "two", "three"]
    made = Board.create(names, watchers={"three": "two"}, frozen_timeout_s=TIMEOUT_S)
    yield made
    made.close()


class Looks:
    """A watcher that polls once per period, with a simulated clock."""

    def __init__(self) -> None:
        self.watch = Watch(timeout_s=TIMEOUT_S)
        self.now_s = 1000.0

    def look(self, **beats: int) -> list[str]:
        self.now_s += PERIOD_S
        self.watch.look(beats, now_s=self.now_s)
        return self.watch.overdue

    def until_overdue(self, **beats: int) -> float:
        """Return the time until a process is overdue, with these heartbeats at each poll."""
        start_s = self.now_s
        while not self.look(**beats):
            assert self.now_s < start_s + 10 * TIMEOUT_S
        return self.now_s - start_s


def test_who_beats_is_never_overdue() -> None:
    looks = Looks()
    assert not any(looks.look(one=number, two=number // 10) for number in range(1, 1000))


def test_who_is_silent_is_overdue_after_its_time() -> None:
    looks = Looks()
    looks.look(one=1, two=1)
    assert looks.until_overdue(one=1) == pytest.approx(TIMEOUT_S)
    assert looks.watch.overdue == ["one"]


def test_who_rests_is_not_waited_for() -> None:
    looks = Looks()
    looks.look(one=1)
    looks.until_overdue(one=1)
    assert looks.look() == []
    assert looks.look(one=1) == []  # it was restarted, and gets its full time
    assert looks.until_overdue(one=1) == pytest.approx(TIMEOUT_S)


def test_a_watcher_that_slept_blames_nobody() -> None:
    """The machine was suspended or overloaded."""
    looks = Looks()
    looks.look(one=1)
    for _ in range(5):
        looks.now_s += 100 * TIMEOUT_S
        assert looks.look(one=1) == []
    assert looks.look(one=2) == []
    assert looks.until_overdue(one=2) == pytest.approx(TIMEOUT_S)


@given(
    gaps_s=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=200),
    beats=st.lists(st.booleans(), min_size=200, max_size=200),
)
def test_nobody_is_overdue_who_had_fewer_looks_than_its_time_has(
    gaps_s: list[float], beats: list[bool]
) -> None:
    watch, now_s, beat, num_silent = Watch(timeout_s=TIMEOUT_S), 1.0, 1, 0
    for gap_s, has_beaten in zip(gaps_s, beats, strict=False):
        now_s += gap_s
        beat += has_beaten
        num_silent = 0 if has_beaten else num_silent + 1
        watch.look({"one": beat}, now_s=now_s)
        assert not watch.overdue or num_silent >= TIMEOUT_S / (2 * PERIOD_S)


def test_the_board_shows_who_is_silent(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(heartbeat.time, "monotonic_ns", lambda: now_ns)
    board.beat("one")
    board.beat("two")
    assert board.read() == {"one": now_ns, "two": now_ns}
    assert board.silent() == []
    first_ns, now_ns = now_ns, now_ns + int(heartbeat.SILENT_S * 1e9) + 1
    board.beat("two")
    assert board.silent() == ["one"]
    assert board.read(["one"]) == {"one": first_ns}
    board.rest("one", "three")
    assert board.silent() == []


def test_of_whom_a_silent_one_watches_nothing_is_known(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(heartbeat.time, "monotonic_ns", lambda: now_ns)
    board.beat("two")
    board.beat("three")
    now_ns += int(heartbeat.SILENT_S * 1e9) + 1
    assert board.silent() == ["two"]
    board.beat("two")
    assert board.silent() == ["three"]


def test_a_child_beats_unless_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, board: Board
) -> None:
    (tmp_path / "beats.py").write_text(BEATS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    log = process.LogSettings(level="warning", format="text")
    child = process.spawn("two", "beats", Struct(), log=log, board=board.place)
    try:
        wait_until(lambda: "two" in board.read())
        first = board.read()["two"]
        wait_until(lambda: board.read()["two"] > first)
        assert board.silent() == []
        child.popen.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(child.pid))
        wait_until(lambda: board.silent() == ["two"])
        child.popen.send_signal(signal.SIGCONT)
        wait_until(lambda: board.silent() == [])
    finally:
        child.popen.kill()
        child.popen.wait()
        child.close()


def is_stopped(pid: int) -> bool:
    stat = ProcStat.read(pid)
    assert stat is not None
    return stat.is_stopped


def test_what_the_kernel_says_of_a_process() -> None:
    stat = ProcStat.read(os.getpid())
    assert stat is not None
    assert (stat.is_stopped, stat.session) == (False, os.getsid(0))
    assert stat.start_ticks > 0
    assert ProcStat.read(2**22 + 1) is None  # beyond the highest possible process id
