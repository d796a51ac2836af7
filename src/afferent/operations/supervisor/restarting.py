"""Restarts that lose no request: of the frontends one by one, of the engine as a whole."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from afferent.errors import ConfigError
from afferent.operations.supervisor.control import Tell, What
from afferent.operations.supervisor.parts import Part
from afferent.proxy.launch import LEAVE_SIGNAL
from afferent.runtime.heartbeat import Board

if TYPE_CHECKING:
    from afferent.operations.supervisor.supervisor import Supervisor

_LOOK_S = 0.02
FRONTEND_START_TIMEOUT_S = 120.0
"""Timeout for a frontend's successor to become ready."""
_KILL_AFTER_S = 5.0
ENGINE_ENDS_S = 10.0
"""Time for an engine to end: 4 s for vLLM's own end, and its parent then removes its files."""


class Restarts:
    """Restarts of one server's processes, one at a time.

    Invariants: a part is replaced only by a successor that is ready and runs; until then the part,
    its process and its listening socket stay as they are.
    """

    def __init__(
        self,
        host: Supervisor,
        board: Board,
        *,
        drain_timeout_s: float,
        engine_start_timeout_s: float,
        frontend_start_timeout_s: float = FRONTEND_START_TIMEOUT_S,
    ) -> None:
        self._host, self._board, self._drain_timeout_s = host, board, drain_timeout_s
        self._engine_start_timeout_s = engine_start_timeout_s
        self._frontend_start_timeout_s = frontend_start_timeout_s

    async def restart(self, what: What, tell: Tell) -> None:
        """Restart all frontends or the engine.

        Raises:
            ConfigError: A process does not start. The old process of a frontend stays.
        """
        if what == "engine":
            await self._engine(tell)
            return
        parts = list(self._host.parts.values())
        if missing := [part.name for part in parts if not part.is_ready]:
            raise ConfigError(
                f"not ready: {', '.join(missing)}; see the server's log, and try again"
            )
        for part in [part for part in parts if part.is_frontend]:
            start_s = time.monotonic()
            await self._frontend(part)
            tell(f"{part.name}: replaced in {time.monotonic() - start_s:.1f} s")

    async def _frontend(self, part: Part) -> None:
        """Start a successor that accepts from the same socket before the old process leaves."""
        try:
            successor = self._host.start_successor(part)
        except OSError as error:
            raise ConfigError(
                f"a new {part.name} can't be started ({error.strerror}); the old one goes on"
            ) from error
        try:
            await self._successor_is_ready(successor)
        except BaseException:
            self._host.discard(successor)
            raise
        self._host.replace(part, successor)
        await self._end([part], LEAVE_SIGNAL, self._drain_timeout_s + _KILL_AFTER_S)

    async def _successor_is_ready(self, successor: Part) -> None:
        """Wait until the successor is ready.

        Raises:
            ConfigError: It ends before, or takes too long.
        """
        name, timeout_s = successor.name, self._frontend_start_timeout_s
        await self._until(lambda: successor.is_ready or successor.child is None, timeout_s)
        if successor.child is None:
            why = f": {successor.last_said}" if successor.last_said else ""
            raise ConfigError(
                f"a new {name} ended before it was ready{why}; the old one goes on, and the "
                "server's log says more"
            )
        if not successor.is_ready:
            raise ConfigError(
                f"a new {name} was not ready within {timeout_s:g} s; the old one goes on"
            )

    async def _engine(self, tell: Tell) -> None:
        parts = [part for part in self._host.parts.values() if part.is_engine]
        if not parts:
            raise ConfigError("this server has started no engine: somebody else runs it")
        if starting := [part.name for part in parts if not part.has_been_ready]:
            raise ConfigError(f"still starting: {', '.join(starting)}; try again when it is ready")
        self._board.close_doors(True)
        try:
            closed_ns = time.monotonic_ns()
            tell(f"no request is admitted; {self._board.num_inside} requests are being answered")
            await self._until(lambda: self._is_empty(closed_ns), self._drain_timeout_s)
            if left := self._board.num_inside:
                tell(f"{left} requests took longer than --drain-timeout-s, and are given up")
            await self._end(parts, signal.SIGTERM, ENGINE_ENDS_S)
            tell(f"{', '.join(part.name for part in parts)}: ended, and started again")
            await self._engine_is_ready(parts)
        finally:
            self._board.close_doors(False)

    def _is_empty(self, closed_ns: int) -> bool:
        """Whether no request is in flight; each frontend has counted since the doors were closed.

        A count that was written before may be of a process that has been replaced, or be followed
        by a request that came before the frontend read that the doors are closed.
        """
        frontends = [part.name for part in self._host.parts.values() if part.is_frontend]
        beats = self._board.read(frontends).values()
        return all(beat >= closed_ns for beat in beats) and not self._board.num_inside

    async def _engine_is_ready(self, parts: list[Part]) -> None:
        """Wait until all engine processes are ready.

        Raises:
            ConfigError: One of them does not start; the supervisor tries again.
        """
        for part in parts:  # a requested end is no failed start
            part.num_failed_starts = 0
        timeout_s = self._engine_start_timeout_s

        def failed() -> list[Part]:
            return [part for part in parts if part.num_failed_starts]

        await self._until(lambda: failed() or all(part.is_ready for part in parts), timeout_s)
        if names := ", ".join(part.name for part in failed()):
            raise ConfigError(
                f"{names}: did not start; the server tries again until it does, and answers 503 "
                "meanwhile; its log says more"
            )
        late = [part for part in parts if not part.is_ready]
        for part in late:
            if part.child is not None:
                part.child.popen.kill()
        if late:
            raise ConfigError(
                f"{', '.join(part.name for part in late)}: not ready within {timeout_s:g} s, and "
                "killed; the server tries again, and answers 503 meanwhile"
            )

    async def _end(self, parts: Iterable[Part], signum: signal.Signals, timeout_s: float) -> None:
        """End the current processes of the parts; their replacements stay."""
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
        """Wait for a condition, at most ``timeout_s``.

        Raises:
            ConfigError: The server is stopped meanwhile.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition() and (deadline is None or time.monotonic() < deadline):
            if self._host.is_stopping:
                raise ConfigError("the server is being stopped")
            await asyncio.sleep(_LOOK_S)
