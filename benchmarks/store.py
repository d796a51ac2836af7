"""Measure the cost of putting an object into the store, and of getting it in other processes.

A put is: create, write in place, seal, with a real daemon. The lower bound is one warm memcpy of
the same bytes by one thread; ``put_ratio`` is the multiple of it. ``threads`` copy: the library
uses two from 10 MB on, which has its own row. Compare the row with one thread with the baselines,
which all copy with one.

A get is: pin by handle and view as arrays, in ``readers`` of their own at the same time (eight are
limited to 500 a second each). Each reader gets many new objects, each once. Then it reads all bytes
(`read_ms`, the slowest reader), since a view defers a cost that a copy has already paid.

The baselines do what today's engines do:

- `ring`: a shared-memory ring (vLLM's `MessageQueue`, and its cache of processed items): the writer
  copies into warm memory, each reader copies out of it into its own warm memory. None beyond 128
  MiB, as in vLLM's cache.
- `segment`: a new segment of shared memory for each object (SGLang's transport: allocate, copy, map
  again, free). It touches new pages each time.
- `ray`: Ray's object store, a Plasma, where it is installed (``make bench-ray``).

Our side is a writer, a daemon and the readers; a ring has no daemon; Ray has several.

Expected before the measurement: a put by one thread ties with the ring's (both are a memcpy; ours
takes 0.1 ms more for its two round trips, so up to 4 times at 1 MB), two threads 0.7 to 0.8 of it
from 50 MB on; Ray 2 to 3 times ours at 5 MB, a tie at 50 MB. A get of 60 to 100 us at any size with
one reader; the ring's grows from the same at 1 MB to 5 to 10 ms at 50 MB; Ray's 2 to 5 times ours.
With all bytes read, half to a third of the ring's from 5 MB on; a tie at 1 MB and with eight
readers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from afferent.store.block.copying import SPLIT_NBYTES
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.types import MiB, ObjectKind
from benchmarks.peers import ray_store
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate
from benchmarks.store_sides import MAX_RING_NBYTES, Getting, Putting, Readers, readers_of

QUESTION = (
    "What does it cost to put an object into the store, and to get it elsewhere, beside a warm "
    "ring (vLLM), a fresh segment (SGLang) and Plasma (Ray)?"
)
COLUMNS = (
    "nbytes",
    "readers",
    "threads",
    "memcpy_ms",
    "put_ratio",
    "control_ring_put_ratio",
    "ray_put_ratio",
    "control_segment_ms",
    "get_us",
    "control_ring_get_us",
    "ray_get_us",
    "read_ms",
    "control_ring_read_ms",
    "ray_read_ms",
)

_NBYTES, _QUICK_NBYTES = (1_000_000, 5_000_000, 50_000_000, 500_000_000), (1_000_000, 50_000_000)
_READERS, _QUICK_READERS = (1, 2, 4, 8), (1, 4)
_GETS_NBYTES, _QUICK_GETS_NBYTES = 400_000_000, 150_000_000  # size of all objects in one sample
_LARGE_NBYTES = 50_000_000
_GOAL_RATIO, _GOAL_EXTRA_US, _GOAL_GET_US, _GOAL_FLAT = 1.3, 150.0, 120.0, 1.5
_GOAL_TIES, _GOAL_READ_TIMES = {1_000_000: 1.0, _LARGE_NBYTES: 1.15}, 2.0

AfterSample = Callable[[], None]
Samples = dict[str, list[float]]


def num_steps(*, quick: bool) -> int:
    num_samples, sizes, numbers = _num_samples(quick=quick), _sizes(quick), _numbers(quick)
    num_puts = sum(len(_put_sides(nbytes)) for nbytes in sizes) * (num_samples + 1)
    num_gets = sum(len(_get_sides(nbytes)) for nbytes in sizes) * (num_samples + 1)
    return num_puts + len(numbers) * num_gets


def _sizes(quick: bool) -> tuple[int, ...]:
    return _QUICK_NBYTES if quick else _NBYTES


def _numbers(quick: bool) -> tuple[int, ...]:
    return _QUICK_READERS if quick else _READERS


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 3 * MIN_SAMPLES


def run(
    *,
    quick: bool,
    after_sample: AfterSample,
    sizes_nbytes: tuple[int, ...] | None = None,
    num_readers: tuple[int, ...] | None = None,
) -> Report:
    sizes, numbers = sizes_nbytes or _sizes(quick), num_readers or _numbers(quick)
    gets_nbytes = _QUICK_GETS_NBYTES if quick else _GETS_NBYTES
    arena_nbytes = max(2 * max(sizes), gets_nbytes) + max(sizes) // 2 + 64 * MiB
    num_samples = _num_samples(quick=quick)
    report = Report("store", QUESTION, notes=_notes(sizes))
    with ExitStack() as stack:
        server = stack.enter_context(
            StoreServer(arena_nbytes, shares={ObjectKind.FEATURES: 1.0}, preallocate=True)
        )
        store = stack.enter_context(DaemonStore(server.address, name="writer", writable=True))
        store.wait_populated()
        ray = stack.enter_context(ray_store.ray_store(arena_nbytes, max(numbers)))
        readers = stack.enter_context(readers_of(server.address, max(numbers)))
        meter = BusyMeter()
        for nbytes in sizes:
            tree = {"pixel_values": np.arange(nbytes, dtype=np.uint8)}
            puts = _put_samples(Putting(store, ray, tree), num_samples, after_sample)
            for number in numbers:
                getting = Getting(store, ray, tree, Readers(readers[:number]), gets_nbytes)
                gets = _get_samples(getting, num_samples, after_sample)
                report.rows += _rows(nbytes, number, puts, gets, is_first=number == numbers[0])
        report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.goals = _goals(report.rows)
    return report


def _notes(sizes: Sequence[int]) -> list[str]:
    notes = ["threads: those that copy for put_ratio; all else is copied by one thread"]
    if max(sizes) > MAX_RING_NBYTES:
        notes.append("ring: none beyond 128 MiB, as in vLLM's cache")
    if not ray_store.is_installed():
        notes.append(ray_store.MISSING)
    return notes


def _threads(nbytes: int) -> tuple[int, ...]:
    """Return the numbers of threads; below a size, the library itself uses one."""
    return (1, 2) if nbytes >= SPLIT_NBYTES else (1,)


def _put_sides(nbytes: int) -> list[str]:
    sides = ["memcpy", *(f"put_{threads}" for threads in _threads(nbytes)), "segment"]
    return [*sides, *(side for side in _get_sides(nbytes) if side != "afferent")]


def _get_sides(nbytes: int) -> list[str]:
    ring = ["ring"] if nbytes <= MAX_RING_NBYTES else []
    return ["afferent", *ring, *(["ray"] if ray_store.is_installed() else [])]


def _put_samples(putting: Putting, num_samples: int, after_sample: AfterSample) -> Samples:
    """Return the milliseconds of each side."""
    sides = {side: getattr(putting, side) for side in _put_sides(putting.nbytes)}
    return alternate(sides, num_samples=num_samples, after_sample=after_sample)


def _get_samples(getting: Getting, num_samples: int, after_sample: AfterSample) -> Samples:
    """Return the microseconds until each side has arrays, and the milliseconds of reading all."""
    read_ms: Samples = {}
    with getting:
        sides = {}
        for name in _get_sides(getting.nbytes):

            def side(name: str = name) -> float:
                took = getting.get(name)
                read_ms.setdefault(f"{name} read", []).append(took.read_ms)
                return took.get_us

            sides[name] = side
        get_us = alternate(sides, num_samples=num_samples, after_sample=after_sample)
    return {**get_us, **{name: values[1:] for name, values in read_ms.items()}}


def _rows(nbytes: int, number: int, puts: Samples, gets: Samples, *, is_first: bool) -> list[Row]:
    """Return a row for each number of threads; only the first number of readers has several."""
    memcpy_ms = puts["memcpy"]
    shared = {
        "memcpy_ms": memcpy_ms,
        "control_segment_ms": puts["segment"],
        "get_us": gets["afferent"],
        "read_ms": gets["afferent read"],
    }
    for side, prefix in (("ring", "control_ring"), ("ray", "ray")):
        if side in gets:
            shared[f"{prefix}_put_ratio"] = _ratios(puts[side], memcpy_ms)
            shared[f"{prefix}_get_us"] = gets[side]
            shared[f"{prefix}_read_ms"] = gets[f"{side} read"]
    rows = []
    for threads in _threads(nbytes) if is_first else _threads(nbytes)[-1:]:
        put_ms = puts[f"put_{threads}"]
        samples = {
            **shared,
            "put_ratio": _ratios(put_ms, memcpy_ms),
            "put_extra_us": [
                (put - memcpy) * 1e3 for put, memcpy in zip(put_ms, memcpy_ms, strict=True)
            ],
        }
        rows.append(Row({"nbytes": nbytes, "readers": number, "threads": threads}, samples))
    return rows


def _ratios(values: Sequence[float], to: Sequence[float]) -> list[float]:
    return [value / base for value, base in zip(values, to, strict=True)]


def _goals(rows: list[Row]) -> list[Goal]:
    goals = []

    def at_most(what: str, value: float, limit: float) -> None:
        goals.append(Goal(f"{what} <= {limit:g}", value <= limit, value))

    for row in (row for row in rows if row.keys["readers"] == 1):
        nbytes, threads = row.keys["nbytes"], row.keys["threads"]
        where = f"at {nbytes / 1e6:g} MB, threads {threads}"
        if nbytes >= _LARGE_NBYTES:
            at_most(f"put_ratio {where}", row.median("put_ratio"), _GOAL_RATIO)
        else:
            at_most(f"put_extra_us {where}", row.median("put_extra_us"), _GOAL_EXTRA_US)
        if nbytes in _GOAL_TIES and threads == 1:
            ring = row.samples["control_ring_put_ratio"]
            tie = statistics.median(_ratios(row.samples["put_ratio"], ring))
            at_most(f"put / ring's put {where}", tie, _GOAL_TIES[nbytes])
        if nbytes == _LARGE_NBYTES and threads == 1:
            times = statistics.median(
                _ratios(row.samples["control_ring_read_ms"], row.samples["read_ms"])
            )
            what = f"control_ring_read_ms / read_ms at 50 MB, 1 reader >= {_GOAL_READ_TIMES:g}"
            goals.append(Goal(what, times >= _GOAL_READ_TIMES, times))
    for number in sorted({row.keys["readers"] for row in rows}):
        medians = [row.median("get_us") for row in rows if row.keys["readers"] == number]
        at_most(f"get_us with {number} readers, any size", max(medians), _GOAL_GET_US)
        if number == 1:
            at_most("get_us, dearest / cheapest size", max(medians) / min(medians), _GOAL_FLAT)
    return goals
