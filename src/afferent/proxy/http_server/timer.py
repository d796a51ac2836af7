"""Restartable timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timer:
    """Calls at most once after each start, on the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def start(self, timeout_s: float, call: Callable[[], object]) -> None:
        """Schedule a call in ``timeout_s`` seconds, and cancel an earlier one."""
        self.stop()
        self._handle = self._loop.call_later(timeout_s, call)

    def stop(self) -> None:
        """Cancel the scheduled call."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
