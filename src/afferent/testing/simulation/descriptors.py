"""What a descriptor may stand for, besides sockets: memory, a process's death, a bell."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from afferent.testing.simulation.watching import Watched

if TYPE_CHECKING:
    from afferent.testing.simulation.machine import Process

_inodes = itertools.count(1)


class Memory:
    """What a memfd stands for; it is there as long as anybody has it."""

    def __init__(self) -> None:
        self.data = np.zeros(0, np.uint8)
        self.inode = next(_inodes)

    def resize(self, nbytes: int) -> None:
        self.data = np.zeros(nbytes, np.uint8)

    def open(self, process: Process) -> None:
        """A descriptor more."""

    def close(self, process: Process) -> None:
        """A descriptor less."""


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
