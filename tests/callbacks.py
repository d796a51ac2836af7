"""Processor time of the callbacks of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
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
"""On shared processors, other programs evict cache lines, which costs processor time."""

_UNIT_MS = 3.3
"""The time of `slowness`'s work on the machine for which the limits of processor time were set."""

LEAST_MS = 0.2
"""Shorter callbacks are not noted."""

LOG = "CALLBACKS_LOG"
"""The environment variable with the file to which a server's frontends write."""

_METERED = Path(__file__).parent / "end_to_end" / "metered"


def slowness() -> float:
    """Return how many times slower this processor is than the reference machine; at least 1.

    The function measures the best of several short runs.
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
    """The processor time of a block, set when the block has ended."""

    slowness: float
    """The higher of before and after: the load of a busy machine changes."""
    thread_s: float = 0.0
    process_s: float = 0.0


@contextlib.contextmanager
def measured() -> Iterator[Cost]:
    """Measure the processor time of the block in this thread and in this process."""
    cost = Cost(slowness())
    thread_s, process_s = time.thread_time(), time.process_time()
    try:
        yield cost
    finally:
        cost.thread_s = time.thread_time() - thread_s
        cost.process_s = time.process_time() - process_s
        cost.slowness = max(cost.slowness, slowness())


@dataclass
class Meter:
    """The processor time of each callback that the event loop of this thread has run."""

    slowest: list[tuple[float, str]] = field(default_factory=list)
    slowness_before: float = field(default_factory=slowness)

    @property
    def most_ms(self) -> float:
        return max((took_ms for took_ms, _ in self.slowest), default=0.0)

    def check(self, what: str, *, slack: float = SLACK) -> None:
        """Check that no callback took more than the goal, on a machine of this speed."""
        limit_ms = slack * GOAL_MS * max(self.slowness_before, slowness())
        num_long = sum(took_ms > limit_ms for took_ms, _ in self.slowest)
        print(
            f"{what}: {num_long} of {len(self.slowest)} callbacks above {LEAST_MS} ms took more "
            f"than {limit_ms:.0f}, the longest {self.most_ms:.1f} ms",
            sorted(self.slowest)[-1:],
        )
        assert num_long == 0

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
    """The same for the frontends of a server that is started with ``env``."""

    path: Path

    @property
    def env(self) -> dict[str, str]:
        folders = [str(_METERED), str(_METERED.parents[2]), os.environ.get("PYTHONPATH", "")]
        return {LOG: str(self.path), "PYTHONPATH": os.pathsep.join(filter(None, folders))}

    @contextlib.contextmanager
    def watching(self) -> Iterator[Meter]:
        """Yield a meter that is filled when the block has ended."""
        start, meter = self.path.stat().st_size, Meter()
        yield meter
        with self.path.open() as file:
            file.seek(start)
            meter.slowest += [tuple(json.loads(line)) for line in file]
        assert meter.slowest, "no frontend has told of anything"


def tell(path: str) -> None:
    """Append a line to a file for each callback of this thread from now on."""
    file = Path(path).open("a", buffering=1)  # noqa: SIM115 - as long as the process
    _time(lambda *noted: print(json.dumps(noted), file=file))


def _time(note: Callable[[float, str], None]) -> None:
    """Call ``note`` with the time and the code of each long callback of this thread."""
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
    """Return the callback's description; for a task, the line where it is waiting now."""
    task = getattr(getattr(handle, "_callback", None), "__self__", None)
    if not isinstance(task, asyncio.Task):
        return repr(handle)
    coroutine: Any = task.get_coro()
    places = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = coroutine.cr_await
    return " > ".join(places) or repr(task)
