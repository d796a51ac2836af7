"""Admission switch of all frontends, set by the supervisor, and the requests in flight."""

from __future__ import annotations

from afferent.errors import EngineUnavailable
from afferent.runtime.heartbeat import Board

_RETRY_AFTER_S = 5.0


class Doors:
    """Admission switch of one process.

    While a frontend is replaced, the old process and its successor write the same count. So each
    heartbeat repeats it.

    Invariants:
        - The heartbeat table has the number of requests in ``_inside``, at the latest with the next
          heartbeat.
    """

    def __init__(self, board: Board, name: str) -> None:
        """Create it; ``name`` is the process's name in the heartbeat table."""
        self._board, self._name = board, name
        self._inside: set[str] = set()

    def enter(self, request_id: str) -> None:
        """Admit and count a request.

        Raises:
            EngineUnavailable: The engine is about to be restarted.
        """
        if self._board.are_doors_closed:
            error = EngineUnavailable("the engine is being restarted; try again")
            error.retry_after_s = _RETRY_AFTER_S
            raise error
        self._inside.add(request_id)
        self.count()

    def leave(self, request_id: str) -> None:
        """Stop counting a request, if it was admitted."""
        if request_id in self._inside:
            self._inside.remove(request_id)
            self.count()

    def count(self) -> None:
        """Write the number of requests in flight into the heartbeat table."""
        self._board.count_inside(self._name, len(self._inside))
