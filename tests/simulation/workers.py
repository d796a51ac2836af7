"""Processes without an event loop, and the workers that make features."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

from afferent.errors import AfferentError, DeadlineExceeded, StoreUnavailable
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import Failure, Handle
from tests.simulation.oracle import LINE_NBYTES, Use
from tests.simulation.sizes import RAW, Limit, sleep
from tests.simulation.world import ADDRESS, World
from tests.simulator.machine import Process

T = TypeVar("T")


class Blocking:
    """A process with a `DaemonStore`."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process, self._plan = world, process, world.plan
        process.start_thread(self._run, "main")

    def _run(self) -> None:
        try:
            self._store = DaemonStore(ADDRESS, name=self._process.name, writable=True)
        except StoreUnavailable:
            self._world.machine.kill(self._process)
            return
        self._work()

    def _work(self) -> None:
        raise NotImplementedError

    def _timed(self, what: str, limit_s: float, call: Callable[[], T]) -> T:
        limit = Limit(self._world, self._process, what, limit_s)
        try:
            return call()
        finally:
            limit.check()

    def _use(self, handle: Handle, what: int, *, writes: bool) -> Use:
        block = self._store.block(handle)
        return self._world.oracle.begin(self._process, block, handle, what, writes=writes)

    def _write(self, handle: Handle, what: int, *, source: int = 0, pause_s: float = 1e-4) -> int:
        """Write a block except its last line, and return the number of bytes written."""
        count = max(handle.nbytes // LINE_NBYTES - 1, 1)
        use = self._use(handle, what, writes=True)
        try:
            use.write(0, count // 2, source)
            sleep(pause_s)
            use.check(0, count // 2)
            use.write(count // 2, count, source)
        finally:
            use.close()
        return count * LINE_NBYTES

    def _read(self, handle: Handle, what: int) -> int:
        use = self._use(handle, what, writes=False)
        try:
            found = use.check(0, handle.nbytes // LINE_NBYTES)
            sleep(self._world.looking_s())
            use.check(0, handle.nbytes // LINE_NBYTES)
            self._world.seen_handles.append((handle, what))
        finally:
            use.close()
        return found


class Worker(Blocking):
    """Takes jobs; some jobs fail, some hang, and one key kills its worker."""

    def _work(self) -> None:
        rng = random.Random(f"{self._plan.seed} {self._process.name} {self._process.start_ticks}")
        while True:
            try:
                order = self._store.take()
                failure, used_nbytes = None, 0
                try:
                    used_nbytes = self._make(order, rng)
                except AfferentError as error:
                    failure = Failure(error.code, error.message)
                self._store.finish(order, used_nbytes=used_nbytes, failure=failure)
            except StoreUnavailable:
                self._world.machine.kill(self._process)  # a new worker is forked
                sleep(1.0)
            except AfferentError:
                continue

    def _make(self, order: Any, rng: random.Random) -> int:
        use = self._use(order.inputs[0], 0, writes=False)
        try:
            use.what = int(use.lines[0, 0]) if use.lines is not None else 0
            what = use.what - RAW
            use.check(0, order.inputs[0].nbytes // LINE_NBYTES)
        finally:
            use.close()
        if rng.random() < 0.1:
            raise DeadlineExceeded("this job fails")
        dies = what == self._plan.poison
        pause_s = rng.choice((1e-4, 1e-2, 1e-1))
        # It hangs until it is killed, unless the daemon would wait for it for ever.
        may_hang = self._plan.recovery_timeout_s is not None and not self._world.is_healed
        if may_hang and rng.random() < 0.05:
            pause_s = 1e9
        if dies:
            self._process.machine.after(pause_s / 2, self._process.machine.kill, self._process)
        used_nbytes = self._write(order.target, what, pause_s=pause_s)
        self._world.oracle.made(order.target, what)
        return used_nbytes
