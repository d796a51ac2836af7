"""A ring of chunks in shared memory: one process writes, and each reader makes its own copy.

vLLM's `MessageQueue` sends steps to the workers of one machine in this way, and its shared-memory
cache of processed items is similar. Each chunk has flags: one for the writer, and one for each
reader. A chunk is reused when all readers have read it.

The baseline is faster than these: its memory is warm on both sides; a chunk is as large as needed
(vLLM's are 16 MiB, and larger data go through sockets); readers are notified and don't poll; and a
reader copies into warm memory that it reuses. So it costs one memcpy of the writer, and one of each
reader.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afferent.errors import InternalError
from benchmarks.controls.tensor_message import Buffer

_ALIGNMENT = 64
_MAX_PARTS = 1024
_HEAD_NBYTES = (1 + _MAX_PARTS) * 8
_TIMEOUT_S = 60.0


class Ring:
    """One process's map of a ring; the process that creates the ring writes."""

    def __init__(self, fd: int, *, num_chunks: int, chunk_nbytes: int, num_readers: int) -> None:
        """Map the ring, with all pages in this process's tables; ``fd`` belongs to the caller."""
        self._chunk_nbytes = _aligned(_HEAD_NBYTES + chunk_nbytes + _MAX_PARTS * _ALIGNMENT)
        num_flags = num_chunks * (1 + num_readers)
        flags_nbytes = _aligned(8 * num_flags)
        nbytes = flags_nbytes + num_chunks * self._chunk_nbytes
        if os.fstat(fd).st_size < nbytes:
            os.posix_fallocate(fd, 0, nbytes)
        memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        whole = np.frombuffer(memory, np.uint8)
        flags = np.frombuffer(memory, np.int64, num_flags)
        self._flags = flags.reshape(num_chunks, 1 + num_readers)
        self._chunks = whole[flags_nbytes:].reshape(num_chunks, self._chunk_nbytes)
        self._num_written = 0

    @property
    def chunk_nbytes(self) -> int:
        """Size of a reader's own memory."""
        return self._chunk_nbytes

    def write(self, parts: Sequence[Buffer]) -> None:
        """Write the next chunk; wait for its readers of the previous round."""
        flags, chunk = self._at(self._num_written)
        _wait(lambda: bool((flags[1:] == flags[0]).all()))
        head, position = chunk[:_HEAD_NBYTES].view(np.int64), _HEAD_NBYTES
        head[0] = len(parts)
        for number, part in enumerate(parts, start=1):
            data = np.frombuffer(part, np.uint8)
            head[number] = data.nbytes
            np.copyto(chunk[position : position + data.nbytes], data)
            position = _aligned(position + data.nbytes)
        self._num_written += 1
        flags[0] = self._num_written  # last: readers may read it now

    def _at(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        index = number % len(self._chunks)
        return self._flags[index], self._chunks[index]


class RingReader:
    """A reader of a ring, with warm memory of its own."""

    def __init__(self, ring: Ring, index: int) -> None:
        self._ring, self._index, self._num_read = ring, index, 0
        self._memory = np.zeros(ring.chunk_nbytes, np.uint8)
        self._memory[:] = 1  # zeros alone would not touch the pages

    def read(self) -> list[memoryview]:
        """Return a copy of the next written parts, valid until the next call."""
        flags, chunk = self._ring._at(self._num_read)
        _wait(lambda: flags[0] == self._num_read + 1)
        head = chunk[:_HEAD_NBYTES].view(np.int64)
        sizes = [int(nbytes) for nbytes in head[1 : 1 + int(head[0])]]
        starts, end = [], _HEAD_NBYTES
        for nbytes in sizes:
            starts.append(end)
            end = _aligned(end + nbytes)
        np.copyto(self._memory[:end], chunk[:end])
        self._num_read += 1
        flags[1 + self._index] = self._num_read
        memory: Any = self._memory.data
        return [memory[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=True)]


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise InternalError("the other side of a ring does not go on")
        time.sleep(0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
