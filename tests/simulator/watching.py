"""Watchers of readable descriptors: threads, and event loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulator.machine import Process


class Watched:
    """Base of objects that can become readable. Several processes may have descriptors of one."""

    def __init__(self) -> None:
        self._watchers: dict[int, Callable[[], object]] = {}
        self._next = 0
        self.num_open = 0

    @property
    def is_readable(self) -> bool:
        """Whether there is something to read."""
        raise NotImplementedError

    def watch(self, call: Callable[[], object]) -> int:
        """Call ``call`` at each possible change; return a number for `unwatch`."""
        self._next += 1
        self._watchers[self._next] = call
        return self._next

    def unwatch(self, number: int) -> None:
        self._watchers.pop(number, None)

    def stir(self) -> None:
        """Notify all watchers of a possible change."""
        for call in list(self._watchers.values()):
            call()

    def open(self, process: Process) -> None:
        """Count an opened descriptor."""
        self.num_open += 1

    def close(self, process: Process) -> None:
        """Count a closed descriptor."""
        self.num_open -= 1
        if self.num_open == 0:
            self.on_unused()

    def on_unused(self) -> None:
        """Release the object: no descriptor of it is open."""
