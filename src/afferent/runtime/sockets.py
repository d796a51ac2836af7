"""Paths of sockets: in a folder that only its user may enter.

Another user can't connect there, nor fill the backlog. A path, unlike an abstract name, is the same
in every network namespace. The folder is removed with the process that created it. A process locks
its folder while it lives, so that a later process can remove the folders of killed ones.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from afferent.errors import ConfigError

MAX_PATH_NBYTES: Final = 107
"""Limit of the kernel."""
_PREFIX = "afferent-sockets-"
_MAX_PARENT_NBYTES = MAX_PATH_NBYTES - len(f"/{_PREFIX}xxxxxxxx/preprocess-xxxxxxxx.sock")
_ADDRESS = re.compile(rf".*/{_PREFIX}[^/]+/(\w+)-([0-9a-f]{{8}})\.sock")


def new_address(name: str) -> str:
    """Return a new path in this process's own folder.

    For example ``/run/user/1000/afferent-.../store-3f....sock``.

    Raises:
        ConfigError: It would be too long, or the folder can't be created.
    """
    return address_in(_own.folder(), name)


def own_folder() -> Path:
    """Return the folder of `new_address`; other processes of the server may use it, too."""
    return _own.folder()


def address_in(folder: Path, name: str) -> str:
    """Return a new path in the folder of another process.

    Raises:
        ConfigError: It would be too long.
    """
    address = str(folder / f"{name}-{secrets.token_hex(4)}.sock")
    check_length(address)
    return address


def addresses_in(folder: Path, name: str) -> list[str]:
    """Return all addresses of this name in a folder; their processes may be dead."""
    return sorted(str(path) for path in folder.glob(f"{name}-*.sock"))


def check_length(path: str) -> None:
    """Check that a path is short enough for a socket.

    Raises:
        ConfigError: It is too long.
    """
    nbytes = len(os.fsencode(path))
    if nbytes > MAX_PATH_NBYTES:
        raise ConfigError(
            f"the path of a socket has {MAX_PATH_NBYTES} bytes at most, and {path} has {nbytes}: "
            "choose a shorter one, or a shorter XDG_RUNTIME_DIR or TMPDIR"
        )


def digits_of(address: str, name: str) -> str | None:
    """Return the random digits of an address by `new_address` for this name; else ``None``."""
    match = _ADDRESS.fullmatch(address)
    return match[2] if match is not None and match[1] == name else None


class SocketFolder:
    """Folder of mode 0700, locked while its process lives."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path, self._lock_fd = path, lock_fd

    @classmethod
    def create(cls, parent: Path) -> SocketFolder:
        """Create a folder, and lock it.

        Raises:
            ConfigError: The parent is not writable.
        """
        while True:
            try:
                path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            except OSError as error:
                raise ConfigError(f"no folder can be made in {parent}: {error.strerror}") from error
            lock_fd = _lock(path)
            if lock_fd is not None:  # else another process has just taken it for an abandoned one
                return cls(path, lock_fd)

    def remove(self) -> None:
        """Remove the folder with its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def remove_left(parent: Path) -> None:
    """Remove the folders of this user whose processes have ended."""
    for path in parent.glob(f"{_PREFIX}*"):
        if _is_private(path) and (lock_fd := _lock(path)) is not None:
            SocketFolder(path, lock_fd).remove()


def _lock(path: Path) -> int | None:
    """Lock a folder; return the descriptor, ``None`` if it is locked by another process or gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists():  # its previous owner may have removed it
            return fd
    os.close(fd)
    return None


def _is_private(path: Path) -> bool:
    """Return whether it is a folder of this user, closed to all others."""
    try:
        found = path.lstat()
    except OSError:
        return False
    is_folder = stat.S_ISDIR(found.st_mode)
    return is_folder and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _parent() -> Path:
    """Return the parent of our folders: XDG_RUNTIME_DIR, the temporary folder, or /tmp.

    The first that is writable and whose path is short enough is used: those of batch systems are
    often too long.
    """
    given, temporary = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nowhere"), tempfile.gettempdir()
    is_ours = _is_private(given) and os.access(given, os.W_OK)
    parents = [*([given] if is_ours else []), Path(temporary), Path("/tmp")]  # noqa: S108 - a folder of mode 0700 in it
    short = [parent for parent in parents if len(os.fsencode(parent)) <= _MAX_PARENT_NBYTES]
    return next((parent for parent in short if os.access(parent, os.W_OK)), Path(temporary))


class _Own:
    """Folder of this process, created on first use. A forked child gets another."""

    def __init__(self) -> None:
        self._made: tuple[int, SocketFolder] | None = None

    def folder(self) -> Path:
        if self._made is None or self._made[0] != os.getpid():
            parent = _parent()
            remove_left(parent)
            self._made = (os.getpid(), SocketFolder.create(parent))
            atexit.register(self._remove, *self._made)
        return self._made[1].path

    def _remove(self, pid: int, folder: SocketFolder) -> None:
        if os.getpid() == pid:  # else this is a child that was forked later
            folder.remove()


_own = _Own()
