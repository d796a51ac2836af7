"""Work on an event loop that would hold everybody else up."""

from __future__ import annotations

import asyncio
import time

_SLICE_S = 0.005


class Pace:
    """Lets others have their turn now and then.

    For work in many small steps whose number a client decides; a thread would not help, because
    it is work of the interpreter's.
    """

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    async def rest(self) -> None:
        """Call this between two steps; it is next to nothing while little time has passed."""
        if time.perf_counter() - self._since_s > _SLICE_S:
            await asyncio.sleep(0)
            self._since_s = time.perf_counter()
