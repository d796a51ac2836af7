"""Simulated objects behind descriptors, except sockets: memory, pidfds, eventfds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulator.watching import Watched

if TYPE_CHECKING:
    from tests.simulator.machine import Process

_inodes = itertools.count(1)


PAGE_NBYTES = 1024


class Memory:
    """Memory behind a memfd; it exists while any process has it."""

    def __init__(self) -> None:
        self.inode = next(_inodes)
        self.on_sent: Callable[[Process], object] | None = None
        """Called with the receiving process before a descriptor of it is sent."""
        self.resize(0)

    def resize(self, nbytes: int) -> None:
        self.data = np.zeros(nbytes, np.uint8)
        self._has_page = np.zeros(-(-nbytes // PAGE_NBYTES), np.bool_)

    def allocate(self, start: int, end: int) -> None:
        """Allocate the pages of these bytes."""
        self._has_page[_pages(start, end)] = True

    def has(self, start: int, end: int) -> bool:
        """Return whether these bytes have pages: a writer to others may be killed."""
        return bool(self._has_page[_pages(start, end)].all())

    @property
    def num_pages(self) -> int:
        return int(self._has_page.sum())

    def first_hole(self, start: int) -> int:
        """Return the first byte from ``start`` on without a page; the end if there is none."""
        holes = np.flatnonzero(~self._has_page[start // PAGE_NBYTES :])
        return (
            (start // PAGE_NBYTES + int(holes[0])) * PAGE_NBYTES if len(holes) else len(self.data)
        )

    def first_used(self, start: int) -> int | None:
        """Return the first byte from ``start`` on that is not zero; ``None`` if there is none."""
        used = np.flatnonzero(self.data[start:])
        return start + int(used[0]) if len(used) else None

    def open(self, process: Process) -> None:
        """Count an opened descriptor."""

    def close(self, process: Process) -> None:
        """Count a closed descriptor."""


def _pages(start: int, end: int) -> slice:
    return slice(start // PAGE_NBYTES, -(-end // PAGE_NBYTES))


class ReadOnly:
    """Descriptor of memory that can't be written through."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def open(self, process: Process) -> None:
        """Count an opened descriptor."""

    def close(self, process: Process) -> None:
        """Count a closed descriptor."""


class Map(np.ndarray[Any, Any]):
    """Memory as a process has mapped it."""

    # By identity: numpy compares by contents, and maps are elements of sets.
    __hash__ = object.__hash__  # type: ignore[assignment]

    def close(self) -> None:
        """Unmap the memory. Existing views stay valid, as with the kernel."""


class Pidfd(Watched):
    """Pidfd, readable when its process is dead."""

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
