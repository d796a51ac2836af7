"""Liveness of the server's processes: a process that is silent too long is killed and replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from afferent.operations.supervisor.parts import SUPERVISOR, Part
from afferent.runtime.heartbeat import PERIOD_S, Board, Watch


class Watcher:
    """Owner of the heartbeat table of all processes, the supervisor included."""

    def __init__(self, parts: Mapping[str, Part], *, frozen_timeout_s: float) -> None:
        """Watch ``parts``, by name; a part may be replaced by another of its name."""
        self._parts = parts
        watchers = {name: part.name for part in parts.values() for name in part.watches}
        self.board = Board.create(
            [SUPERVISOR, *self._parts, *watchers],
            watchers=watchers,
            frozen_timeout_s=frozen_timeout_s,
        )
        self._watch = Watch(timeout_s=frozen_timeout_s)

    def forget(self, part: Part) -> None:
        """Unregister an ended part and the processes that it watches."""
        self.board.rest(part.name, *part.watches)

    async def run(self, on_frozen: Callable[[Part], None]) -> None:
        """Watch until cancelled; call ``on_frozen`` once for each part that has to be replaced."""
        while True:
            self.board.beat(SUPERVISOR)
            self._watch.look(self.board.read(self._parts), now_s=time.monotonic())
            for name in self._watch.overdue:
                part = self._parts[name]
                self.forget(part)
                on_frozen(part)
            await asyncio.sleep(PERIOD_S)
