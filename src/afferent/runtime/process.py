"""Start of processes: fresh interpreters, inherited descriptors, settings as msgpack.

A child is started as ``python -m MODULE FD``, where ``FD`` contains a `Launch`. It dies with its
parent (PDEATHSIG), leaves Ctrl-C to its parent, and reports on a pipe when it is ready. From then
on it writes heartbeats (`afferent.runtime.heartbeat`).
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
from collections.abc import Callable, Coroutine, Sequence
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
"""Exit status of a child that ends because its partner processes are gone; it is not at fault."""

REFUSED = os.EX_CONFIG
"""Exit status of a child that has reported that it can't do its task; a restart would not help."""

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Environment of a process that multiplies no matrices with numpy.

numpy would start a thread for each core, and each would spin for a tenth of a second.
"""

Settings = TypeVar("Settings", bound=Struct)


class Launch(Struct, kw_only=True, forbid_unknown_fields=True):
    """Launch record of every child; ``settings`` is for its own module."""

    name: str
    parent_pid: int
    status_fd: int
    log_level: str
    log_format: logs.LogFormat
    settings: msgspec.Raw
    board: BoardPlace | None = None
    """``None``: no process watches it."""


class Status(Struct, kw_only=True, forbid_unknown_fields=True):
    """Report of a child on its status pipe: its activity, and whether it is ready."""

    ready: bool
    text: str


@dataclass(slots=True)
class Child:
    """Running child; ``status_fd`` yields `Status` lines until the child is gone."""

    name: str
    popen: subprocess.Popen[bytes]
    status_fd: int

    @property
    def pid(self) -> int:
        return self.popen.pid

    def close(self) -> None:
        os.close(self.status_fd)

    def discard(self) -> None:
        """Kill it, and release all its resources."""
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
        board: Heartbeat table for ``name`` and the processes that it watches; ``None``: not
            watched.

    Raises:
        OSError: Descriptors or memory are insufficient; none is left open.
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
            process_group=0,  # Ctrl-C reaches only the supervisor, which then stops in order
        )
        os.set_blocking(status_read, False)
        ours.pop_all()
    return Child(name=name, popen=popen, status_fd=status_read)


def _inherited() -> dict[str, str]:
    """Return the environment without our settings, which children get in their launch record.

    API keys must not reach a process that decodes media of clients.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("AFFERENT_")}


class ChildProcess:
    """Child's own side: its settings, its reports to the supervisor, and its heartbeats.

    Attributes:
        board: Heartbeat table of the server; ``None`` if no process watches.
    """

    def __init__(self, launch: Launch) -> None:
        self.name = launch.name
        self.board = None if launch.board is None else Board(launch.board)
        self._status_fd = launch.status_fd
        self._settings = bytes(launch.settings)

    @classmethod
    def start(cls) -> Self:
        """Read the launch record named by ``sys.argv[1]``, and tie this process to its parent.

        The garbage collector is off until the child reports that it is ready: most objects of a
        start stay, and repeated collections are a fifth of an engine worker's start.
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
        """Report the activity to the supervisor, which shows it to the operator.

        Args:
            ready: The child is ready. The garbage collector ignores all current objects from now
                on.
        """
        if ready:
            gc.freeze()
            gc.enable()
        status = Status(ready=ready, text=text)
        os.write(self._status_fd, msgspec.json.encode(status) + b"\n")

    def leave(self) -> None:
        """Close the way to the supervisor, in a fork of this process: it is no child of it."""
        os.close(self._status_fd)
        if self.board is not None:
            self.board.close()

    def refuse(self, why: str) -> NoReturn:
        """Report ``why`` and end: a restart would not help."""
        self.report(why)
        raise SystemExit(REFUSED)

    def beat(self, name: str = "") -> None:
        """Write a heartbeat of this process.

        After the first one, it has to continue once a second: a process that is silent for
        ``--frozen-timeout-s`` is killed and restarted.

        Args:
            name: Name of a watched process, instead of its own.
        """
        if self.board is not None:
            self.board.beat(name or self.name)

    async def keep_beating(self, before: Callable[[], None] = lambda: None) -> None:
        """Write heartbeats from the event loop until cancelled: a blocked loop is silent.

        Args:
            before: Called before each heartbeat.
        """
        while self.board is not None:
            before()
            self.beat()
            await asyncio.sleep(PERIOD_S)

    def beat_in_thread(self) -> None:
        """Write heartbeats from a thread until the process ends, even while its main thread works.

        For work that may exceed the liveness timeout, with a limit of its own elsewhere. A stopped
        process is still silent, because its threads stop too.
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
    """Log a shortage of the system in one line; its traceback shows no defect."""
    if why := shortage.explain(error):
        log.error("%s", why)
    else:
        sys.__excepthook__(kind, error, trace)


async def run_until_terminated(
    serving: Coroutine[Any, Any, None], *background: Coroutine[Any, Any, None]
) -> None:
    """Run all coroutines until SIGTERM, or until ``serving`` fails."""
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
    if os.getppid() != parent_pid:  # the parent died before prctl took effect
        os._exit(1)
