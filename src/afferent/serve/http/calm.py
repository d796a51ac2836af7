"""An HTTP server that has nothing to do while there is nothing to do."""

from __future__ import annotations

import asyncio
from types import FrameType

import uvicorn

from afferent.runtime.turns import next_turn

_TICK_S = 1.0


class CalmServer(uvicorn.Server):
    """It wakes up once a second, to write the date of answers anew, and when it is to end;
    `uvicorn`'s own does so ten times, and to wake up costs some hundred microseconds.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: asyncio.Task[float] | None = None

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):  # as at each tenth of its own ticks
            self._waiting = self._loop.create_task(next_turn(_TICK_S))
            await asyncio.wait([self._waiting])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.end_soon()

    def end_soon(self) -> None:
        """Look now whether it is to end; from a signal's handler, too."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
