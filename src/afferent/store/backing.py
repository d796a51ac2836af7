"""Memory of an arena, allocated in chunks on demand.

An arena has its full size from the start, in every process that maps it, but memory only where an
object was stored. If the machine has no memory for a chunk, it is refused here, before any process
gets it: a process that writes there would be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from afferent.runtime import logs, memory
from afferent.store import advice

CHUNK_NBYTES = 16 << 20
"""Takes about 7 ms, and the check of free memory half a millisecond more."""
AHEAD_NBYTES = 32 << 20
"""Memory that a thread allocates beyond the last requested byte."""

_ZEROS = memoryview(bytes(256 << 10))
"""Fits into a core's cache."""
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_HUGE_NBYTES = 2 << 20
_MOST_HUGE_S = 1.5e-3
"""Twice the processor time of the same memory in small pages, and 15 times that of a huge page that
is free."""
_PAUSE_NBYTES = 1 << 30
"""Memory that is taken in small pages after a huge page that was too expensive."""
_TRY_AGAIN_S = 0.9
_LEFT_PART, _MOST_LEFT_NBYTES = 0.05, 1 << 30
"""Part, and maximum bytes, of the machine's memory that are left to other processes."""

log = logging.getLogger(__name__)


class Backing:
    """Allocates the pages of a file in memory.

    Args:
        fd: Descriptor of the file, which stays open. It has its size; pages may be missing.
        ahead: Let a thread allocate the next `AHEAD_NBYTES` after the last requested byte, so that
            no call waits for them.

    Invariants:
        - Each chunk in ``_backed`` has all its pages.
        - One chunk is allocated at a time, under ``_allocating``.
    """

    def __init__(self, fd: int, *, ahead: bool) -> None:
        self._fd, self._ahead = fd, ahead
        self._nbytes, self._chunk_nbytes = os.fstat(fd).st_size, CHUNK_NBYTES
        num_chunks = -(-self._nbytes // self._chunk_nbytes)
        self._backed = set(range(num_chunks)) if is_whole(fd) else set[int]()
        self._allocating = threading.Lock()
        self._wanted = deque[int]()
        self._thread: threading.Thread | None = None
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
        """Let a thread allocate memory from these offsets on, if ``ahead`` is set."""
        if not self._ahead or self._is_refused:
            return
        for offset in offsets:
            end = min(offset + AHEAD_NBYTES, self._nbytes)
            chunks = range(offset // self._chunk_nbytes, -(-end // self._chunk_nbytes))
            self._wanted.extend(each for each in chunks if each not in self._backed)
        if self._wanted and not (self._thread is not None and self._thread.is_alive()):
            thread = threading.Thread(target=self._allocate_wanted, name="arena", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: nothing is allocated ahead
                thread.start()
                self._thread = thread

    def _allocate_wanted(self) -> None:
        """Allocate the wanted chunks; the next `prepare` repeats those that came too late."""
        while self._wanted:
            self._has(self._wanted.popleft())

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
        with self._allocating:
            return number in self._backed or self._get(number)

    def _get(self, number: int) -> bool:
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


def give_memory(fd: int, start: int, end: int) -> None:
    """Allocate all pages of ``[start, end)``, and clear them unless some of them were used.

    The kernel would clear each page when a process first touches it. Afterwards, a process maps it
    in a third of the time.

    Raises:
        OSError: There is not enough memory.
    """
    try:
        is_used = os.lseek(fd, start, os.SEEK_DATA) < end
    except OSError:  # no later page was used either
        is_used = False
    if is_used:
        os.posix_fallocate(fd, start, end - start)
        return
    start = _huge_pages.give(fd, start, end)
    while start < end:
        start += os.pwrite(fd, _ZEROS[: end - start], start)


class HugePages:
    """Allocation of cleared memory in huge pages, where the system wants to be asked for them.

    A write to the file does not ask. With the other settings it gets huge pages, or nothing does.
    Where memory is fragmented, the kernel moves other pages out of the way of each huge page, which
    can cost many times as much as small pages; after such a one, the next `_PAUSE_NBYTES` are left
    to small pages.
    """

    def __init__(self) -> None:
        self._pause_nbytes = 0

    def give(self, fd: int, start: int, end: int) -> int:
        """Allocate ``[start, end)``, or its beginning; return the end of what was allocated."""
        self._pause_nbytes = max(0, self._pause_nbytes - (end - start))
        if self._pause_nbytes or (end - start) % _HUGE_NBYTES or not _are_huge_pages_advised():
            return start
        try:
            with mmap.mmap(fd, end - start, offset=start) as mapped:
                address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
                advice.advise(address, end - start, advice.HUGEPAGE)
                return start + self._populate(address, end - start)
        except (OSError, ValueError):  # a write will tell
            return start

    def _populate(self, address: int, nbytes: int) -> int:
        """Return how many bytes were allocated, one page after the other."""
        for done in range(0, nbytes, _HUGE_NBYTES):
            start_s = time.thread_time()
            # It fails on an older kernel, and without memory: then a write tells.
            if advice.advise(address + done, _HUGE_NBYTES, advice.POPULATE_WRITE):
                return done
            if time.thread_time() - start_s > _MOST_HUGE_S:
                self._pause_nbytes = _PAUSE_NBYTES
                return done + _HUGE_NBYTES
        return nbytes


def _are_huge_pages_advised() -> bool:
    """Whether the system gives huge pages of `_HUGE_NBYTES` to shared memory that asks for them."""
    try:
        size = int((_HUGE_PAGES / "hpage_pmd_size").read_text())
        return size == _HUGE_NBYTES and "[advise]" in (_HUGE_PAGES / "shmem_enabled").read_text()
    except (OSError, ValueError):
        return False


_huge_pages = HugePages()


def _allocate(fd: int, start: int, end: int) -> None:
    """Allocate pages, but keep a reserve: the kernel does not refuse, but kills processes."""
    least_nbytes = min(memory.limit_nbytes() * _LEFT_PART, _MOST_LEFT_NBYTES)
    if memory.available_nbytes() - (end - start) < least_nbytes:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    give_memory(fd, start, end)
