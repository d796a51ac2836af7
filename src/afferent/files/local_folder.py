"""Objects in a folder of this machine, or of a file server that several machines have mounted.

Durable, without a lock server:

- A writer has a temporary file, and a lock (``flock``) on it for as long as its process lives. A
  temporary file without a lock is what a dead process has left, and is deleted.
- The length of a temporary file is at least what was reserved for it. So the lengths in the folder
  are the tenant's usage, with all running uploads of all processes.
- ``finish`` writes the trailer and syncs the file; then ``commit`` renames it and syncs the folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from afferent.files.backend import DEFAULT, Usage
from afferent.files.stored_file import TRAILER_NBYTES, StoredFile, read_trailer

_TENANT: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_LOCK: Final = ".lock"
_TEMPORARY: Final = ".new-"
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_IS_NO_FILE: Final = (errno.ENOENT, errno.ELOOP, errno.ENXIO)
"""Nothing, a link, or a socket."""
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY


class LocalFolder:
    """See `Backend`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: set[Path] = set()
        """Folders whose creation is durable."""

    def check(self) -> None:
        """See `Backend`. A folder that does not exist is created with the first file."""
        folder = self._root if self._root.exists() else self._root.parent
        os.close(os.open(folder, _FOLDER))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    @contextmanager
    def locked(self, tenant: str) -> Iterator[None]:
        """See `Backend`. The kernel releases the lock when the process dies."""
        folder = self._folder(tenant)
        self._make(self._root)
        self._make(folder)
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def usage(self, tenant: str) -> Usage:
        """See `Backend`."""
        nbytes = num = 0
        with os.scandir(self._folder(tenant)) as entries:
            for entry in entries:
                if entry.name == _LOCK:
                    continue
                if entry.name.startswith(_TEMPORARY) and _is_left_behind(entry.path):
                    Path(entry.path).unlink(missing_ok=True)
                    continue
                with suppress(FileNotFoundError):  # complete or deleted meanwhile
                    nbytes += entry.stat(follow_symlinks=False).st_size
                    num += 1
        return Usage(nbytes, num)

    def create(self, tenant: str, nbytes: int) -> _LocalWriter:
        """See `Backend`."""
        return _LocalWriter(self._folder(tenant), nbytes)

    def open(self, tenant: str, name: str) -> _LocalReader | None:
        """See `Backend`."""
        try:
            fd = os.open(self._folder(tenant) / name, _READ)
        except OSError as error:
            if error.errno in _IS_NO_FILE:
                return None
            raise
        try:
            reader = _LocalReader.of(fd)
        except BaseException:
            os.close(fd)
            raise
        if reader is None:
            os.close(fd)
        return reader

    def records(self, tenant: str, names: Sequence[str]) -> list[StoredFile | None]:
        """See `Backend`."""
        found: list[StoredFile | None] = []
        for name in names:
            reader = self.open(tenant, name)
            found.append(None if reader is None else reader.record)
            if reader is not None:
                reader.close()
        return found

    def names(self, tenant: str) -> Iterator[str]:
        """See `Backend`."""
        try:
            entries = os.scandir(self._folder(tenant))
        except FileNotFoundError:
            return
        with entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    yield entry.name

    def delete(self, tenant: str, name: str) -> bool:
        """See `Backend`."""
        folder = self._folder(tenant)
        try:
            (folder / name).unlink()
        except FileNotFoundError:
            return False
        _sync_folder(folder)
        return True

    def tenants(self) -> Iterator[str]:
        """See `Backend`."""
        try:
            entries = os.scandir(self._root)
        except FileNotFoundError:
            return
        with entries:
            for entry in entries:
                is_ours = entry.name == DEFAULT or _TENANT.fullmatch(entry.name)
                if is_ours and entry.is_dir(follow_symlinks=False):
                    yield "" if entry.name == DEFAULT else entry.name

    def _folder(self, tenant: str) -> Path:
        return self._root / (tenant or DEFAULT)

    def _make(self, folder: Path) -> None:
        """Create a folder durably, for this user only; another process may have begun it."""
        if folder not in self._made:
            folder.mkdir(0o700, exist_ok=True)
            _sync_folder(folder.parent)
            self._made.add(folder)


class _LocalWriter:
    """See `Writer`. The tenant's lock is held while it is created."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._folder = folder
        self._path = folder / f"{_TEMPORARY}{secrets.token_hex(16)}"
        self._fd = os.open(self._path, _CREATE, 0o600)
        self._is_open, self._nbytes = True, 0
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, nbytes)
        except BaseException:
            self.abort()
            raise

    def reserve(self, nbytes: int) -> None:
        """See `Writer`."""
        os.ftruncate(self._fd, nbytes)

    def write(self, data: bytes) -> None:
        """See `Writer`."""
        view = memoryview(data)
        while view:
            num = os.pwrite(self._fd, view, self._nbytes)
            self._nbytes += num
            view = view[num:]

    def finish(self, trailer: bytes) -> None:
        """See `Writer`."""
        self.write(trailer)
        os.ftruncate(self._fd, self._nbytes)
        os.fsync(self._fd)

    def commit(self, name: str) -> None:
        """See `Writer`."""
        self._path.rename(self._folder / name)
        try:
            _sync_folder(self._folder)
        except BaseException:
            (self._folder / name).unlink(missing_ok=True)
            raise
        self._close()

    def abort(self) -> None:
        """See `Writer`."""
        if self._is_open:
            self._path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        self._is_open = False
        os.close(self._fd)


class _LocalReader:
    """See `Reader`."""

    def __init__(self, fd: int, record: StoredFile) -> None:
        self._fd, self.record = fd, record

    @classmethod
    def of(cls, fd: int) -> _LocalReader | None:
        """Return the reader of a complete object; ``None`` for any other file."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        nbytes = status.st_size - TRAILER_NBYTES
        record = read_trailer(os.pread(fd, TRAILER_NBYTES, nbytes)) if nbytes >= 0 else None
        return cls(fd, record) if record is not None and record.nbytes == nbytes else None

    def read_into(self, start: int, block: memoryview) -> int:
        """See `Reader`."""
        return os.preadv(self._fd, [block], start)

    def close(self) -> None:
        """See `Reader`."""
        os.close(self._fd)


def _is_left_behind(path: str) -> bool:
    """Whether no living process writes to a temporary file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _sync_folder(path: Path) -> None:
    fd = os.open(path, _FOLDER)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
