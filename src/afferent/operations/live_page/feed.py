"""Stream of snapshots for all viewers of the page: one a second while there are viewers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator

import msgspec

from afferent.operations.live_page.observing import Observation, Observer
from afferent.operations.live_page.view import earliest, view

log = logging.getLogger(__name__)

PERIOD_S = 1.0
WINDOW = 6
"""Snapshots that rates are computed over: five seconds."""
MAX_VIEWERS = 16


class Feed:
    """Stream of one server's views. Without viewers, it polls no process and has no connection.

    Invariants: at most one task polls; it ends after the last viewer has left.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._seen: deque[Observation] = deque(maxlen=WINDOW)
        self._looking: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._latest, self._number = b"", 0
        self.num_viewers = 0
        self._is_closed = False

    @property
    def is_full(self) -> bool:
        return self.num_viewers >= MAX_VIEWERS

    async def views(self) -> AsyncGenerator[bytes, None]:
        """Yield views as JSON; a slow viewer skips to the latest one."""
        self.num_viewers += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        seen = self._number - bool(self._seen)  # send an existing snapshot at once
        try:
            while not self._is_closed:
                async with self._changed:
                    while self._number <= seen and not self._is_closed:
                        await self._changed.wait()
                    seen, latest = self._number, self._latest
                if not self._is_closed:
                    yield latest
        finally:
            self.num_viewers -= 1

    async def close(self) -> None:
        """End all streams and the polling."""
        self._is_closed = True
        async with self._changed:
            self._changed.notify_all()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    async def _look(self) -> None:
        try:
            while self.num_viewers:
                due_s = time.monotonic() + PERIOD_S
                try:
                    await self._look_once()
                except Exception:  # the next poll may succeed
                    log.exception("the server could not be looked at")
                await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
        finally:
            self._looking = None
            self._seen.clear()
            await self._observer.close()

    async def _look_once(self) -> None:
        self._seen.append(await self._observer.observe())
        self._latest = msgspec.json.encode(view(earliest(self._seen), self._seen[-1]))
        async with self._changed:
            self._number += 1
            self._changed.notify_all()
