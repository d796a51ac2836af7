"""A reader for `benchmarks.store`: a process that gets objects on request.

    python -m benchmarks.reader ADDRESS

Each line of its input is a `Task` in JSON; each line of its output is a `Took` with the times of
all gets.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from afferent.store.block import codec
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import Handle
from benchmarks.controls import tensor_message
from benchmarks.controls.ring import Ring, RingReader

_NUM_WARM_UP = 20


class RingPlace(Struct, frozen=True):
    """The location of a ring; ``index`` is that of this reader."""

    path: str
    num_chunks: int
    chunk_nbytes: int
    num_readers: int
    index: int


class Task(Struct):
    """A task: get each of the ``handles`` once, or the next ``num_messages`` of a ``ring``.

    With ``pace_hz`` 0 the gets follow each other without a pause; else each is later by ``phase``,
    a part of the period. ``reads``: also sum all bytes of each object. ``small``: get this object
    some times first, untimed, since reader and store have slept.
    """

    handles: list[Handle] = []
    small: Handle | None = None
    ring: RingPlace | None = None
    num_messages: int = 0
    pace_hz: float = 0.0
    phase: float = 0.0
    reads: bool = False


class Took(Struct):
    """The times of all gets: until there are arrays, and until all their bytes are read."""

    get_us: list[float] = []
    read_us: list[float] = []


class _Reader:
    def __init__(self, store: DaemonStore) -> None:
        self._store = store
        self._place: RingPlace | None = None
        self._ring: RingReader | None = None

    def do(self, task: Task) -> Took:
        if task.ring is None:
            return self._get_from_store(task)
        if self._ring is None or task.ring != self._place:
            self._ring = None  # free its memory first
            self._ring, self._place = _open(task.ring), task.ring
        return _get_from_ring(self._ring, task)

    def _get_from_store(self, task: Task) -> Took:
        took = Took()
        if task.small is not None:
            for _ in range(_NUM_WARM_UP):
                self._get_one(task.small, Took(), reads=False)
        next_s = time.perf_counter() + (task.phase / task.pace_hz if task.pace_hz else 0.0)
        for handle in task.handles:
            if task.pace_hz:
                next_s += 1 / task.pace_hz
                time.sleep(max(0.0, next_s - time.perf_counter()))
            self._get_one(handle, took, reads=task.reads)
        return took

    def _get_one(self, handle: Handle, took: Took, *, reads: bool) -> None:
        start = time.perf_counter()
        self._store.get("bench", [handle])
        tree: Any = codec.view(self._store.block(handle))
        took.get_us.append((time.perf_counter() - start) * 1e6)
        if reads:
            _sum(tree)
            took.read_us.append((time.perf_counter() - start) * 1e6)
        del tree
        self._store.forget("bench")


def _get_from_ring(ring: RingReader, task: Task) -> Took:
    took = Took()
    for _ in range(task.num_messages):
        start = time.perf_counter()
        tree = tensor_message.decode(ring.read())
        took.get_us.append((time.perf_counter() - start) * 1e6)
        _sum(tree)
        took.read_us.append((time.perf_counter() - start) * 1e6)
    return took


def _open(place: RingPlace) -> RingReader:
    fd = os.open(place.path, os.O_RDWR)
    try:
        ring = Ring(
            fd,
            num_chunks=place.num_chunks,
            chunk_nbytes=place.chunk_nbytes,
            num_readers=place.num_readers,
        )
    finally:
        os.close(fd)
    return RingReader(ring, place.index)


def _sum(tree: dict[str, Any]) -> None:
    """Read every byte, eight at a time."""
    for array in tree.values():
        array.view(np.int64).sum()


def main() -> None:
    with DaemonStore(sys.argv[1], name="reader") as store:
        store.wait_populated()
        reader = _Reader(store)
        _answer(Took())
        while line := sys.stdin.buffer.readline():
            _answer(reader.do(msgspec.json.decode(line, type=Task)))


def _answer(took: Took) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(took) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
