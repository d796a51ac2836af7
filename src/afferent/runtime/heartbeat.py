"""Heartbeats: each process writes its own into memory that all processes of a server read.

A process that was stopped, or hangs, keeps its connections and looks alive. So each process writes
a heartbeat, at a point that proves its progress. ``/ready`` shows a process that has been silent
for long, and its parent replaces it.

A heartbeat is eight bytes written: nothing can fill up or block. Reading needs no other process,
not even the supervisor. The same memory has the admission switch, and the number of requests in
flight.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

PERIOD_S = 1.0
"""Interval of heartbeats."""
SILENT_S = 3.0
"""A process without a heartbeat for this time is shown as frozen."""
_MOST_BETWEEN_LOOKS_S = 2 * PERIOD_S
_BEAT = struct.Struct("@Q")  # native: written at once, so no reader sees half of one
_ROW = struct.Struct("@QQ")
"""The last heartbeat, and the number of requests in flight."""


class BoardPlace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Location of the heartbeat table: memory behind ``fd``, in the order of ``names``.

    ``watchers`` maps each process that does not write its own heartbeats to the one that does.
    """

    fd: int
    names: tuple[str, ...]
    watchers: dict[str, str]
    frozen_timeout_s: float
    """A process that is silent for this time has to be replaced."""


class Board:
    """Heartbeat table: the last heartbeat of each process of a server, by name.

    Invariants: a heartbeat of 0 means unregistered.
    """

    def __init__(self, place: BoardPlace) -> None:
        self.place = place
        self._rows = {name: index for index, name in enumerate(place.names)}

    @classmethod
    def create(
        cls,
        names: Sequence[str],
        *,
        watchers: Mapping[str, str] | None = None,
        frozen_timeout_s: float,
    ) -> Board:
        """Create a table in new memory, without heartbeats.

        Args:
            names: Names of all processes.
            watchers: Process that writes the heartbeats of each one that does not do so itself.
        """
        fd = os.memfd_create("afferent-beats", os.MFD_CLOEXEC)
        os.ftruncate(fd, _ROW.size * len(names) + _BEAT.size)
        place = BoardPlace(
            fd=fd,
            names=tuple(names),
            watchers=dict(watchers or {}),
            frozen_timeout_s=frozen_timeout_s,
        )
        return cls(place)

    def beat(self, name: str) -> None:
        """Write a heartbeat of this process, or of one that it watches.

        From now on the process has to continue, or be unregistered by `rest`.
        """
        self._write(name, time.monotonic_ns())

    def rest(self, *names: str) -> None:
        """Unregister processes that have ended or not begun: no heartbeat is expected."""
        for name in names:
            self._write(name, 0)
            self.count_inside(name, 0)

    def read(self, names: Iterable[str] | None = None) -> dict[str, int]:
        """Return the last heartbeats, in ns of the monotonic clock, of all registered processes."""
        beats = [beat for beat, _ in self._read_rows()]
        wanted = self._rows if names is None else names
        return {name: beats[self._rows[name]] for name in wanted if beats[self._rows[name]]}

    def silent(self) -> list[str]:
        """Return registered processes without a heartbeat for `SILENT_S`.

        Processes watched by a silent one are omitted.
        """
        least_ns = time.monotonic_ns() - int(SILENT_S * 1e9)
        silent = [name for name, beat in self.read().items() if beat < least_ns]
        return [name for name in silent if self.place.watchers.get(name) not in silent]

    # Admission switch

    def close_doors(self, are_closed: bool) -> None:
        """Switch admission off, or on again, for all processes."""
        os.pwrite(self.place.fd, _BEAT.pack(are_closed), self._doors_at)

    @property
    def are_doors_closed(self) -> bool:
        return os.pread(self.place.fd, _BEAT.size, self._doors_at) != _BEAT.pack(False)

    def count_inside(self, name: str, num_inside: int) -> None:
        """Set the number of requests that this process has in flight."""
        at = _ROW.size * self._rows[name] + _BEAT.size
        os.pwrite(self.place.fd, _BEAT.pack(num_inside), at)

    @property
    def num_inside(self) -> int:
        """Requests in flight of all processes."""
        return sum(num_inside for _, num_inside in self._read_rows())

    def close(self) -> None:
        os.close(self.place.fd)

    @property
    def _doors_at(self) -> int:
        return _ROW.size * len(self._rows)

    def _read_rows(self) -> list[tuple[int, int]]:
        data = os.pread(self.place.fd, _ROW.size * len(self._rows), 0)
        return [(beat, num_inside) for beat, num_inside in _ROW.iter_unpack(data)]

    def _write(self, name: str, beat: int) -> None:
        os.pwrite(self.place.fd, _BEAT.pack(beat), _ROW.size * self._rows[name])


class Watch:
    """Detection of processes that are silent too long, for their parent. Pure.

    Silence counts only while the parent itself polls in time: after a pause of the whole machine,
    or while everything is late, no process is blamed.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._awake_s, self._looked_s = 0.0, 0.0
        self._heard: dict[str, tuple[int, float]] = {}

    def look(self, beats: Mapping[str, int], *, now_s: float) -> None:
        """Record the current heartbeats; a process that is missing is not expected."""
        if self._looked_s:
            self._awake_s += min(now_s - self._looked_s, _MOST_BETWEEN_LOOKS_S)
        self._looked_s = now_s
        before, self._heard = self._heard, {}
        for name, beat in beats.items():
            new = (beat, self._awake_s)
            known = before.get(name, new)
            self._heard[name] = known if known[0] == beat else new

    @property
    def overdue(self) -> list[str]:
        """Processes that have to be replaced."""
        least_s = self._awake_s - self._timeout_s
        return [name for name, (_, heard_s) in self._heard.items() if heard_s <= least_s]
