"""Reader of encoded media: into reused memory, where they are digested before they are stored.

The first touch of new memory costs several times as much as reading into it, so memory is reused.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from afferent import keys
from afferent.errors import FormatError
from afferent.types import KiB, MiB

Bytes = bytes | bytearray | memoryview
Source = str | os.PathLike[str] | Bytes
"""Path of a file, or a file's bytes."""

_PIECE_NBYTES = 4 * MiB
_MAX_KEPT_NBYTES = 64 * MiB
_ALIGNMENT = 64
_LONG_NBYTES = 256 * KiB


class ReadMedia(NamedTuple):
    """Bytes of one file, valid inside `MediaReader.reading`, and their `keys.digest`."""

    data: memoryview
    digest: bytes


class MediaReader:
    """Reads and digests many files; thread-safe.

    Args:
        num_workers: Threads that help the caller's thread; 0: the caller reads one file after
            another.
    """

    def __init__(self, num_workers: int = 0) -> None:
        self._num_workers = num_workers
        self._pool: ThreadPoolExecutor | None = None
        self._memory = _KeptMemory()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self, sources: Sequence[Source]) -> Iterator[list[ReadMedia]]:
        """Read all sources, in order; the data are valid in the ``with`` block.

        Raises:
            OSError: A file can't be read.
            FormatError: One of them is empty.
        """
        # One iterator for all threads: each takes the next file when it is ready.
        waiting, read = iter(list(enumerate(sources))), [_NOTHING] * len(sources)
        num_helpers = min(self._num_workers, len(sources) - 1)
        rooms = [_Room(self._memory) for _ in range(1 + max(num_helpers, 0))]
        try:
            helpers = [self._threads().submit(_read_all, waiting, read, room) for room in rooms[1:]]
            try:
                _read_all(waiting, read, rooms[0])
            finally:  # no helper may read into returned memory
                for _ in waiting:
                    pass
                errors = [helper.exception() for helper in helpers]
            for error in errors:
                if error is not None:
                    raise error
            yield read
        finally:
            for room in rooms:
                room.give_back()

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix="read")
            return self._pool


_NOTHING = ReadMedia(memoryview(b""), b"")


class _KeptMemory:
    """Pool of memory that has been touched, for reuse."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, nbytes: int) -> mmap.mmap:
        """Take at least ``nbytes`` bytes."""
        if nbytes <= _PIECE_NBYTES:
            with contextlib.suppress(IndexError):
                return self._free.pop()
        return mmap.mmap(-1, max(nbytes, _PIECE_NBYTES))

    def give_back(self, piece: mmap.mmap) -> None:
        if len(piece) == _PIECE_NBYTES and len(self._free) < _MAX_KEPT_NBYTES // _PIECE_NBYTES:
            self._free.append(piece)


class _Room:
    """Read buffer of one thread: files are placed one after another."""

    def __init__(self, memory: _KeptMemory) -> None:
        self._memory = memory
        self._pieces: list[mmap.mmap] = []
        self._left = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        padded = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if padded > len(self._left):
            self._pieces.append(self._memory.take(padded))
            self._left = memoryview(self._pieces[-1])
        taken, self._left = self._left[:nbytes], self._left[padded:]
        return taken

    def give_back(self) -> None:
        self._left = memoryview(b"")
        while self._pieces:
            self._memory.give_back(self._pieces.pop())


def _read_all(waiting: Iterator[tuple[int, Source]], read: list[ReadMedia], room: _Room) -> None:
    for index, source in waiting:
        if isinstance(source, bytes | bytearray | memoryview):
            data = memoryview(source).cast("B")
        else:
            data = _read_file(source, room)
        if not data:
            raise FormatError(f"source {index} has no bytes")
        read[index] = ReadMedia(data, keys.digest(data))


def _read_file(path: str | os.PathLike[str], room: _Room) -> memoryview:
    """Read a file, up to its size when opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = room.take(os.fstat(descriptor).st_size)
        num_read = 0
        while num_read < len(data) and (more := os.readv(descriptor, [data[num_read:]])):
            num_read += more
        return data[:num_read]
    finally:
        os.close(descriptor)


def copy_into(data: memoryview, block: memoryview) -> int:
    """Write ``data`` at the beginning of a block; return its length in bytes."""
    nbytes = len(data)
    if nbytes < _LONG_NBYTES:
        block[:nbytes] = data
    else:  # other threads run meanwhile
        np.copyto(np.frombuffer(block, np.uint8)[:nbytes], np.frombuffer(data, np.uint8))
    return nbytes
