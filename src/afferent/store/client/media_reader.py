"""Encoded media on their way into the store: read into memory that is kept, and digested there.

Memory that a process has never touched costs several times what reading into it does, so what was
read into once is read into again.
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
"""The path of a file, or a file's bytes."""

_PIECE_NBYTES = 4 * MiB
_MAX_KEPT_NBYTES = 64 * MiB
_ALIGNMENT = 64
_LONG_NBYTES = 256 * KiB


class ReadMedia(NamedTuple):
    """One file's bytes, valid as long as `MediaReader.reading` says, and their `keys.digest`."""

    data: memoryview
    digest: bytes


class MediaReader:
    """Reads and digests many files; any thread may call it.

    Args:
        num_workers: Threads beside the caller's that do so; 0: the caller does it all, one file
            after another.
    """

    def __init__(self, num_workers: int = 0) -> None:
        self._num_workers = num_workers
        self._pool: ThreadPoolExecutor | None = None
        self._memory = _KeptMemory()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self, sources: Sequence[Source]) -> Iterator[list[ReadMedia]]:
        """All of them, in order, for the length of the block.

        Raises:
            OSError: A file can't be read.
            FormatError: There is nothing in one of them.
        """
        # One list for all threads: whoever is done with a file takes the next one.
        waiting, read = iter(list(enumerate(sources))), [_NOTHING] * len(sources)
        num_helpers = min(self._num_workers, len(sources) - 1)
        rooms = [_Room(self._memory) for _ in range(1 + max(num_helpers, 0))]
        try:
            helpers = [self._threads().submit(_read_all, waiting, read, room) for room in rooms[1:]]
            try:
                _read_all(waiting, read, rooms[0])
            finally:  # none of them reads into what is given back
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
    """Pieces of memory that have been touched."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, nbytes: int) -> mmap.mmap:
        """At least so many bytes."""
        if nbytes <= _PIECE_NBYTES:
            with contextlib.suppress(IndexError):
                return self._free.pop()
        return mmap.mmap(-1, max(nbytes, _PIECE_NBYTES))

    def give_back(self, piece: mmap.mmap) -> None:
        if len(piece) == _PIECE_NBYTES and len(self._free) < _MAX_KEPT_NBYTES // _PIECE_NBYTES:
            self._free.append(piece)


class _Room:
    """Where one thread reads to: file behind file."""

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
    """As long as it is when it is opened."""
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
    """Write ``data`` at the begin of a block; its length in bytes."""
    nbytes = len(data)
    if nbytes < _LONG_NBYTES:
        block[:nbytes] = data
    else:  # other threads run meanwhile
        np.copyto(np.frombuffer(block, np.uint8)[:nbytes], np.frombuffer(data, np.uint8))
    return nbytes
