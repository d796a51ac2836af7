"""The memory of one side of `benchmarks.gate`, measured from outside during a run."""

from __future__ import annotations

import contextlib
import re
import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_PERIOD_S = 0.05
_PAGE_NBYTES = resource.getpagesize()
_PSS = re.compile(rb"^(Pss|Pss_Shmem): +(\d+) kB", re.MULTILINE)
_PRIVATE = re.compile(rb"^Private_(?:Clean|Dirty): +(\d+) kB", re.MULTILINE)


def private_nbytes(roots: Sequence[int]) -> int:
    """Return the bytes that only one process maps, of these processes and all below them.

    The arena does not count, because several processes map it. The kernel needs tens of
    milliseconds for this, most of them for the arena, so use it when nothing runs.
    """
    return sum(map(_private_nbytes, trees(roots)))


def anonymous_nbytes(roots: Sequence[int]) -> int:
    """Return the heaps and stacks of these processes and all below them, in microseconds.

    It grows as `private_nbytes` does: pages that are shared with the parent process cancel out in a
    difference.
    """
    return sum(map(_anonymous_nbytes, trees(roots)))


def pss_nbytes(pid: int) -> tuple[float, float]:
    """Return the bytes of a process: those of shared memory last, and of all other memory first.

    A page that several processes map counts in parts, so that the sums of all processes count it
    once.
    """
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
    except OSError:  # it has just ended
        return 0.0, 0.0
    found = {name: int(kb) * 1024.0 for name, kb in _PSS.findall(rollup)}
    shmem = found.get(b"Pss_Shmem", 0.0)
    return found.get(b"Pss", 0.0) - shmem, shmem


def _private_nbytes(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
    except OSError:  # it has just ended
        return 0
    return 1024 * sum(map(int, _PRIVATE.findall(rollup)))


def _anonymous_nbytes(pid: int) -> int:
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE_NBYTES


def trees(roots: Sequence[int]) -> list[int]:
    """Return these processes and all processes that their threads have started."""
    found: list[int] = []
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has just ended
                waiting += map(int, task.read_text().split())
    return found


class Sampler:
    """A thread that reads a value repeatedly until the block ends; ``peak`` is the maximum.

    An error of a read is raised at the end of the block.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._error: Exception | None = None
        self.peak = 0
        self.num_samples = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.peak = max(self.peak, self._read())
                self.num_samples += 1
                self._stop.wait(_PERIOD_S)
        except Exception as error:
            self._error = error
