"""What a process may do that reads hostile bytes, such as a decoder: as little as possible.

A preprocess worker can't open sockets, start programs, stop other processes, or write files; its
memory, its descriptors and the processor time of each item are limited. It keeps what it had
before: the arena's map and its connection to the store. It can still read what its user may read.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import struct
from pathlib import Path

from afferent.errors import ConfigError

_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _ALL_THREADS = 1, 1  # of seccomp(2)
_SECCOMP = {"x86_64": 317, "aarch64": 277}

# Opcodes of the kernel's packet filter, which judges each system call.
_LOAD, _RETURN = 0x20, 0x06
_JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_ANY_BIT = 0x15, 0x35, 0x45
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # with EPERM
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in the kernel's description of a call

_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The machines whose calls we know, and their numbers in the kernel."""
_REFUSED = {
    "socket": (41, 198),
    "connect": (42, 203),
    "accept": (43, 202),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept4": (288, 242),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "openat2": (437, 437),
    "creat": (85, None),
    "truncate": (76, 45),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "pidfd_send_signal": (424, 424),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchownat": (260, 54),
    "mknod": (133, None),
    "mknodat": (259, 33),
}
"""Calls that nobody needs who decodes, with their numbers on x86-64 and on aarch64."""
_OPENING = {"open": (2, None, 1), "openat": (257, 56, 2)}
"""Refused for writing: the last number says which argument holds the flags."""
_PRLIMIT = (302, 261)
"""Limits of this process, whose number is 0 there, and of no other."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_FIRST_FOREIGN = 0x40000000
"""From here on x86-64 has the calls of another interface, under other numbers."""

_SPARE_FDS = 32


def enter(*, memory_nbytes: int) -> None:
    """Give up what this process will not need; there is no way back.

    Args:
        memory_nbytes: How much more private memory it may have than now. Shared memory, such as the
            arena, does not count.

    Raises:
        ConfigError: The kernel refuses, or is not one that we know the calls of.
    """
    _limit(resource.RLIMIT_DATA, data_nbytes() + memory_nbytes)
    _limit(resource.RLIMIT_NOFILE, _highest_fd() + _SPARE_FDS)
    _limit(resource.RLIMIT_CORE, 0)
    _refuse_calls()


def check_machine() -> None:
    """Raises: ConfigError: Workers can't be confined on this machine."""
    _filter(platform.machine())


def allow_cpu(seconds: float) -> None:
    """From now on this process may use so much processor time; then the kernel ends it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    whole = int(used.ru_utime + used.ru_stime + seconds) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (whole, hard))


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    least = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (least, least))


def data_nbytes() -> int:
    """This process's private memory, as its limit counts it."""
    match = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise ConfigError("/proc/self/status does not say how much memory this process has")
    return int(match[1]) * 1024


def _highest_fd() -> int:
    return max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())


def _refuse_calls() -> None:
    program = _filter(platform.machine())
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    head = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if not failed:  # the threads that there are already are confined, too
        number = _SECCOMP[platform.machine()]
        failed = libc.syscall(number, _SET_MODE_FILTER, _ALL_THREADS, head)
    if failed:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(f"the kernel refused to confine a preprocess worker: {reason}")


_Line = tuple[int, int, int, int]
"""An operation, how many lines to skip if its test holds and if it does not, and a value."""


def _filter(machine: str) -> list[_Line]:
    """The program that judges each call of this process from now on."""
    if machine not in _MACHINES:
        raise ConfigError(f"preprocess workers can't be confined on a {machine} machine")
    column = list(_MACHINES).index(machine)
    body: list[_Line] = [(_LOAD, 0, 0, _NUMBER_AT)]
    for numbers in _OPENING.values():
        number = numbers[:2][column]
        if number is not None:
            body += [
                (_JUMP_IF_EQUAL, 0, 4, number),
                (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * numbers[2]),
                (_JUMP_IF_ANY_BIT, 0, 1, _WRITING),
                (_RETURN, 0, 0, _REFUSE),
                (_RETURN, 0, 0, _ALLOW),
            ]
    body += [
        (_JUMP_IF_EQUAL, 0, 4, _PRLIMIT[column]),
        (_LOAD, 0, 0, _ARGUMENTS_AT),
        (_JUMP_IF_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    checks = [(_JUMP_IF_AT_LEAST, _FIRST_FOREIGN)]
    refused = [numbers[column] for numbers in _REFUSED.values()]
    checks += [(_JUMP_IF_EQUAL, number) for number in refused if number is not None]
    for index, (jump, value) in enumerate(checks):
        body.append((jump, len(checks) - index, 0, value))
    body += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    return [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 1, 0, _MACHINES[machine]),
        (_RETURN, 0, 0, _REFUSE),
        *body,
    ]
