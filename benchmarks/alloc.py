"""Measure the cost of storing the images of a request, all of them new.

Both sides do the same work: read the files into memory of their own, as a request's bytes arrive;
digest them; allocate all of them in one call; copy them; report in one call that all are ready. The
files are JPEGs of 644 x 364 (about 55 KB) in the page cache. The release is not measured.

Afferent's side is one call of the public library, `ItemCache.load`, with all its costs: files,
BLAKE3, keys over tenant, model and options, one allocation, copies, one seal, and a store daemon.
Its *call* is `ItemCache.allocate` of as many new keys, by itself.

The baseline is a batched cache server (`peers/lightllm.py`: LightLLM's newest, without the cost of
rpyc): md5, `allocate`, a call that returns the ready images, a segment of shared memory for each
image, a call at the end, and a server process. With ``--lightllm FOLDER``, LightLLM's own server in
a clone of its first version takes part, too (`peers/lightllm_own.py`).

Both have one client and one server, which wait for each other, and ``threads`` that read and digest
(0: the client itself). Afferent's side reads into memory that is reused for the next call; the
baseline reads each file into new memory, as its frontend does. Only the baseline touches new pages
of shared memory, because it uses a segment for each image.

Expected before the measurement, at 128 images: the call 0.6 ms on both sides, because a list of
digests costs the same in msgpack on both, and ours also allocates (0.5 to 1.0 times); the whole 6
to 8 ms against 15 to 25 (2 to 3 times): md5 costs 2 to 4 times as much as BLAKE3, and 128 segments
cost as much again. At 4 images some 1.5 times.
"""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np

from afferent import keys
from afferent.errors import ConfigError
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.client.item_cache import ItemCache
from afferent.store.daemon.server import StoreServer
from afferent.types import ContentKey, MiB, Modality, ObjectKind
from benchmarks.peers.lightllm import CacheClient, cache_server, md5
from benchmarks.peers.lightllm_own import OwnClient, own_server
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate

QUESTION = (
    "What does it cost to bring the images of a request into the store, beside a batched cache "
    "server with a segment for each (LightLLM)?"
)
COLUMNS = (
    *("images", "threads", "rpc_ms", "total_ms", "control_rpc_ms", "control_total_ms"),
    "lightllm_total_ms",
)

_IMAGES = (4, 16, 64, 128)
_THREADS = (0, 2)
_GOAL_RPC_MS, _GOAL_TOTAL_MS, _GOAL_RPC_TIMES, _GOAL_TOTAL_TIMES = 1.0, 8.0, 0.5, 6.0
_QUALITY = 82  # some 55 KB for each file
_NUM_TOKENS = 299

AfterSample = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--alloc-workers",
        type=int,
        metavar="N",
        help="threads that read and digest, on both sides; 0: one image after another "
        f"(default: {', '.join(map(str, _THREADS))} in turn)",
    )
    parser.add_argument(
        "--lightllm",
        type=Path,
        metavar="FOLDER",
        help="a clone of LightLLM, whose own server takes part",
    )


def num_steps(
    *, quick: bool, alloc_workers: int | None = None, lightllm: Path | None = None
) -> int:
    num_sides = 2 * len(_threads(alloc_workers)) + (lightllm is not None)
    return len(_IMAGES) * num_sides * (_num_samples(quick=quick) + 1)


def _threads(alloc_workers: int | None) -> tuple[int, ...]:
    return _THREADS if alloc_workers is None else (alloc_workers,)


def run(
    *,
    quick: bool,
    after_sample: AfterSample,
    images: tuple[int, ...] = _IMAGES,
    alloc_workers: int | None = None,
    lightllm: Path | None = None,
) -> Report:
    """Run the benchmark; ``alloc_workers`` threads read and digest, or 0 for the client itself."""
    threads = _threads(alloc_workers)
    report = Report("alloc", QUESTION)
    report.notes.append(
        "ours: ItemCache.load and a store daemon; control: a client and a cache server on TCP; "
        "threads: those that read and digest, the same on both sides"
    )
    with (
        StoreServer(64 * MiB, shares={ObjectKind.RAW: 1.0}, preallocate=True) as server,
        DaemonStore(server.address, name="bench", writable=True) as store,
        cache_server() as control,
        own_server(lightllm) if lightllm else nullcontext() as own,
        _image_files(max(images)) as paths,
    ):
        store.wait_populated()
        meter = BusyMeter()
        for number in images:
            with _Allocation(store, control, own, paths[:number], threads) as allocation:
                sides: dict[str, Callable[[], float]] = {}
                for count in threads:
                    sides[f"{count}"] = functools.partial(allocation.ours, count)
                    sides[f"{count} control"] = functools.partial(allocation.control, count)
                if own is not None:
                    sides["lightllm"] = allocation.lightllm
                alternate(sides, num_samples=_num_samples(quick=quick), after_sample=after_sample)
                for count in threads:
                    row_keys = {"images": number, "threads": count}
                    report.rows.append(Row(row_keys, allocation.samples(count)))
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
        Goal(f"rpc_ms {where} <= {_GOAL_RPC_MS:g}", rpc_ms <= _GOAL_RPC_MS, rpc_ms),
        Goal(f"total_ms {where} <= {_GOAL_TOTAL_MS:g}", total_ms <= _GOAL_TOTAL_MS, total_ms),
    ]
    for name, times in (("rpc", _GOAL_RPC_TIMES), ("total", _GOAL_TOTAL_TIMES)):
        pairs = zip(best.samples[f"control_{name}_ms"], best.samples[f"{name}_ms"], strict=True)
        ratio = statistics.median(control / ours for control, ours in pairs)
        goals.append(
            Goal(f"control_{name}_ms / {name}_ms {where} >= {times:g}", ratio >= times, ratio)
        )
    for row in last:
        if theirs := row.samples.get("lightllm_total_ms"):
            pairs = zip(theirs, row.samples["total_ms"], strict=True)
            ratio = statistics.median(other / ours for other, ours in pairs)
            what = f"lightllm_total_ms / total_ms at {images} >= {_GOAL_TOTAL_TIMES:g}"
            goals.append(Goal(what, ratio >= _GOAL_TOTAL_TIMES, ratio))
    return goals


class _Allocation:
    """The sides for one number of images; each returns the milliseconds of the whole.

    Each runs twice and the second run counts: the side before has left the caches cold.
    """

    def __init__(
        self,
        store: DaemonStore,
        control: CacheClient,
        own: OwnClient | None,
        paths: Sequence[Path],
        threads: Sequence[int],
    ) -> None:
        self._caches = {
            count: ItemCache(store, kind=ObjectKind.RAW, num_workers=count) for count in threads
        }
        self._store, self._control, self._own, self._paths = store, control, own, paths
        self._turns = itertools.count()
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._recorded: dict[str, list[float]] = {}

    def __enter__(self) -> _Allocation:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.shutdown()

    def ours(self, num_threads: int) -> float:
        self._ours(num_threads)
        return self._ours(num_threads)

    def control(self, num_threads: int) -> float:
        self._by_control(num_threads)
        return self._by_control(num_threads)

    def _ours(self, num_threads: int) -> float:
        turn = next(self._turns)  # a new tenant each time, so that all images are misses
        key_of = functools.partial(_key, f"{turn}")
        cache = self._caches[num_threads]
        start = time.perf_counter()
        loaded = cache.load("bench", self._paths, key_of)
        total_ms = (time.perf_counter() - start) * 1e3
        if len({one.handle for one in loaded}) < len(self._paths):
            raise RuntimeError("the benchmark met an image that was there already")
        sizes = {_key(f"{turn} call", one.digest): one.handle.nbytes for one in loaded}
        before = time.perf_counter()
        cache.allocate("bench", sizes)
        rpc_ms = (time.perf_counter() - before) * 1e3
        cache.release("bench")
        self._store.evict(ObjectKind.RAW)
        return self._record(f"{num_threads}", rpc_ms, total_ms)

    def _by_control(self, num_threads: int) -> float:
        start = time.perf_counter()
        read = self._read(num_threads)
        before = time.perf_counter()
        records = self._control.allocate(
            [digest for _, digest in read], [_NUM_TOKENS] * len(self._paths)
        )
        rpc_ms = (time.perf_counter() - before) * 1e3
        segments = self._control.store(records, [data for data, _ in read])
        total_ms = (time.perf_counter() - start) * 1e3
        self._control.clear()
        for segment in segments:
            segment.unlink()
        if len(segments) < len(self._paths):
            raise RuntimeError("the benchmark met an image that was there already")
        return self._record(f"{num_threads} control", rpc_ms, total_ms)

    def lightllm(self) -> float:
        self._by_lightllm()
        return self._by_lightllm()

    def _by_lightllm(self) -> float:
        if self._own is None:
            raise RuntimeError("LightLLM does not take part")
        suffix = f"_{len(self._paths)}_{next(self._turns)}"  # so that all images are misses
        start = time.perf_counter()
        names = self._own.store(self._paths, suffix=suffix, num_tokens=_NUM_TOKENS)
        total_ms = (time.perf_counter() - start) * 1e3
        self._own.remove(names)
        self._recorded.setdefault("lightllm total", []).append(total_ms)
        return total_ms

    def samples(self, num_threads: int) -> dict[str, list[float]]:
        """Return the measurements without warm-up: each second run, without the first turn."""
        found = {
            "rpc_ms": f"{num_threads} rpc",
            "total_ms": f"{num_threads} total",
            "control_rpc_ms": f"{num_threads} control rpc",
            "control_total_ms": f"{num_threads} control total",
        }
        if self._own is not None and not num_threads:  # it reads one image after another
            found["lightllm_total_ms"] = "lightllm total"
        return {name: self._recorded[recorded][3::2] for name, recorded in found.items()}

    def _read(self, num_threads: int) -> list[tuple[bytes, str]]:
        if num_threads == 0:
            return list(map(_read_one, self._paths))
        pool = self._pools.setdefault(num_threads, ThreadPoolExecutor(num_threads))
        parts = [self._paths[start::num_threads] for start in range(num_threads)]
        read = pool.map(lambda part: list(map(_read_one, part)), parts)
        return [one for part in read for one in part]

    def _record(self, side: str, rpc_ms: float, total_ms: float) -> float:
        self._recorded.setdefault(f"{side} rpc", []).append(rpc_ms)
        self._recorded.setdefault(f"{side} total", []).append(total_ms)
        return total_ms


def _read_one(path: Path) -> tuple[bytes, str]:
    data = path.read_bytes()
    return data, md5(data)


def _key(tenant: str, digest: bytes) -> ContentKey:
    return keys.item_key(tenant=tenant, fingerprint=b"bench", modality=Modality.IMAGE, media=digest)


@contextmanager
def _image_files(number: int) -> Iterator[list[Path]]:
    """Yield files with different images."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ConfigError("this benchmark needs Pillow: pip install pillow") from error
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="afferent-bench-") as folder:
        paths = []
        for index in range(number):
            coarse = rng.integers(0, 256, (46, 81, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize((644, 364), Image.Resampling.BICUBIC)
            encoded = io.BytesIO()
            image.save(encoded, "JPEG", quality=_QUALITY)
            paths.append(Path(folder) / f"{index}.jpg")
            paths[-1].write_bytes(encoded.getvalue())
        yield paths
