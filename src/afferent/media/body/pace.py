"""Cooperative yield for long work on an event loop."""

from __future__ import annotations

import asyncio
import time

_SLICE_S = 0.005


class Pace:
    """Yields to other tasks now and then.

    For work in many small steps whose number a client decides. A thread would not help, because the
    work needs the interpreter.
    """

    def __init__(self, slice_s: float = _SLICE_S) -> None:
        """Create it; ``slice_s`` is the time between two yields."""
        self._slice_s, self._since_s = slice_s, time.perf_counter()

    async def rest(self) -> None:
        """Yield if enough time has passed; call this between two steps. It costs little
        otherwise.
        """
        if time.perf_counter() - self._since_s > self._slice_s:
            await asyncio.sleep(0)
            self._since_s = time.perf_counter()
