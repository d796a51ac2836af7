"""Who maps the arena: written by the store daemon, for the daemon that may come after it.

A daemon that takes over an arena must not reuse a byte while a process of the former epoch still
looks at it. So each client is written down, in memory that outlives the daemon, before it is given
the arena, and struck out when it has died or said that it uses nothing any more. A process is known
by its pid and its start time: pids are used again.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from afferent.errors import StoreFull
from afferent.runtime.proc_stat import ProcStat

# The fields of an `Entry`. A power of two: no row lies on two pages.
_ROW = struct.Struct("<QQQQ")
_NUM_ROWS = 4096
# Behind the rows.
_NUMBER = struct.Struct("<Q")


def create_client_table() -> int:
    """The memory of a client table; its descriptor."""
    fd = os.memfd_create("afferent-clients", os.MFD_CLOEXEC)
    os.ftruncate(fd, table_nbytes(_NUM_ROWS))
    return fd


def table_nbytes(num_rows: int) -> int:
    """The size of a table of so many clients."""
    return num_rows * _ROW.size + _NUMBER.size


@dataclass(frozen=True, slots=True)
class Entry:
    """``start_time`` is in clock ticks since boot; ``token`` is the client's own."""

    client: int
    pid: int
    start_time: int
    token: int

    def open_pidfd(self) -> int | None:
        """A descriptor that tells of the process's death; ``None`` if it is dead already."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if start_time(self.pid) != self.start_time:  # another process has got the pid
            os.close(fd)
            return None
        return fd


class ClientTable:
    def __init__(self, fd: int) -> None:
        """Read what an earlier daemon has left in it."""
        self._fd = fd
        data = os.pread(fd, os.fstat(fd).st_size, 0)
        self._number_offset = len(data) - _NUMBER.size
        (self._last_number,) = _NUMBER.unpack_from(data, self._number_offset)
        rows = list(_ROW.iter_unpack(data[: self._number_offset]))
        self._free = [index for index, fields in enumerate(rows) if not fields[0]]
        self._free.reverse()
        self._rows = {fields[0]: index for index, fields in enumerate(rows) if fields[0]}
        self._read = [Entry(*rows[index]) for index in self._rows.values()]

    def __iter__(self) -> Iterator[Entry]:
        """The entries that were there when the table was opened."""
        return iter(self._read)

    def new_client(self) -> int:
        """A number that no client has ever had, under this daemon or an earlier one: pins are taken
        for others by their number, who may have gone with the former epoch.
        """
        self._last_number += 1
        os.pwrite(self._fd, _NUMBER.pack(self._last_number), self._number_offset)
        return int(self._last_number)

    def add(self, client: int, pid: int, token: int) -> None:
        """Write a client down, before it is given the arena.

        Raises:
            StoreFull: There are thousands already.
        """
        if not self._free:
            raise StoreFull("too many processes are connected to the store")
        index = self._free.pop()
        self._rows[client] = index
        # Within a page and in one call: never half there, whenever the daemon is killed.
        row = _ROW.pack(client, pid, start_time(pid), token)
        os.pwrite(self._fd, row, index * _ROW.size)

    def remove(self, client: int) -> None:
        """The client uses nothing of the arena any more."""
        index = self._rows.pop(client, None)
        if index is not None:
            os.pwrite(self._fd, bytes(_ROW.size), index * _ROW.size)
            self._free.append(index)


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if there is none."""
    stat = ProcStat.read(pid)
    return 0 if stat is None else stat.start_ticks
