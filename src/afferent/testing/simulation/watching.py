"""Who waits until a descriptor is readable: threads, and event loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from afferent.testing.simulation.machine import Process


class Watched:
    """What can be waited for. A descriptor of it may be had by several processes."""

    def __init__(self) -> None:
        self._watchers: dict[int, Callable[[], object]] = {}
        self._next = 0
        self.num_open = 0

    @property
    def is_readable(self) -> bool:
        """Whether there is something to read."""
        raise NotImplementedError

    def watch(self, call: Callable[[], object]) -> int:
        """Have ``call`` called whenever something may have changed; a number to `unwatch`."""
        self._next += 1
        self._watchers[self._next] = call
        return self._next

    def unwatch(self, number: int) -> None:
        self._watchers.pop(number, None)

    def stir(self) -> None:
        """Something may have changed."""
        for call in list(self._watchers.values()):
            call()

    def open(self, process: Process) -> None:
        """A descriptor more."""
        self.num_open += 1

    def close(self, process: Process) -> None:
        """A descriptor less."""
        self.num_open -= 1
        if self.num_open == 0:
            self.on_unused()

    def on_unused(self) -> None:
        """Nobody has it any more."""
