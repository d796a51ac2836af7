"""Limits of control groups, in folders like those of the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from afferent.runtime import cgroup, memory
from afferent.types import GiB, MiB

NONE_1 = 9223372036854771712
"""The value of version 1 for "no limit"."""


class Groups:
    """A fake ``/proc/self`` and hierarchies of both versions, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.mounts = folder / "proc", folder / "cgroup with a blank"
        self.proc.mkdir()
        self._membership, self._mountinfo = list[str](), list[str]()

    def mount(self, name: str, *, root: str = "/", group: str = "/") -> Path:
        """Mount a hierarchy and return its folder.

        It is named by its controllers, or ``unified``; this process is in ``group``, and only the
        part below ``root`` is visible.
        """
        path = self.mounts / name
        path.mkdir(parents=True)
        is_second = name == "unified"
        kind = "cgroup2 cgroup2 rw" if is_second else f"cgroup cgroup rw,{name}"
        where = str(path).replace(" ", "\\040")
        self._mountinfo.append(f"30 1 0:1 {root} {where} rw - {kind}\n")
        self._membership.append(f"{0 if is_second else 5}:{'' if is_second else name}:{group}\n")
        others = "1 1 0:1 / / rw,relatime shared:1 - ext4 /dev/x rw\n"
        (self.proc / "mountinfo").write_text(others + "".join(self._mountinfo))
        (self.proc / "cgroup").write_text("".join(self._membership))
        return path


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    made = Groups(tmp_path)
    monkeypatch.setattr(cgroup, "PROC", made.proc)
    return made


def write(folder: Path, **figures: object) -> Path:
    """Write files such as ``memory.max``, which is ``memory_max`` as an argument."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{figure}\n")
    return folder


@pytest.mark.parametrize("which", ["own", "parent", "topmost"])
def test_limit_of_any_ancestor_of_version_2_counts(groups: Groups, which: str) -> None:
    top = groups.mount("unified", group="/system.slice/afferent.service")
    chain = {"topmost": top, "parent": top / "system.slice"}
    chain["own"] = chain["parent"] / "afferent.service"
    for name, folder in chain.items():
        limit = 64 * MiB if name == which else "max"
        write(folder, memory_max=limit, memory_current=16 * MiB, memory_stat="anon 5")
    assert memory.limit_nbytes() == 64 * MiB
    assert memory.available_nbytes() == 48 * MiB


@pytest.mark.parametrize("which", ["own", "parent", "topmost"])
def test_limit_of_any_ancestor_of_version_1_counts(groups: Groups, which: str) -> None:
    top = groups.mount("memory", group="/kubepods/pod7")
    chain = {"topmost": top, "parent": top / "kubepods", "own": top / "kubepods" / "pod7"}
    statistics = f"total_inactive_file {MiB}\ntotal_active_file {2 * MiB}\ninactive_file 7"
    for name, folder in chain.items():
        limit = 64 * MiB if name == which else NONE_1
        write(folder, memory_limit_in_bytes=limit, memory_usage_in_bytes=16 * MiB)
        write(folder, memory_stat=statistics)
    assert memory.limit_nbytes() == 64 * MiB
    assert memory.available_nbytes() == 51 * MiB


def test_least_of_both_versions_and_all_groups(groups: Groups) -> None:
    first = groups.mount("memory", group="/a/b")
    second = groups.mount("unified", group="/c")
    write(first / "a", memory_limit_in_bytes=3 * MiB)
    write(first / "a" / "b", memory_limit_in_bytes=5 * MiB)
    write(second / "c", memory_max=4 * MiB)
    assert memory.limit_nbytes() == 3 * MiB


def test_container_sees_its_own_group_at_the_mount(groups: Groups) -> None:
    """Docker on version 1 mounts only the container's group, but shows its path on the host."""
    top = groups.mount("memory", root="/docker/3f", group="/docker/3f/inner")
    write(top, memory_limit_in_bytes=3 * MiB)
    write(top / "inner", memory_limit_in_bytes=2 * MiB)
    assert memory.limit_nbytes() == 2 * MiB
    assert cgroup.folders("memory") == (top / "inner", top)


@pytest.mark.parametrize("group", ["/docker/other", "/../outside"])
def test_group_outside_of_the_mount_leaves_what_is_mounted(groups: Groups, group: str) -> None:
    top = groups.mount("unified", root="/docker/3f", group=group)
    write(top, memory_max=3 * MiB)
    assert memory.limit_nbytes() == 3 * MiB


def test_no_groups_leave_the_machine(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert cgroup.folders("memory") == ()
    assert memory.limit_nbytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory.available_nbytes() <= memory.limit_nbytes() < 1024 * GiB
    assert cgroup.num_cores() == 64


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"cpu_max": "max 100000"}, 64),
        ({"cpu_max": "400000 100000"}, 4),
        ({"cpu_max": "250000 100000"}, 2),
        ({"cpu_max": "50000 100000"}, 1),  # at least 1
        ({"cpu_max": "12800000 100000"}, 64),  # more than the machine has
        ({"cpu_cfs_quota_us": -1, "cpu_cfs_period_us": 100_000}, 64),
        ({"cpu_cfs_quota_us": 300_000, "cpu_cfs_period_us": 100_000}, 3),
        ({"cpu_cfs_quota_us": 300_000, "cpu_cfs_period_us": 0}, 64),
        ({"cpu_max": "nonsense"}, 64),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_quota_of_cores(
    groups: Groups,
    monkeypatch: pytest.MonkeyPatch,
    figures: dict[str, object],
    expected: int,
    is_nested: bool,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    is_first = "cpu_max" not in figures
    top = groups.mount("cpu,cpuacct" if is_first else "unified", group="/pod/container")
    write(top / "pod" if is_nested else top / "pod" / "container", **figures)
    assert cgroup.num_cores() == expected
