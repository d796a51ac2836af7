"""What a descriptor may stand for, besides sockets: memory, a process's death, a bell."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from afferent.testing.simulation.watching import Watched

if TYPE_CHECKING:
    from afferent.testing.simulation.machine import Process

_inodes = itertools.count(1)


PAGE_NBYTES = 1024


class Memory:
    """What a memfd stands for; it is there as long as anybody has it."""

    def __init__(self) -> None:
        self.inode = next(_inodes)
        self.on_sent: Callable[[Process], object] | None = None
        """Called with the process to which a descriptor of it is sent, before it is."""
        self.resize(0)

    def resize(self, nbytes: int) -> None:
        self.data = np.zeros(nbytes, np.uint8)
        self._has_page = np.zeros(-(-nbytes // PAGE_NBYTES), np.bool_)

    def allocate(self, start: int, end: int) -> None:
        """Give these bytes their pages."""
        self._has_page[_pages(start, end)] = True

    def has(self, start: int, end: int) -> bool:
        """Whether these bytes have their pages: who writes elsewhere may be killed."""
        return bool(self._has_page[_pages(start, end)].all())

    @property
    def num_pages(self) -> int:
        return int(self._has_page.sum())

    def first_hole(self, start: int) -> int:
        """The first byte from ``start`` on that has no page; the end, where all have theirs."""
        holes = np.flatnonzero(~self._has_page[start // PAGE_NBYTES :])
        return (
            (start // PAGE_NBYTES + int(holes[0])) * PAGE_NBYTES if len(holes) else len(self.data)
        )

    def open(self, process: Process) -> None:
        """A descriptor more."""

    def close(self, process: Process) -> None:
        """A descriptor less."""


def _pages(start: int, end: int) -> slice:
    return slice(start // PAGE_NBYTES, -(-end // PAGE_NBYTES))


class ReadOnly:
    """A descriptor of memory that can't be written through."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def open(self, process: Process) -> None:
        """A descriptor more."""

    def close(self, process: Process) -> None:
        """A descriptor less."""


class Map(np.ndarray[Any, Any]):
    """Memory as a process has mapped it."""

    # By identity: numpy compares by contents, and maps are kept in sets.
    __hash__ = object.__hash__  # type: ignore[assignment]

    def close(self) -> None:
        """Unmapped. What is still over it stays, as the kernel would have it."""


class Pidfd(Watched):
    """Readable when its process is dead."""

    def __init__(self, of: Process) -> None:
        super().__init__()
        self.of = of
        if of.pid in of.machine.processes and of.machine.processes[of.pid] is of:
            of.on_exit.append(self.stir)

    @property
    def is_readable(self) -> bool:
        return self.of.machine.processes.get(self.of.pid) is not self.of


class Eventfd(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @property
    def is_readable(self) -> bool:
        return self.count > 0

    def ring(self, number: int) -> None:
        self.count += number
        self.stir()
