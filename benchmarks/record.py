"""The report of a benchmark: rows of medians with their samples, the machine, and the goals."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Struct

import afferent

T = TypeVar("T")

FORMAT_VERSION = 1
MIN_SAMPLES = 7
MAX_FOREIGN_CORES: Final = 0.15
"""A round of servers side by side does not count if other processes used more."""
_VECTORS: Final = ("avx512f", "avx2", "asimd")
"""Names of vector instructions, the widest first: two processors with one name can differ here."""


class Goal(Struct, frozen=True):
    what: str
    met: bool
    value: float


class Row(Struct, frozen=True):
    """A row; ``keys`` identify the case, ``samples`` has all measurements by their names."""

    keys: dict[str, Any]
    samples: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def as_record(self) -> dict[str, Any]:
        medians = {name: self.median(name) for name in self.samples}
        return {**self.keys, **medians, "samples": self.samples}


@dataclass(slots=True)
class Report:
    """The outcome of one benchmark."""

    benchmark: str
    question: str
    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    busy_cores_elsewhere: float = 0.0
    notes: list[str] = field(default_factory=list)
    """Notes on the table: the processes of each side, and the reasons for empty cells."""

    def as_json(self) -> bytes:
        record = {
            "benchmark": self.benchmark,
            "version": FORMAT_VERSION,
            "machine": machine(),
            "versions": versions(),
            "code": code(),
            "busy_cores_elsewhere": round(self.busy_cores_elsewhere, 2),
            "rows": [row.as_record() for row in self.rows],
            "goals": self.goals,
            "notes": self.notes,
        }
        return msgspec.json.format(msgspec.json.encode(record), indent=2)


def machine() -> dict[str, Any]:
    """Return what is known of this machine; ``vectors`` are its widest vector instructions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    about = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    flags = about.get("flags", about.get("Features", "")).split()  # of x86, of Arm
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": about.get("model name", platform.machine()),
        "vectors": next((flag for flag in _VECTORS if flag in flags), ""),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
    }


def named(where: Mapping[str, Any]) -> str:
    """Return a machine's name for a table; older records do not know its vector instructions."""
    vectors = f" ({where['vectors']})" if where.get("vectors") else ""
    return (
        f"{where['cpu']}{vectors}, {where['cores']} cores, {where['memory_gib']} GiB, "
        f"Linux {where['kernel']}"
    )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "afferent": afferent.__version__}
    for name in ("numpy", "msgspec"):
        found[name] = metadata.version(name)
    return found


def code(folder: Path = Path(afferent.__file__).parent) -> dict[str, str]:
    """Return a digest of each package of the measured code; modules at the top count as one.

    Args:
        folder: Folder of the package whose packages these are.
    """
    hashers: dict[str, blake3] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".c", ".h"):
            place = path.relative_to(folder)
            package = place.parts[0] if len(place.parts) > 1 else folder.name
            content = path.read_bytes()
            hasher = hashers.setdefault(package, blake3())
            hasher.update(f"{place} {len(content)} ".encode() + content)
    return {package: hasher.hexdigest(length=8) for package, hasher in hashers.items()}


class BusyMeter:
    """Measures the cores that other processes kept busy during a benchmark."""

    def __init__(self) -> None:
        self._start = self._read()

    def busy_cores_elsewhere(self) -> float:
        used, total, own = (
            now - before for now, before in zip(self._read(), self._start, strict=True)
        )
        cores = os.cpu_count() or 1
        return max(0.0, (used - own) / max(total, 1.0) * cores)

    def _read(self) -> tuple[float, float, float]:
        """Return busy and total ticks of the machine, and the ticks of this process tree."""
        return *machine_ticks(), _tree_ticks()


def machine_ticks() -> tuple[float, float]:
    """Return busy and total ticks of all cores."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    ticks = [float(value) for value in fields]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def quiet_rounds(one_round: Callable[[], T], *, number: int, report: Report, what: str) -> list[T]:
    """Return the results of rounds in which others kept at most `MAX_FOREIGN_CORES` busy.

    Other rounds are discarded and repeated, until there are twice as many as ``number``. Then the
    rounds with the least other load are used, and the report notes this.
    """
    rounds: list[tuple[float, T]] = []
    while sum(not _is_noisy(busy) for busy, _ in rounds) < number and len(rounds) < 2 * number:
        meter = BusyMeter()
        result = one_round()
        rounds.append((meter.busy_cores_elsewhere(), result))
    # The sort is stable: it takes the first of the quiet rounds.
    ranked = sorted(range(len(rounds)), key=lambda n: max(rounds[n][0], MAX_FOREIGN_CORES))
    kept, left = sorted(ranked[:number]), ranked[number:]
    if left:
        most = max(rounds[n][0] for n in left)
        report.notes.append(
            f"{what}: {len(left)} of {len(rounds)} rounds thrown away, with up to {most:.2f} cores "
            "busy elsewhere"
        )
    if noisy := [rounds[n][0] for n in kept if _is_noisy(rounds[n][0])]:
        report.notes.append(
            f"{what}: {len(noisy)} of {number} rounds count with up to {max(noisy):.2f} cores busy "
            "elsewhere, for want of quieter ones"
        )
    return [rounds[n][1] for n in kept]


def _is_noisy(busy_cores: float) -> bool:
    return busy_cores > MAX_FOREIGN_CORES


def _tree_ticks() -> float:
    """Return the processor time of this process and all below it, including ended ones."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        ticks[pid] = sum(float(field) for field in fields[11:15])
    total, waiting = 0.0, [os.getpid()]
    while waiting:
        pid = waiting.pop()
        total += ticks.get(pid, 0.0)
        waiting += children.get(pid, [])
    return total


def alternate(
    sides: Mapping[str, Callable[[], T]],
    *,
    num_samples: int,
    after_sample: Callable[[], None] = lambda: None,
) -> dict[str, list[T]]:
    """Run the sides in turn, ``num_samples`` times each after one warm-up; return the results."""
    samples: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(num_samples + 1):
        for name, side in sides.items():
            value = side()
            if number:
                samples[name].append(value)
            after_sample()
    return samples


def spread(values: Sequence[float]) -> str:
    """Return the minimum and the maximum, for a table."""
    return f"{figure(min(values))}..{figure(max(values))}"


def figure(value: float) -> str:
    """Return the value with three digits, without a power of ten up to a million."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.3g}"
