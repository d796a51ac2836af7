"""Measure the rate of copies from the arena to the GPU, and the time for which the GPU waits.

- `locked` copies from the arena with its pages locked once, as the engine's workers do.
- `pageable` copies from the same arena without locked pages.
- `pin_memory` copies a tensor on the heap into pinned memory first, as engines do that receive
  tensors in messages (vLLM and SGLang call `pin_memory`).

The lower bound is a copy from memory that is already pinned.

`idle` is the part of the time in which the GPU computes nothing, in a loop like that of an engine:
while it computes one batch, the features of the next one are copied. A computation takes as long as
a copy at the lower bound. The benchmark needs a GPU with CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from afferent.errors import ConfigError
from afferent.store.arena import ArenaMap
from afferent.store.block import codec
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.types import MiB, ObjectKind
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate

QUESTION = "How fast do features come from the arena to the GPU, and does the GPU wait for them?"
_WAYS = ("floor", "locked", "pageable", "pin_memory")
_SIDES = (*(f"{way}_gbps" for way in _WAYS), *(f"{way}_idle" for way in _WAYS))
COLUMNS = ("nbytes", *_SIDES)

_NBYTES = (1_000_000, 12_800_000, 100_000_000)
_NUM_STEPS = 20
_MATRIX_SIDE = 1024
_WARM_UP_S = 0.3
_GOAL_FLOOR, _GOAL_IDLE = 0.9, 0.1

AfterSample = Callable[[], None]


def num_steps(*, quick: bool) -> int:
    return len(_NBYTES) * len(_SIDES) * (_num_samples(quick=quick) + 1)


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 3 * MIN_SAMPLES


def run(*, quick: bool, after_sample: AfterSample) -> Report:
    """Run the benchmark.

    Raises:
        ConfigError: There is no GPU, or no torch that can use one.
    """
    torch = _torch()
    report = Report("gpu", QUESTION)
    with (
        StoreServer(256 * MiB, shares={ObjectKind.FEATURES: 1.0}, preallocate=True) as server,
        DaemonStore(server.address, name="bench producer", writable=True) as producer,
        DaemonStore(server.address, name="bench worker") as worker,
    ):
        worker.wait_populated()
        meter = BusyMeter()
        for nbytes in _NBYTES:
            tree = {"pixel_values": np.ones(nbytes, np.uint8)}
            handle = producer.put("kept", tree)
            worker.get("bench", [handle])
            viewed: Any = codec.view(worker.block(handle), tensors="torch")
            case = _Case(torch, worker.arena, viewed["pixel_values"])
            sides = {f"{way}_gbps": functools.partial(case.gbps, way) for way in _WAYS}
            sides |= {f"{way}_idle": functools.partial(case.idle, way) for way in _WAYS}
            samples = alternate(
                sides, num_samples=_num_samples(quick=quick), after_sample=after_sample
            )
            report.rows.append(Row({"nbytes": nbytes}, samples))
            del viewed, case, sides
            worker.release("bench")
            producer.release("kept")
        report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.goals = _goals(report.rows[-1])
    return report


def _torch() -> Any:
    try:
        torch: Any = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise ConfigError("this benchmark needs torch: pip install '.[engine]'") from error
    if not torch.cuda.is_available():
        raise ConfigError("this benchmark needs a GPU with CUDA, and torch finds none")
    return torch


def _goals(row: Row) -> list[Goal]:
    where = f"at {row.keys['nbytes']:,} bytes"
    ratio, idle = row.median("locked_gbps") / row.median("floor_gbps"), row.median("locked_idle")
    return [
        Goal(f"locked / floor {where} >= {_GOAL_FLOOR}", ratio >= _GOAL_FLOOR, ratio),
        Goal(f"locked_idle {where} <= {_GOAL_IDLE}", idle <= _GOAL_IDLE, idle),
    ]


class _Case:
    """One size; each side copies in one way."""

    def __init__(self, torch: Any, arena: ArenaMap, viewed: Any) -> None:
        """Prepare the copies; ``viewed`` is a tensor over the arena."""
        from afferent.builtin.engine.worker.page_lock import PageLock

        self._torch, self._arena, self._lock = torch, arena, PageLock.of_this_machine()
        on_heap = viewed.clone()
        self._sources = {
            "floor": on_heap.pin_memory(),
            "locked": viewed,
            "pageable": viewed,
            "pin_memory": on_heap,
        }
        self._targets = [torch.empty_like(on_heap, device="cuda") for _ in range(2)]
        self._matrix = torch.ones(_MATRIX_SIDE, _MATRIX_SIDE, device="cuda")
        self._num_products = self._products_during(on_heap.nbytes / 1e9 / self.gbps("floor"))

    def gbps(self, way: str) -> float:
        """Return the rate of successive copies, until the last has arrived."""
        with self._prepared(way):
            self._copy(way, self._targets[0])
            self._torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_NUM_STEPS):
                self._copy(way, self._targets[0])
            self._torch.cuda.synchronize()
            took_s = time.perf_counter() - start
        return float(_NUM_STEPS * self._targets[0].nbytes / 1e9 / took_s)

    def idle(self, way: str) -> float:
        """Return the part of a loop's time in which nothing was computed."""
        cuda = self._torch.cuda
        computing, copying = cuda.Stream(), cuda.Stream()
        copied = [cuda.Event(), cuda.Event()]
        spans = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_NUM_STEPS)]
        with self._prepared(way):
            with cuda.stream(copying):
                self._copy(way, self._targets[0])
                copied[0].record()
            cuda.synchronize()
            start = time.perf_counter()
            for step, (begin, end) in enumerate(spans):
                here, there = step % 2, (step + 1) % 2
                with cuda.stream(computing):
                    computing.wait_event(copied[here])
                    begin.record()
                    self._compute(self._targets[here])
                    end.record()
                with cuda.stream(copying):
                    if step:  # wait for the computation with the previous data
                        copying.wait_event(spans[step - 1][1])
                    self._copy(way, self._targets[there])
                    copied[there].record()
            cuda.synchronize()
            took_ms = (time.perf_counter() - start) * 1e3
        computed_ms = sum(float(begin.elapsed_time(end)) for begin, end in spans)
        return max(0.0, 1.0 - computed_ms / took_ms)

    @contextlib.contextmanager
    def _prepared(self, way: str) -> Iterator[None]:
        """Lock the arena's pages for one way only, outside of the measured time."""
        if way != "locked" or self._lock is None:
            yield
            return
        self._lock.follow(self._arena)
        try:
            if not self._sources[way].is_pinned():
                raise ConfigError("this GPU's driver does not lock the arena's pages")
            yield
        finally:
            self._lock.release()

    def _copy(self, way: str, target: Any) -> None:
        source = self._sources[way]
        target.copy_(source.pin_memory() if way == "pin_memory" else source, non_blocking=True)

    def _compute(self, features: Any) -> None:
        features.max()
        for _ in range(self._num_products):
            self._torch.mm(self._matrix, self._matrix)

    def _products_during(self, copy_s: float) -> int:
        """Return the number of products with which a computation takes as long as a copy."""
        few, many = self._seconds_with(1), self._seconds_with(1 + _NUM_STEPS)
        product_s = (many - few) / _NUM_STEPS
        return max(1, round(1 + (copy_s - few) / product_s))

    def _seconds_with(self, num_products: int) -> float:
        """Return the time of one computation, in a series of them, on a GPU that is warm."""
        self._num_products = num_products
        took_s, begun = 0.0, time.perf_counter()
        while time.perf_counter() - begun < _WARM_UP_S:
            self._torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_NUM_STEPS):
                self._compute(self._targets[0])
            self._torch.cuda.synchronize()
            took_s = time.perf_counter() - start
        return took_s / _NUM_STEPS
