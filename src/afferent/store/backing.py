"""Memory of an arena, allocated in chunks on demand.

An arena has its full size from the start, in every process that maps it, but memory only where an
object was stored. If the machine has no memory for a chunk, it is refused here, before any process
gets it: a process that writes there would be killed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Iterable

from afferent.runtime import logs, memory

CHUNK_NBYTES = 32 << 20
"""Takes about 10 ms of the kernel's time, most of it to clear pages."""

_TRY_AGAIN_S = 0.9
_LEFT_PART, _MOST_LEFT_NBYTES = 0.05, 1 << 30
"""Part, and maximum bytes, of the machine's memory that are left to other processes."""

log = logging.getLogger(__name__)


class Backing:
    """Allocates the pages of a file in memory.

    Args:
        fd: Descriptor of the file, which stays open. It has its size; pages may be missing.
        ahead: Let a thread allocate the chunk after the last requested one, so that no call waits
            for it.

    Invariants:
        - Each chunk in ``_backed`` has all its pages.
    """

    def __init__(self, fd: int, *, ahead: bool) -> None:
        self._fd, self._ahead = fd, ahead
        self._nbytes, self._chunk_nbytes = os.fstat(fd).st_size, CHUNK_NBYTES
        num_chunks = -(-self._nbytes // self._chunk_nbytes)
        self._backed = set(range(num_chunks)) if is_whole(fd) else set[int]()
        self._refused_until_s = 0.0
        self._seldom = logs.Seldom(log)

    def back(self, start: int, end: int) -> int:
        """Allocate memory for ``[start, end)``: as much as there is, in whole chunks.

        Returns:
            The end of the memory: ``end`` or more, or less if the machine has no more.
        """
        at = start // self._chunk_nbytes
        while at * self._chunk_nbytes < end and self._has(at):
            at += 1
        self.prepare([at * self._chunk_nbytes])
        return max(start, min(at * self._chunk_nbytes, self._nbytes))

    def prepare(self, offsets: Iterable[int]) -> None:
        """Let a thread allocate the chunks of these offsets, if ``ahead`` is set."""
        chunks = [offset // self._chunk_nbytes for offset in offsets if offset < self._nbytes]
        wanted = [number for number in chunks if number not in self._backed]
        if self._ahead and wanted and not self._is_refused:
            thread = threading.Thread(
                target=lambda: [self._has(number) for number in wanted], name="arena", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # no more threads: no chunk is allocated ahead
                thread.start()

    @property
    def has_refused(self) -> bool:
        """Whether there was no memory for the last requested chunk."""
        return self._refused_until_s > 0

    @property
    def _is_refused(self) -> bool:
        """Whether to refuse without a check: only one call checks the memory now and then."""
        return time.monotonic() < self._refused_until_s

    def _has(self, number: int) -> bool:
        """Whether a chunk has memory now; two threads may call it at once."""
        if number in self._backed:
            return True
        if self._is_refused:
            return False
        start = number * self._chunk_nbytes
        end = min(start + self._chunk_nbytes, self._nbytes)
        try:
            _allocate(self._fd, start, end)
        except OSError as error:
            if has_memory(self._fd, start, end):  # allocated by a daemon that has died
                return True
            self._refused_until_s = time.monotonic() + _TRY_AGAIN_S
            self._seldom.warning("the arena gets no more memory", reason=error.strerror)
            return False
        self._backed.add(number)
        self._refused_until_s = 0.0
        return True


def is_whole(fd: int) -> bool:
    """Whether all pages exist."""
    status = os.fstat(fd)
    return status.st_blocks * 512 >= status.st_size


def has_memory(fd: int, start: int, end: int) -> bool:
    """Whether all pages of ``[start, end)`` exist and were used; as slow as allocating them."""
    return os.lseek(fd, start, os.SEEK_HOLE) >= end


def _allocate(fd: int, start: int, end: int) -> None:
    """Allocate pages, but keep a reserve: the kernel does not refuse, but kills processes."""
    least_nbytes = min(memory.limit_nbytes() * _LEFT_PART, _MOST_LEFT_NBYTES)
    if memory.available_nbytes() - (end - start) < least_nbytes:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    os.posix_fallocate(fd, start, end - start)
