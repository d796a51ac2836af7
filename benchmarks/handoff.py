"""Measure the time of features from an engine's core to all of its workers.

The features are in the arena already, in a tree of one large tensor. The time ends when the last
worker has reported its arrays. The core pins for all workers in one round trip to the store's
daemon, and sends each the handle. The lower bound is an empty message to each worker and its
answer.

The baselines send the tensors to each worker: pickled through a pipe (LMDeploy); as msgpack with
the tensors out of band through ZMQ (vLLM, for data that are too large for its ring); and through a
ring in shared memory whose chunks are large enough (vLLM). The ring's workers copy into warm memory
that they reuse, the others into the memory of the sockets.

Our side is a core, a store daemon and the workers; a baseline has the core and the workers, and a
thread of ZMQ in each.

Expected before the measurement: 0.3 ms for any size. The ring is the best baseline: one memcpy of
the core, and one of each worker, so 8 workers on two cores need five in a row, some 50 ms at 50 MB.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from afferent.errors import InternalError
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.types import Handle, MiB, ObjectKind
from benchmarks.engine_workers import EngineWorkers, engine_workers
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate

QUESTION = (
    "How long do features take from an engine's core to all of its workers, beside pipes "
    "(LMDeploy), ZMQ and a ring (vLLM)?"
)

_NBYTES = (1_000_000, 12_800_000, 50_000_000, 100_000_000)
_WORKERS = (1, 2, 4, 8)
_QUICK_NBYTES, _QUICK_WORKERS = (1_000_000, 12_800_000), (2, 8)
_SIDES = ("floor_ms", "handle_ms", "control_pipe_ms", "control_zmq_ms", "control_ring_ms")
COLUMNS = ("nbytes", "workers", *_SIDES)
_NUM_IN_A_ROW = 40
_ROW_NBYTES = 1176
_GOAL_MS, _GOAL_FLAT = 0.3, 1.5

AfterSample = Callable[[], None]


def num_steps(*, quick: bool) -> int:
    sizes, workers = _cases(quick=quick)
    return len(sizes) * len(workers) * len(_SIDES) * (_num_samples(quick=quick) + 1)


def _cases(*, quick: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (_QUICK_NBYTES, _QUICK_WORKERS) if quick else (_NBYTES, _WORKERS)


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 2 * MIN_SAMPLES


def run(
    *,
    quick: bool,
    after_sample: AfterSample,
    sizes_nbytes: tuple[int, ...] | None = None,
    num_workers: tuple[int, ...] | None = None,
) -> Report:
    all_sizes, all_workers = _cases(quick=quick)
    sizes, workers = sizes_nbytes or all_sizes, num_workers or all_workers
    report = Report("handoff", QUESTION)
    arena_nbytes = max(2 * max(sizes), 16 * MiB)
    with (
        StoreServer(arena_nbytes, shares={ObjectKind.FEATURES: 1.0}, preallocate=True) as server,
        DaemonStore(server.address, name="producer", writable=True) as producer,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        producer.wait_populated()
        meter = BusyMeter()
        for number in workers:
            stack = AsyncExitStack()
            started = stack.enter_async_context(
                engine_workers(server.address, number, ring_chunk_nbytes=max(sizes))
            )
            made = runner.run(started)
            try:
                for nbytes in sizes:
                    case = _Case(runner, made, producer, nbytes)
                    samples = case.samples(_num_samples(quick=quick), after_sample)
                    report.rows.append(Row({"nbytes": nbytes, "workers": number}, samples))
            finally:
                runner.run(stack.aclose())
        report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.goals = _goals(report.rows)
    return report


def _goals(rows: list[Row]) -> list[Goal]:
    most = max(row.keys["workers"] for row in rows)
    medians = {
        row.keys["nbytes"]: row.median("handle_ms") for row in rows if row.keys["workers"] == most
    }
    worst, flat = max(medians.values()), max(medians.values()) / min(medians.values())
    return [
        Goal(f"handle_ms with {most} workers, any size <= {_GOAL_MS}", worst <= _GOAL_MS, worst),
        Goal(
            f"with {most} workers, dearest / cheapest size <= {_GOAL_FLAT}",
            flat <= _GOAL_FLAT,
            flat,
        ),
    ]


@dataclass(slots=True)
class _Case:
    """One size and one number of workers; its sides return milliseconds."""

    runner: asyncio.Runner
    workers: EngineWorkers
    producer: DaemonStore
    nbytes: int

    def samples(self, num_samples: int, after_sample: AfterSample) -> dict[str, list[float]]:
        tree = {"pixel_values": np.ones((self.nbytes // _ROW_NBYTES, _ROW_NBYTES), np.uint8)}
        handle = self.producer.put("kept", tree)
        sides = {
            "floor_ms": lambda: self._often(self._ping),
            "handle_ms": lambda: self._often(lambda: self._view(handle, tree)),
            "control_pipe_ms": lambda: self._once(self.workers.send_through_pipes, tree),
            "control_zmq_ms": lambda: self._once(self.workers.send_through_zmq, tree),
            "control_ring_ms": lambda: self._once(self.workers.send_through_ring, tree),
        }
        try:
            return alternate(sides, num_samples=num_samples, after_sample=after_sample)
        finally:
            self.producer.release("kept")

    def _often(self, work: Callable[[], Awaitable[float]]) -> float:
        """Return the median of many runs, after one that warms up."""

        async def all_of_them() -> list[float]:
            return [await work() for _ in range(_NUM_IN_A_ROW + 1)]

        return statistics.median(self.runner.run(all_of_them())[1:])

    async def _ping(self) -> float:
        start = time.perf_counter()
        await self.workers.ping()
        return (time.perf_counter() - start) * 1e3

    async def _view(self, handle: Handle, tree: dict[str, Any]) -> float:
        start = time.perf_counter()
        seen = await self.workers.view([handle])
        took_ms = (time.perf_counter() - start) * 1e3
        _check(seen, tree)
        await self.workers.let_go()
        return took_ms

    def _once(
        self, send: Callable[[list[dict[str, Any]]], Awaitable[list[int]]], tree: dict[str, Any]
    ) -> float:
        async def timed() -> float:
            start = time.perf_counter()
            seen = await send([tree])
            took_ms = (time.perf_counter() - start) * 1e3
            _check(seen, tree)
            return took_ms

        return self.runner.run(timed())


def _check(seen: list[int], tree: dict[str, Any]) -> None:
    if set(seen) != {tree["pixel_values"].nbytes}:
        raise InternalError("a worker does not see what was handed to it")
