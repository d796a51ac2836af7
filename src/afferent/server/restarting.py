"""Restarts that lose no request: of the frontends one after the other, of the engine as a whole."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from afferent.errors import ConfigError
from afferent.runtime.heartbeat import Board
from afferent.serve.launch import LEAVE_SIGNAL
from afferent.server.control import Tell, What
from afferent.server.parts import Part

_LOOK_S = 0.02
_READY_TIMEOUT_S = 120.0
_KILL_AFTER_S = 5.0


class Host(Protocol):
    """What of the supervisor is needed."""

    @property
    def parts(self) -> Mapping[str, Part]: ...

    @property
    def is_stopping(self) -> bool: ...

    def start(self, part: Part) -> None:
        """A process for it."""

    def set_aside(self, part: Part) -> Part:
        """Its process is another part's from now on, which nobody starts again."""

    def put_back(self, part: Part, aside: Part) -> None:
        """Its process, if it has one, is killed, and the one that was set aside is its again."""


class Restarts:
    """Of one server, whose processes are all there; one at a time."""

    def __init__(self, host: Host, board: Board, *, drain_timeout_s: float) -> None:
        self._host, self._board, self._drain_timeout_s = host, board, drain_timeout_s

    async def restart(self, what: What, tell: Tell) -> None:
        """
        Raises:
            ConfigError: Something is not there, or does not come back; what was there stays.
        """
        if not all(part.is_ready for part in self._host.parts.values()):
            raise ConfigError("not all processes of the server are ready; see its log")
        if what == "engine":
            await self._engine(tell)
            return
        for part in [part for part in self._host.parts.values() if part.is_frontend]:
            start_s = time.monotonic()
            await self._frontend(part)
            tell(f"{part.name}: replaced in {time.monotonic() - start_s:.1f} s")

    async def _frontend(self, part: Part) -> None:
        """Its successor accepts from the same socket before it leaves."""
        aside = self._host.set_aside(part)
        try:
            self._host.start(part)
            await self._until(lambda: part.is_ready or part.child is None, _READY_TIMEOUT_S)
        finally:
            if not part.is_ready:
                self._host.put_back(part, aside)
        if not part.is_ready:
            raise ConfigError(f"a new {part.name} does not start; the old one goes on")
        await self._end([aside], LEAVE_SIGNAL, self._drain_timeout_s + _KILL_AFTER_S)

    async def _engine(self, tell: Tell) -> None:
        parts = [part for part in self._host.parts.values() if part.is_engine]
        if not parts:
            raise ConfigError("this server has started no engine: somebody else runs it")
        self._board.close_doors(True)
        try:
            tell(f"letting nobody in; {self._board.num_inside} requests are being answered")
            await self._until(lambda: not self._board.num_inside, self._drain_timeout_s)
            if left := self._board.num_inside:
                tell(f"{left} requests took longer than --drain-timeout-s, and are given up")
            await self._end(parts, signal.SIGTERM, _KILL_AFTER_S)
            tell(f"{', '.join(part.name for part in parts)}: ended, and started again")
            # As long as it takes: a large model may load for half an hour.
            await self._until(lambda: all(part.is_ready and part.child for part in parts), None)
        finally:
            self._board.close_doors(False)

    async def _end(self, parts: Iterable[Part], signum: signal.Signals, timeout_s: float) -> None:
        """All of their processes, that is; others may have been started meanwhile."""
        ending = {part.name: (part, part.child) for part in parts if part.child is not None}
        for _, child in ending.values():
            child.popen.send_signal(signum)

        def have_ended() -> bool:
            return all(part.child is not child for part, child in ending.values())

        await self._until(have_ended, timeout_s)
        for part, child in ending.values():
            if part.child is child:
                child.popen.kill()
        await self._until(have_ended, None)

    async def _until(self, condition: Callable[[], object], timeout_s: float | None) -> None:
        """
        Raises:
            ConfigError: The server is stopped meanwhile.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition() and (deadline is None or time.monotonic() < deadline):
            if self._host.is_stopping:
                raise ConfigError("the server is being stopped")
            await asyncio.sleep(_LOOK_S)
