"""The arena: one preallocated anonymous mapping that every process shares.

The memory is a memfd: it has no name in any file system, so nothing remains when the last process
that holds it is gone, and a container's small /dev/shm does not matter. All of its pages exist
before the first byte is stored, so a full machine is an error at the start and never a SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Self

from afferent.errors import ConfigError

_ALIGNMENT = mmap.PAGESIZE


def create_segment(nbytes: int) -> int:
    """A new memfd of ``nbytes`` (rounded up to pages), all pages allocated; its descriptor.

    Raises:
        ConfigError: The machine, or this container, has not that much memory to give.
    """
    nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    fd = os.memfd_create("afferent-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        # Restarted writers need new maps, so writing stays allowed.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"the arena of {nbytes / 2**20:.0f} MiB could not be allocated "
            f"({os.strerror(error.errno or 0)}); choose a smaller --arena-nbytes"
        ) from error
    return fd


def reopen_read_only(fd: int) -> int:
    """A second descriptor of the same memory that can't be mapped for writing."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


class ArenaMap:
    """This process's view of the arena: mapped once, kept for the life of the process."""

    def __init__(self, fd: int, *, writable: bool) -> None:
        """Map all of ``fd``; the descriptor itself may be closed afterwards."""
        self.nbytes = os.fstat(fd).st_size
        self.writable = writable
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # Populated at once: filling in page tables one fault at a time is six times slower.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(fd, self.nbytes, flags=flags, prot=protection)
        self._view = memoryview(self._map)

    def block(self, offset: int, nbytes: int) -> memoryview:
        """The bytes ``[offset, offset + nbytes)``; read-only where the map is."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"[{offset}, +{nbytes}) is outside of the arena")
        return self._view[offset : offset + nbytes]

    def close(self) -> None:
        """Unmap; fails while arrays over the arena are alive."""
        self._view.release()
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
