"""Sandbox of a process that reads hostile bytes, such as a decoder.

A confined process makes only the system calls that `afferent.media.workers.seccomp` lists:

- It opens no sockets, and starts no programs or processes. It may start threads.
- It sends signals only to itself.
- It makes no memory executable.
- It writes only to files that it has open.

Its memory, its descriptors, the growth of its log and the processor time of each item are limited.
It has no capabilities, not even root's. It keeps the arena's map and its connection to the store.
It can still read what its user may read.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import re
import resource
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from afferent.errors import ConfigError
from afferent.media.workers import seccomp
from afferent.types import GiB

_SPARE_FDS: Final = 32
_SPARE_THREADS: Final = 4096
"""Many: the limit counts all threads of the user, and a decoder may end a process that hits it.

The stacks of this process's own threads count as its memory, which is limited.
"""
_LOG_NBYTES: Final = GiB
_CAPABILITY_VERSION: Final = 0x20080522


def enter(*, memory_nbytes: int, runs_foreign_code: bool = False) -> None:
    """Confine this process, for good.

    Args:
        memory_nbytes: Additional private memory that it may allocate. Shared memory, such as the
            arena, does not count.
        runs_foreign_code: Whether it runs unknown code, which may load libraries. All other code
            has loaded its libraries before.

    Raises:
        ConfigError: The kernel refuses, the machine's calls are unknown, or another thread was
            started before `drop_capabilities`.
    """
    _limit(resource.RLIMIT_DATA, data_nbytes() + memory_nbytes)
    _limit(resource.RLIMIT_NOFILE, max(_fds()) + _SPARE_FDS)
    _limit(resource.RLIMIT_FSIZE, _written_nbytes() + _LOG_NBYTES)
    _limit(resource.RLIMIT_NPROC, _num_tasks() + _SPARE_THREADS)
    _limit(resource.RLIMIT_CORE, 0)
    drop_capabilities()
    _check_threads()
    seccomp.confine(runs_foreign_code=runs_foreign_code)


def check_machine() -> None:
    """Check that workers can be confined on this machine.

    Raises:
        ConfigError: They can't.
    """
    seccomp.program(platform.machine(), pid=0, runs_foreign_code=False)


def allow_cpu(seconds: float) -> None:
    """Limit the processor time of this process from now on; beyond it, the kernel ends it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    whole = int(used.ru_utime + used.ru_stime + seconds) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (whole, hard))


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    least = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (least, least))


def data_nbytes() -> int:
    """Return this process's private memory, as its limit counts it."""
    return int(_status("VmData").removesuffix(" kB")) * 1024


_SELF: Final = Path("/proc/thread-self")


def _status(name: str, *, of: Path = _SELF) -> str:
    text = (of / "status").read_text()
    match = re.search(rf"^{name}:\s+(.*)$", text, re.MULTILINE)
    if match is None:
        raise ConfigError(f"{of}/status has no {name}")
    return match[1]


def _fds() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]


def _written_nbytes() -> int:
    """Return the size of the largest file that is open for writing, such as the log."""

    def sizes() -> Iterator[int]:
        for fd in _fds():
            try:
                found, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
            except OSError:  # the folder of the list itself
                continue
            # The arena has no name, and is written to through its map.
            if stat.S_ISREG(found.st_mode) and found.st_nlink and flags & os.O_ACCMODE:
                yield found.st_size

    return max(sizes(), default=0)


def _num_tasks() -> int:
    """Return all threads of the machine: no fewer than this user's, which the limit counts."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


def drop_capabilities() -> None:
    """Drop all capabilities; root keeps only the access to its own files.

    Each thread has capabilities of its own, and a new thread those of the thread that starts it: so
    call this before any thread is started.

    Raises:
        ConfigError: The kernel refuses.
    """
    if int(_status("CapPrm"), 16) == 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION, 0))
    none = ctypes.create_string_buffer(struct.pack("6I", *(0,) * 6))
    if libc.capset(head, none):
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(f"the kernel refused to confine a preprocess worker: {reason}")


def _check_threads() -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if int(_status("CapPrm", of=thread), 16):
                raise ConfigError("a thread of a process that is to be confined has capabilities")
