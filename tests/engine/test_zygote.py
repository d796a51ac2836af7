"""A worker's zygote forks a lost worker again, but not one that fails at its start."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from msgspec import Struct

from afferent.runtime.heartbeat import Board
from afferent.runtime.process import LOST_PARTNERS, Child, LogSettings, Status, spawn

pytestmark = pytest.mark.timeout(60)

NAME = "worker"


class Settings(Struct):
    """The behaviour of each fork in turn; the last one is repeated."""

    lives: list[str]


def main() -> None:
    """Run the zygote, as `spawn` starts it."""
    from afferent.builtin.engine.worker.zygote import keep_one
    from afferent.runtime.process import ChildProcess

    child = ChildProcess.start()
    lives = child.settings(Settings).lives

    def work() -> None:
        num_lives = int(os.environ.get("LIVES", "0"))
        how = lives[min(num_lives, len(lives) - 1)]
        if how.isdecimal():
            raise SystemExit(int(how))
        if how == "fail":
            raise RuntimeError("on purpose")
        child.beat()
        child.report(f"life {num_lives}: {os.getpid()}", ready=True)
        if how == "lost":
            raise SystemExit(LOST_PARTNERS)
        while True:
            time.sleep(3600)

    os.register_at_fork(before=_count)
    raise SystemExit(keep_one(child, work))


def _count() -> None:
    """Count the forks in an environment variable, so that each knows its number."""
    os.environ["LIVES"] = str(int(os.environ.get("LIVES", "-1")) + 1)


@contextmanager
def zygote(*lives: str) -> Iterator[tuple[Child, Board]]:
    board = Board.create([NAME], frozen_timeout_s=60.0)
    child = spawn(
        NAME,
        "tests.engine.test_zygote",
        Settings(list(lives)),
        log=LogSettings(level="critical", format="text"),
        board=board.place,
    )
    try:
        yield child, board
    finally:
        child.popen.kill()
        child.popen.wait()
        child.close()
        board.close()


def next_pid(child: Child, life: int) -> int:
    """Return the process id of the fork that reports to be ready."""
    said = b""
    while True:
        assert select.select([child.status_fd], [], [], 30)[0]
        said += os.read(child.status_fd, 1 << 16)
        for line in said.splitlines():
            status = msgspec.json.decode(line, type=Status)
            if status.ready and status.text.startswith(f"life {life}: "):
                return int(status.text.rpartition(" ")[2])


def test_who_is_killed_is_forked_again() -> None:
    with zygote("run") as (child, _):
        first = next_pid(child, 0)
        assert first != child.pid
        os.kill(first, signal.SIGKILL)
        second = next_pid(child, 1)
        assert second not in (first, child.pid)
        assert child.popen.poll() is None


def test_who_has_lost_the_others_is_forked_again_even_before_it_was_ready() -> None:
    with zygote(str(LOST_PARTNERS), "lost", "run") as (child, _):
        next_pid(child, 2)


@pytest.mark.parametrize(("how", "status"), [("78", 78), ("3", 3), ("fail", 1)])
def test_who_can_not_begin_is_not_forked_again(how: str, status: int) -> None:
    with zygote(how) as (child, _):
        assert child.popen.wait(30) == status


def test_on_sigterm_both_end() -> None:
    with zygote("run") as (child, _):
        pid = next_pid(child, 0)
        child.popen.terminate()
        assert child.popen.wait(30) == 0
        assert not is_there(pid)


def test_a_worker_does_not_outlive_its_zygote() -> None:
    with zygote("run") as (child, _):
        pid = next_pid(child, 0)
        child.popen.kill()
        child.popen.wait()
        deadline = time.monotonic() + 30
        while is_there(pid):
            assert time.monotonic() < deadline


def is_there(pid: int) -> bool:
    """Return whether the process runs, and is no zombie."""
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
    return bool(state) and not state.startswith("Z")


if __name__ == "__main__":
    sys.exit(main())
