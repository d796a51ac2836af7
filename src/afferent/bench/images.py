"""What do the pictures of one request cost on their way to every worker of the engine?

Pictures are JPEGs of 644 x 364, in one body; features are bytes, as the Qwen2-VL family makes them.
Two times: `afferent_ms`, from features that exist to arrays of all of them in both workers; and
`whole_ms`, from the last byte of the body to the same: digests, room, jobs for two preprocess
workers, their features, the hand-off. What had arrived before that byte has been cut and decoded
from base64 already (`cut_ms`). The floor is an empty message to each worker and its answer.

The controls keep everything on the heap, as engines do: `control_whole_ms` parses the body, decodes
the same pictures with the same decoders on two threads, and hands on what it made. The hand-off,
`control_ms`, is nested tensors, pickled, through a pipe to each worker; `control_zmq_ms` sends them
out of band.
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

from afferent.bench import preprocess
from afferent.bench.engine_workers import EngineWorkers, Trees, engine_workers
from afferent.bench.images_sides import Control, Frontend, chat_body
from afferent.bench.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate
from afferent.errors import ConfigError, InternalError
from afferent.preprocess.registry import AnyFamily, describe
from afferent.store.client import DaemonStore
from afferent.store.server import StoreServer
from afferent.types import Handle, MiB, ObjectKind

QUESTION = "What do the pictures of a request cost on their way to every worker of the engine?"
_SIDES = ("floor_ms", "afferent_ms", "control_ms", "control_zmq_ms", "whole_ms", "control_whole_ms")
COLUMNS = ("images", "workers", *_SIDES, "cut_ms")

_IMAGES, _QUICK_IMAGES = (1, 10, 20, 30, 40, 50, 100), (1, 10, 100)
_NUM_WORKERS = 2
_SHARES = {ObjectKind.RAW: 0.1, ObjectKind.FEATURES: 0.9}
_ROOM_NBYTES = 2 * MiB  # for one picture: its file, and its features twice
_GOAL_TIMES, _GOAL_WHOLE_TIMES = 10.0, 1.0

AfterSample = Callable[[], None]


def num_steps(*, quick: bool) -> int:
    images = _QUICK_IMAGES if quick else _IMAGES
    return len(images) * len(_SIDES) * (_num_samples(quick=quick) + 1)


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 2 * MIN_SAMPLES


def run(*, quick: bool, after_sample: AfterSample, images: tuple[int, ...] | None = None) -> Report:
    numbers = images or (_QUICK_IMAGES if quick else _IMAGES)
    report = Report("images", QUESTION)
    arena_nbytes = 64 * MiB + max(numbers) * _ROOM_NBYTES
    with ExitStack() as stack:
        family = _family(stack)
        server = stack.enter_context(StoreServer(arena_nbytes, shares=_SHARES))
        stack.enter_context(preprocess.workers(server.address, family))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        bench = _Bench(runner, server.address, family)
        stack.callback(bench.close)
        meter = BusyMeter()
        for number in numbers:
            samples = bench.samples(number, _num_samples(quick=quick), after_sample)
            report.rows.append(Row({"images": number, "workers": _NUM_WORKERS}, samples))
        report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.goals = _goals(report.rows[-1])
    return report


def _family(stack: ExitStack) -> AnyFamily:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    preprocess.write_model(folder)
    family = describe(folder)
    if family is None:
        raise ConfigError("the benchmark's model is not known")
    return family


def _goals(row: Row) -> list[Goal]:
    goals = []
    for control, ours, times in (
        ("control_ms", "afferent_ms", _GOAL_TIMES),
        ("control_zmq_ms", "afferent_ms", _GOAL_TIMES),
        ("control_whole_ms", "whole_ms", _GOAL_WHOLE_TIMES),
    ):
        ratio = row.median(control) / row.median(ours)
        what = f"{control} / {ours} at {row.keys['images']} >= {times:g}"
        goals.append(Goal(what, ratio >= times, ratio))
    return goals


class _Bench:
    """The processes under test, started once."""

    def __init__(self, runner: asyncio.Runner, address: str, family: AnyFamily) -> None:
        self._runner, self._stack = runner, AsyncExitStack()
        self._control = Control(family)
        self._producer = self._stack.enter_context(
            DaemonStore(address, name="bench producer", writable=True)
        )
        self._producer.wait_populated()
        self._workers, self._frontend = runner.run(self._start(address, family))

    async def _start(self, address: str, family: AnyFamily) -> tuple[EngineWorkers, Frontend]:
        workers = await self._stack.enter_async_context(engine_workers(address, _NUM_WORKERS))
        frontend = await Frontend.connect(address, family)
        self._stack.push_async_callback(frontend.close)
        return workers, frontend

    def close(self) -> None:
        self._control.close()
        self._runner.run(self._stack.aclose())

    def samples(
        self, number: int, num_samples: int, after_sample: AfterSample
    ) -> dict[str, list[float]]:
        """All sides, in turn, for a request with so many pictures."""
        body = chat_body(number)
        trees = self._control.features(body)
        handles = [self._producer.put("kept", tree) for tree in trees]
        case = _Case(self._workers, self._frontend, self._control, body, trees, handles)
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
    """The sides for one request; each returns milliseconds, and is called as its column."""

    workers: EngineWorkers
    frontend: Frontend
    control: Control
    body: bytes
    trees: Trees
    handles: Sequence[Handle]
    cut_ms: list[float] = field(default_factory=list)

    async def floor_ms(self) -> float:
        start = time.perf_counter()
        await self.workers.ping()
        return _since_ms(start)

    async def afferent_ms(self) -> float:
        took_ms = await self._seen_since(time.perf_counter(), self.workers.view(self.handles))
        await self.workers.let_go()
        return took_ms

    async def control_ms(self) -> float:
        sent = self.workers.send_through_pipes(self.trees)
        return await self._seen_since(time.perf_counter(), sent)

    async def control_zmq_ms(self) -> float:
        sent = self.workers.send_through_zmq(self.trees)
        return await self._seen_since(time.perf_counter(), sent)

    async def whole_ms(self) -> float:
        made = await self.frontend.features(self.body)
        took_ms = await self._seen_since(made.last_byte_s, self.workers.view(made.handles))
        self.cut_ms.append(made.cut_ms)
        await self.workers.let_go()
        await self.frontend.clear()
        return took_ms

    async def control_whole_ms(self) -> float:
        start = time.perf_counter()
        made = await asyncio.to_thread(self.control.features, self.body)
        return await self._seen_since(start, self.workers.send_through_pipes(made))

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
