"""A program for tests: in the sandbox of workers, it attempts allowed and forbidden operations.

python -m tests.media.confined calls        each system call, in a process of its own
python -m tests.media.confined corpus       decode the corpus, and make features of it
python -m tests.media.confined FUNCTION     one of the functions below
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import functools
import json
import mmap
import os
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from afferent.media.workers import sandbox, seccomp

LAST_CALL = 480
MiB = 1 << 20
NUMBERS = {name: pair[0] for name, pair in {**seccomp.ALLOWED, **seccomp.CHECKED}.items()}
_libc = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: int) -> str:
    """Return the name of a system call's error; empty if it succeeds."""
    ctypes.set_errno(0)
    given = [ctypes.c_long(each) for each in (*arguments, *(-1,) * (6 - len(arguments)))]
    failed = _libc.syscall(ctypes.c_long(number), *given) == -1
    return errno.errorcode.get(ctypes.get_errno(), "?") if failed else ""


def in_child(
    attempt: Callable[[], str],
    *,
    is_foreign: bool = False,
    memory_nbytes: int = 64 * MiB,
    before: Callable[[], object] = lambda: None,
) -> str:
    """Return the result of ``attempt`` in a confined fork, or how the fork ended.

    Args:
        before: Is called in the fork before it is confined.
    """
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            before()
            sandbox.enter(memory_nbytes=memory_nbytes, runs_foreign_code=is_foreign)
            os.write(write, b"+" + attempt().encode())
        except BaseException as error:
            os.write(write, f"+{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        said = answer.read()
    _, status = os.waitpid(pid, 0)
    return said[1:].decode() if said else f"ended by {os.waitstatus_to_exitcode(status)}"


def calls() -> dict[str, str]:
    """Attempt each system call with arguments of -1, with which an allowed call does nothing."""

    def attempt(number: int) -> str:
        signal.setitimer(signal.ITIMER_REAL, 0.5)  # pause(2) never returns by itself
        return call(number)

    numbers = range(LAST_CALL)
    return {str(number): in_child(functools.partial(attempt, number)) for number in numbers}


def corpus() -> dict[str, str]:
    """Decode the corpus in a confined process; return the names of differing features."""
    from afferent.media.workers.worker import load_lazy_modules
    from tests.media import golden_features as golden

    load_lazy_modules()
    saved = golden.recorded()
    assert saved is not None
    families = golden.described_families()
    for _, family in families:
        family.load()

    def made() -> str:
        features = golden.decoded_features()
        for title, family in families:
            features |= golden.features_of(title, family)
        found = golden.compare(features, *saved)
        return json.dumps({"changed": found.changed, "num": len(features)})

    return {"features": in_child(made, memory_nbytes=1024 * MiB)}


def threads() -> dict[str, str]:
    def start() -> str:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        return ""

    return {"known": in_child(start), "foreign": in_child(start, is_foreign=True)}


def bomb() -> dict[str, str]:
    """Start threads until an error; return their number."""

    def start() -> str:
        stop = _thread.allocate_lock()
        stop.acquire()
        running: list[int] = []

        def run() -> None:
            running.append(1)
            stop.acquire()

        threading.stack_size(64 << 10)
        try:
            # `Thread.start` would wait forever for a thread that finds no memory to begin with.
            for _ in range(20_000):
                _thread.start_new_thread(run, ())
        except RuntimeError:
            pass
        return str(len(running))

    return {"threads": in_child(start, is_foreign=True)}


def arguments() -> dict[str, str]:
    """Attempt calls that are allowed (+) or forbidden (-) depending on their arguments."""
    n, own = NUMBERS, os.getpid()
    thread_flags = seccomp._THREAD
    new_user = 0x10000000
    limit = ctypes.create_string_buffer(16)
    at = ctypes.addressof(limit)
    attempts: dict[str, Callable[[], str]] = {
        "+kill itself": lambda: call(n["kill"], os.getpid(), 0),
        "+tgkill itself": lambda: call(n["tgkill"], os.getpid(), threading.get_native_id(), 0),
        "-kill the parent": lambda: call(n["kill"], own, 0),
        "-kill all": lambda: call(n["kill"], -1, 0),
        "-kill its group": lambda: call(n["kill"], 0, 0),
        "-tgkill the parent": lambda: call(n["tgkill"], own, own, 0),
        "-fork": lambda: call(n["clone"], signal.SIGCHLD, 0, 0, 0, 0),
        "-clone into a user's namespace": lambda: call(n["clone"], new_user, 0, 0, 0, 0),
        "-a thread in a namespace": lambda: call(n["clone"], thread_flags | new_user, 0, 0, 0, 0),
        "+map": lambda: call(n["mmap"], 0, 4096, 3, 0x22, -1, 0),
        "-map executable": lambda: call(n["mmap"], 0, 4096, 7, 0x22, -1, 0),
        "-make executable": lambda: call(n["mprotect"], 0, 4096, 5),
        "-map a file executable": lambda: call(n["mmap"], 0, 4096, 5, 2, 3, 0),
        "-poison memory": lambda: call(n["madvise"], 0, 0, 100),
        "+advise": lambda: call(n["madvise"], 0, 0, mmap.MADV_DONTNEED),
        "+own limits": lambda: call(n["prlimit64"], 0, resource.RLIMIT_NOFILE, 0, at),
        "+own time": lambda: call(n["prlimit64"], 0, resource.RLIMIT_CPU, 0, at),
        "-raise a limit": lambda: call(n["prlimit64"], 0, resource.RLIMIT_NOFILE, at, 0),
        "-another's limits": lambda: call(n["prlimit64"], own, resource.RLIMIT_CPU, at, 0),
        "+duplicate": lambda: call(n["fcntl"], 1, 0, 0) and "",
        "-seal": lambda: call(n["fcntl"], 1, 1033, 0),
        "-signals for a file": lambda: call(n["fcntl"], 1, 8, own),
        "-push into a terminal": lambda: call(n["ioctl"], 0, 0x5412, at),
        "+name itself": lambda: call(n["prctl"], 15, at, 0, 0, 0),
        "-outlive the zygote": lambda: call(n["prctl"], 1, 0, 0, 0, 0),
    }
    found = {name: in_child(attempt) for name, attempt in attempts.items()}
    foreign = {
        "+foreign: load a library": lambda: call(n["mmap"], 0, 4096, 5, 2, _a_file(), 0),
        "-foreign: a shared one": lambda: call(n["mmap"], 0, 4096, 5, 1, _a_file(), 0),
        "-foreign: executable": lambda: call(n["mmap"], 0, 4096, 5, 0x22, -1, 0),
        "-foreign: writable": lambda: call(n["mmap"], 0, 4096, 7, 2, _a_file(), 0),
        "-foreign: fork": lambda: call(n["clone"], signal.SIGCHLD, 0, 0, 0, 0),
    }
    return found | {name: in_child(each, is_foreign=True) for name, each in foreign.items()}


def _a_file() -> int:
    return os.open(sys.executable, os.O_RDONLY)


def log() -> dict[str, str]:
    """Write to an open log file; it can't grow beyond its limit."""
    with tempfile.TemporaryFile() as nameless, tempfile.NamedTemporaryFile() as file:
        nameless.truncate(8 << 30)  # a file without a name, like the arena
        file.write(b"x")
        file.flush()

        def grow() -> str:
            file.seek(sandbox._LOG_NBYTES - 1)
            file.write(b"y")
            file.flush()
            file.seek(0)
            os.lseek(file.fileno(), sandbox._LOG_NBYTES + 1, os.SEEK_SET)
            return call(NUMBERS["write"], file.fileno(), ctypes.addressof(ctypes.c_char(b"z")), 1)

        return {"log": in_child(grow)}


def capabilities() -> dict[str, str]:
    """Return the capabilities of a confined process."""
    return {"held": in_child(_held)}


def _held(folder: Path = Path("/proc/thread-self")) -> str:
    lines = (folder / "status").read_text().splitlines()
    return " ".join(line.split()[1] for line in lines if line.startswith(("CapEff", "CapPrm")))


def capabilities_of_threads() -> dict[str, str]:
    """Return the capabilities of all threads, with a thread started before the sandbox or after."""

    def start() -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def drop_and_start() -> None:
        sandbox.drop_capabilities()
        start()

    def held() -> str:
        return ", ".join(map(_held, Path("/proc/self/task").iterdir()))

    return {
        "started after": in_child(held, before=drop_and_start),
        "started before": in_child(held, before=start),
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
