"""How much memory there is. Past it, the kernel does not refuse: it kills."""

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
"""The limit, and what is used of it: of version 2, and of version 1."""


def limit_nbytes() -> int:
    """The least of the machine's memory and the limits of this process and its cgroups."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return min([*limits, *(limit for limit, _ in _cgroup_limits())])


def available_nbytes() -> int:
    """What of it is not in use: of the machine's memory, and of what these cgroups may have."""
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
    """Each limit, and the file that says what is used of it."""
    for folder in cgroup.folders("memory"):
        for limit_file, used_file in _CGROUP_FILES:
            limit = cgroup.read_number(folder / limit_file)
            if limit is not None:
                yield limit, folder / used_file


def _cached_nbytes(statistics: Path) -> int:
    """What a cgroup uses for cached files, which the kernel gives up when memory is short."""
    try:
        figures = dict(line.split() for line in statistics.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    prefix = "total_" if "total_inactive_file" in figures else ""
    names = (f"{prefix}{name}" for name in ("inactive_file", "active_file"))
    return sum(int(figures.get(name, 0)) for name in names)
