"""Whether requests are let in, as the supervisor says to all frontends, and how many are inside."""

from __future__ import annotations

from afferent.errors import EngineUnavailable
from afferent.runtime.heartbeat import Board

_RETRY_AFTER_S = 5.0


class Doors:
    """One process's."""

    def __init__(self, board: Board, name: str) -> None:
        """``name`` is the process's own, on the board."""
        self._board, self._name = board, name
        self._inside: set[str] = set()

    def enter(self, request_id: str) -> None:
        """
        Raises:
            EngineUnavailable: The engine is about to be restarted.
        """
        if self._board.are_doors_closed:
            error = EngineUnavailable("the engine is being restarted; try again")
            error.retry_after_s = _RETRY_AFTER_S
            raise error
        self._inside.add(request_id)
        self._board.count_inside(self._name, len(self._inside))

    def leave(self, request_id: str) -> None:
        """It has been answered, or was never let in."""
        if request_id in self._inside:
            self._inside.remove(request_id)
            self._board.count_inside(self._name, len(self._inside))
