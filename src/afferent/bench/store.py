"""What does it cost to put an object into the store, and to get it in other processes?

Put is: create, write in place, seal, through a real daemon; the floor is one warm memcpy of the
same bytes by one thread. Get is: pin by handle and view as arrays, in readers of their own; up to
four readers get again at once, eight are paced at 500 a second each. The controls do what engines
do today: a fresh segment of shared memory for each object (as SGLang's transport does: allocate,
copy, map again, give back), and pickle through a pipe (as `multiprocessing` queues do).
"""

from __future__ import annotations

import mmap
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import numpy as np
from numpy.typing import NDArray

from afferent.bench.reader import Task
from afferent.bench.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate
from afferent.store import codec
from afferent.store import messages as m
from afferent.store.client import DaemonStore
from afferent.store.server import StoreServer
from afferent.types import Handle, MiB, ObjectKind

QUESTION = "What does it cost to put an object into the store, and to get it in other processes?"
COLUMNS = (
    "nbytes",
    "readers",
    "memcpy_ms",
    "put_ratio",
    "put_extra_us",
    "get_us",
    "control_segment_ms",
    "control_pickle_ms",
)

_NBYTES = (1_000_000, 5_000_000, 50_000_000, 500_000_000)
_READERS = (1, 2, 4, 8)
_PACED_HZ = {8: 500.0}
_NUM_GETS = 200
_MAX_IN_A_ROW = 20
_LARGE_NBYTES = 50_000_000
_GOAL_RATIO, _GOAL_EXTRA_US, _GOAL_GET_US, _GOAL_FLAT = 1.3, 150.0, 120.0, 1.5
_ARENA_NBYTES = 1280 * MiB

AfterSample = Callable[[], None]


def num_steps(*, quick: bool) -> int:
    per_size = 4 * (_num_samples(quick=quick) + 1) + len(_READERS) * _num_samples(quick=quick)
    return per_size * len(_NBYTES)


def run(
    *, quick: bool, after_sample: AfterSample, sizes_nbytes: tuple[int, ...] = _NBYTES
) -> Report:
    report = Report("store", QUESTION)
    num_samples = _num_samples(quick=quick)
    arena_nbytes = min(_ARENA_NBYTES, 3 * max(sizes_nbytes))
    with (
        StoreServer(arena_nbytes, shares={ObjectKind.FEATURES: 1.0}) as server,
        DaemonStore(server.address, name="writer", writable=True) as store,
        _readers(server.address, max(_READERS)) as readers,
    ):
        store.wait_populated()
        meter = BusyMeter()
        for nbytes in sizes_nbytes:
            writer = _Writer(store, readers[0], nbytes)
            samples = _put_samples(writer, num_samples, after_sample)
            handle = writer.put_and_keep()
            for num_readers in _READERS:
                get_us = []
                for _ in range(num_samples):
                    get_us.append(_get_us(readers[:num_readers], handle))
                    after_sample()
                keys = {"nbytes": nbytes, "readers": num_readers}
                report.rows.append(Row(keys, {**samples, "get_us": get_us}))
            store.release("kept")
        report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.goals = _goals(report.rows)
    return report


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 3 * MIN_SAMPLES


def _put_samples(
    writer: _Writer, num_samples: int, after_sample: AfterSample
) -> dict[str, list[float]]:
    sides = {
        "memcpy_ms": writer.memcpy,
        "put_ms": writer.put,
        "control_segment_ms": writer.fresh_segment,
        "control_pickle_ms": writer.pickle_through_pipe,
    }
    samples = alternate(sides, num_samples=num_samples, after_sample=after_sample)
    pairs = list(zip(samples.pop("put_ms"), samples["memcpy_ms"], strict=True))
    samples["put_ratio"] = [put / memcpy for put, memcpy in pairs]
    samples["put_extra_us"] = [(put - memcpy) * 1e3 for put, memcpy in pairs]
    return samples


def _goals(rows: list[Row]) -> list[Goal]:
    goals = []

    def at_most(what: str, value: float, limit: float) -> None:
        goals.append(Goal(f"{what} <= {limit:g}", value <= limit, value))

    for row in (row for row in rows if row.keys["readers"] == 1):
        size = f"at {row.keys['nbytes'] / 1e6:g} MB"
        if row.keys["nbytes"] >= _LARGE_NBYTES:
            at_most(f"put_ratio {size}", row.median("put_ratio"), _GOAL_RATIO)
        else:
            at_most(f"put_extra_us {size}", row.median("put_extra_us"), _GOAL_EXTRA_US)
    for readers in _READERS:
        medians = [row.median("get_us") for row in rows if row.keys["readers"] == readers]
        at_most(f"get_us with {readers} readers, any size", max(medians), _GOAL_GET_US)
        if readers == 1:
            at_most("get_us, dearest / cheapest size", max(medians) / min(medians), _GOAL_FLAT)
    return goals


class _Writer:
    """The sides that move ``nbytes``; each returns milliseconds."""

    def __init__(self, store: DaemonStore, reader: subprocess.Popen[bytes], nbytes: int) -> None:
        self._store, self._reader = store, reader
        self._source: NDArray[np.uint8] = np.arange(nbytes, dtype=np.uint8)
        self._target = self._source.copy()
        self._tree = {"pixel_values": self._source}

    def memcpy(self) -> float:
        return self._median_ms(lambda: np.copyto(self._target, self._source))

    def put(self) -> float:
        return self._median_ms(lambda: self._put("bench"), lambda: self._store.release("bench"))

    def _median_ms(
        self, work: Callable[[], object], afterwards: Callable[[], None] = lambda: None
    ) -> float:
        """Of several in a row for small objects: the controls leave the caches cold."""
        took_ms = []
        for _ in range(max(1, min(_MAX_IN_A_ROW, _LARGE_NBYTES // self._source.nbytes)) + 1):
            start = time.perf_counter()
            work()
            took_ms.append((time.perf_counter() - start) * 1e3)
            afterwards()
        return statistics.median(took_ms[1:])

    def put_and_keep(self) -> Handle:
        return self._put("kept")

    def _put(self, request: str) -> Handle:
        planned = codec.plan(self._tree)
        (handle,) = self._store.create(request, [m.CreateItem(ObjectKind.FEATURES, planned.nbytes)])
        used = codec.write_into(self._tree, self._store.block(handle))
        (sealed,) = self._store.seal(request, [m.SealItem(handle, used)])
        return sealed

    def fresh_segment(self) -> float:
        nbytes = self._source.nbytes
        start = time.perf_counter()
        fd = os.memfd_create("control")
        os.posix_fallocate(fd, 0, nbytes)
        with mmap.mmap(fd, nbytes) as writer:
            mapped = np.frombuffer(writer, np.uint8)
            np.copyto(mapped, self._source)
            del mapped
            with mmap.mmap(fd, nbytes, prot=mmap.PROT_READ) as reader:
                viewed = np.frombuffer(reader, np.uint8)
                del viewed
        os.close(fd)
        return (time.perf_counter() - start) * 1e3

    def pickle_through_pipe(self) -> float:
        start = time.perf_counter()
        data = pickle.dumps(self._tree, protocol=5)
        _tell(self._reader, Task(pickled_nbytes=len(data)))
        stdin = self._reader.stdin
        if stdin is not None:
            stdin.write(data)
            stdin.flush()
        _hear(self._reader)
        return (time.perf_counter() - start) * 1e3


def _get_us(readers: list[subprocess.Popen[bytes]], handle: Handle) -> float:
    """The median of what all of them needed, running at the same time."""
    pace_hz = _PACED_HZ.get(len(readers), 0.0)
    for index, reader in enumerate(readers):
        task = Task(handle=handle, num_gets=_NUM_GETS, pace_hz=pace_hz, phase=index / len(readers))
        _tell(reader, task)
    return statistics.median(sample for reader in readers for sample in _hear(reader))


@contextmanager
def _readers(address: str, number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-m", "afferent.bench.reader", address[1:]]
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


def _tell(reader: subprocess.Popen[bytes], task: Task) -> None:
    if reader.stdin is not None:
        reader.stdin.write(msgspec.json.encode(task) + b"\n")
        reader.stdin.flush()


def _hear(reader: subprocess.Popen[bytes]) -> list[float]:
    line = reader.stdout.readline() if reader.stdout is not None else b""
    if not line:
        raise RuntimeError("a reader of the benchmark has ended")
    return msgspec.json.decode(line, type=list[float])
