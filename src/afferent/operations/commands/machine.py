"""Checks of this machine, with a fix for each problem."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct
from packaging.requirements import Requirement

from afferent.errors import AfferentError, in_a_line
from afferent.runtime import cgroup, memory
from afferent.runtime.sockets import new_address
from afferent.types import GiB, MiB

Level = Literal["ok", "could be better", "wrong"]

DISTRIBUTION: Final = "afferent-mm"
"""Name of the package in the index, where `afferent` is another project."""

_LEAST_KERNEL, _GOOD_KERNEL = (5, 4), (5, 14)
_LEAST_FILES, _GOOD_FILES = 1024, 16384
_LEAST_SHM_NBYTES = GiB
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_SHM = "/dev/shm"  # noqa: S108 - the kernel's own
_GPU = Path("/dev/nvidiactl")
_SPARE_NBYTES = GiB


class Finding(Struct, frozen=True, kw_only=True):
    """Result of one check; ``mend`` is the fix, a command if there is one."""

    what: str
    level: Level
    found: str
    mend: str = ""


def found_as(
    what: str, is_fine: bool, found: str, mend: str, *, otherwise: Level = "wrong"
) -> Finding:
    """Return the finding of a check whose result is known; ``otherwise`` is a fault's level."""
    if is_fine:
        return Finding(what=what, level="ok", found=found)
    return Finding(what=what, level=otherwise, found=found, mend=mend)


def judged(what: str, ask: Callable[[], str], mend: str = "") -> Finding:
    """Return the finding of a check: wrong if ``ask`` raises an `AfferentError`."""
    try:
        return Finding(what=what, level="ok", found=ask())
    except AfferentError as error:
        return Finding(what=what, level="wrong", found=error.message, mend=mend)


def findings(*, num_workers: int, extras: Sequence[str], needs_shm: bool) -> Iterator[Finding]:
    """Yield the findings of all checks.

    Args:
        num_workers: Configured preprocess workers; 0: at most one for each core.
        extras: Extras of this package that have to be installed.
        needs_shm: The engine's processes communicate through ``/dev/shm``.
    """
    yield _kernel()
    yield _confinement()
    yield _calls()
    yield _versions(extras)
    yield _resizing()
    yield _files()
    yield _cores(num_workers)
    yield _memory()
    yield _overcommit()
    yield _huge_pages()
    if _GPU.exists():
        yield _locked_memory()
    if needs_shm:
        yield _shm()
    yield judged(
        "sockets",
        lambda: f"in {Path(new_address('doctor')).parent.parent}",
        "export XDG_RUNTIME_DIR=/run/user/$(id -u), or a TMPDIR that can be written to",
    )


def _kernel() -> Finding:
    release, machine = platform.release(), platform.machine()
    version = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    level: Level = "ok" if version >= _GOOD_KERNEL else "could be better"
    mend = "" if level == "ok" else "a kernel from 5.14 on maps the arena ahead of its use"
    if version < _LEAST_KERNEL:
        level, mend = "wrong", "a kernel from 5.4 on: apt install linux-image-amd64, or its like"
    return Finding(what="kernel", level=level, found=f"{release} on {machine}", mend=mend)


_CONFINE: Final = """
import os
from afferent.errors import AfferentError
from afferent.media.workers import sandbox
try:
    sandbox.enter(memory_nbytes=64 << 20)
except AfferentError as error:
    os.write(1, error.message.encode())
os._exit(0)
"""
"""Program that enters the sandbox, and prints why it could not."""


def _confinement() -> Finding:
    """Check the sandbox in a process of its own: it can't be left, and may have one thread only."""
    done = subprocess.run(
        [sys.executable, "-c", _CONFINE], capture_output=True, text=True, check=False
    )
    said = done.stdout
    if done.returncode and not said:
        said = f"the process that tried it has ended with status {done.returncode}"
    return found_as(
        *("confinement", not said, said or "decoders can be confined (seccomp)"),
        "a container needs a seccomp profile that allows seccomp(2), as the default ones of "
        "Docker and Podman do: no --security-opt seccomp=FILE of your own",
    )


def _calls() -> Finding:
    """Check system calls that a container's profile may refuse, or an old kernel lack."""
    missing = []
    for name, call in _CALLS.items():
        try:
            os.close(call())
        except (OSError, AttributeError):
            missing.append(name)
    if ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) != 0:  # PR_SET_PDEATHSIG
        missing.append("prctl")
    return found_as(
        *("system calls", not missing),
        f"refused: {', '.join(missing)}" if missing else ", ".join([*_CALLS, "prctl"]),
        "--security-opt seccomp=unconfined shows whether the container's profile refuses them",
    )


_CALLS: dict[str, Callable[[], int]] = {
    "memfd_create": lambda: os.memfd_create("afferent-doctor", os.MFD_ALLOW_SEALING),
    "pidfd_open": lambda: os.pidfd_open(os.getpid()),
}


def _versions(extras: Sequence[str]) -> Finding:
    wrong = []
    for line in _requirements():
        wanted = Requirement(line)
        if wanted.marker and not any(
            wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        ):
            continue
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{wanted.name} is missing")
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            wrong.append(f"{wanted.name} is {found}, not {wanted.specifier}")
    python = platform.python_version()
    if wrong:
        names = f"[{','.join(extras)}]" if extras else ""
        mend = f"{sys.executable} -m pip install --upgrade '.{names}' in the clone of Afferent"
        return Finding(what="packages", level="wrong", found="; ".join(wrong), mend=mend)
    return Finding(what="packages", level="ok", found=f"as declared, with Python {python}")


def _requirements() -> list[str]:
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # run from the sources, not installed
        return []


def _resizing() -> Finding:
    try:
        importlib.import_module("afferent.media.native._native")
    except ImportError as error:
        return Finding(
            what="resizing",
            level="could be better",
            found="by libraries, which decode PNG, too, at a third of the speed or less: "
            + in_a_line(error),
            mend="a C compiler (gcc) and Python's headers, then install Afferent again",
        )
    return Finding(what="resizing", level="ok", found="the compiled part is there")


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    level: Level = "ok" if soft >= _GOOD_FILES else "could be better"
    if hard < _LEAST_FILES:
        level = "wrong"
    mend = f"ulimit -n {_GOOD_FILES}; of a unit LimitNOFILE=, of a container --ulimit nofile="
    return Finding(
        what="open files",
        level=level,
        found=f"{soft:,} (at most {hard:,}); each connection takes one",
        mend="" if level == "ok" else mend,
    )


def _cores(num_workers: int) -> Finding:
    cores = cgroup.num_cores()
    return found_as(
        *("cores", num_workers <= cores),
        f"{cores}, for {num_workers or 'at most as many'} preprocess workers beside all else",
        f"--preprocess-workers {cores}",
        otherwise="could be better",
    )


def _memory() -> Finding:
    limit, free = memory.limit_nbytes(), memory.available_nbytes()
    return found_as(
        *("memory", free >= _SPARE_NBYTES),
        f"{limit / GiB:.1f} GiB by machine, limits and cgroup, {free / GiB:.1f} GiB free",
        "end other programs, or raise the container's --memory",
    )


def _overcommit() -> Finding:
    is_strict = _read(_OVERCOMMIT) == "2"
    return found_as(
        *("overcommit", not is_strict),
        "strict: what processes only map counts, too" if is_strict else "as usual",
        "sysctl vm.overcommit_memory=0",
        otherwise="could be better",
    )


def _huge_pages() -> Finding:
    match = re.search(r"\[(\w+)\]", _read(_HUGE_PAGES))
    chosen = match[1] if match else "not offered"
    is_on = chosen in ("always", "advise", "within_size", "force")
    mend = f"echo advise > {_HUGE_PAGES}" if match else ""
    found = f"for shared memory: {chosen}"
    return found_as("huge pages", is_on, found, mend, otherwise="could be better")


def _locked_memory() -> Finding:
    """Check the limit of locked memory: a GPU copies by itself only from locked arena pages."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = soft == resource.RLIM_INFINITY
    mend = (
        "ulimit -l unlimited; of a unit LimitMEMLOCK=infinity, of a container --ulimit memlock=-1"
    )
    found = "unlimited" if is_unlimited else f"{soft / MiB:,.0f} MiB: less than the arena"
    return found_as("locked memory", is_unlimited, found, mend, otherwise="could be better")


def _shm() -> Finding:
    try:
        status = os.statvfs(_SHM)
        free = status.f_bavail * status.f_frsize
    except OSError:
        free = 0
    return found_as(
        *(_SHM, free >= _LEAST_SHM_NBYTES),
        f"{free / MiB:,.0f} MiB free; engine processes talk through it, the arena is not there",
        "mount -o remount,size=4G /dev/shm; of a container --shm-size 4g",
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
