"""What the callbacks of an event loop cost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

GOAL_MS = 20.0
SLACK = 2.0
"""For processors that are slow, or shared."""


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

    @property
    def most_ms(self) -> float:
        return max((took_ms for took_ms, _ in self.slowest), default=0.0)

    def check(self, what: str) -> None:
        print(f"{what}: {self.most_ms:.1f} ms", sorted(self.slowest)[-1:])
        assert self.most_ms < SLACK * GOAL_MS

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        run, thread = asyncio.Handle._run, threading.get_ident()

        def timed(handle: asyncio.Handle) -> None:
            if threading.get_ident() != thread:
                run(handle)
                return
            start_ns = time.thread_time_ns()
            run(handle)
            took_ms = (time.thread_time_ns() - start_ns) / 1e6
            if took_ms > 1:
                self.slowest.append((took_ms, repr(handle)))

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            asyncio.Handle._run = run  # type: ignore[method-assign]
