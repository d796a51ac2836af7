"""A process's map of the arena: the memory that all processes share (`segment`)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from afferent.errors import StaleHandle
from afferent.store import advice, backing

_PIECE_NBYTES = 1 << 20
"""Part of the arena whose page tables are filled in one step; chunks consist of such pieces."""
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _disown_maps() -> None:
    """Keep inherited map objects alive in a forked child.

    The child does not have the maps, and their addresses may belong to other maps of its own. The
    objects would unmap those when they are collected.
    """
    for inherited in _maps:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


os.register_at_fork(after_in_child=_disown_maps)


class ArenaMap:
    """This process's map of the arena, kept for the life of the process.

    A forked child does not have the map: it has no pins, so the bytes could change while it reads.
    It needs its own connection and map.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        """Map all of ``fd``; the descriptor itself may be closed afterwards.

        The page tables are filled for the blocks that this process uses: memory that was never
        stored to has no entries. Of an arena that had all its memory before, a thread fills them.
        """
        status = os.fstat(fd)
        self.nbytes, self.identity = status.st_size, (status.st_dev, status.st_ino)
        self.writable = writable
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, self.nbytes, flags=mmap.MAP_SHARED, prot=protection)
        _maps.add(self._map)
        self._pid = os.getpid()
        self._advise(0, self.nbytes, advice.DONTFORK)
        self._advise(0, self.nbytes, advice.HUGEPAGE)  # refused if the system does not allow it
        self._all: memoryview | None = None
        self._retired: weakref.ref[Any] | None = None
        self.renew()
        self._is_mapped = bytearray(-(-self.nbytes // _PIECE_NBYTES))
        self._stop = threading.Event()
        self._populating: threading.Thread | None = None
        self.is_whole = backing.is_whole(fd)  # all pages existed when it was mapped
        if self.is_whole:
            populating = threading.Thread(target=self._populate, name="populate", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: blocks as they are used
                populating.start()
                self._populating = populating

    def block(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes ``[offset, offset + nbytes)``; read-only if the map is.

        Raises:
            StaleHandle: They are outside of the arena, or the map has been retired.
        """
        everything = self._all  # another thread may retire the map at any moment
        if everything is None:
            raise StaleHandle("the store has been closed, or restarts: nothing of it can be read")
        self._check_inside(offset, nbytes)
        first, end = offset // _PIECE_NBYTES, -(-(offset + nbytes) // _PIECE_NBYTES)
        if self._is_mapped.find(0, first, end) >= 0:
            self._fill_tables(first, end)
        return everything[offset : offset + nbytes]

    def _check_inside(self, offset: int, nbytes: int) -> None:
        """
        Raises:
            StaleHandle: The range is outside of the arena.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise StaleHandle(f"[{offset}, +{nbytes}) is outside of the arena")

    def is_of(self, fd: int) -> bool:
        """Whether this is a map of the memory behind ``fd``."""
        status = os.fstat(fd)
        return self.identity == (status.st_dev, status.st_ino)

    def pinned_elsewhere(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes that another process pins and views, read-only, also after `retire`.

        They do not count as a use of the arena by this process.

        Raises:
            StaleHandle: They are outside of the arena.
        """
        self._check_inside(offset, nbytes)
        return memoryview(self._map).toreadonly()[offset : offset + nbytes]

    def wait_populated(self) -> None:
        """Wait until all pages with memory are in this process's page tables, for benchmarks."""
        if (populating := self._populating) is not None:
            populating.join()

    def retire(self, on_unused: Callable[[], object]) -> None:
        """Hand out no more blocks; call ``on_unused`` once all blocks are unused.

        Any thread may call it, also before this returns.
        """
        everything = self._all
        array: Any = self._retired() if self._retired is not None else everything and everything.obj
        if array is None:
            on_unused()
            return
        # Exactly the arrays and memoryviews over the arena keep this array alive.
        weakref.finalize(array, on_unused).atexit = False
        self._retired, self._all = weakref.ref(array), None

    def renew(self) -> None:
        """Hand out blocks again, after `retire`."""
        self._retired, self._all = None, np.frombuffer(self._map, dtype=np.uint8).data

    def close(self) -> None:
        """Unmap the arena, or let the last array over it unmap it."""
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

    def _populate(self) -> None:
        """Fill the tables for the whole arena, piece by piece."""
        for number in range(len(self._is_mapped)):
            if self._stop.is_set():
                return
            self._fill_tables(number, number + 1)

    def _fill_tables(self, first: int, end: int) -> None:
        """Fill the page tables for these pieces; two threads may do so at once.

        To read is enough, also for a writer, and costs a third of writing. It takes a page fault
        for each page where the kernel is too old, or where memory was never touched.
        """
        start = first * _PIECE_NBYTES
        nbytes = min(end * _PIECE_NBYTES, self.nbytes) - start
        self._advise(start, nbytes, advice.POPULATE_READ)
        self._is_mapped[first:end] = b"\1" * (end - first)

    def _advise(self, offset: int, nbytes: int, kind: int) -> None:
        advice.advise(self.address + offset, nbytes, kind)

    @property
    def address(self) -> int:
        """Start address of the map in this process."""
        interface: dict[str, Any] = np.frombuffer(self._map, dtype=np.uint8).__array_interface__
        return int(interface["data"][0])
