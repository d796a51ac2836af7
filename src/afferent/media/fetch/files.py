"""Media files in folders that the operator named, and nothing outside them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol
from urllib.parse import unquote_to_bytes, urlsplit

from afferent import keys
from afferent.errors import ConfigError, FetchFailed, ForbiddenUrl
from afferent.files.stored_file import ReadFile
from afferent.media.fetch.fetch_policy import check_characters
from afferent.runtime.exhaustion import blamed

_PIECE_NBYTES = 64 << 20  # a thread that is to end is waited for
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: the open call of a pipe without a writer would never return.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Root:
    """Folder that is opened once: a later rename changes nothing. ``parts`` is its path."""

    parts: tuple[bytes, ...]
    descriptor: int


class Readable(Protocol):
    """Open file; see `OpenFile`."""

    @property
    def nbytes(self) -> int: ...

    def read_into(self, block: memoryview) -> ReadFile: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenFile:
    """Plain file, and its number of bytes when it was opened."""

    descriptor: int
    nbytes: int

    def read_into(self, block: memoryview) -> ReadFile:
        """Read as much of it as ``block`` takes, and digest it.

        Raises:
            FetchFailed: It can't be read.
        """
        nbytes = 0
        with _explained():
            while nbytes < len(block) and (
                num_read := os.readv(self.descriptor, [block[nbytes : nbytes + _PIECE_NBYTES]])
            ):
                nbytes += num_read
        return ReadFile(nbytes, keys.digest(block[:nbytes]))

    def close(self) -> None:
        os.close(self.descriptor)


class FileRoots:
    """Reads files by ``file:`` URL.

    Args:
        roots: Absolute paths of folders. They may be links themselves; no link below them is
            followed.

    Raises:
        ConfigError: A root is no folder that can be opened.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots: list[_Root] = []
        try:
            for root in roots:
                self._roots.append(_open_root(root))
        except ConfigError:
            self.close()
            raise
        self._roots.sort(key=lambda root: len(root.parts), reverse=True)

    def open_files(self, urls: Sequence[str], opened: list[Readable]) -> None:
        """Open files, and append them to ``opened``; the caller closes those in it, also after an
        error.

        Raises:
            ForbiddenUrl: Not a plain file under a root, or reached through a link.
            FetchFailed: It can't be opened.
        """
        for url in urls:
            root, names = self._locate(url)
            with _explained():
                opened.append(_open(root, names))

    def close(self) -> None:
        for root in self._roots:
            os.close(root.descriptor)
        self._roots.clear()

    def _locate(self, url: str) -> tuple[_Root, Sequence[bytes]]:
        """Return the root that holds the file, and the names from there to the file."""
        parts = file_parts(url)
        for root in self._roots:
            depth = len(root.parts)
            if parts[:depth] == root.parts and len(parts) > depth:
                return root, parts[depth:]
        raise ForbiddenUrl("files are read below the folders of the server's --file-roots only")


def file_parts(url: str) -> tuple[bytes, ...]:
    """Return the names in the path of a ``file:`` URL.

    Raises:
        ForbiddenUrl: It names another host, or has a query, ``..``, or other parts with more than
            one meaning.
    """
    check_characters(url)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ForbiddenUrl("the URL is malformed") from error
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or "?" in url or "#" in url:
        raise ForbiddenUrl("a file: URL has the form file:///folder/file")
    head, *names = (unquote_to_bytes(name) for name in parts.path.split("/"))
    for name in names:
        if name in (b"", b".", b"..") or b"/" in name or b"\x00" in name:
            raise ForbiddenUrl("a file: URL has the form file:///folder/file")
    if head or not names:
        raise ForbiddenUrl("a file: URL has the form file:///folder/file")
    return tuple(names)


def _open_root(path: str) -> _Root:
    pure = PurePosixPath(path)
    if not pure.is_absolute() or ".." in pure.parts:
        raise ConfigError(f"--file-roots {path}: must be an absolute path, without ..")
    try:
        descriptor = os.open(path, _FOLDER & ~os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(
            f"--file-roots {path}: must be a folder that can be opened ({error.strerror})"
        ) from error
    return _Root(tuple(map(os.fsencode, pure.parts[1:])), descriptor)


def _open(root: _Root, names: Sequence[bytes]) -> OpenFile:
    descriptor = _walk(root, names)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise _not_plain()
    return OpenFile(descriptor, status.st_size)


def _walk(root: _Root, names: Sequence[bytes]) -> int:
    """Return the file's descriptor. The names are opened one after another, so that no link is
    followed.
    """
    *folders, name = names
    descriptor = os.dup(root.descriptor)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        return os.open(name, _FILE, dir_fd=descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # A link in place of a folder or a file; ENXIO is a socket's, or a pipe's.
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise _not_plain() from error
        raise blamed(error, FetchFailed("the media file can't be read")) from error


def _not_plain() -> ForbiddenUrl:
    return ForbiddenUrl("a media file is a plain file, and is not reached through links")
