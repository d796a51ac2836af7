"""Stand-ins for `os`, `socket`, `time` and other modules, in a simulation.

Each stand-in has the functions that the product uses of the real module, and its constants. Any
other attribute raises an error, so that no real call happens by accident.
"""

from __future__ import annotations

import errno
import gc as real_gc
import mmap as real_mmap
import os as real_os
import secrets as real_secrets
import select as real_select
import signal as real_signal
import socket as real_socket
import threading as real_threading
import time as real_time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np

from afferent.runtime.proc_stat import ProcStat
from tests.simulator import threads
from tests.simulator.descriptors import (
    PAGE_NBYTES,
    Eventfd,
    Map,
    Memory,
    Pidfd,
    ReadOnly,
)
from tests.simulator.socket_calls import UID, Socket, calling, recv_fds, send_fds
from tests.simulator.sockets import End
from tests.simulator.threads import TIMED_OUT, Killed, Thread
from tests.simulator.watching import Watched


class StandIn:
    """Stand-in for a module."""

    def __init__(self, module: ModuleType, **functions: object) -> None:
        self._module = module
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        is_error = isinstance(found, type) and issubclass(found, BaseException)
        if name.isupper() or is_error:
            return found
        raise AttributeError(f"{self._module.__name__}.{name} is not simulated")


# Files and memory


def _fstat(fd: int) -> SimpleNamespace:
    found = calling().fds[fd]
    memory = found.memory if isinstance(found, ReadOnly) else found
    num_blocks = memory.num_pages * PAGE_NBYTES // 512
    return SimpleNamespace(
        st_size=len(memory.data), st_blocks=num_blocks, st_dev=1, st_ino=memory.inode
    )


def _memfd_create(name: str, flags: int = 0) -> int:
    process = calling()
    return process.machine.new_fd(process, Memory())


def _fallocate(fd: int, offset: int, nbytes: int) -> None:
    process = calling()
    if (failure := process.machine.fails("fallocate", process)) is not None:
        raise failure
    process.fds[fd].allocate(offset, offset + nbytes)


def _lseek(fd: int, at: int, how: int) -> int:
    memory: Memory = calling().fds[fd]
    if how == real_os.SEEK_HOLE:
        return memory.first_hole(at)
    if how != real_os.SEEK_DATA:
        raise OSError(errno.EINVAL, "not simulated")
    if (used := memory.first_used(at)) is None:
        raise OSError(errno.ENXIO, "no data behind this offset")
    return used


def _open(path: str, flags: int, mode: int = 0) -> int:
    process = calling()
    memory = process.fds[int(path.removeprefix("/proc/self/fd/"))]
    return process.machine.new_fd(process, ReadOnly(memory))


def _close(fd: int) -> None:
    process = threads.current_process()
    # Otherwise it is a late finalizer.
    if process is not None and process.is_alive and not process.is_doomed:
        process.machine.close_fd(fd)


def _pread(fd: int, nbytes: int, offset: int) -> bytes:
    return cast(bytes, calling().fds[fd].data[offset : offset + nbytes].tobytes())


def _pwrite(fd: int, data: bytes, offset: int) -> int:
    if len(data) >= PAGE_NBYTES:  # for less, there is always memory
        _fallocate(fd, offset, len(data))
    calling().fds[fd].data[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    return len(data)


def _mmap(fd: int, nbytes: int, *, flags: int = 0, prot: int = 0) -> Map:
    process = calling()
    if (failure := process.machine.fails("mmap", process)) is not None:
        raise failure
    found = process.fds[fd]
    memory = found.memory if isinstance(found, ReadOnly) else found
    mapped = memory.data.view(Map)
    if not prot & real_mmap.PROT_WRITE:
        mapped.flags.writeable = False
    elif isinstance(found, ReadOnly):
        raise PermissionError(13, "permission denied")
    return cast(Map, mapped)


# Processes


def _pidfd_open(pid: int) -> int:
    process = calling()
    found = process.machine.processes.get(pid)
    if found is None:
        raise ProcessLookupError(3, "no such process")
    return process.machine.new_fd(process, Pidfd(found))


def _pidfd_send_signal(fd: int, number: int) -> None:
    process = calling()
    target = process.fds[fd].of
    if not target.is_alive:
        raise ProcessLookupError(3, "no such process")
    process.machine.note(process.name, f"kills {target.name}")
    process.machine.kill(target)


def _exit(status: int) -> None:
    process = calling()
    process.machine.kill(process)
    raise Killed


class ProcessTable:
    """Stand-in for `ProcStat`."""

    @staticmethod
    def read(pid: int) -> ProcStat | None:
        found = calling().machine.processes.get(pid)
        if found is None:
            return None
        return ProcStat(
            is_stopped=found.is_paused, session=1, cpu_ticks=0, start_ticks=found.start_ticks
        )


# Eventfds


def _eventfd(count: int, flags: int = 0) -> int:
    process = calling()
    return process.machine.new_fd(process, Eventfd())


def _eventfd_write(fd: int, number: int) -> None:
    process = threads.current_process()
    bell = process.fds.get(fd) if process is not None else None
    if bell is not None:  # otherwise it is a late finalizer
        bell.ring(number)


def _eventfd_read(fd: int) -> int:
    bell = calling().fds[fd]
    if not bell.count:
        raise BlockingIOError(11, "would block")
    found, bell.count = bell.count, 0
    return cast(int, found)


# Time


def _sleep(seconds: float) -> None:
    me = threads.current()
    me.process.system_call()
    me.wait(seconds)


def _monotonic() -> float:
    return threads.current().process.monotonic_s


def _monotonic_ns() -> int:
    return int(threads.current().process.monotonic_s * 1e9)


def _randbits(number: int) -> int:
    return threads.current().process.machine.rng.getrandbits(number)


# Threads


class _Thread:
    """Stand-in for `threading.Thread`."""

    def __init__(
        self, *, target: Callable[[], object], name: str = "", daemon: bool = False
    ) -> None:
        self._target, self._name = target, name
        self._thread: Thread | None = None

    def start(self) -> None:
        self._thread = calling().start_thread(self._target, self._name)

    def join(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.has_ended


class _Poll:
    """Stand-in for `select.poll`."""

    def __init__(self) -> None:
        self._watched: list[tuple[int, Watched, bool]] = []

    def register(self, fd: int, mask: int) -> None:
        self._watched.append((fd, calling().fds[fd], mask == real_select.POLLRDHUP))

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        me = threads.current()
        while True:
            me.process.system_call()
            if found := self._look():
                return found
            turn = me.turn
            numbers = [
                (each, each.watch(lambda turn=turn: me.wake(turn)))  # type: ignore[misc]
                for _, each, _ in self._watched
            ]
            try:
                if me.wait(None if timeout is None else timeout / 1e3) is TIMED_OUT:
                    return []
            finally:
                for each, number in numbers:
                    each.unwatch(number)

    def _look(self) -> list[tuple[int, int]]:
        found = []
        for fd, each, is_hang_up in self._watched:
            if is_hang_up and isinstance(each, End):
                if each.has_ended or each.has_reset:
                    found.append((fd, real_select.POLLRDHUP))
            elif each.is_readable:
                found.append((fd, real_select.POLLIN))
        return found


STAND_INS: dict[str, StandIn] = {
    "os": StandIn(
        real_os,
        fstat=_fstat,
        memfd_create=_memfd_create,
        posix_fallocate=_fallocate,
        lseek=_lseek,
        open=_open,
        close=_close,
        pread=_pread,
        pwrite=_pwrite,
        pidfd_open=_pidfd_open,
        eventfd=_eventfd,
        eventfd_write=_eventfd_write,
        eventfd_read=_eventfd_read,
        getuid=lambda: UID,
        getpid=lambda: threads.current().process.pid,
        strerror=real_os.strerror,
        _exit=_exit,
    ),
    "socket": StandIn(real_socket, socket=Socket, send_fds=send_fds, recv_fds=recv_fds),
    "time": StandIn(real_time, monotonic=_monotonic, monotonic_ns=_monotonic_ns, sleep=_sleep),
    "select": StandIn(real_select, poll=_Poll),
    "signal": StandIn(real_signal, pidfd_send_signal=_pidfd_send_signal),
    "threading": StandIn(real_threading, Thread=_Thread, Lock=threads.Lock, Event=threads.Event),
    "gc": StandIn(real_gc, collect=real_gc.collect, set_threshold=lambda *_: None),
    "secrets": StandIn(real_secrets, randbits=_randbits),
    "mmap": StandIn(real_mmap, mmap=_mmap),
}
