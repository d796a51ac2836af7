"""What does it cost to bring the pictures of a request into the store, all of them new?

The whole is: read the files, digest them, acquire all of them in one call, copy, seal all of them
in one call. Files are real JPEGs of 644 x 364 (about 55 KB), in the page cache. The control does
what servers do that go item by item (as LightLLM did before its batched allocation): for each
picture read, md5, a call, a fresh segment of shared memory, copy, a call.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import itertools
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from afferent import keys
from afferent.bench.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate
from afferent.errors import ConfigError
from afferent.store import messages as m
from afferent.store.client import DaemonStore
from afferent.store.server import StoreServer
from afferent.types import ContentKey, MiB, ObjectKind

QUESTION = "What does it cost to bring the pictures of a request into the store?"
COLUMNS = (
    "images",
    "threads",
    "rpc_ms",
    "total_ms",
    "control_rpc_ms",
    "control_total_ms",
)

_IMAGES = (4, 16, 64, 128)
_THREADS = (0, 1, 2)
_GOAL_RPC_MS, _GOAL_TOTAL_MS, _GOAL_RPC_TIMES, _GOAL_TOTAL_TIMES = 0.4, 8.0, 10.0, 5.0
_QUALITY = 82  # some 55 KB

AfterSample = Callable[[], None]
_Keyed = tuple[ContentKey, NDArray[np.uint8]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--alloc-workers",
        type=int,
        metavar="N",
        help="threads that read and digest; 0: one picture after another "
        f"(default: {', '.join(map(str, _THREADS))} in turn)",
    )


def num_steps(*, quick: bool, alloc_workers: int | None = None) -> int:
    num_sides = len(_threads(alloc_workers)) + 1
    return len(_IMAGES) * num_sides * (_num_samples(quick=quick) + 1)


def _threads(alloc_workers: int | None) -> tuple[int, ...]:
    return _THREADS if alloc_workers is None else (alloc_workers,)


def run(
    *,
    quick: bool,
    after_sample: AfterSample,
    images: tuple[int, ...] = _IMAGES,
    alloc_workers: int | None = None,
) -> Report:
    """``alloc_workers``: threads that read and digest; 0 is one after another."""
    threads = _threads(alloc_workers)
    report = Report("alloc", QUESTION)
    with (
        StoreServer(64 * MiB, shares={ObjectKind.RAW: 1.0}) as server,
        DaemonStore(server.address, name="bench", writable=True) as store,
        _pictures(max(images)) as paths,
    ):
        store.wait_populated()
        meter = BusyMeter()
        for number in images:
            allocation = _Allocation(store, paths[:number], max(1, *threads))
            sides: dict[str, Callable[[], float]] = {
                f"{count} threads": functools.partial(allocation.batched, count)
                for count in threads
            }
            sides["control"] = allocation.one_by_one
            alternate(sides, num_samples=_num_samples(quick=quick), after_sample=after_sample)
            for num_threads in threads:
                row_keys = {"images": number, "threads": num_threads}
                report.rows.append(Row(row_keys, allocation.samples(num_threads)))
        report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.goals = _goals(report.rows, images[-1])
    return report


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 5 * MIN_SAMPLES


def _goals(rows: list[Row], images: int) -> list[Goal]:
    last = [row for row in rows if row.keys["images"] == images]
    best = min(last, key=lambda row: row.median("total_ms"))
    rpc_ms, total_ms = best.median("rpc_ms"), best.median("total_ms")
    where = f"at {images}, {best.keys['threads']} threads"
    goals = [
        Goal(f"rpc_ms {where} <= {_GOAL_RPC_MS}", rpc_ms <= _GOAL_RPC_MS, rpc_ms),
        Goal(f"total_ms {where} <= {_GOAL_TOTAL_MS:g}", total_ms <= _GOAL_TOTAL_MS, total_ms),
    ]
    for name, times in (("rpc", _GOAL_RPC_TIMES), ("total", _GOAL_TOTAL_TIMES)):
        pairs = zip(best.samples[f"control_{name}_ms"], best.samples[f"{name}_ms"], strict=True)
        ratio = statistics.median(control / ours for control, ours in pairs)
        goals.append(
            Goal(f"control_{name}_ms / {name}_ms {where} >= {times:g}", ratio >= times, ratio)
        )
    return goals


class _Allocation:
    """The sides for one number of pictures; each returns the milliseconds of the whole."""

    def __init__(self, store: DaemonStore, paths: Sequence[Path], num_readers: int) -> None:
        self._store, self._paths = store, paths
        total_nbytes = sum(path.stat().st_size for path in paths)
        self._readers = [_Reader(total_nbytes) for _ in range(num_readers)]
        self._turns = itertools.count()
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._recorded: dict[str, list[float]] = {}

    def batched(self, num_threads: int) -> float:
        """The second of two in a row: the side before has left the caches cold."""
        self._batched(num_threads)
        return self._batched(num_threads)

    def one_by_one(self) -> float:
        """Likewise."""
        self._one_by_one()
        return self._one_by_one()

    def _batched(self, num_threads: int) -> float:
        tenant = str(next(self._turns))  # a new one each time, so that all are missing
        start = time.perf_counter()
        media = self._read(num_threads, tenant)
        items = [m.AcquireItem(key, ObjectKind.RAW, len(data), "self") for key, data in media]
        before = time.perf_counter()
        outcomes = self._store.acquire("bench", items)
        rpc_ms = (time.perf_counter() - before) * 1e3
        sealed = []
        for (_, data), outcome in zip(media, outcomes, strict=True):
            if outcome.state != "yours" or outcome.handle is None:
                raise RuntimeError("the benchmark met a picture that was there already")
            np.copyto(np.frombuffer(self._store.block(outcome.handle), np.uint8), data)
            sealed.append(m.SealItem(outcome.handle, len(data)))
        self._store.seal("bench", sealed)
        total_ms = (time.perf_counter() - start) * 1e3
        self._clear()
        self._record(f"{num_threads} rpc", rpc_ms)
        self._record(f"{num_threads} total", total_ms)
        return total_ms

    def _one_by_one(self) -> float:
        tenant = str(next(self._turns))
        rpc_ms, segments = 0.0, []
        start = time.perf_counter()
        for path in self._paths:
            data = path.read_bytes()
            key = _key(tenant, hashlib.md5(data).digest())  # noqa: S324 the control
            before = time.perf_counter()
            (outcome,) = self._store.acquire(
                "bench", [m.AcquireItem(key, ObjectKind.RAW, 64, "self")]
            )
            rpc_ms += (time.perf_counter() - before) * 1e3
            segments.append(_fresh_segment(data))
            if outcome.handle is not None:
                self._store.seal("bench", [m.SealItem(outcome.handle, 64)])
        total_ms = (time.perf_counter() - start) * 1e3
        for segment in segments:
            segment.close()
        self._clear()
        self._record("control rpc", rpc_ms)
        self._record("control total", total_ms)
        return total_ms

    def samples(self, num_threads: int) -> dict[str, list[float]]:
        """What was recorded, but for the first of two, and the first turn, which warm up."""
        found = {
            "rpc_ms": f"{num_threads} rpc",
            "total_ms": f"{num_threads} total",
            "control_rpc_ms": "control rpc",
            "control_total_ms": "control total",
        }
        return {name: self._recorded[recorded][3::2] for name, recorded in found.items()}

    def _read(self, num_threads: int, tenant: str) -> list[_Keyed]:
        if num_threads == 0:
            return self._readers[0].read(self._paths, tenant)
        parts = [self._paths[start::num_threads] for start in range(num_threads)]
        pool = self._pools.setdefault(num_threads, ThreadPoolExecutor(num_threads))
        found = pool.map(_Reader.read, self._readers, parts, itertools.repeat(tenant))
        return [keyed for part in found for keyed in part]

    def _clear(self) -> None:
        self._store.release("bench")
        self._store.evict(ObjectKind.RAW)

    def _record(self, name: str, value: float) -> None:
        self._recorded.setdefault(name, []).append(value)


class _Reader:
    """Reads files one after another into memory that it keeps: fresh memory is dear."""

    def __init__(self, capacity_nbytes: int) -> None:
        self._memory = np.zeros(capacity_nbytes, np.uint8)

    def read(self, paths: Sequence[Path], tenant: str) -> list[_Keyed]:
        found, start = [], 0
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            nbytes = os.readv(fd, [self._memory[start:]])  # type: ignore[list-item]
            os.close(fd)
            data = self._memory[start : start + nbytes]
            found.append((_key(tenant, keys.digest(data.data)), data))
            start += nbytes
        return found


def _key(tenant: str, digest: bytes) -> ContentKey:
    return keys.features_key(tenant=tenant, fingerprint=b"bench", options=b"", media=digest)


def _fresh_segment(data: bytes) -> mmap.mmap:
    fd = os.memfd_create("control")
    os.ftruncate(fd, len(data))
    segment = mmap.mmap(fd, len(data))
    os.close(fd)
    segment[:] = data
    return segment


@contextmanager
def _pictures(number: int) -> Iterator[list[Path]]:
    """Files of distinct pictures."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ConfigError("this benchmark needs Pillow: pip install pillow") from error
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="afferent-bench-") as folder:
        paths = []
        for index in range(number):
            coarse = rng.integers(0, 256, (46, 81, 3), dtype=np.uint8)
            picture = Image.fromarray(coarse).resize((644, 364), Image.Resampling.BICUBIC)
            encoded = io.BytesIO()
            picture.save(encoded, "JPEG", quality=_QUALITY)
            paths.append(Path(folder) / f"{index}.jpg")
            paths[-1].write_bytes(encoded.getvalue())
        yield paths
