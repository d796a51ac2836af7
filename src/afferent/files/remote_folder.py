"""Objects in a file system of `fsspec`, such as an object store.

An object is written under a temporary name, and then gets its own. It has its length and trailer
then, or it is not shown. There is no lock between processes: uploads at the same time may exceed a
quota by their own length. Temporary objects are deleted when they are a day old.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from afferent.errors import ConfigError, in_a_line
from afferent.files.backend import DEFAULT, Usage
from afferent.files.stored_file import TRAILER_NBYTES, StoredFile, read_trailer

_TEMPORARY: Final = "new-"
_MAX_AGE_NS: Final = 86_400 * 10**9
_MEMORY: Final = {"memory"}
_LOCAL: Final = {"file", "local"}


class RemoteFolder:
    """See `Backend`."""

    def __init__(self, url: str) -> None:
        """Open the file system of a URL.

        Raises:
            ConfigError: `fsspec` is missing, does not know the URL, or keeps files in memory only.
        """
        try:
            import fsspec.core
        except ImportError as error:
            raise ConfigError(
                "--files-store: a URL needs fsspec (pip install 'afferent-mm[files]')"
            ) from error
        try:
            self._system, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:  # of a file system
            raise ConfigError(f"--files-store: {in_a_line(error)}") from error
        protocols = self._system.protocol
        protocols = {protocols} if isinstance(protocols, str) else set(protocols)
        if protocols & _MEMORY:
            raise ConfigError("--files-store: memory is no store: files would be lost")
        if protocols & _LOCAL:
            raise ConfigError("--files-store: must be an absolute path of a folder, or a URL")
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._writing: dict[_RemoteWriter, str] = {}
        """Writers of this process, with their tenants; changed under the tenant's lock."""

    def check(self) -> None:
        """See `Backend`."""
        path = f"{self._root}/{_TEMPORARY}{secrets.token_hex(8)}"
        self._system.makedirs(self._root, exist_ok=True)
        self._system.pipe_file(path, b"\0")
        self._system.rm_file(path)

    @contextmanager
    def locked(self, tenant: str) -> Iterator[None]:
        """See `Backend`; other processes are not excluded."""
        with self._locks[tenant]:
            yield

    def usage(self, tenant: str) -> Usage:
        """See `Backend`."""
        writing = [writer for writer, owner in list(self._writing.items()) if owner == tenant]
        own = {writer.path for writer in writing}
        nbytes, num = sum(writer.reserved for writer in writing), len(writing)
        for entry in self._entries(tenant):
            name = _name_of(entry)
            if entry["name"] in own:
                continue
            if name.startswith(_TEMPORARY) and _is_old(name):
                self._remove(entry["name"])
                continue
            nbytes += entry.get("size") or 0
            num += 1
        return Usage(nbytes, num)

    def create(self, tenant: str, nbytes: int) -> _RemoteWriter:
        """See `Backend`."""
        folder = self._folder(tenant)
        self._system.makedirs(folder, exist_ok=True)
        writer = _RemoteWriter(self._system, folder, nbytes, self._writing)
        self._writing[writer] = tenant
        return writer

    def open(self, tenant: str, name: str) -> _RemoteReader | None:
        """See `Backend`."""
        (record,) = self.records(tenant, [name])
        path = f"{self._folder(tenant)}/{name}"
        return None if record is None else _RemoteReader(self._system, path, record)

    def records(self, tenant: str, names: Sequence[str]) -> list[StoredFile | None]:
        """See `Backend`. All are requested at once, where the file system allows this."""
        if not names:
            return []
        paths = [f"{self._folder(tenant)}/{name}" for name in names]
        found = self._system.cat_ranges(
            *(paths, [-TRAILER_NBYTES] * len(paths), [None] * len(paths)), on_error="return"
        )
        return [None if _is_absent(each) else read_trailer(bytes(each)) for each in found]

    def tenants(self) -> Iterator[str]:
        """See `Backend`."""
        for entry in self._listed(self._root):
            if entry["type"] == "directory":
                name = _name_of(entry)
                yield "" if name == DEFAULT else name

    def names(self, tenant: str) -> Iterator[str]:
        """See `Backend`."""
        for entry in self._entries(tenant):
            if not (name := _name_of(entry)).startswith(_TEMPORARY):
                yield name

    def delete(self, tenant: str, name: str) -> bool:
        """See `Backend`."""
        return self._remove(f"{self._folder(tenant)}/{name}")

    def _remove(self, path: str) -> bool:
        try:
            self._system.rm_file(path)
        except FileNotFoundError:
            return False
        return True

    def _entries(self, tenant: str) -> list[dict[str, Any]]:
        found = self._listed(self._folder(tenant))
        return [entry for entry in found if entry["type"] == "file"]

    def _listed(self, path: str) -> list[dict[str, Any]]:
        self._system.invalidate_cache(path)  # other processes write, too
        try:
            found: list[dict[str, Any]] = self._system.ls(path, detail=True)
        except FileNotFoundError:
            return []
        return found

    def _folder(self, tenant: str) -> str:
        return f"{self._root}/{tenant or DEFAULT}"


class _RemoteWriter:
    """See `Writer`."""

    def __init__(
        self, system: Any, folder: str, nbytes: int, writing: dict[_RemoteWriter, str]
    ) -> None:
        self._system, self._folder = system, folder
        self._writing, self.reserved = writing, nbytes
        self.path = f"{folder}/{_TEMPORARY}{time.time_ns():016x}{secrets.token_hex(8)}"
        self._file = system.open(self.path, "wb")
        self._nbytes = 0

    def reserve(self, nbytes: int) -> None:
        """See `Writer`."""
        self.reserved = nbytes

    def write(self, data: bytes) -> None:
        """See `Writer`."""
        self._file.write(data)
        self._nbytes += len(data)

    def finish(self, trailer: bytes) -> None:
        """See `Writer`."""
        self.write(trailer)
        self._file.close()
        if (nbytes := self._system.size(self.path)) != self._nbytes:
            raise OSError(f"the store has {nbytes} bytes of {self._nbytes}")

    def commit(self, name: str) -> None:
        """See `Writer`."""
        self._system.mv(self.path, f"{self._folder}/{name}")
        self._writing.pop(self, None)

    def abort(self) -> None:
        """See `Writer`."""
        if self._writing.pop(self, None) is not None:
            with suppress(Exception):  # it failed before
                self._file.close()
            with suppress(FileNotFoundError):
                self._system.rm_file(self.path)


class _RemoteReader:
    """See `Reader`. Nothing stays open: a deleted object can't be read any more."""

    def __init__(self, system: Any, path: str, record: StoredFile) -> None:
        self._system, self._path, self.record = system, path, record

    def read_into(self, start: int, block: memoryview) -> int:
        """See `Reader`."""
        data: bytes = self._system.cat_file(self._path, start=start, end=start + len(block))
        block[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """See `Reader`."""


def _name_of(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _is_absent(found: object) -> bool:
    """Whether there is no object; any other error is raised."""
    if isinstance(found, FileNotFoundError | IsADirectoryError):
        return True
    if isinstance(found, Exception):
        raise found
    return False


def _is_old(name: str) -> bool:
    """Whether a temporary object is from a process that has ended."""
    try:
        created_ns = int(name.removeprefix(_TEMPORARY)[:16], 16)
    except ValueError:
        return False
    return created_ns + _MAX_AGE_NS < time.time_ns()
