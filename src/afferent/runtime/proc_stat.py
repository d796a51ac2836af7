"""What the kernel says of a process, of which it need not know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

_STOPPED = (b"T", b"t")  # by a signal; by a debugger


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcStat:
    """``cpu_ticks`` is the processor time that it has used, and ``start_ticks`` when it started
    after the machine did, in clock ticks.
    """

    is_stopped: bool
    session: int
    cpu_ticks: int
    start_ticks: int

    @classmethod
    def read(cls, pid: int) -> Self | None:
        """``None`` if there is no such process."""
        try:
            text = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return None
        # The name, in brackets, may hold anything; what follows it is numbers.
        fields = text.rpartition(b")")[2].split()
        return cls(
            is_stopped=fields[0] in _STOPPED,
            session=int(fields[3]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            start_ticks=int(fields[19]),
        )
