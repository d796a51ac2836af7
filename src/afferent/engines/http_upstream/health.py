"""Liveness of an upstream, as far as it is visible from outside."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from afferent.runtime.heartbeat import Board, Watch
from afferent.runtime.proc_stat import ProcStat


async def answers(session: aiohttp.ClientSession) -> bool:
    """Whether the API server answers its health check, within the session's timeout."""
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with session.get("http://upstream/health") as answer:
            return answer.status == 200
    return False


class ServerWatch:
    """Sends heartbeats for a server that makes progress.

    A server makes progress if none of its processes is stopped, and it answers or at least
    computes: while it reads a long prompt or computes features, it may answer no request for many
    seconds.

    Invariants:
        - Without a heartbeat table, `look` never requests a replacement.
    """

    def __init__(self, board: Board | None, pid: int, *, name: str) -> None:
        """Create it.

        Args:
            board: Heartbeat table.
            pid: Process that leads the session of all processes of the server.
            name: The server's name in the table.
        """
        self._board, self._pid, self._name = board, pid, name
        self._watch = Watch(timeout_s=board.place.frozen_timeout_s) if board is not None else None
        self._cpu_ticks = 0

    def look(self, *, has_answered: bool) -> bool:
        """Record the present state; return whether the server must be replaced."""
        if self._board is None or self._watch is None:
            return False
        if self._goes_on(has_answered=has_answered):
            self._board.beat(self._name)
        self._watch.look(self._board.read([self._name]), now_s=time.monotonic())
        return bool(self._watch.overdue)

    def _goes_on(self, *, has_answered: bool) -> bool:
        stats = map(ProcStat.read, pids_of_session(self._pid))
        of_session = [stat for stat in stats if stat is not None]
        own = ProcStat.read(self._pid)
        before, self._cpu_ticks = self._cpu_ticks, own.cpu_ticks if own is not None else 0
        if any(stat.is_stopped for stat in of_session):
            return False
        return has_answered or self._cpu_ticks > before


def pids_of_session(session: int) -> Iterator[int]:
    """Yield the processes of a session that have not ended."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            stat = ProcStat.read(int(entry.name))
            if stat is not None and stat.session == session:
                yield int(entry.name)
