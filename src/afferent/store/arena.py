"""The arena: one anonymous mapping that every process shares.

The memory is a memfd: it has no name in any file system, so nothing remains when the last process
that holds it is gone, and a container's small /dev/shm does not matter. Its pages exist before the
first byte is stored there, so a full machine is an error and never a SIGBUS: all from the start
(`create_segment`), or in chunks as they are needed (`open_segment` and `backing.Backing`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np

from afferent.errors import ConfigError, StaleHandle
from afferent.runtime import memory, shortage
from afferent.store import backing

_PAGE = mmap.PAGESIZE
_MAX_PART_OF_MEMORY = 0.9
_ALLOCATE_STEP_NBYTES = 32 << 20
_POPULATE_STEP_NBYTES = 8 << 20
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22  # since Linux 5.14
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)  # its calls, unlike mmap.madvise, release the GIL
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _disown_maps() -> None:
    """In a forked child the maps are not there, and what is mapped in their place is its own.

    So their objects, which unmap what is there when they are collected, are kept for ever.
    """
    for inherited in _maps:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


os.register_at_fork(after_in_child=_disown_maps)


def create_segment(nbytes: int) -> int:
    """A new memfd of ``nbytes`` (rounded up to pages), all pages allocated; its descriptor.

    Raises:
        ConfigError: The machine, or this container, has not that much memory to give.
    """
    fd = open_segment(nbytes)
    try:
        for _ in allocate(fd):
            pass
    except ConfigError:
        os.close(fd)
        raise
    return fd


def open_segment(nbytes: int) -> int:
    """A new memfd of ``nbytes`` (rounded up to pages), whose pages are still to be allocated: all
    by `allocate`, or each before it is used.

    Raises:
        ConfigError: The machine, or this container, has not that much memory to give now.
    """
    nbytes = -(-nbytes // _PAGE) * _PAGE
    check_available(nbytes)
    fd = os.memfd_create("afferent-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)  # before its pages: huge ones are given within a file's size
    # Restarted writers need new maps, so writing stays allowed.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def check_available(nbytes: int) -> None:
    """Asking the kernel for too much does not fail: it kills processes until there is enough.

    Raises:
        ConfigError: The machine, or this container, has not that much memory to give.
    """
    shortage.check_file_size(nbytes)
    available = memory.available_nbytes()
    if nbytes > available * _MAX_PART_OF_MEMORY:
        raise ConfigError(
            f"the arena of {nbytes / 2**20:,.0f} MiB does not fit in {_MAX_PART_OF_MEMORY:.0%} of "
            f"the {available / 2**20:,.0f} MiB of memory that are free; choose a smaller one"
        )


def allocate(fd: int) -> Iterator[None]:
    """Give a segment its pages, step by step: it takes the kernel up to a second for each GiB.

    Raises:
        ConfigError: There is not that much memory after all.
    """
    nbytes = os.fstat(fd).st_size
    try:
        for start in range(0, nbytes, _ALLOCATE_STEP_NBYTES):
            os.posix_fallocate(fd, start, min(_ALLOCATE_STEP_NBYTES, nbytes - start))
            yield
    except OSError as error:
        raise ConfigError(
            f"the arena of {nbytes / 2**20:.0f} MiB could not be allocated "
            f"({os.strerror(error.errno or 0)}); choose a smaller --arena-nbytes"
        ) from error


def reopen_read_only(fd: int) -> int:
    """A second descriptor of the same memory that can't be mapped for writing."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class ArenaMap:
    """This process's view of the arena: mapped once, kept for the life of the process.

    The map is not there in a forked child: a child holds no pins, so what it saw could change
    under it. It makes a connection, and a map, of its own.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        """Map all of ``fd``; the descriptor itself may be closed afterwards.

        Page tables are filled by a thread, for each chunk that has memory or is used: nobody waits
        for it, and what was never stored takes none.
        """
        status = os.fstat(fd)
        self.nbytes, self._identity = status.st_size, (status.st_dev, status.st_ino)
        self.writable = writable
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, self.nbytes, flags=mmap.MAP_SHARED, prot=protection)
        _maps.add(self._map)
        self._pid = os.getpid()
        self._advise(0, self.nbytes, _MADV_DONTFORK)
        self._advise(0, self.nbytes, _MADV_HUGEPAGE)  # refused where the system does not allow it
        self._all: memoryview | None = None
        self._retired: weakref.ref[Any] | None = None
        self.renew()
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._chunk_nbytes = backing.CHUNK_NBYTES
        self._is_seen = bytearray(self.nbytes // self._chunk_nbytes + 1)
        self._to_populate = deque[int]()
        self._populating: threading.Thread | None = None
        self.is_whole = backing.is_whole(fd)  # all pages were there when it was mapped
        if self.is_whole:
            self._see(0, self.nbytes)

    def block(self, offset: int, nbytes: int) -> memoryview:
        """The bytes ``[offset, offset + nbytes)``; read-only where the map is.

        Raises:
            StaleHandle: They are outside of the arena, or the map has been retired.
        """
        everything = self._all  # another thread may retire the map at any moment
        if everything is None:
            raise StaleHandle("the store has been closed, or restarts: nothing of it can be read")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise StaleHandle(f"[{offset}, +{nbytes}) is outside of the arena")
        if not self._is_seen[offset // self._chunk_nbytes]:
            self._see(offset, nbytes)
        return everything[offset : offset + nbytes]

    def is_of(self, fd: int) -> bool:
        """Whether this is a map of the memory behind ``fd``."""
        status = os.fstat(fd)
        return self._identity == (status.st_dev, status.st_ino)

    def wait_populated(self) -> None:
        """Wait until every page that has memory is in this process's page tables, as a benchmark
        wants it.
        """
        if (populating := self._populating) is not None:
            populating.join()

    def retire(self, on_unused: Callable[[], object]) -> None:
        """Hand out no more blocks; call ``on_unused`` once nothing uses those handed out.

        It may be called by any thread, and before this returns.
        """
        everything = self._all
        array: Any = self._retired() if self._retired is not None else everything and everything.obj
        if array is None:
            on_unused()
            return
        # Arrays and memoryviews over the arena keep this array alive, and nothing else does.
        weakref.finalize(array, on_unused).atexit = False
        self._retired, self._all = weakref.ref(array), None

    def renew(self) -> None:
        """Hand out blocks again, after `retire`."""
        self._retired, self._all = None, np.frombuffer(self._map, dtype=np.uint8).data

    def close(self) -> None:
        """Unmap. While arrays over the arena are alive it stays mapped: the last one unmaps it."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self.wait_populated()
        self._all = None
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _see(self, offset: int, nbytes: int) -> None:
        """Have a thread populate the chunks of this block, whose pages are all there."""
        chunks = range(offset // self._chunk_nbytes, -(-(offset + nbytes) // self._chunk_nbytes))
        with self._lock:
            for number in chunks:
                if not self._is_seen[number]:
                    self._is_seen[number] = 1
                    self._to_populate.append(number)
            running = self._populating is not None and self._populating.is_alive()
            if not running and not self._stop.is_set():
                populating = threading.Thread(target=self._populate, name="populate", daemon=True)
                with contextlib.suppress(RuntimeError):  # no more threads: pages come one by one
                    populating.start()
                    self._populating = populating

    def _populate(self) -> None:
        """What comes just when this ends is left out: its pages come one fault at a time."""
        advice = _MADV_POPULATE_WRITE if self.writable else _MADV_POPULATE_READ
        while self._to_populate:
            start = self._to_populate.popleft() * self._chunk_nbytes
            end = min(start + self._chunk_nbytes, self.nbytes)
            for offset in range(start, end, _POPULATE_STEP_NBYTES):
                nbytes = min(_POPULATE_STEP_NBYTES, end - offset)
                if self._stop.is_set() or self._advise(offset, nbytes, advice) == errno.EINVAL:
                    return  # an old kernel fills the tables one fault at a time

    def _advise(self, offset: int, nbytes: int, advice: int) -> int:
        """madvise(2); the error number, or 0."""
        address = self.address + offset
        failed = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)
        return ctypes.get_errno() if failed else 0

    @property
    def address(self) -> int:
        """Where the map begins in this process."""
        interface: dict[str, Any] = np.frombuffer(self._map, dtype=np.uint8).__array_interface__
        return int(interface["data"][0])
