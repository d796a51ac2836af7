"""Copies of tensors into a block; from ten megabytes on, with a second thread.

One core does not saturate the memory bandwidth. The first large enough copy starts the helper
thread, which stays. A forked child starts its own.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Copy = tuple[Array, Array]
"""Target and source: same shape, same element type except for the byte order."""

SPLIT_NBYTES = 10_000_000
# Small enough to balance two threads, large enough for few handovers of the GIL.
_PIECE_NBYTES = 4 << 20
# Larger copies are halved if that is fast: the C library bypasses the caches in them.
_HALVES_NBYTES = 256 << 20


def copy_all(copies: Sequence[Copy], *, num_threads: int = 2) -> None:
    """Do all copies. numpy releases the GIL while it copies; a memoryview would not."""
    total_nbytes = sum(target.nbytes for target, _ in copies)
    if num_threads < 2 or total_nbytes < SPLIT_NBYTES:
        for target, source in copies:
            np.copyto(target, source)
    else:
        _copy_with_helper(list(_pieces(copies)))


def _copy_with_helper(pieces: list[Copy]) -> None:
    """Copy with two threads from one list; neither waits for the other for longer than a piece."""

    def work() -> None:
        while True:
            try:
                target, source = pieces.pop()
            except IndexError:
                return
            np.copyto(target, source)

    future = _helper.submit(work)
    try:
        work()
    finally:
        # After this returns, no thread may write into the block, even after an error.
        pieces.clear()
        if future is not None and not future.cancel():
            future.result()


def _pieces(copies: Sequence[Copy]) -> Iterator[Copy]:
    for target, source in copies:
        num_pieces = 2 if _bypasses_caches(target, source) else -(-target.nbytes // _PIECE_NBYTES)
        if target.flags.c_contiguous and source.flags.c_contiguous:
            target, source = target.reshape(-1), source.reshape(-1)
        axis = next((axis for axis, side in enumerate(target.shape) if side > 1), None)
        if axis is None or num_pieces < 2:
            yield target, source
            continue
        step = -(-target.shape[axis] // num_pieces)
        for first in range(0, target.shape[axis], step):
            part = (*(slice(None),) * axis, slice(first, first + step))
            yield target[part], source[part]


def _bypasses_caches(target: Array, source: Array) -> bool:
    """Whether a copy is fastest if it bypasses the caches.

    Such a copy loads from several pages at a time. If the target's offset in its page is slightly
    larger than the source's, each load seems to depend on a recent store: four times slower.
    """
    ahead = (target.ctypes.data - source.ctypes.data) % mmap.PAGESIZE
    return target.nbytes >= _HALVES_NBYTES and not 0 < ahead < 1024


class _Helper:
    """Second copying thread, if this process may run on a second core."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], None]) -> Future[None] | None:
        """Submit work; ``None`` if there is no helper: then the caller does all of the work."""
        with self._lock:
            if self._pool is None:
                if len(os.sched_getaffinity(0)) < 2:
                    return None
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="afferent-copy")
            try:
                return self._pool.submit(work)
            except RuntimeError:
                return None  # no more threads, or the interpreter is shutting down


def _start_over() -> None:
    """Replace the helper in a forked child: its thread is gone, and its lock may be locked."""
    global _helper
    _helper = _Helper()


_helper = _Helper()
os.register_at_fork(after_in_child=_start_over)
