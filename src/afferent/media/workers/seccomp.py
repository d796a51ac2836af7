"""System calls that a confined process may make, as a program for the kernel's filter.

All others are refused: with EPERM, or with ENOSYS for the calls from number 424 on. Those came with
newer kernels (5.1 and later, one number on all machines), and libraries use older calls when they
see ENOSYS. A refused call does not end the process: libraries probe for available calls, and a
decoder reports a refused call as an ordinary error.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable
from typing import Final

from afferent.errors import ConfigError

_PR_SET_NO_NEW_PRIVS: Final = 38
_SET_MODE_FILTER, _ALL_THREADS = 1, 1  # of seccomp(2)
_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}

# Opcodes of the kernel's packet filter, which checks each system call.
_LOAD, _RETURN = 0x20, 0x06
_JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_ANY_BIT = 0x15, 0x35, 0x45
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in the kernel's description of a call

_MACHINES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Supported machines, and their numbers in the kernel."""
FIRST_NEW: Final = 424
"""From this number on, a refused call looks as if this kernel did not have it."""

_Numbers = tuple[int | None, int | None]
"""Numbers of a call on x86-64 and on aarch64; ``None`` if it does not exist."""

ALLOWED: Final[dict[str, _Numbers]] = {
    # memory
    "munmap": (11, 215),
    "mremap": (25, 216),
    "brk": (12, 214),
    # open files, and reading of others
    "read": (0, 63),
    "pread64": (17, 67),
    "readv": (19, 65),
    "write": (1, 64),
    "writev": (20, 66),
    "lseek": (8, 62),
    "close": (3, 57),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "stat": (4, None),
    "lstat": (6, None),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    # sockets that were connected before
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "shutdown": (48, 210),
    "getsockname": (51, 204),
    "getsockopt": (55, 209),
    # waiting
    "pause": (34, None),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "futex": (202, 98),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "sched_yield": (24, 124),
    "restart_syscall": (219, 128),
    # time
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    # its own signals and threads
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # facts
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "getcpu": (309, 168),
    "sched_getaffinity": (204, 123),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getrandom": (318, 278),
}
"""Calls that are allowed with any arguments.

They affect only the process itself and what it has open, and read files.
"""
CHECKED: Final[dict[str, _Numbers]] = {
    "open": (2, None),
    "openat": (257, 56),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "clone": (56, 220),
    "kill": (62, 129),
    "tgkill": (234, 131),
}
"""Calls that are allowed or refused by their arguments."""

_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_PROT_WRITE, _PROT_EXEC = 2, 4
_MAP_SHARED, _MAP_PRIVATE, _MAP_ANONYMOUS = 1, 2, 0x20
_FIRST_HARDWARE_ADVICE: Final = 100
"""From here on madvise(2) marks memory of the machine as broken."""
_FCNTL: Final = (0, 1, 2, 3, 4, 1030)
"""Copies and flags of descriptors: no seals, no locks, no signals to the owner of a file."""
_IOCTL: Final = (0x5401, 0x802C542A, 0x5450, 0x5451, 0x5421, 0x541B)
"""TCGETS, TCGETS2, FIONCLEX, FIOCLEX, FIONBIO, FIONREAD."""
_PRCTL: Final = (15, 16)
"""PR_SET_NAME, PR_GET_NAME."""
_THREAD: Final = 0x003D0F00
"""Flags of glibc's threads. All share memory, files and signal handlers with their process.

libde265, which decodes HEIC, always starts one, and ends the process if it can't.
"""
_RLIMIT_CPU: Final = 0

_Line = tuple[int, int, int, int]
"""An operation, the lines to skip if its test succeeds and if it fails, and a value."""


def confine(*, runs_foreign_code: bool) -> None:
    """Refuse all other calls of this process's threads from now on.

    Args:
        runs_foreign_code: Whether it runs unknown code, which may load libraries.

    Raises:
        ConfigError: The kernel refuses, or the machine's calls are unknown.
    """
    lines = program(platform.machine(), pid=os.getpid(), runs_foreign_code=runs_foreign_code)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if not failed:  # existing threads are confined, too
        number = _SECCOMP[platform.machine()]
        failed = libc.syscall(number, _SET_MODE_FILTER, _ALL_THREADS, head)
    if failed:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(f"the kernel refused to confine a preprocess worker: {reason}")


def program(machine: str, *, pid: int, runs_foreign_code: bool) -> list[_Line]:
    """Return the filter.

    Args:
        machine: As named by ``uname -m``.
        pid: Id of the process, which may signal itself.
        runs_foreign_code: As for `confine`.

    Raises:
        ConfigError: The calls of such a machine are unknown.
    """
    if machine not in _MACHINES:
        raise ConfigError(f"preprocess workers can't be confined on a {machine} machine")
    column = list(_MACHINES).index(machine)
    body: list[_Line] = []
    for name, lines in _checks(pid, runs_foreign_code=runs_foreign_code).items():
        if (number := CHECKED[name][column]) is not None:
            body += [(_JUMP_IF_EQUAL, 0, len(lines), number), *lines]
    for numbers in ALLOWED.values():
        if (number := numbers[column]) is not None:
            body += [(_JUMP_IF_EQUAL, 0, 1, number), _ALLOWED]
    return [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 1, 0, _MACHINES[machine]),
        # Calls of another interface, such as that of 32 bits, have other numbers.
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        *body,
        (_JUMP_IF_AT_LEAST, 0, 1, FIRST_NEW),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        _REFUSED,
    ]


_ALLOWED: Final[_Line] = (_RETURN, 0, 0, _ALLOW)
_REFUSED: Final[_Line] = (_RETURN, 0, 0, _ERROR | errno.EPERM)


def _checks(pid: int, *, runs_foreign_code: bool) -> dict[str, list[_Line]]:
    """Return the lines that decide about each call of `CHECKED`, and always return."""
    return {
        "open": _without_bits(1, _WRITING),
        "openat": _without_bits(2, _WRITING),
        "mmap": _LIBRARIES if runs_foreign_code else _without_bits(2, _PROT_EXEC),
        "mprotect": _without_bits(2, _PROT_EXEC),
        "madvise": [
            _argument(2),
            (_JUMP_IF_AT_LEAST, 1, 0, _FIRST_HARDWARE_ADVICE),
            _ALLOWED,
            _REFUSED,
        ],
        "fcntl": _one_of(1, _FCNTL),
        "ioctl": _one_of(1, _IOCTL),
        "prctl": _one_of(0, _PRCTL),
        # Limits of this process, whose number is 0 there; only that of its time can be set.
        "prlimit64": [
            _argument(0),
            (_JUMP_IF_EQUAL, 0, 7, 0),
            _argument(1),
            (_JUMP_IF_EQUAL, 4, 0, _RLIMIT_CPU),
            _argument(2),
            (_JUMP_IF_EQUAL, 0, 3, 0),
            _argument(2, is_upper=True),
            (_JUMP_IF_EQUAL, 0, 1, 0),
            _ALLOWED,
            _REFUSED,
        ],
        "clone": _one_of(0, (_THREAD,)),
        "kill": _one_of(0, (pid,)),
        "tgkill": _one_of(0, (pid,)),
    }


def _argument(index: int, *, is_upper: bool = False) -> _Line:
    """Load half of an argument: the kernel uses only the lower half for a C int."""
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index + 4 * is_upper)


def _without_bits(index: int, bits: int) -> list[_Line]:
    return [_argument(index), (_JUMP_IF_ANY_BIT, 1, 0, bits), _ALLOWED, _REFUSED]


_LIBRARIES: Final[list[_Line]] = [
    _argument(2),
    (_JUMP_IF_ANY_BIT, 0, 4, _PROT_EXEC),
    (_JUMP_IF_ANY_BIT, 4, 0, _PROT_WRITE),
    _argument(3),
    (_JUMP_IF_ANY_BIT, 2, 0, _MAP_SHARED | _MAP_ANONYMOUS),
    (_JUMP_IF_ANY_BIT, 0, 1, _MAP_PRIVATE),
    _ALLOWED,
    _REFUSED,
]
"""Memory may be executable only as a private, read-only map of a file."""


def _one_of(index: int, values: Iterable[int]) -> list[_Line]:
    values = tuple(values)
    tests = [(_JUMP_IF_EQUAL, len(values) - place, 0, each) for place, each in enumerate(values)]
    return [_argument(index), *tests, _REFUSED, _ALLOWED]
