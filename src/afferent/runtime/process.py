"""Starting processes: fresh interpreters, inherited descriptors, settings as msgpack.

A child is started as ``python -m MODULE FD``, where ``FD`` holds a `Launch`. It dies with its
parent (PDEATHSIG), leaves Ctrl-C to its parent, reports on a pipe when it is ready, and beats
(`afferent.runtime.heartbeat`) from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import msgspec
from msgspec import Struct

from afferent.errors import ConfigError
from afferent.runtime import logs, shortage
from afferent.runtime.heartbeat import PERIOD_S, Board, BoardPlace

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1

LOST_PARTNERS = os.EX_TEMPFAIL
"""The exit status of a child that ends because those it works with are gone; it is not at fault."""

REFUSED = os.EX_CONFIG
"""The exit status of a child that can't do what it was told, as it has reported; nor could the next
one.
"""

Settings = TypeVar("Settings", bound=Struct)


class Launch(Struct, kw_only=True, forbid_unknown_fields=True):
    """What every child is told; ``settings`` is for its own module."""

    name: str
    parent_pid: int
    status_fd: int
    log_level: str
    log_format: logs.LogFormat
    settings: msgspec.Raw
    board: BoardPlace | None = None
    """``None``: nobody watches it."""


class Status(Struct, kw_only=True, forbid_unknown_fields=True):
    """A child's report on its status pipe: what it does, and whether it can be used."""

    ready: bool
    text: str


@dataclass(slots=True)
class Child:
    """A running child; ``status`` yields `Status` lines until the child is gone."""

    name: str
    popen: subprocess.Popen[bytes]
    status_fd: int

    @property
    def pid(self) -> int:
        return self.popen.pid

    def close(self) -> None:
        os.close(self.status_fd)

    def discard(self) -> None:
        """End it at once; nothing of it is left."""
        self.popen.kill()
        self.popen.wait()
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    level: str
    format: logs.LogFormat


def spawn(
    name: str,
    module: str,
    settings: Struct,
    *,
    log: LogSettings,
    fds: Sequence[int] = (),
    env: dict[str, str] | None = None,
    board: BoardPlace | None = None,
) -> Child:
    """Start ``python -m module`` with ``fds`` open under the same numbers.

    Args:
        board: Where it beats under its ``name``, and whoever it watches; without it, nobody does.

    Raises:
        OSError: There are no descriptors, or no memory, for it; none is left open.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        status_read, status_write = os.pipe()
        ours.callback(os.close, status_read)
        theirs.callback(os.close, status_write)
        launch = Launch(
            name=name,
            parent_pid=os.getpid(),
            status_fd=status_write,
            log_level=log.level,
            log_format=log.format,
            settings=msgspec.Raw(msgspec.msgpack.encode(settings)),
            board=board,
        )
        watched = () if board is None else (board.fd,)
        launch_fd = os.memfd_create("afferent-launch")
        theirs.callback(os.close, launch_fd)
        os.write(launch_fd, msgspec.msgpack.encode(launch))
        os.lseek(launch_fd, 0, os.SEEK_SET)
        popen = subprocess.Popen(
            [sys.executable, "-m", module, str(launch_fd)],
            pass_fds=(launch_fd, status_write, *watched, *fds),
            env={**_inherited(), **(env or {})},
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C reaches the supervisor alone, which then stops in order
        )
        os.set_blocking(status_read, False)
        ours.pop_all()
    return Child(name=name, popen=popen, status_fd=status_read)


def _inherited() -> dict[str, str]:
    """The environment without our settings, which come with the launch to those who need them.

    A key of the API is not for a process that decodes what clients send.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("AFFERENT_")}


class ChildProcess:
    """A child's own side: its settings, its reports to the supervisor, and its signs of life.

    Attributes:
        board: Where all processes of the server beat; ``None`` where nobody watches.
    """

    def __init__(self, launch: Launch) -> None:
        self.name = launch.name
        self.board = None if launch.board is None else Board(launch.board)
        self._status_fd = launch.status_fd
        self._settings = bytes(launch.settings)

    @classmethod
    def start(cls) -> Self:
        """Read the launch record named by ``sys.argv[1]`` and join the parent's fate.

        No garbage is collected from now until the child reports that it is ready: most of what is
        made meanwhile stays, and to look through it again and again is a fifth of an engine
        worker's start.
        """
        gc.disable()
        fd = int(sys.argv[1])
        with open(fd, "rb") as file:
            launch = msgspec.msgpack.decode(file.read(), type=Launch)
        sys.excepthook = _log_shortage
        die_with_parent(launch.parent_pid)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        logs.configure(launch.name, level=launch.log_level, format=launch.log_format)
        os.set_inheritable(launch.status_fd, False)
        if launch.board is not None:
            os.set_inheritable(launch.board.fd, False)
        return cls(launch)

    def settings(self, cls: type[Settings]) -> Settings:
        return msgspec.msgpack.decode(self._settings, type=cls)

    def report(self, text: str, *, ready: bool = False) -> None:
        """Tell the supervisor what is going on; it shows it to the operator.

        Args:
            ready: The child can be used. What there is by now is never looked through for garbage.
        """
        if ready:
            gc.freeze()
            gc.enable()
        status = Status(ready=ready, text=text)
        os.write(self._status_fd, msgspec.json.encode(status) + b"\n")

    def refuse(self, why: str) -> NoReturn:
        """End, and have the operator read ``why``: another start would not help."""
        self.report(why)
        raise SystemExit(REFUSED)

    def beat(self, name: str = "") -> None:
        """Show that this process goes on. Who has once done so must go on doing it, once a
        second: who is silent for ``--frozen-timeout-s`` is killed, and started again.

        Args:
            name: Of one that this process watches, instead of its own.
        """
        if self.board is not None:
            self.board.beat(name or self.name)

    async def keep_beating(self) -> None:
        """Beat from the event loop until cancelled: a loop that does not turn is silent."""
        while self.board is not None:
            self.beat()
            await asyncio.sleep(PERIOD_S)

    def beat_in_thread(self) -> None:
        """Beat for the rest of this process's life, however long its main thread computes.

        For who rightly works for longer than the silence that is allowed, within a time that is
        limited elsewhere. A process that was stopped is silent all the same: its threads are, too.
        """

        def beat() -> None:
            while True:
                self.beat()
                time.sleep(PERIOD_S)

        if self.board is not None:
            threading.Thread(target=beat, name="beat", daemon=True).start()


def _log_shortage(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Say in a line that the system has no more to give; the traceback shows no fault then."""
    if why := shortage.explain(error):
        log.error("%s", why)
    else:
        sys.__excepthook__(kind, error, trace)


async def run_until_terminated(
    serving: Coroutine[Any, Any, None], *background: Coroutine[Any, Any, None]
) -> None:
    """Run all of them until SIGTERM, or until ``serving`` fails."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in (serving, *background)]
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, tasks[0].cancel)
    try:
        await tasks[0]
    except asyncio.CancelledError:
        log.debug("stopped")
    finally:
        for task in tasks[1:]:
            task.cancel()


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise ConfigError("the kernel refused PR_SET_PDEATHSIG")
    if os.getppid() != parent_pid:  # it died before the request was in force
        os._exit(1)
