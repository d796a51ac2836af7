"""The sides of `benchmarks.store`: a writer, and readers in their own processes."""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from afferent.store.block import codec
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol.items import SealItem
from afferent.types import CreateItem, Handle, MiB, ObjectKind
from benchmarks.controls import tensor_message
from benchmarks.controls.ring import Ring
from benchmarks.peers.ray_store import RayStore
from benchmarks.reader import RingPlace, Task, Took

MAX_RING_NBYTES = 128 * MiB

_MAX_IN_A_ROW, _IN_A_ROW_NBYTES = 20, 50_000_000
_MIN_GETS, _MAX_GETS = 2, 100
_PACED_HZ = {8: 500.0}
_HEAD_NBYTES = 1 << 10  # of a message, without its tensors

Tree = dict[str, Any]


class Putting:
    """The sides that put a tree; each returns milliseconds.

    A small put is repeated several times in a row: the side before has left the caches cold.
    """

    def __init__(self, store: DaemonStore, ray: RayStore | None, tree: Tree) -> None:
        (self._source,) = tree.values()
        self._store, self._ray, self._tree = store, ray, tree
        self._target = self._source.copy()
        self.nbytes: int = self._source.nbytes
        self._ring: Ring | None = None  # with readers that never delay the writer

    def memcpy(self) -> float:
        """Copy the tree once: the lower bound."""
        return self._median_ms(lambda: np.copyto(self._target, self._source))

    def put_1(self) -> float:
        return self._put(num_threads=1)

    def put_2(self) -> float:
        return self._put(num_threads=2)

    def _put(self, *, num_threads: int) -> float:
        return self._median_ms(
            lambda: put(self._store, "bench", self._tree, num_threads=num_threads),
            lambda: self._store.release("bench"),
        )

    def ring(self) -> float:
        if self._ring is None:
            self._ring, fd = make_ring(self.nbytes, num_chunks=2, num_readers=0)
            os.close(fd)
        ring = self._ring
        return self._median_ms(lambda: ring.write(tensor_message.encode(self._tree)))

    def ray(self) -> float:
        ray, kept = self._ray, []
        if ray is None:
            return 0.0
        return self._median_ms(lambda: kept.append(ray.put(self._source)), kept.clear)

    def segment(self) -> float:
        return self._median_ms(self._fresh_segment)

    def _fresh_segment(self) -> None:
        fd = os.memfd_create("control")
        os.posix_fallocate(fd, 0, self.nbytes)
        with mmap.mmap(fd, self.nbytes) as writer:
            mapped = np.frombuffer(writer, np.uint8)
            np.copyto(mapped, self._source)
            del mapped
            with mmap.mmap(fd, self.nbytes, prot=mmap.PROT_READ) as reader:
                viewed = np.frombuffer(reader, np.uint8)
                del viewed
        os.close(fd)

    def _median_ms(
        self, work: Callable[[], object], afterwards: Callable[[], object] = lambda: None
    ) -> float:
        took_ms = []
        for _ in range(max(1, min(_MAX_IN_A_ROW, _IN_A_ROW_NBYTES // self.nbytes)) + 1):
            start = time.perf_counter()
            work()
            took_ms.append((time.perf_counter() - start) * 1e3)
            afterwards()
        return statistics.median(took_ms[1:])


@dataclass(frozen=True, slots=True)
class Got:
    """The medians ``get_us`` of all gets, and ``read_ms`` of the slowest reader."""

    get_us: float
    read_ms: float


class Getting:
    """The sides that get; new objects are put for each sample, untimed, and each is got once."""

    def __init__(
        self,
        store: DaemonStore,
        ray: RayStore | None,
        tree: Tree,
        readers: Readers,
        total_nbytes: int,
    ) -> None:
        (self._source,) = tree.values()
        self.nbytes: int = self._source.nbytes
        self._store, self._ray, self._tree, self._readers = store, ray, tree, readers
        self._num_gets = max(_MIN_GETS, min(_MAX_GETS, total_nbytes // self.nbytes))
        self._stack = ExitStack()
        self._ring: Ring | None = None
        self._ring_path = ""

    def __enter__(self) -> Getting:
        self._small = put(self._store, "small", {"small": np.zeros(8, np.int64)}, num_threads=1)
        self._stack.callback(self._store.release, "small")
        return self

    def __exit__(self, *_: object) -> None:
        self._ring = None
        self._stack.close()

    def get(self, side: str) -> Got:
        match side:
            case "afferent":
                return self._get_from_store()
            case "ring":
                return self._get_from_ring()
            case _:
                return self._get_from_ray()

    def _get_from_store(self) -> Got:
        """Measure gets without reads, which would make the caches colder than the others'."""
        handles = [
            put(self._store, "kept", self._tree, num_threads=2) for _ in range(self._num_gets)
        ]
        task = Task(handles=handles, small=self._small)
        pace_hz = _PACED_HZ.get(self._readers.number, 0.0)
        paced = [
            msgspec.structs.replace(task, pace_hz=pace_hz, phase=index / self._readers.number)
            for index in range(self._readers.number)
        ]
        got = self._readers.do(paced)
        reading = msgspec.structs.replace(task, reads=True)
        read = self._readers.do([reading] * self._readers.number)
        self._store.release("kept")
        return replace(_got(read), get_us=_got(got).get_us)

    def _get_from_ring(self) -> Got:
        number = self._readers.number
        if self._ring is None:
            self._ring, fd = make_ring(self.nbytes, num_chunks=self._num_gets, num_readers=number)
            self._stack.callback(os.close, fd)
            self._ring_path = f"/proc/{os.getpid()}/fd/{fd}"
        for _ in range(self._num_gets):
            self._ring.write(tensor_message.encode(self._tree))
        tasks = []
        for index in range(number):
            place = RingPlace(
                path=self._ring_path,
                num_chunks=self._num_gets,
                chunk_nbytes=self.nbytes + _HEAD_NBYTES,
                num_readers=number,
                index=index,
            )
            tasks.append(Task(ring=place, num_messages=self._num_gets))
        return _got(self._readers.do(tasks))

    def _get_from_ray(self) -> Got:
        if self._ray is None:
            return Got(0.0, 0.0)
        references = [self._ray.put(self._source) for _ in range(self._num_gets)]
        return _got([Took(*each) for each in self._ray.get_all(references, self._readers.number)])


def _got(took: Sequence[Took]) -> Got:
    get_us = statistics.median(value for each in took for value in each.get_us)
    read_us = [statistics.median(each.read_us) for each in took if each.read_us]
    return Got(get_us, max(read_us, default=0.0) / 1e3)


def put(store: DaemonStore, request: str, tree: Tree, *, num_threads: int) -> Handle:
    """Put like `Store.put`, with a given number of threads."""
    planned = codec.plan(tree)
    (handle,) = store.create(request, [CreateItem(ObjectKind.FEATURES, planned.nbytes)])
    used = codec.write_into(tree, store.block(handle), num_threads=num_threads)
    (sealed,) = store.seal(request, [SealItem(handle, used)])
    return sealed


def make_ring(nbytes: int, *, num_chunks: int, num_readers: int) -> tuple[Ring, int]:
    """Return a warm ring for messages with tensors of this size, and its descriptor."""
    fd = os.memfd_create("ring")
    ring = Ring(
        fd, num_chunks=num_chunks, chunk_nbytes=nbytes + _HEAD_NBYTES, num_readers=num_readers
    )
    return ring, fd


class Readers:
    """Reading processes, which run their tasks at the same time."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self.number = len(processes)

    def do(self, tasks: Sequence[Task]) -> list[Took]:
        for process, task in zip(self._processes, tasks, strict=True):
            if process.stdin is not None:
                process.stdin.write(msgspec.json.encode(task) + b"\n")
                process.stdin.flush()
        return [_hear(process) for process in self._processes]


@contextmanager
def readers_of(address: str, number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run readers with the arena in their page tables; wait until they are ready."""
    command = [sys.executable, "-m", "benchmarks.reader", address]
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            for _ in range(number)
        ]
        for reader in started:
            _hear(reader)
        yield started


def _hear(reader: subprocess.Popen[bytes]) -> Took:
    line = reader.stdout.readline() if reader.stdout is not None else b""
    if not line:
        raise RuntimeError("a reader of the benchmark has ended")
    return msgspec.json.decode(line, type=Took)
