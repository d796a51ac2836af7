"""Tier in a folder or an object store: ``file://``, and all other schemes of `fsspec`.

Suited to long-lived, rarely used values: a value is one file, and is copied once on its way.
"""

from __future__ import annotations

import contextlib
import errno
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from afferent.errors import ConfigError, TierUnavailable, in_a_line
from afferent.tier.bounded_calls import BoundedCalls
from afferent.tier.local_files import LEFT_AFTER_S, File, LocalFiles, is_left, own_name
from afferent.tier.protocol import (
    MAX_HEAD_NBYTES,
    NAME_NBYTES,
    Found,
    Health,
    Value,
    Wanted,
    part,
)
from afferent.types import MiB

T = TypeVar("T")

_START: Final = struct.Struct("<QQI")
"""Expiry (in seconds since 1970), length of the body, length of the header."""
_FIRST_NBYTES: Final = 4096
"""First read for a header; a longer header needs another read."""
_NUM_THREADS = 8
_AHEAD_NBYTES: Final = 32 * MiB
"""Limit of read-ahead over several bodies; a longer body is read ahead as a whole."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_VALUE: Final = Found(b"", 0)


class Files(Protocol):
    """Interface of the file system; see `LocalFiles`."""

    def read(self, name: bytes, end: int) -> File | None: ...

    def write(self, name: bytes, data: bytes) -> bool: ...

    def delete(self, name: bytes) -> bool: ...

    def names(self) -> Iterator[list[bytes]]: ...

    def check(self) -> None: ...


class FolderTier:
    """Tier whose values are files.

    A file system has its own timeouts, or none. So its calls run in threads that have only private
    memory, and late calls are abandoned.
    """

    def __init__(self, url: str) -> None:
        """Open the folder.

        Raises:
            ConfigError: `fsspec` can't open it.
        """
        try:
            system, root = fsspec.core.url_to_fs(url)
        except Exception as error:  # from a third-party file system
            raise ConfigError(f"--tier: {in_a_line(error)}") from error
        self._files: Files
        if isinstance(system, LocalFileSystem):
            self._files = LocalFiles(root)
        else:
            self._files = _RemoteFiles(system, root)
        self._calls = BoundedCalls(_NUM_THREADS, name="folder")
        self._about = f"{type(system).__name__} at {root}"

    def exists_many(self, names: Sequence[bytes], *, deadline_s: float) -> list[Found | None]:
        """See `Tier`."""
        return self._for_each(names, self._find, deadline_s)

    def get_many_into(self, wanted: Sequence[Wanted], *, deadline_s: float) -> list[bool]:
        """See `Tier`. Here the waiting thread copies it, until the deadline."""
        to_ask, ahead = deque(wanted), deque[tuple[Wanted, Future[bytes | None]]]()
        nbytes, were_read = 0, []
        with self._leaving(future for _, future in ahead):
            while to_ask or ahead:
                while to_ask and (not ahead or nbytes + len(to_ask[0].target) <= _AHEAD_NBYTES):
                    one = to_ask.popleft()
                    nbytes += len(one.target)
                    ahead.append((one, self._calls.submit(partial(self._read, one))))
                one, future = ahead[0]
                were_read.append(_copy(self._result(future, deadline_s), one))
                ahead.popleft()
                nbytes -= len(one.target)
        return were_read

    def put_many(self, values: Sequence[Value], *, ttl_s: float, deadline_s: float) -> list[bool]:
        """See `Tier`."""
        # Private copies: a late thread must not read memory that has been reused.
        ends = int(time.time() + ttl_s) + 1
        files = [
            (value.name, b"".join((_start(ends, value), value.head, value.body)))
            for value in values
        ]
        return self._for_each(files, lambda file: self._files.write(*file), deadline_s)

    def delete_many(self, names: Sequence[bytes], *, deadline_s: float) -> int:
        """See `Tier`."""
        return sum(self._for_each(names, self._files.delete, deadline_s))

    def names(self, *, deadline_s: float) -> Iterator[bytes]:
        """See `Tier`."""
        listing = self._files.names()
        while (
            page := self._result(self._calls.submit(partial(next, listing, None)), deadline_s)
        ) is not None:
            yield from page

    def health(self, *, deadline_s: float) -> Health:
        """See `Tier`."""
        self._result(self._calls.submit(self._files.check), deadline_s)
        return Health(about=self._about)

    def close(self) -> None:
        """See `Tier`."""
        self._calls.close()

    # In threads of `BoundedCalls`

    def _find(self, name: bytes) -> Found | None:
        file = self._files.read(name, _FIRST_NBYTES)
        if file is None:
            return None
        if len(file.data) < _START.size:
            return _NO_VALUE
        ends, nbytes, head_nbytes = _START.unpack_from(file.data)
        if ends < time.time():
            with contextlib.suppress(OSError):  # a folder that this node may only read
                self._files.delete(name)
            return None
        if head_nbytes > MAX_HEAD_NBYTES:
            return _NO_VALUE
        end = _START.size + head_nbytes
        if file.nbytes is not None and file.nbytes != end + nbytes:
            return _NO_VALUE
        if len(file.data) < end:
            file = self._files.read(name, end)
        if file is None or len(file.data) < end:
            return None if file is None else _NO_VALUE
        return Found(file.data[_START.size : end], nbytes)

    def _read(self, one: Wanted) -> bytes | None:
        """Read a whole file, or one byte more than the limit; empty if it is not a regular file."""
        longest = _START.size + MAX_HEAD_NBYTES + len(one.target)
        file = self._files.read(one.name, longest + 1)
        return None if file is None else file.data

    # Inner steps

    def _for_each(
        self, items: Sequence[Any], work: Callable[[Any], T], deadline_s: float
    ) -> list[T]:
        futures = [self._calls.submit(partial(work, item)) for item in items]
        with self._leaving(futures):
            return [self._result(future, deadline_s) for future in futures]

    @contextlib.contextmanager
    def _leaving(self, futures: Iterable[Future[T]]) -> Iterator[None]:
        """Abandon all calls if one fails."""
        try:
            yield
        except BaseException:
            for future in futures:
                self._calls.leave(future)
            raise

    def _result(self, future: Future[T], deadline_s: float) -> T:
        try:
            return self._calls.result(future, deadline_s)
        except TierUnavailable:
            raise
        except Exception as error:  # from a third-party file system
            raise TierUnavailable(in_a_line(error)) from error


class _RemoteFiles:
    """Files of `fsspec`. The length of a file would take another round trip."""

    def __init__(self, system: Any, root: str) -> None:
        self._system, self._root = system, root

    def read(self, name: bytes, end: int) -> File | None:
        try:
            data: bytes = self._system.cat_file(self._path(name), start=0, end=end)
        except (FileNotFoundError, ValueError, IndexError):
            return None
        except IsADirectoryError:
            return File(b"", None)
        return File(data, None)

    def write(self, name: bytes, data: bytes) -> bool:
        path = self._path(name)
        # A file gets its name once it is complete. An object store has only complete files.
        own = own_name(path)
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            self._system.pipe_file(own, data)
            self._system.mv(own, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._system.rm_file(own)
            if error.errno not in _FULL:
                raise
            return False
        return True

    def delete(self, name: bytes) -> bool:
        try:
            self._system.rm_file(self._path(name))
        except FileNotFoundError:
            return False
        return True

    def names(self) -> Iterator[list[bytes]]:
        try:
            found: list[str] = self._system.find(self._root)
        except FileNotFoundError:
            return
        for path in found:
            digits = str(path).rpartition("/")[2]
            if is_left(digits):
                self._delete_left(path)
            with contextlib.suppress(ValueError):  # another program's file, or incomplete
                if len(digits) == 2 * NAME_NBYTES:
                    yield [bytes.fromhex(digits)]

    def _delete_left(self, path: str) -> None:
        """Delete what a process that died while it wrote has left."""
        with contextlib.suppress(OSError, NotImplementedError):
            if time.time() - self._system.modified(path).timestamp() > LEFT_AFTER_S:
                self._system.rm_file(path)

    def check(self) -> None:
        self._system.exists(self._root)

    def _path(self, name: bytes) -> str:
        digits = name.hex()
        return f"{self._root}/{digits[:2]}/{digits}"


def _start(ends: int, value: Value) -> bytes:
    return _START.pack(ends, len(value.body), len(value.head))


def _copy(whole: bytes | None, one: Wanted) -> bool:
    if whole is None:
        return False
    body = _body(whole)
    if len(body) != len(one.target):
        one.refuse()
        return False
    for index in range(one.num_parts):
        one.part(index)[:] = part(body, index)
        if not one.accept(index):
            return False
    return True


def _body(whole: bytes) -> memoryview:
    """Return the bytes after a file's header."""
    if len(whole) < _START.size:
        return memoryview(b"")
    _, _, head_nbytes = _START.unpack_from(whole)
    return memoryview(whole)[_START.size + head_nbytes :]
