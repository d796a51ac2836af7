"""How much memory there is. Past it, the kernel does not refuse: it kills."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""The limit, and what is used of it: of version 2, and of version 1."""


def limit_nbytes() -> int:
    """The least of the machine's memory and the limits of this process and its cgroup."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    for path, _ in _CGROUP_FILES:
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(limits)


def available_nbytes() -> int:
    """What of it is not in use: of the machine's memory, and of what this cgroup may have."""
    match = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available = [limit_nbytes()]
    if match is not None:
        available.append(int(match[1]) * 1024)
    for limit, used in _CGROUP_FILES:
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
            available.append(left + _cached_nbytes(Path(used).with_name("memory.stat")))
        except (OSError, ValueError, KeyError):  # no such file, or "max"
            continue
    return min(available)


def _cached_nbytes(statistics: Path) -> int:
    """What a cgroup uses for cached files, which the kernel gives up when memory is short."""
    figures = dict(line.split() for line in statistics.read_text().splitlines())
    prefix = "total_" if "total_inactive_file" in figures else ""
    return sum(int(figures[f"{prefix}{name}"]) for name in ("inactive_file", "active_file"))
