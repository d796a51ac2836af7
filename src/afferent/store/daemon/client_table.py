"""Table of the clients that map the arena; it outlives the store daemon.

A daemon that takes over an arena must not reuse a byte while a process of the previous epoch still
reads it. So the daemon adds each client, in memory that outlives the daemon, before it sends the
arena. It removes the client when that has died or reported that it uses nothing. A process is
identified by its pid and its start time, as pids are reused.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from afferent.errors import StoreFull
from afferent.runtime.proc_stat import ProcStat

# The fields of an `Entry`. A power of two: no row crosses a page boundary.
_ROW = struct.Struct("<QQQQ")
_NUM_ROWS = 4096
# The last client number, after the rows.
_NUMBER = struct.Struct("<Q")


def create_client_table() -> int:
    """Create the memory of a client table; return its descriptor."""
    fd = os.memfd_create("afferent-clients", os.MFD_CLOEXEC)
    os.ftruncate(fd, table_nbytes(_NUM_ROWS))
    return fd


def table_nbytes(num_rows: int) -> int:
    """Return the size of a table of ``num_rows`` clients."""
    return num_rows * _ROW.size + _NUMBER.size


@dataclass(frozen=True, slots=True)
class Entry:
    """Client process; ``start_time`` is in clock ticks since boot, ``token`` is the client's."""

    client: int
    pid: int
    start_time: int
    token: int

    def open_pidfd(self) -> int | None:
        """Open a descriptor that reports the process's death; ``None`` if it is already dead."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if start_time(self.pid) != self.start_time:  # the pid was reused
            os.close(fd)
            return None
        return fd


class ClientTable:
    """Clients that may map the arena, in shared memory.

    Invariants:
        - A row is written before its client gets the arena, by one call within a page: it is
          complete or empty, whenever the daemon is killed.
        - Client numbers only grow, also across daemons.
    """

    def __init__(self, fd: int) -> None:
        """Read the entries of an earlier daemon."""
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
        """Iterate over the entries that existed when the table was opened."""
        return iter(self._read)

    def new_client(self) -> int:
        """Return a number that no client has ever had, under this daemon or an earlier one.

        A request can pin objects for other clients by number, and such a client may have gone with
        the previous epoch.
        """
        self._last_number += 1
        os.pwrite(self._fd, _NUMBER.pack(self._last_number), self._number_offset)
        return int(self._last_number)

    def add(self, client: int, pid: int, token: int) -> None:
        """Add a client, before it gets the arena.

        Raises:
            StoreFull: The table is full, with thousands of clients.
        """
        if not self._free:
            raise StoreFull("too many processes are connected to the store")
        index = self._free.pop()
        self._rows[client] = index
        # Within a page and in one call: never half written, whenever the daemon is killed.
        row = _ROW.pack(client, pid, start_time(pid), token)
        os.pwrite(self._fd, row, index * _ROW.size)

    def remove(self, client: int) -> None:
        """Remove a client that uses nothing of the arena any more."""
        index = self._rows.pop(client, None)
        if index is not None:
            os.pwrite(self._fd, bytes(_ROW.size), index * _ROW.size)
            self._free.append(index)


def start_time(pid: int) -> int:
    """Return the start of a process, in clock ticks since boot; 0 if it does not exist."""
    stat = ProcStat.read(pid)
    return 0 if stat is None else stat.start_ticks
