"""Values as files in a folder of this machine, or of a mounted file server.

A process that can write to the folder can put a pipe, a device, a link, or a file of any length
there. So an entry is opened without waiting and without following links. It is read only if it is
a regular file, and not beyond the requested length.

A folder that Afferent creates is private to its user. An existing folder keeps its mode: if its
group may write to it, the group may read the values.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from afferent.tier.protocol import NAME_NBYTES

T = TypeVar("T")

_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_IS_NO_FILE: Final = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR)
_IS_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_IS_IN_THE_WAY: Final = (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_GROUP_FOLDER, _GROUP_FILE = 0o770, 0o640
_NUM_DIGITS: Final = 2 * NAME_NBYTES
LEFT_AFTER_S: Final = 3600.0
"""Age at which an unfinished file is deleted: the process that wrote it has died."""
_IS_LEFT: Final = re.compile(rf"[0-9a-f]{{{_NUM_DIGITS}}}\.[0-9a-f]{{16}}")


def own_name(digits: str) -> str:
    """Return the name or path of a file while it is written."""
    return f"{digits}.{secrets.token_hex(8)}"


def is_left(name: str) -> bool:
    """Whether a file is being written, or was when its process died."""
    return _IS_LEFT.fullmatch(name) is not None


class File(NamedTuple):
    """Start of a file, and its length; ``None`` for an entry that is not a regular file."""

    data: bytes
    nbytes: int | None


class LocalFiles:
    """Files in 256 folders, by the first two digits of their names."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def read(self, name: bytes, end: int) -> File | None:
        """Return the first ``end`` bytes of a file, or all; ``None`` if it is absent."""
        return _unless_absent(lambda: self._read(name, end))

    def write(self, name: bytes, data: bytes) -> bool:
        """Write a file, which gets its name once it is complete.

        Returns:
            `False` if there is no space, or if an entry that can't be replaced has the name.
        """
        digits = name.hex()
        own = own_name(digits)
        try:
            with self._made(digits) as (folder, is_shared):
                try:
                    _create(own, data, folder, _GROUP_FILE if is_shared else _PRIVATE_FILE)
                    _replace(own, digits, folder)
                except OSError:
                    with contextlib.suppress(OSError):
                        os.unlink(own, dir_fd=folder)
                    raise
        except OSError as error:
            if error.errno in (*_NO_SPACE, *_IS_IN_THE_WAY):
                return False
            raise
        return True

    def delete(self, name: bytes) -> bool:
        """Delete the entry with this name, except for a folder that is not empty."""
        return _unless_absent(lambda: self._delete(name)) or False

    def names(self) -> Iterator[list[bytes]]:
        """Yield the names of all files, folder by folder."""
        for folder in sorted(_unless_absent(lambda: list(self._root.iterdir())) or ()):
            if len(folder.name) == 2:
                yield _unless_absent(lambda: _list(folder)) or []  # noqa: B023

    def check(self) -> None:
        """Check that the file system answers.

        Raises:
            OSError: It does not.
        """
        with contextlib.suppress(FileNotFoundError):
            self._root.stat()

    # Inner steps

    def _read(self, name: bytes, end: int) -> File:
        digits = name.hex()
        with self._opened(digits[:2]) as folder:
            try:
                fd = os.open(digits, _READ, dir_fd=folder)
            except OSError as error:
                if error.errno in _IS_NO_FILE:
                    return File(b"", None)
                raise
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    return File(b"", None)
                return File(_read_all(fd, min(end, status.st_size)), status.st_size)
            finally:
                os.close(fd)

    def _delete(self, name: bytes) -> bool:
        digits = name.hex()
        with self._opened(digits[:2]) as folder:
            try:
                os.unlink(digits, dir_fd=folder)
            except IsADirectoryError:
                try:
                    os.rmdir(digits, dir_fd=folder)
                except OSError:
                    return False
        return True

    @contextlib.contextmanager
    def _opened(self, prefix: str) -> Iterator[int]:
        fd = os.open(self._root / prefix, _FOLDER)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _made(self, digits: str) -> Iterator[tuple[int, bool]]:
        """Open a file's folder, created if missing, and return whether the group may read there."""
        path = self._root / digits[:2]
        self._root.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
        of_root = self._root.stat().st_mode
        is_shared = bool(of_root & stat.S_IWGRP)
        try:
            path.mkdir(_PRIVATE_FOLDER)
        except FileExistsError:
            if not stat.S_ISDIR(path.lstat().st_mode):  # link or pipe: the next write succeeds
                path.unlink()
                raise
        else:
            if is_shared:
                path.chmod(_GROUP_FOLDER | of_root & stat.S_ISGID)
        with self._opened(digits[:2]) as folder:
            yield folder, is_shared


def _list(folder: Path) -> list[bytes]:
    """Return the names of files; delete what a process that died while it wrote has left."""
    names = []
    for path in folder.iterdir():
        if is_left(path.name):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > LEFT_AFTER_S:
                    path.unlink()
        with contextlib.suppress(ValueError):  # another program's file, or incomplete
            if len(path.name) == _NUM_DIGITS:
                names.append(bytes.fromhex(path.name))
    return names


def _unless_absent(work: Callable[[], T]) -> T | None:
    try:
        return work()
    except OSError as error:
        if error.errno in _IS_ABSENT:
            return None
        raise


def _read_all(fd: int, nbytes: int) -> bytes:
    """Read ``nbytes`` of a file, or as much as is left."""
    data = bytearray(nbytes)
    view, num = memoryview(data), 0
    while num < nbytes and (more := os.readv(fd, [view[num:]])):
        num += more
    view.release()
    del data[num:]
    return bytes(data)


def _create(own: str, data: bytes, folder: int, mode: int) -> None:
    fd = os.open(own, _CREATE, _PRIVATE_FILE, dir_fd=folder)
    with os.fdopen(fd, "wb", buffering=0) as file:
        os.fchmod(fd, mode)
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]


def _replace(own: str, digits: str, folder: int) -> None:
    """Give a file its name, which an empty folder may have."""
    try:
        os.replace(own, digits, src_dir_fd=folder, dst_dir_fd=folder)
    except IsADirectoryError:
        os.rmdir(digits, dir_fd=folder)
        os.replace(own, digits, src_dir_fd=folder, dst_dir_fd=folder)
