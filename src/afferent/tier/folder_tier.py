"""A tier in a folder, or in an object store: ``file://``, and whatever else `fsspec` opens.

For what lives long and is asked for seldom: a value is one file, and is copied once on its way.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, Final, TypeVar

import fsspec.core

from afferent.errors import ConfigError, TierUnavailable, in_a_line
from afferent.tier.protocol import MAX_HEAD_NBYTES, Found, Health, Value, Wanted, part

T = TypeVar("T")

_START: Final = struct.Struct("<QQI")
"""When it ends (in seconds since 1970), how long the body is, how long the head."""
_FIRST_NBYTES: Final = 4096
"""What is read to find a head: more where it is longer."""
_NUM_THREADS = 8
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FolderTier:
    """Each file system has its own time-outs, or none. So its calls are made in threads that have
    private memory alone, and are left to themselves when they are late.
    """

    def __init__(self, url: str) -> None:
        """
        Raises:
            ConfigError: `fsspec` can't open it.
        """
        try:
            self._files: Any
            self._files, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:  # of a file system that is not ours
            raise ConfigError(f"--tier: {in_a_line(error)}") from error
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="folder")
        self._about = f"{type(self._files).__name__} at {self._root}"

    def exists_many(self, names: Sequence[bytes], *, deadline_s: float) -> list[Found | None]:
        """See `Tier`."""
        return self._for_each(names, self._find, deadline_s)

    def get_many_into(self, wanted: Sequence[Wanted], *, deadline_s: float) -> list[bool]:
        """See `Tier`. Here it is copied, by the thread that waits, until the deadline."""
        bodies = [self._threads.submit(self._read, one.name) for one in wanted]
        return [
            _copy(self._result(body, deadline_s), one)
            for one, body in zip(wanted, bodies, strict=True)
        ]

    def put_many(self, values: Sequence[Value], *, ttl_s: float, deadline_s: float) -> list[bool]:
        """See `Tier`."""
        # Private copies: a thread that is late must not read what has another meaning by then.
        ends = int(time.time() + ttl_s) + 1
        files = [
            (value.name, b"".join((_start(ends, value), value.head, value.body)))
            for value in values
        ]
        return self._for_each(files, self._write, deadline_s)

    def delete_many(self, names: Sequence[bytes], *, deadline_s: float) -> int:
        """See `Tier`."""
        return sum(self._for_each(names, self._delete, deadline_s))

    def names(self, *, deadline_s: float) -> Iterator[bytes]:
        """See `Tier`."""
        for path in self._result(self._threads.submit(self._list), deadline_s):
            try:
                yield bytes.fromhex(str(path).rpartition("/")[2])
            except ValueError:  # a file of somebody else, or one that is being written
                continue

    def health(self, *, deadline_s: float) -> Health:
        """See `Tier`."""
        self._result(self._threads.submit(self._files.exists, self._root), deadline_s)
        return Health(about=self._about)

    def close(self) -> None:
        """See `Tier`."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # In threads of our own

    def _find(self, name: bytes) -> Found | None:
        start = self._cat(name, 0, _FIRST_NBYTES)
        if start is None or len(start) < _START.size:
            return None
        ends, nbytes, head_nbytes = _START.unpack_from(start)
        if ends < time.time() or head_nbytes > MAX_HEAD_NBYTES:
            return None
        end = _START.size + head_nbytes
        if len(start) < end:
            start = self._cat(name, 0, end)
        return None if start is None else Found(start[_START.size : end], nbytes)

    def _read(self, name: bytes) -> memoryview | None:
        whole = self._cat(name, 0, None)
        if whole is None or len(whole) < _START.size:
            return None
        _, nbytes, head_nbytes = _START.unpack_from(whole)
        body = memoryview(whole)[_START.size + head_nbytes :]
        return body if len(body) == nbytes else None

    def _cat(self, name: bytes, start: int, end: int | None) -> bytes | None:
        try:
            data: bytes = self._files.cat_file(self._path(name), start=start, end=end)
        except (FileNotFoundError, ValueError, IndexError):  # or shorter than it says
            return None
        return data

    def _write(self, file: tuple[bytes, bytes]) -> bool:
        name, data = file
        path = self._path(name)
        # A file has its name once it is whole. An object store has no other files.
        own = f"{path}.{secrets.token_hex(8)}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            self._files.pipe_file(own, data)
            self._files.mv(own, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._files.rm_file(own)
            if error.errno not in _FULL:
                raise
            return False
        return True

    def _delete(self, name: bytes) -> bool:
        try:
            self._files.rm_file(self._path(name))
        except FileNotFoundError:
            return False
        return True

    def _list(self) -> list[str]:
        try:
            found: list[str] = self._files.find(self._root)
        except FileNotFoundError:
            return []
        return found

    # Inner steps

    def _path(self, name: bytes) -> str:
        digits = name.hex()
        return f"{self._root}/{digits[:2]}/{digits}"

    def _for_each(
        self, items: Sequence[Any], work: Callable[[Any], T], deadline_s: float
    ) -> list[T]:
        futures = [self._threads.submit(work, item) for item in items]
        return [self._result(future, deadline_s) for future in futures]

    def _result(self, future: Future[T], deadline_s: float) -> T:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            future.cancel()
            raise TierUnavailable("the deadline is over")
        try:
            return future.result(timeout=left_s)
        except NotInTime:
            future.cancel()
            raise TierUnavailable("the folder did not answer in time") from None
        except Exception as error:  # of a file system that is not ours
            raise TierUnavailable(in_a_line(error)) from error


def _start(ends: int, value: Value) -> bytes:
    return _START.pack(ends, len(value.body), len(value.head))


def _copy(body: memoryview | None, one: Wanted) -> bool:
    if body is None or len(body) != len(one.target):
        return False
    for index in range(one.num_parts):
        one.part(index)[:] = part(body, index)
        if not one.accept(index):
            return False
    return True
