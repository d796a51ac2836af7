"""Signs of life: who works writes so, again and again, into memory that all processes of a server
read.

A process that was stopped, or hangs, keeps its connections and looks alive. So each beats, from
where its beating proves that it goes on, and who has been silent for long is shown by ``/ready``
and replaced by its parent. To beat is to write eight bytes: nothing can fill up or block, and to
read needs nobody's help, not even the supervisor's. The same memory says whether requests are let
in, and how many are inside.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

PERIOD_S = 1.0
"""Between two beats."""
SILENT_S = 3.0
"""Who has not beaten for so long is shown as frozen."""
_MOST_BETWEEN_LOOKS_S = 2 * PERIOD_S
_BEAT = struct.Struct("@Q")  # native: written in one go, so nobody reads the half of one
_ROW = struct.Struct("@QQ")
"""The last beat, and how many requests are inside."""


class BoardPlace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the beats are: in the memory behind ``fd``, in the order of ``names``.

    ``watchers`` says who beats for those that don't do it themselves.
    """

    fd: int
    names: tuple[str, ...]
    watchers: dict[str, str]
    frozen_timeout_s: float
    """Who is silent for so long is to be replaced."""


class Board:
    """The last beat of each process of a server, by name."""

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
        """New memory; nobody has beaten.

        Args:
            names: Of all processes.
            watchers: Who beats for those that don't do it themselves.
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
        """This process goes on, or one that it watches. From now on it has to beat, or to rest."""
        self._write(name, time.monotonic_ns())

    def rest(self, *names: str) -> None:
        """They don't run, or are only about to: nobody waits for their beats."""
        for name in names:
            self._write(name, 0)
            self.count_inside(name, 0)

    def read(self, names: Iterable[str] | None = None) -> dict[str, int]:
        """When each has beaten last, in ns of the monotonic clock; without those that rest."""
        beats = [beat for beat, _ in self._read_rows()]
        wanted = self._rows if names is None else names
        return {name: beats[self._rows[name]] for name in wanted if beats[self._rows[name]]}

    def silent(self) -> list[str]:
        """Who should beat, and has not for `SILENT_S`: of whom a silent one watches, none."""
        least_ns = time.monotonic_ns() - int(SILENT_S * 1e9)
        silent = [name for name, beat in self.read().items() if beat < least_ns]
        return [name for name in silent if self.place.watchers.get(name) not in silent]

    # The doors, by which requests come in

    def close_doors(self, are_closed: bool) -> None:
        """No process lets requests in until they are open again."""
        os.pwrite(self.place.fd, _BEAT.pack(are_closed), self._doors_at)

    @property
    def are_doors_closed(self) -> bool:
        return os.pread(self.place.fd, _BEAT.size, self._doors_at) != _BEAT.pack(False)

    def count_inside(self, name: str, num_inside: int) -> None:
        """So many requests are inside that this process has let in."""
        at = _ROW.size * self._rows[name] + _BEAT.size
        os.pwrite(self.place.fd, _BEAT.pack(num_inside), at)

    @property
    def num_inside(self) -> int:
        """Requests that any process is answering."""
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
    """Who has been silent for too long, as their parent sees it; pure.

    Silence counts only while the watcher itself looks in time: after a pause of the whole machine,
    or while all is late, nobody is to blame.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._awake_s, self._looked_s = 0.0, 0.0
        self._heard: dict[str, tuple[int, float]] = {}

    def look(self, beats: Mapping[str, int], *, now_s: float) -> None:
        """Take note of the beats as they are now; who is not among them is not waited for."""
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
        """Who is to be replaced."""
        least_s = self._awake_s - self._timeout_s
        return [name for name, (_, heard_s) in self._heard.items() if heard_s <= least_s]
