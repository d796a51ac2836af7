"""Status of any process, from the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

_STOPPED = (b"T", b"t")  # by a signal; by a debugger


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcStat:
    """Kernel status of a process, with times in clock ticks.

    ``cpu_ticks`` is its processor time, ``start_ticks`` its start relative to the machine's.
    """

    is_stopped: bool
    session: int
    cpu_ticks: int
    start_ticks: int

    @classmethod
    def read(cls, pid: int) -> Self | None:
        """Return the status; ``None`` if there is no such process."""
        try:
            text = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return None
        # The name, in brackets, may contain anything; numbers follow it.
        fields = text.rpartition(b")")[2].split()
        return cls(
            is_stopped=fields[0] in _STOPPED,
            session=int(fields[3]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            start_ticks=int(fields[19]),
        )
