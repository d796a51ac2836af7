"""Advice on mapped memory, by madvise(2): unlike ``mmap.madvise``, it lets other threads run."""

from __future__ import annotations

import ctypes
from typing import Final

DONTFORK: Final = 10
HUGEPAGE: Final = 14
POPULATE_READ: Final = 22
"""Since Linux 5.14."""
POPULATE_WRITE: Final = 23
"""Since Linux 5.14."""

_libc = ctypes.CDLL(None, use_errno=True)


def advise(address: int, nbytes: int, advice: int) -> int:
    """Advise the system on a range of memory; return the error number, or 0."""
    failed = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)
    return ctypes.get_errno() if failed else 0
