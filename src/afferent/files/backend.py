"""Interface of what stores objects: a local folder, or a file system of `fsspec`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Protocol

from afferent.files.stored_file import StoredFile

DEFAULT: Final = "_default"
"""Folder of the default tenant; no tenant's name begins so."""


class Usage(NamedTuple):
    """Bytes and objects of a tenant, with those that are being written."""

    nbytes: int
    num_objects: int


class Writer(Protocol):
    """Object that is being written; no process sees it before `commit` has returned."""

    def reserve(self, nbytes: int) -> None:
        """Count this many bytes as used from now on."""

    def write(self, data: bytes) -> None:
        """Append bytes."""

    def finish(self, trailer: bytes) -> None:
        """Write the end of the object, and bring all of it to the disk."""

    def commit(self, name: str) -> None:
        """Give a finished object its name durably; the writer is closed."""

    def abort(self) -> None:
        """Drop the object, unless it is complete."""


class Reader(Protocol):
    """Open object; of a local folder, its bytes stay readable after it was deleted."""

    @property
    def record(self) -> StoredFile:
        """Record in its trailer."""

    def read_into(self, start: int, block: memoryview) -> int:
        """Read bytes from ``start`` on; return how many, at least one unless all were read."""

    def close(self) -> None:
        """Close it."""


class Backend(Protocol):
    """Objects in one folder for each tenant. Thread-safe."""

    def locked(self, tenant: str) -> AbstractContextManager[None]:
        """Exclude other writers of a tenant while its usage is read and a writer is made."""

    def usage(self, tenant: str) -> Usage:
        """Return the usage, and drop what dead processes have left; call it while locked."""

    def create(self, tenant: str, nbytes: int) -> Writer:
        """Return a writer with reserved bytes; call it while locked."""

    def open(self, tenant: str, name: str) -> Reader | None:
        """Open a complete object; ``None`` if there is none."""

    def records(self, tenant: str, names: Sequence[str]) -> list[StoredFile | None]:
        """Return the records of objects; ``None`` for those that do not exist."""

    def tenants(self) -> Iterator[str]:
        """Yield the names of all tenants with a folder."""

    def names(self, tenant: str) -> Iterator[str]:
        """Yield the names of all objects, in any order."""

    def delete(self, tenant: str, name: str) -> bool:
        """Delete an object durably; return whether it existed."""

    def check(self) -> None:
        """Check that the place can be used."""
