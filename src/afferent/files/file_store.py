"""Files of clients: created, listed, read and deleted, within quotas."""

from __future__ import annotations

import errno
import heapq
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from afferent import keys
from afferent.config import ServeConfig
from afferent.errors import (
    AfferentError,
    BodyTooLarge,
    ConfigError,
    FileDamaged,
    FileNotFound,
    FilesUnavailable,
    StorageQuotaExceeded,
    in_a_line,
)
from afferent.files.backend import Backend, Reader, Writer
from afferent.files.local_folder import LocalFolder
from afferent.files.remote_folder import RemoteFolder
from afferent.files.stored_file import (
    FILE,
    TRAILER_NBYTES,
    UPLOAD,
    ReadFile,
    StoredFile,
    created_ns,
    expires_s,
    is_id,
    new_id,
    trailer_of,
)
from afferent.runtime.tasks import in_pool
from afferent.types import MiB

log = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_THREADS: Final = 8
_STEP_NBYTES: Final = 16 * MiB
"""Reservation of an upload without an announced length, at a time."""
_BATCH: Final = 1000
"""Files of a list that are in memory at a time."""
TRANSIENT_S: Final = 3600
"""Life of all objects that are no files: those of an upload in parts."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of a tenant; 0: none."""

    nbytes: int = 0
    num_files: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """Limits of a store."""

    max_nbytes: int
    """Largest file."""
    quota: Quota = Quota()
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """Quotas of tenants with their own."""

    @classmethod
    def of(cls, config: ServeConfig) -> FileLimits:
        """Return the limits of a server."""
        most_nbytes, most_files = config.files_tenant_nbytes, config.files_tenant_count
        quotas = {
            tenant.name: Quota(tenant.files_nbytes or most_nbytes, tenant.files_count or most_files)
            for tenant in config.tenants
        }
        usual = Quota(most_nbytes, most_files)
        return cls(max_nbytes=config.files_max_nbytes, quota=usual, quotas=quotas)

    def quota_of(self, tenant: str) -> Quota:
        return self.quotas.get(tenant, self.quota)


class FileStore:
    """Files of all tenants. Thread-safe; all methods but `run` wait for the backend."""

    def __init__(
        self, backend: Backend, limits: FileLimits, *, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._backend, self.limits, self._now_ns = backend, limits, now_ns
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="files")

    async def run(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Run ``work`` in a thread of the store; a cancelled call waits for its end.

        Args:
            undo: Called with a result that a cancelled call does not return.
        """
        return await in_pool(self._pool, work, undo)

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    # Writing

    def new_id(self, prefix: str, *, lives_s: int = 0) -> str:
        """Return the id of a new object.

        Args:
            lives_s: Seconds until it expires; 0: never.
        """
        now_ns = self._now_ns()
        return new_id(prefix, now_ns=now_ns, expires_s=now_ns // 10**9 + lives_s if lives_s else 0)

    def begin(self, tenant: str, *, announced_nbytes: int | None) -> Incoming:
        """Begin a file of a tenant.

        Args:
            announced_nbytes: Its length, or more; ``None`` if it is unknown.

        Raises:
            StorageQuotaExceeded: The tenant has no space left.
            FilesUnavailable: The store does not work.
        """
        reserved = TRAILER_NBYTES + min(announced_nbytes or 0, self.limits.max_nbytes)
        with _explained(), self._backend.locked(tenant):
            self._drop_expired(tenant)
            self._check_quota(tenant, reserved, num_new=1)
            writer = self._backend.create(tenant, reserved)
        return Incoming(self, tenant, writer, reserved)

    def extend(self, tenant: str, writer: Writer, *, reserved: int, nbytes: int) -> int:
        """Reserve more bytes for a file that is being written; return how many it has in all.

        Raises:
            StorageQuotaExceeded: The tenant has no space left.
        """
        with _explained(), self._backend.locked(tenant):
            left = self._check_quota(tenant, nbytes - reserved, num_new=0)
            step = max(nbytes, min(reserved + _STEP_NBYTES, self.limits.max_nbytes))
            nbytes = min(step, nbytes + left)
            writer.reserve(nbytes)
        return nbytes

    def add(
        self, tenant: str, writer: Writer, record: StoredFile, *, object_name: str = ""
    ) -> StoredFile:
        """Complete an object durably; return its record, or that of the object with its name."""
        name = object_name or record.id
        trailer = trailer_of(record)
        with _explained():
            writer.finish(trailer)  # without the lock: it may take seconds
        with _explained(), self._backend.locked(tenant):
            (there,) = self._backend.records(tenant, [name])
            if there is not None:
                writer.abort()
                return there
            writer.commit(name)
        return record

    def sweep(self) -> None:
        """Delete what has expired, and what dead processes have left, of all tenants.

        Raises:
            FilesUnavailable: The store does not work.
        """
        with _explained():
            for tenant in self._backend.tenants():
                with self._backend.locked(tenant):
                    self._drop_expired(tenant)
                    self._backend.usage(tenant)

    def _check_quota(self, tenant: str, nbytes: int, *, num_new: int) -> int:
        """Check that so many bytes and objects fit; return how many bytes are left then.

        Raises:
            StorageQuotaExceeded: They do not fit.
        """
        quota, usage = self.limits.quota_of(tenant), self._backend.usage(tenant)
        if quota.nbytes and usage.nbytes + nbytes > quota.nbytes:
            raise StorageQuotaExceeded(
                f"{nbytes} bytes more do not fit: {usage.nbytes} of {quota.nbytes} bytes of stored "
                "files are in use (--files-tenant-nbytes); delete files"
            )
        if quota.num_files and usage.num_objects + num_new > quota.num_files:
            raise StorageQuotaExceeded(
                f"{usage.num_objects} files are stored, and {quota.num_files} are allowed "
                "(--files-tenant-count); delete files"
            )
        return quota.nbytes - usage.nbytes - nbytes if quota.nbytes else _STEP_NBYTES

    def _drop_expired(self, tenant: str) -> None:
        for name in self._backend.names(tenant):
            if self._is_expired(name):
                self._backend.delete(tenant, name)

    def _is_expired(self, name: str) -> bool:
        """Whether an object has ended; objects of other programs never do."""
        id, now_ns = name.partition(".")[0], self._now_ns()
        if is_id(id, FILE):
            return 0 < expires_s(id) <= now_ns // 10**9
        if is_id(id, UPLOAD):
            return created_ns(id) + TRANSIENT_S * 10**9 <= now_ns
        return False

    # Reading

    def get(self, tenant: str, id: str) -> StoredFile:
        """Return the record of a file.

        Raises:
            FileNotFound: The tenant has no such file.
            FilesUnavailable: The store does not work.
        """
        if not is_id(id, FILE):
            raise missing(id)
        found = self.record(tenant, id)
        if found is None:
            raise missing(id)
        return found

    def record(self, tenant: str, name: str) -> StoredFile | None:
        """Return the record of any object; ``None`` if there is none, or it has expired."""
        if self._is_expired(name):
            return None
        with _explained():
            return self._backend.records(tenant, [name])[0]

    def known(self, tenant: str, ids: list[str]) -> dict[str, StoredFile]:
        """Return the existing files among these, by id."""
        asked = [id for id in ids if is_id(id, FILE) and not self._is_expired(id)]
        with _explained():
            found = self._backend.records(tenant, asked)
        return {record.id: record for record in found if record is not None}

    def batches(
        self, tenant: str, *, after: str = "", is_ascending: bool = True
    ) -> Iterator[list[StoredFile]]:
        """Yield the files, by time of creation, a bounded number at a time.

        Args:
            after: Id before the first one.
        """
        while True:
            ids = self._next_ids(tenant, after, is_ascending=is_ascending)
            if not ids:
                return
            with _explained():
                found = self._backend.records(tenant, ids)
            yield [record for record in found if record is not None]
            after = ids[-1]

    def _next_ids(self, tenant: str, after: str, *, is_ascending: bool) -> list[str]:
        def is_wanted(name: str) -> bool:
            if not is_id(name, FILE) or self._is_expired(name):
                return False
            return not after or (name > after if is_ascending else name < after)

        choose = heapq.nsmallest if is_ascending else heapq.nlargest
        with _explained():
            return choose(_BATCH, filter(is_wanted, self._backend.names(tenant)))

    def open(self, tenant: str, id: str) -> OpenedFile:
        """Open a file, or another object by its name.

        Raises:
            FileNotFound: The tenant has no such file.
            FilesUnavailable: The store does not work.
        """
        with _explained():
            reader = None if self._is_expired(id) else self._backend.open(tenant, id)
        if reader is None:
            raise missing(id)
        return OpenedFile(reader)

    def delete(self, tenant: str, id: str) -> None:
        """Delete a file durably.

        Raises:
            FileNotFound: The tenant has no such file.
            FilesUnavailable: The store does not work.
        """
        self.get(tenant, id)
        self.drop(tenant, id)

    def drop(self, tenant: str, name: str) -> None:
        """Delete any object; one that does not exist is no error."""
        with _explained():
            self._backend.delete(tenant, name)

    def names(self, tenant: str, prefix: str) -> list[str]:
        """Return the names of all objects that begin so."""
        with _explained():
            return [name for name in self._backend.names(tenant) if name.startswith(prefix)]


class Incoming:
    """File that is being written. Not thread-safe; close it with `commit` or `abort`."""

    def __init__(self, store: FileStore, tenant: str, writer: Writer, reserved: int) -> None:
        self._store, self._tenant, self._writer = store, tenant, writer
        self._reserved = reserved
        self._hasher = keys.hasher()
        self.nbytes = 0

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            BodyTooLarge: The file is too large.
            StorageQuotaExceeded: The tenant has no space left.
            FilesUnavailable: The store does not work.
        """
        nbytes, most = self.nbytes + len(data), self._store.limits.max_nbytes
        if nbytes > most:
            raise BodyTooLarge(f"the file has more than {most} bytes (--files-max-nbytes)")
        if nbytes + TRAILER_NBYTES > self._reserved:
            self._reserved = self._store.extend(
                self._tenant,
                self._writer,
                reserved=self._reserved,
                nbytes=nbytes + TRAILER_NBYTES,
            )
        with _explained():
            self._writer.write(data)
        self._hasher.update(data)
        self.nbytes = nbytes

    def commit(
        self, id: str, *, name: str, media_type: str, purpose: str, object_name: str = ""
    ) -> StoredFile:
        """Complete the file durably, and return its record.

        Args:
            object_name: Name of the object, of one that is no file.

        Raises:
            FilesUnavailable: The store does not work.
        """
        digest = self._hasher.digest()
        record = StoredFile(id, name, media_type, purpose, self.nbytes, digest)
        return self._store.add(self._tenant, self._writer, record, object_name=object_name)

    def abort(self) -> None:
        """Drop the file, unless it is complete."""
        with _explained():
            self._writer.abort()


class OpenedFile:
    """Stored file that is open; its bytes are checked as they are read in order."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self.record = reader, reader.record

    @property
    def nbytes(self) -> int:
        return self.record.nbytes

    def read_into(self, block: memoryview) -> ReadFile:
        """Read the whole file into a block of its length.

        Raises:
            FileDamaged: They are not the bytes that were stored.
            FilesUnavailable: The store does not work.
        """
        start = 0
        with _explained():
            while start < len(block) and (num := self._reader.read_into(start, block[start:])):
                start += num
        digest = keys.digest(block[:start])
        self._check(digest)
        return ReadFile(start, digest)

    def pieces(self, nbytes: int) -> Iterator[bytes]:
        """Yield the bytes, in pieces. The last piece comes after all were checked.

        Raises:
            FileDamaged: They are not the bytes that were stored.
            FilesUnavailable: The store does not work.
        """
        hasher, start = keys.hasher(), 0
        while start < self.nbytes:
            block = memoryview(bytearray(min(nbytes, self.nbytes - start)))
            with _explained():
                num = self._reader.read_into(start, block)
            hasher.update(block[:num])
            start += num
            if start >= self.nbytes or not num:
                self._check(hasher.digest())
            yield bytes(block[:num])

    def _check(self, digest: bytes) -> None:
        if digest != self.record.digest:
            log.error("a stored file is damaged", extra={"file": self.record.id})
            raise FileDamaged(f"the stored file {self.record.id} is damaged")

    def close(self) -> None:
        self._reader.close()


def open_store(url: str, limits: FileLimits) -> FileStore:
    """Open the store at a path or URL.

    Raises:
        ConfigError: It can't be used.
    """
    path = url.removeprefix("file://")
    backend: Backend
    if path.startswith("/"):
        backend = LocalFolder(Path(path))
        problem = f"--files-store {path}: must be a folder that can be written, or in one"
    else:
        backend = RemoteFolder(url)
        problem = "--files-store: the place can't be used"
    try:
        backend.check()
    except Exception as error:  # of a file system, or of a library
        why = error.strerror if isinstance(error, OSError) and error.strerror else in_a_line(error)
        raise ConfigError(f"{problem} ({why})") from error
    return FileStore(backend, limits)


def missing(id: str, *, param: str | None = None) -> FileNotFound:
    """Return the error for an id that no file of the tenant has."""
    return FileNotFound(f"there is no file {id[:80]!r}", param=param)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except AfferentError:
        raise
    except Exception as error:  # of a file system, or of a library
        log.exception("the store of files failed")
        if isinstance(error, OSError) and error.errno in _FULL:
            raise FilesUnavailable("the store of files is full") from error
        raise FilesUnavailable("the store of files does not work; try again") from error
