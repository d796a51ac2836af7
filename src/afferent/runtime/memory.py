"""Memory limits. Beyond them, the kernel does not refuse memory: it kills."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from afferent.runtime import cgroup

_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Files of the limit and its use: of version 2, and of version 1."""


def limit_nbytes() -> int:
    """Return the least of the machine's memory and the limits of this process and its cgroups."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return min([*limits, *(limit for limit, _ in _cgroup_limits())])


def available_nbytes() -> int:
    """Return the unused memory of the machine and within the limits of these cgroups."""
    match = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available = [limit_nbytes()]
    if match is not None:
        available.append(int(match[1]) * 1024)
    for limit, used_file in _cgroup_limits():
        used = cgroup.read_number(used_file)
        if used is not None:
            available.append(limit - used + _cached_nbytes(used_file.with_name("memory.stat")))
    return min(available)


def _cgroup_limits() -> Iterator[tuple[int, Path]]:
    """Yield each limit, and the file with its current use."""
    for folder in cgroup.folders("memory"):
        for limit_file, used_file in _CGROUP_FILES:
            limit = cgroup.read_number(folder / limit_file)
            if limit is not None:
                yield limit, folder / used_file


def _cached_nbytes(statistics: Path) -> int:
    """Return a cgroup's memory for cached files, which the kernel frees under pressure."""
    try:
        figures = dict(line.split() for line in statistics.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    prefix = "total_" if "total_inactive_file" in figures else ""
    names = (f"{prefix}{name}" for name in ("inactive_file", "active_file"))
    return sum(int(figures.get(name, 0)) for name in names)
