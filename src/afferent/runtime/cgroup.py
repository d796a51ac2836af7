"""Control groups of this process, of both versions, and the cores that they allow.

A limit of a group holds for all groups in it, so the least limit of the process's own group and its
ancestors counts. systemd's units, Kubernetes' pods and nested containers set them at any level.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PROC = Path("/proc/self")


class _Mount(NamedTuple):
    root: PurePosixPath
    """Group that is mounted at ``path``."""
    path: Path
    is_second: bool
    """Whether it is of version 2, which has one hierarchy for all controllers."""
    options: tuple[str, ...]
    """Mount options; of version 1 they include the controllers."""


def folders(controller: str) -> tuple[Path, ...]:
    """Return the folders of the groups that limit this process, of both versions.

    These are its own group and its ancestors, as far as they are visible.
    """
    return _folders(controller, PROC)


@functools.cache  # processes stay in their groups, and the arena asks for each of its chunks
def _folders(controller: str, proc: Path) -> tuple[Path, ...]:
    groups = _groups(proc)
    found: list[Path] = []
    for mount in _mounts(proc):
        key = "" if mount.is_second else controller
        if key in groups and (mount.is_second or controller in mount.options):
            found += _with_ancestors(mount, groups[key])
    return tuple(found)


def num_cores() -> int:
    """Return the cores that this process may use, by its affinity and CPU quotas of its groups."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in folders("cpu"):
        cores = min(cores, *_quotas(folder))
    return max(1, int(cores))


def read_number(path: Path) -> int | None:
    """Return a number of a group; ``None``: no such file, or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _quotas(folder: Path) -> Iterator[float]:
    """Yield the quotas, in cores."""
    yield float("inf")
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        yield int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
        pass
    used_us = read_number(folder / "cpu.cfs_quota_us")
    period_us = read_number(folder / "cpu.cfs_period_us")
    if used_us is not None and period_us and used_us > 0:  # -1: no limit
        yield used_us / period_us


def _groups(proc: Path) -> dict[str, PurePosixPath]:
    """Return the groups by controller of version 1; version 2's is under the empty name."""
    found: dict[str, PurePosixPath] = {}
    for line in _lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), PurePosixPath(path))
    return found


def _mounts(proc: Path) -> Iterator[_Mount]:
    for line in _lines(proc / "mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            root, path = (_unescaped(field) for field in before.split(" ")[3:5])
            is_second = kind == "cgroup2"
            yield _Mount(PurePosixPath(root), Path(path), is_second, tuple(options.split(",")))


def _with_ancestors(mount: _Mount, group: PurePosixPath) -> Iterator[Path]:
    """Yield the folders from the group up to the mounted one."""
    # Within a container, its group may lie outside of the mount: only the mounted group is visible.
    inside = group.is_relative_to(mount.root) and ".." not in group.parts
    folder = mount.path / group.relative_to(mount.root) if inside else mount.path
    while folder != mount.path:
        yield folder
        folder = folder.parent
    yield mount.path


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no /proc
        return []


def _unescaped(field: str) -> str:
    """Decode octal escapes, which stand for blanks and the like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
