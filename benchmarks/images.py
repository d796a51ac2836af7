"""Measure the cost of the images of one request on their way to every worker of the engine.

Images are JPEGs of 644 x 364 in one body; features are bytes, as the Qwen2-VL family makes them.
The times are:

- `afferent_ms`: from existing features to arrays of all of them in both workers of an engine;
- `whole_ms`: from the last byte of the body to the same, through the server's own body reader,
  plans, keys, jobs for two preprocess workers, their features, and the hand-off;
- `cut_ms`: the work on bytes that arrived before the last one: they are cut out and decoded from
  base64 on arrival.

The lower bound is an empty message through the engine's core to each worker, and the answers.

The baselines have everything on the heap, as engines do:

- `control_ms` sends existing features to the core as msgpack with the tensors out of band (vLLM).
  The core hands them to both workers by a ring in shared memory that is large enough for all of
  them (vLLM's `MessageQueue`, whose chunks are 16 MiB).
- `control_zmq_ms` differs in the last hop: a socket to each worker (vLLM, where the ring's chunks
  are too small).
- `control_whole_ms` parses the body, decodes and processes the same images with the same decoders
  and kernels on two threads, and continues as `control_ms`.

Our processes are a frontend (the benchmark itself), a store daemon, two preprocess workers, a core
and two engine workers. Those of the baselines are a frontend with an event loop and two threads, a
core and two engine workers. On either side, at most two need a processor for long at a time.

Expected before the measurement: the hand-off of 100 images (70 MB) 10 times faster than the better
baseline, because that copies four times and ours not at all; the whole 1.3 to 1.8 times, with
`cut_ms`, since decoding is most of both; with one image no gain, 0.8 to 1.1 times, because a job
has to wake another process.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from afferent.config import ServeConfig
from afferent.errors import ConfigError, InternalError
from afferent.media.families.registry import AnyFamily, describe
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.types import Handle, MiB
from benchmarks import preprocess
from benchmarks.controls.heap_frontend import HeapFrontend
from benchmarks.engine_core import EngineCore, engine_core
from benchmarks.engine_workers import Trees
from benchmarks.images_frontend import Frontend, chat_body
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate

QUESTION = (
    "What do the images of a request cost on their way to both workers of an engine, beside "
    "the heap, ZMQ and a ring (vLLM)?"
)
_SIDES = ("floor_ms", "afferent_ms", "control_ms", "control_zmq_ms", "whole_ms", "control_whole_ms")
COLUMNS = ("images", "workers", *_SIDES, "cut_ms")

_IMAGES, _QUICK_IMAGES = (1, 10, 20, 30, 40, 50, 100), (1, 10, 100)
_NUM_WORKERS = 2
_NUM_THREADS = 2  # as many as there are preprocess workers
_RAW_SHARE = 0.1
_ROOM_NBYTES = 2 * MiB  # for each image: its file, and its features twice
_RING_NBYTES = MiB  # for the features of each image
_GOAL_TIMES, _GOAL_WHOLE_TIMES = 8.0, 1.2

AfterSample = Callable[[], None]


def num_steps(*, quick: bool) -> int:
    images = _QUICK_IMAGES if quick else _IMAGES
    return len(images) * len(_SIDES) * (_num_samples(quick=quick) + 1)


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 2 * MIN_SAMPLES


def run(*, quick: bool, after_sample: AfterSample, images: tuple[int, ...] | None = None) -> Report:
    numbers = images or (_QUICK_IMAGES if quick else _IMAGES)
    report = Report("images", QUESTION)
    report.notes.append(
        "control_ms: ZMQ to the core, a ring to the workers; control_zmq_ms: ZMQ to both; "
        f"control_whole_ms: {_NUM_THREADS} threads decode and process, then as control_ms; "
        f"whole_ms: {_NUM_WORKERS} preprocess processes"
    )
    config = ServeConfig(arena_nbytes=64 * MiB + max(numbers) * _ROOM_NBYTES, raw_share=_RAW_SHARE)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        family = _family(folder)
        server = stack.enter_context(
            StoreServer(config.arena_nbytes, shares=config.shares, preallocate=True)
        )
        stack.enter_context(preprocess.workers(server.address, family))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        bench = _Bench(runner, server.address, family)
        stack.callback(bench.close)
        bench.start(config, folder, ring_chunk_nbytes=max(numbers) * _RING_NBYTES)
        meter = BusyMeter()
        for number in numbers:
            samples = bench.samples(number, _num_samples(quick=quick), after_sample)
            report.rows.append(Row({"images": number, "workers": _NUM_WORKERS}, samples))
        report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.goals = _goals(report.rows[-1])
    return report


def _family(folder: Path) -> AnyFamily:
    preprocess.write_model(folder)
    family = describe(folder)
    if family is None:
        raise ConfigError("the benchmark's model is not known")
    return family


def _goals(row: Row) -> list[Goal]:
    """Compare with the better baseline, as if no byte had arrived before the last one."""
    best = min(("control_ms", "control_zmq_ms"), key=row.median)
    ours_ms = row.median("whole_ms") + row.median("cut_ms")
    where = f"at {row.keys['images']}"
    goals = []
    for what, ratio, times in (
        (f"{best} / afferent_ms", row.median(best) / row.median("afferent_ms"), _GOAL_TIMES),
        (
            "control_whole_ms / (whole_ms + cut_ms)",
            row.median("control_whole_ms") / ours_ms,
            _GOAL_WHOLE_TIMES,
        ),
    ):
        goals.append(Goal(f"{what} {where} >= {times:g}", ratio >= times, ratio))
    return goals


class _Bench:
    """The processes under test, started once."""

    def __init__(self, runner: asyncio.Runner, address: str, family: AnyFamily) -> None:
        self._runner, self._address, self._family = runner, address, family
        self._stack = AsyncExitStack()
        self._control = HeapFrontend(family, num_threads=_NUM_THREADS)
        self._producer = self._stack.enter_context(
            DaemonStore(address, name="bench producer", writable=True)
        )
        self._producer.wait_populated()

    def start(self, config: ServeConfig, folder: Path, *, ring_chunk_nbytes: int) -> None:
        started = self._start(config, folder, ring_chunk_nbytes)
        self._core, self._frontend = self._runner.run(started)

    async def _start(
        self, config: ServeConfig, folder: Path, ring_chunk_nbytes: int
    ) -> tuple[EngineCore, Frontend]:
        core = await self._stack.enter_async_context(
            engine_core(self._address, _NUM_WORKERS, ring_chunk_nbytes=ring_chunk_nbytes)
        )
        frontend = await Frontend.connect(self._address, config, folder, self._family)
        self._stack.push_async_callback(frontend.close)
        return core, frontend

    def close(self) -> None:
        self._control.close()
        self._runner.run(self._stack.aclose())

    def samples(
        self, number: int, num_samples: int, after_sample: AfterSample
    ) -> dict[str, list[float]]:
        """Return the samples of all sides, in turn, for a request with this number of images."""
        body = chat_body(number)
        trees = self._runner.run(self._control.features(body))
        handles = [self._producer.put("kept", tree) for tree in trees]
        case = _Case(self._core, self._frontend, self._control, body, trees, handles)
        sides = {name: self._in_the_loop(getattr(case, name)) for name in _SIDES}
        try:
            samples = alternate(sides, num_samples=num_samples, after_sample=after_sample)
        finally:
            self._producer.release("kept")
        return {**samples, "cut_ms": case.cut_ms[1:]}

    def _in_the_loop(self, side: Callable[[], Coroutine[Any, Any, float]]) -> Callable[[], float]:
        return lambda: self._runner.run(side())


@dataclass(slots=True)
class _Case:
    """The sides for one request; each returns milliseconds, and has the name of its column."""

    core: EngineCore
    frontend: Frontend
    control: HeapFrontend
    body: bytes
    trees: Trees
    handles: Sequence[Handle]
    cut_ms: list[float] = field(default_factory=list)

    async def floor_ms(self) -> float:
        start = time.perf_counter()
        await self.core.ping()
        return _since_ms(start)

    async def afferent_ms(self) -> float:
        took_ms = await self._seen_since(time.perf_counter(), self.core.view(self.handles))
        await self.core.let_go()
        return took_ms

    async def control_ms(self) -> float:
        start = time.perf_counter()
        return await self._seen_since(start, self.core.send(self.trees, through="ring"))

    async def control_zmq_ms(self) -> float:
        start = time.perf_counter()
        return await self._seen_since(start, self.core.send(self.trees, through="zmq"))

    async def whole_ms(self) -> float:
        made = await self.frontend.features(self.body)
        took_ms = await self._seen_since(made.last_byte_s, self.core.view(made.handles))
        self.cut_ms.append(made.cut_ms)
        await self.core.let_go()
        await self.frontend.clear(made)
        return took_ms

    async def control_whole_ms(self) -> float:
        start = time.perf_counter()
        made = await self.control.features(self.body)
        return await self._seen_since(start, self.core.send(made, through="ring"))

    async def _seen_since(self, start_s: float, seeing: Awaitable[list[int]]) -> float:
        seen = await seeing
        took_ms = _since_ms(start_s)
        if set(seen) != {sum(map(_nbytes, self.trees))}:
            raise InternalError("a worker does not see what was handed to it")
        return took_ms


def _since_ms(start_s: float) -> float:
    return (time.perf_counter() - start_s) * 1e3


def _nbytes(tree: dict[str, Any]) -> int:
    return sum(array.nbytes for array in tree.values())
