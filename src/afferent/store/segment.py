"""Memory of the arena: one anonymous file that all processes map.

The memory is a memfd. It has no name in any file system: nothing remains after the last process
that has it open, and the size of a container's /dev/shm does not matter. Its pages are allocated
before they are written, so that a lack of memory is an error and never a SIGBUS: all at the start
(`create_segment`), or in chunks on demand (`open_segment` and `backing.Backing`).

The daemon gives out this memory and never looks into it: this module imports no numpy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator

from afferent.errors import ConfigError
from afferent.runtime import memory, shortage
from afferent.store import backing

_PAGE = mmap.PAGESIZE
_MAX_PART_OF_MEMORY = 0.9
_ALLOCATE_STEP_NBYTES = 32 << 20


def create_segment(nbytes: int) -> int:
    """Create a memfd of ``nbytes`` (rounded up to pages) with all pages; return its descriptor.

    Raises:
        ConfigError: The machine, or this container, does not have enough memory.
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
    """Create a memfd of ``nbytes`` (rounded up to pages) without pages; return its descriptor.

    `allocate` allocates all pages; otherwise each must be allocated before its use.

    Raises:
        ConfigError: The machine, or this container, does not have enough memory now.
    """
    nbytes = -(-nbytes // _PAGE) * _PAGE
    check_available(nbytes)
    fd = os.memfd_create("afferent-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)  # before its pages: huge ones need the file's size
    # Restarted writers need new maps, so writing stays allowed.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def check_available(nbytes: int) -> None:
    """Check that the memory is available: the kernel does not refuse, but kills processes.

    Raises:
        ConfigError: The machine, or this container, does not have enough memory.
    """
    shortage.check_file_size(nbytes)
    available = memory.available_nbytes()
    if nbytes > available * _MAX_PART_OF_MEMORY:
        raise ConfigError(
            f"the arena of {nbytes / 2**20:,.0f} MiB does not fit in {_MAX_PART_OF_MEMORY:.0%} of "
            f"the {available / 2**20:,.0f} MiB of memory that are free; choose a smaller one"
        )


def allocate(fd: int) -> Iterator[None]:
    """Allocate the pages of a segment, step by step: it takes up to a second for each GiB.

    Raises:
        ConfigError: There is not enough memory after all.
    """
    nbytes = os.fstat(fd).st_size
    try:
        for start in range(0, nbytes, _ALLOCATE_STEP_NBYTES):
            backing.give_memory(fd, start, min(start + _ALLOCATE_STEP_NBYTES, nbytes))
            yield
    except OSError as error:
        raise ConfigError(
            f"the arena of {nbytes / 2**20:.0f} MiB could not be allocated "
            f"({os.strerror(error.errno or 0)}); choose a smaller --arena-nbytes"
        ) from error


def reopen_read_only(fd: int) -> int:
    """Open a second descriptor of the same memory that can't be mapped for writing."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
