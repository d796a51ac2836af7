"""Memory for an arena, a chunk at a time, as it is needed.

An arena has its whole size from the start, in every process that maps it, and memory where
something was stored. A chunk that the machine can't give is refused here, before anybody is told
of it: whoever writes past that would be killed.
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
"""Some 10 ms of the kernel's time, most of it to clear pages."""

_TRY_AGAIN_S = 0.9
_LEFT_PART, _MOST_LEFT_NBYTES = 0.05, 1 << 30
"""Of the machine's memory, so much is left to others."""

log = logging.getLogger(__name__)


class Backing:
    """Gives the memory behind a descriptor its pages.

    Args:
        fd: Of a file in memory, which stays open. It has its size; pages may be missing.
        ahead: Have a thread get the chunk after what was asked for last, so that nobody waits
            for it.
    """

    def __init__(self, fd: int, *, ahead: bool) -> None:
        self._fd, self._ahead = fd, ahead
        self._nbytes, self._chunk_nbytes = os.fstat(fd).st_size, CHUNK_NBYTES
        num_chunks = -(-self._nbytes // self._chunk_nbytes)
        self._backed = set(range(num_chunks)) if is_whole(fd) else set[int]()
        self._refused_until_s = 0.0
        self._seldom = logs.Seldom(log)

    def back(self, start: int, end: int) -> int:
        """Have memory for ``[start, end)``: as much as there is, in whole chunks.

        Returns:
            Where what has memory ends: ``end`` or more, or less where the machine has no more.
        """
        at = start // self._chunk_nbytes
        while at * self._chunk_nbytes < end and self._has(at):
            at += 1
        self.prepare([at * self._chunk_nbytes])
        return max(start, min(at * self._chunk_nbytes, self._nbytes))

    def prepare(self, offsets: Iterable[int]) -> None:
        """Have a thread get memory for the chunks with these bytes, if it is to."""
        chunks = [offset // self._chunk_nbytes for offset in offsets if offset < self._nbytes]
        wanted = [number for number in chunks if number not in self._backed]
        if self._ahead and wanted and not self._is_refused:
            thread = threading.Thread(
                target=lambda: [self._has(number) for number in wanted], name="arena", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # no more threads: nothing is ahead
                thread.start()

    @property
    def has_refused(self) -> bool:
        """Whether there was no memory for the chunk that was asked for last."""
        return self._refused_until_s > 0

    @property
    def _is_refused(self) -> bool:
        """Not everybody who wants memory looks whether there is some: one does, now and then."""
        return time.monotonic() < self._refused_until_s

    def _has(self, number: int) -> bool:
        """Whether a chunk has memory now. It may be asked for by two threads at once."""
        if number in self._backed:
            return True
        if self._is_refused:
            return False
        start = number * self._chunk_nbytes
        end = min(start + self._chunk_nbytes, self._nbytes)
        try:
            _allocate(self._fd, start, end)
        except OSError as error:
            if has_memory(self._fd, start, end):  # a daemon that has died got it
                return True
            self._refused_until_s = time.monotonic() + _TRY_AGAIN_S
            self._seldom.warning("the arena gets no more memory", reason=error.strerror)
            return False
        self._backed.add(number)
        self._refused_until_s = 0.0
        return True


def is_whole(fd: int) -> bool:
    """Whether all pages are there."""
    status = os.fstat(fd)
    return status.st_blocks * 512 >= status.st_size


def has_memory(fd: int, start: int, end: int) -> bool:
    """Whether all pages of ``[start, end)`` are there, and have been used since; it looks at each,
    which takes as long as to allocate them.
    """
    return os.lseek(fd, start, os.SEEK_HOLE) >= end


def _allocate(fd: int, start: int, end: int) -> None:
    """Past what there is, the kernel would not refuse: it kills processes until there is enough."""
    least_nbytes = min(memory.limit_nbytes() * _LEFT_PART, _MOST_LEFT_NBYTES)
    if memory.available_nbytes() - (end - start) < least_nbytes:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    os.posix_fallocate(fd, start, end - start)
