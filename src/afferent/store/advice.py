"""Advice on mapped memory, by madvise(2): unlike ``mmap.madvise``, it lets other threads run."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Final

import numpy as np

DONTFORK: Final = 10
HUGEPAGE: Final = 14
POPULATE_READ: Final = 22
"""Since Linux 5.14."""
POPULATE_WRITE: Final = 23
"""Since Linux 5.14."""

_libc = ctypes.CDLL(None, use_errno=True)


def address_of(mapped: mmap.mmap) -> int:
    """Return the start address of a map in this process."""
    interface: dict[str, Any] = np.frombuffer(mapped, dtype=np.uint8).__array_interface__
    return int(interface["data"][0])


def advise(address: int, nbytes: int, advice: int) -> int:
    """Advise the system on a range of memory; return the error number, or 0."""
    failed = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)
    return ctypes.get_errno() if failed else 0
