"""What the callbacks of an event loop cost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOAL_MS = 20.0
SLACK = 2.0
"""For processors that are shared: what others leave in the caches costs processor time."""

_UNIT_MS = 3.3
"""Of the work of `slowness`, on the machine on which limits of processor time were set."""

LEAST_MS = 0.2
"""What takes less is not noted."""

LOG = "CALLBACKS_LOG"
"""Names the file that a server's frontends write to."""

_METERED = Path(__file__).parent / "end_to_end" / "metered"


def slowness() -> float:
    """By how much this processor is slower than that on which limits of time were set; 1 if it is
    not. It does a little work now, and takes the best of several times.
    """

    def work_ms() -> float:
        start_ns, seen = time.thread_time_ns(), dict[int, str]()
        for number in range(20_000):
            seen[number & 1023] = str(number)
            assert len(seen[number & 1023]) > 0
        return (time.thread_time_ns() - start_ns) / 1e6

    return max(1.0, min(work_ms() for _ in range(5)) / _UNIT_MS)


@dataclass
class Cost:
    """Processor time of a block, when it has ended."""

    slowness: float
    """The worse of before and after: on a busy machine, others come and go."""
    thread_s: float = 0.0
    process_s: float = 0.0


@contextlib.contextmanager
def measured() -> Iterator[Cost]:
    """Measure what the block costs this thread and this process."""
    cost = Cost(slowness())
    thread_s, process_s = time.thread_time(), time.process_time()
    try:
        yield cost
    finally:
        cost.thread_s = time.thread_time() - thread_s
        cost.process_s = time.process_time() - process_s
        cost.slowness = max(cost.slowness, slowness())


@contextlib.contextmanager
def collector_as_in_a_frontend() -> Iterator[None]:
    """What there is by now is not looked at again. Once for many meters: it takes a while here."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass
class Meter:
    """Processor time of each callback that the event loop of this thread has run."""

    slowest: list[tuple[float, str]] = field(default_factory=list)
    slowness_before: float = field(default_factory=slowness)

    @property
    def most_ms(self) -> float:
        return max((took_ms for took_ms, _ in self.slowest), default=0.0)

    def check(self, what: str, *, slack: float = SLACK) -> None:
        print(f"{what}: {self.most_ms:.1f} ms", sorted(self.slowest)[-1:])
        assert self.most_ms < slack * GOAL_MS * max(self.slowness_before, slowness())

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        run = asyncio.Handle._run
        _time(lambda *noted: self.slowest.append(noted))
        try:
            yield
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]


@dataclass
class MeterOfServer:
    """The same of the frontends of a server that is started with ``env``."""

    path: Path

    @property
    def env(self) -> dict[str, str]:
        folders = [str(_METERED), str(_METERED.parents[2]), os.environ.get("PYTHONPATH", "")]
        return {LOG: str(self.path), "PYTHONPATH": os.pathsep.join(filter(None, folders))}

    @contextlib.contextmanager
    def watching(self) -> Iterator[Meter]:
        """What is in there when the block has ended."""
        start, meter = self.path.stat().st_size, Meter()
        yield meter
        with self.path.open() as file:
            file.seek(start)
            meter.slowest += [tuple(json.loads(line)) for line in file]
        assert meter.slowest, "no frontend has told of anything"


def tell(path: str) -> None:
    """From now on this process adds a line for each callback of this thread to a file."""
    file = Path(path).open("a", buffering=1)  # noqa: SIM115 - as long as the process
    _time(lambda *noted: print(json.dumps(noted), file=file))


def _time(note: Callable[[float, str], None]) -> None:
    """Have the callbacks of this thread noted that take a while: what they take, and where."""
    run, thread = asyncio.Handle._run, threading.get_ident()

    def timed(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread:
            run(handle)
            return
        start_ns = time.thread_time_ns()
        run(handle)
        took_ms = (time.thread_time_ns() - start_ns) / 1e6
        if took_ms > LEAST_MS:
            note(took_ms, _place(handle))

    asyncio.Handle._run = timed  # type: ignore[assignment,method-assign]


def _place(handle: asyncio.Handle) -> str:
    """What it has run; of a task, where it waits by now."""
    task = getattr(getattr(handle, "_callback", None), "__self__", None)
    if not isinstance(task, asyncio.Task):
        return repr(handle)
    coroutine: Any = task.get_coro()
    places = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = coroutine.cr_await
    return " > ".join(places) or repr(task)
