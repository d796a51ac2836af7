"""Media files under folders that the operator named, and nothing outside them."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote_to_bytes, urlsplit

from afferent.errors import ConfigError, FetchFailed, ForbiddenUrl
from afferent.ingest.delivery import Delivery
from afferent.ingest.fetch_policy import check_characters

_PIECE_NBYTES = 64 << 10
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: to open a pipe that nobody writes to would take forever.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Root:
    """A folder, opened once: renaming it later changes nothing. ``parts`` is its path."""

    parts: tuple[bytes, ...]
    descriptor: int


class FileRoots:
    """Reads files by ``file:`` URL.

    Args:
        roots: Absolute paths of folders. They may be links themselves; below them none is followed.

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

    async def read_into(self, url: str, delivery: Delivery) -> None:
        """Deliver the file, from a thread; nothing is delivered once this has returned or raised.

        Raises:
            ForbiddenUrl: Not a plain file under a root, or reached through a link.
            FetchFailed: It can't be read.
            MediaTooLarge: It exceeds what may be delivered.
        """
        root, names = self._locate(url)
        stop, loop = threading.Event(), asyncio.get_running_loop()

        def prepare(nbytes: int) -> None:
            asyncio.run_coroutine_threadsafe(delivery.prepare(nbytes), loop).result()

        work = asyncio.to_thread(_read, root, names, delivery, prepare, stop)
        reading = asyncio.ensure_future(work)
        try:
            await asyncio.shield(reading)
        except asyncio.CancelledError:
            stop.set()
            while not reading.done():  # its sink may be gone once we return
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([reading])
            raise

    def close(self) -> None:
        for root in self._roots:
            os.close(root.descriptor)
        self._roots.clear()

    def _locate(self, url: str) -> tuple[_Root, Sequence[bytes]]:
        """The root that holds the file, and the names that lead from there to it."""
        parts = file_parts(url)
        for root in self._roots:
            depth = len(root.parts)
            if parts[:depth] == root.parts and len(parts) > depth:
                return root, parts[depth:]
        raise ForbiddenUrl("files are read from the folders only that the server was given")


def file_parts(url: str) -> tuple[bytes, ...]:
    """The names in the path of a ``file:`` URL.

    Raises:
        ForbiddenUrl: It names another host, or has a query, ``..``, or other things with more than
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
        raise ConfigError(f"file_roots: {path!r} is not an absolute path")
    try:
        descriptor = os.open(path, _FOLDER & ~os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"file_roots: {path!r} is not a folder that can be opened") from error
    return _Root(tuple(map(os.fsencode, pure.parts[1:])), descriptor)


@contextmanager
def _opened(root: _Root, names: Sequence[bytes]) -> Iterator[int]:
    """The file's descriptor. One name after another is opened, so that no link can lead astray."""
    *folders, name = names
    descriptor = os.dup(root.descriptor)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        inner = os.open(name, _FILE, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _read(
    root: _Root,
    names: Sequence[bytes],
    delivery: Delivery,
    prepare: Callable[[int], None],
    stop: threading.Event,
) -> None:
    try:
        with _opened(root, names) as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _not_plain()
            prepare(status.st_size)
            while not stop.is_set() and (data := os.read(descriptor, _PIECE_NBYTES)):
                delivery.write(data)
    except OSError as error:
        # A link in place of a folder or a file; ENXIO is a socket's, or a pipe's.
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise _not_plain() from error
        raise FetchFailed("the media file can't be read") from error


def _not_plain() -> ForbiddenUrl:
    return ForbiddenUrl("a media file is a plain file, and is not reached through links")
