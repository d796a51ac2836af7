"""vLLM: the product's part of its engine core and of its worker, and simulated steps between.

The worker stores what it computes under the item's name alone, where other engines would find it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from afferent.engines.vllm.plugin.step import FeaturesLost, Located, Step
from afferent.engines.vllm.plugin.step_pins import PinnedStep, StepPins
from afferent.engines.vllm.plugin.step_reader import StepReader
from afferent.errors import StoreUnavailable
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import Handle
from tests.simulation.oracle import LINE_NBYTES, number_of
from tests.simulation.sizes import sleep
from tests.simulation.world import ADDRESS, World
from tests.simulator.machine import Process

CORE, WORKER = "vllm-core", "vllm-worker"
_STEP_S = 2e-3
_NUM_PER_STEP = 2
_NUM_IN_FLIGHT = 2
"""Steps that are scheduled before the first one's results are there."""
_PREEMPTED = 0.1
"""Part of the requests that are computed once more: they may have lost their features by then."""
_STILL_S = 0.05
"""Longest time for which scheduling may stop a step of other requests."""


@dataclass(eq=False, slots=True)
class Asked:
    """Request of a frontend: its items by key, and where the frontend has them pinned."""

    request: str
    handles: dict[bytes, Handle]
    on_end: Callable[[bool], None]
    left: list[bytes] = field(init=False)
    is_reported: bool = False

    def __post_init__(self) -> None:
        self.left = list(self.handles)


@dataclass(eq=False, slots=True)
class _Work:
    """A step, as the worker gets it."""

    step: Step
    asked: list[tuple[Asked, list[bytes]]]
    handles: dict[bytes, Handle]
    is_done: bool = False


class Vllm:
    """State that both processes share: one of them does not outlive the other."""

    def __init__(self) -> None:
        self.waiting: list[Asked] = []
        self.steps: deque[_Work] = deque()
        self.named: dict[bytes, int] = {}
        """Results by name, of this engine and of all others that share them."""
        self.received: dict[bytes, Handle] = {}
        """The first reference to each item: vLLM keeps it, and drops later ones."""

        self.ended: list[Asked] = []
        """Requests that have ended, and that the core does not know of yet."""
        self.cores: list[StepPins] = []

    def withdraw(self, asked: Asked) -> None:
        """Take a request out of the queue, if it is there: its client may have left."""
        if asked in self.waiting:
            self.waiting.remove(asked)

    def abort(self, asked: Asked) -> None:
        """Withdraw a request, which the core then forgets."""
        self.withdraw(asked)
        self.ended.append(asked)

    def close(self) -> None:
        """Drop all pins while the simulated system is there."""
        for pins in self.cores:
            pins._found.clear()
            pins._step.clear()

    def fail(self) -> None:
        """Fail all requests: the engine has ended."""
        waiting, self.waiting = self.waiting, []
        for step in self.steps:
            waiting += [asked for asked, _ in step.asked]
        self.steps.clear()
        for asked in dict.fromkeys(waiting):
            asked.on_end(False)


class _Half:
    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        process.on_exit.append(self._end)
        process.start_thread(self._run, "main")

    @property
    def _vllm(self) -> Vllm:
        return self._world.vllm

    def _end(self) -> None:
        """End the other half too; it goes on for a moment."""
        machine = self._world.machine
        self._vllm.fail()
        for name in (CORE, WORKER):
            other = self._world.processes.get(name)
            if other is not None and other is not self._process and other.is_alive:
                machine.after(machine.rng.choice((1e-4, 0.5)), _kill, other)

    def _run(self) -> None:
        raise NotImplementedError


def _kill(process: Process) -> None:
    if process.is_alive:
        process.machine.kill(process)


class VllmCore(_Half):
    """Schedules steps, with the product's `StepPins`."""

    def _run(self) -> None:
        name = self._process.name
        self._pins = StepPins(lambda: DaemonStore(ADDRESS, name=name))
        self._vllm.cores.append(self._pins)
        in_flight: deque[tuple[_Work, PinnedStep]] = deque()
        while True:
            self._schedule(in_flight)
            sleep(_STEP_S)
            while in_flight and (in_flight[0][0].is_done or len(in_flight) > _NUM_IN_FLIGHT):
                if in_flight[0][0].is_done:
                    self._finish(in_flight.popleft()[0])
                else:
                    sleep(_STEP_S)

    def _schedule(self, in_flight: deque[tuple[_Work, PinnedStep]]) -> None:
        ended, self._vllm.ended = self._vllm.ended, []
        for asked in ended:
            self._pins.forget(asked.request)
        chosen: list[tuple[Asked, list[bytes]]] = []
        for asked in list(self._vllm.waiting):
            asked.left = [key for key in asked.left if not self._is_cached(key)]
            if not asked.left:  # all of it is in the prefix cache
                self._report(asked)
                self._vllm.abort(asked)
                asked.on_end(True)
            elif len(chosen) < _NUM_PER_STEP and self._secure(asked):
                keys = asked.left[: 1 + self._world.machine.rng.randrange(2)]
                for key in keys:
                    self._pins.use(key)
                chosen.append((asked, keys))
                if set(keys) >= set(asked.left):
                    self._report(asked)
        pinned = self._pins.end_step()
        for request in self._pins.take_lost():
            for asked in [each for each in self._vllm.waiting if each.request == request]:
                self._vllm.abort(asked)
                asked.on_end(False)
        if chosen:
            handles = {
                key: self._vllm.received.setdefault(key, each.handles[key])
                for each, keys in chosen
                for key in keys
            }
            work = _Work(pinned.step, chosen, handles)
            for asked, _ in chosen:
                self._vllm.withdraw(asked)
            in_flight.append((work, pinned))
            self._vllm.steps.append(work)

    def _report(self, asked: Asked) -> None:
        """Report a request whose items are all scheduled, as vLLM lets the connector see it."""
        if not asked.is_reported:
            asked.is_reported = True
            self._pins.report_encoded(asked.request, asked.handles)

    def _is_cached(self, key: bytes) -> bool:
        """Whether the prefix cache has an item; it evicts most of them."""
        return key in self._vllm.named and self._world.machine.rng.random() < 0.01

    def _secure(self, asked: Asked) -> bool:
        start_s, paused_s = self._world.machine.now_s, self._process.paused_s
        is_ready = self._pins.secure(asked.request, asked.left)
        took_s = self._world.machine.now_s - start_s - (self._process.paused_s - paused_s)
        if took_s > _STILL_S and self._process.is_alive:
            self._world.machine.violate(f"still: scheduling waits {took_s:.2f} s for the store")
        return is_ready

    def _finish(self, work: _Work) -> None:
        for asked, keys in work.asked:
            asked.left = [key for key in asked.left if key not in keys]
            if not asked.left and self._world.machine.rng.random() < _PREEMPTED:
                asked.left = list(asked.handles)
            if asked.left:
                self._vllm.waiting.append(asked)
            else:
                self._pins.forget(asked.request)
                asked.on_end(True)


class VllmWorker(_Half):
    """Computes steps from features that the product's `StepReader` reads."""

    def _run(self) -> None:
        try:
            store = DaemonStore(ADDRESS, name=self._process.name, writable=True)
        except StoreUnavailable:
            self._world.machine.kill(self._process)
            return
        self._reader = StepReader(store)
        while True:
            if not self._vllm.steps:
                sleep(_STEP_S)
                continue
            work = self._vllm.steps[0]
            try:
                self._compute(work)
            except FeaturesLost:  # as vLLM does: the engine ends
                self._world.machine.kill(self._process)
                return
            work.is_done = True
            if self._vllm.steps and self._vllm.steps[0] is work:
                self._vllm.steps.popleft()

    def _compute(self, work: _Work) -> None:
        self._reader.follow(work.step)
        for _, keys in work.asked:
            for key in keys:
                found = read(self, work.step, key, work.handles[key])
                if found != number_of(key) and self._process.is_alive:
                    self._world.machine.violate(
                        f"names: {found} is computed under the name of {number_of(key)}"
                    )
                self._vllm.named[key] = found

    def read(self, step: Step, key: bytes) -> int:
        """Return the number that all lines of an item's features name, or -1."""
        lines = np.frombuffer(self._reader.block(step, key), np.uint64)
        lines = lines.reshape(-1, LINE_NBYTES // 8)
        half = len(lines) // 2
        first = lines[:half].copy()
        sleep(self._world.machine.rng.choice((1e-3, 0.1, 0.4)))
        whole = np.concatenate([first, lines[half:]])
        del lines
        self._reader.check_core()
        is_right = (whole[:, 0] == whole[0, 0]).all() and (
            whole[:, 3] == np.arange(len(whole))
        ).all()
        return int(whole[0, 0]) if is_right else -1


def read(worker: VllmWorker, step: Step, key: bytes, _: Handle) -> int:
    """Read the features of an item where the core has pinned them."""
    return worker.read(step, key)


def read_there(worker: VllmWorker, step: Step, key: bytes, handle: Handle) -> int:
    """Read them where the frontend of the request had them."""
    arena = step.items[key].arena
    return worker.read(Step(step.core, {key: Located(arena, handle)}), key)


def read_or_nothing(worker: VllmWorker, step: Step, key: bytes, _: Handle) -> int:
    """Read them, or compute something without them."""
    try:
        return worker.read(step, key)
    except FeaturesLost:
        return -1


def ask(world: World, request: str, keys: Sequence[bytes], handles: Sequence[Handle]) -> Asked:
    """Send a request to vLLM; `Asked.on_end` is to be replaced at once."""
    asked = Asked(request, dict(zip(keys, handles, strict=True)), lambda _: None)
    for pins in world.vllm.cores[-1:]:  # as the thread of the core that receives requests does
        pins.expect(request, keys)
    world.vllm.waiting.append(asked)
    return asked
