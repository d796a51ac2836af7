"""Messages for refusals of the system: descriptors, processes, memory, the size of a file."""

from __future__ import annotations

import errno
import resource

from afferent.errors import ConfigError
from afferent.runtime import cgroup
from afferent.types import MiB

LEAST_FILES = 256
_BASE_TASKS, _WORKER_TASKS, _FRONTEND_TASKS = 32, 2, 12
"""Processes and threads of a server: 23 when idle, and others under load."""

_MORE_FILES = "raise it: ulimit -n 16384, of a unit LimitNOFILE=, of a container --ulimit nofile="
_MORE_TASKS = "raise it: ulimit -u, of a unit TasksMax=, of a container --pids-limit"
_MORE_MEMORY = "there is no memory left; end other programs, or raise the container's --memory"


def explain(error: BaseException) -> str:
    """Return the shortage and its fix; empty if the error has another reason."""
    if isinstance(error, MemoryError):
        return _MORE_MEMORY
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return f"no more threads can be started; there is a limit: {_MORE_TASKS}"
    if not isinstance(error, OSError):
        return ""
    match error.errno:
        case errno.EMFILE:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"no more than {soft} files can be open in a process; {_MORE_FILES}"
        case errno.ENFILE:
            return "this machine has too many open files; raise fs.file-max (sysctl)"
        case errno.EAGAIN:
            return f"no more processes can be started; there is a limit: {_MORE_TASKS}"
        case errno.ENOMEM:
            return _MORE_MEMORY
        case errno.EFBIG:
            return f"a file must not be larger than {_file_limit()}; raise it: ulimit -f unlimited"
        case errno.ENOSPC:
            return f"no space is left on the device{_at(error)}"
        case _:
            return ""


def check_files() -> None:
    """Refuse a limit of open files with which no server can run.

    Raises:
        ConfigError: It is below `LEAST_FILES`.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_FILES:
        raise ConfigError(
            f"no more than {soft} files can be open in a process, and a server needs "
            f"{LEAST_FILES}; {_MORE_FILES}"
        )


def check_tasks(*, num_workers: int, num_frontends: int) -> None:
    """Refuse a control group that is too small for all processes and threads of a server.

    Raises:
        ConfigError: It allows fewer.
    """
    needed = _BASE_TASKS + num_workers * _WORKER_TASKS + num_frontends * _FRONTEND_TASKS
    for folder in cgroup.folders("pids"):
        limit = cgroup.read_number(folder / "pids.max")
        used = cgroup.read_number(folder / "pids.current")
        if limit is not None and used is not None and limit - used < needed:
            raise ConfigError(
                f"no more than {limit} processes and threads can run here, {used} do, and a server "
                f"with {num_workers} preprocess workers and {num_frontends} frontends needs "
                f"{needed} more; {_MORE_TASKS}"
            )


def check_file_size(nbytes: int) -> None:
    """Refuse an arena above the limit on files: it is one, in memory.

    Raises:
        ConfigError: It is too large.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft != resource.RLIM_INFINITY and nbytes > soft:
        raise ConfigError(
            f"the arena of {nbytes / MiB:,.0f} MiB is a file in memory, and files must not be "
            f"larger than {_file_limit()}; raise it: ulimit -f unlimited, of a unit LimitFSIZE="
        )


def _file_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return f"{soft / MiB:,.1f} MiB"


def _at(error: OSError) -> str:
    return f": {error.filename}" if error.filename else ""
