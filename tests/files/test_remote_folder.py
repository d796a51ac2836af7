"""Files in a file system of fsspec: the same files, without what only a local folder has."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from afferent.errors import (
    ConfigError,
    FileDamaged,
    FileNotFound,
    FilesUnavailable,
    StorageQuotaExceeded,
)
from afferent.files.file_store import FileLimits, FileStore, Quota, open_store
from afferent.files.remote_folder import RemoteFolder
from afferent.files.stored_file import TRAILER_NBYTES
from tests.files.test_file_store import LIMITS, Clock, content, listed, stored


class SharedFileSystem(MemoryFileSystem):
    """Stands for an object store; what it refuses is in ``broken``."""

    protocol = "shared"
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    broken: ClassVar[set[str]] = set()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("shared://", "memory://"))

    def mv(self, *arguments: object, **more: object) -> None:
        if "mv" in self.broken:
            raise RuntimeError("an error of a library")
        super().mv(*arguments, **more)


@pytest.fixture
def system() -> Iterator[SharedFileSystem]:
    fsspec.register_implementation("shared", SharedFileSystem, clobber=True)
    SharedFileSystem.store.clear()
    SharedFileSystem.pseudo_dirs[:] = [""]
    SharedFileSystem.broken.clear()
    yield SharedFileSystem()
    SharedFileSystem.store.clear()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(system: SharedFileSystem, clock: Clock) -> FileStore:
    return opened(clock)


def opened(clock: Clock, limits: FileLimits = LIMITS) -> FileStore:
    backend = RemoteFolder("shared://files")
    backend.check()
    return FileStore(backend, limits, now_ns=clock)


def objects(system: SharedFileSystem) -> list[str]:
    return [path.rpartition("/")[2] for path in system.find("/files")]


def test_files_are_written_listed_read_and_deleted(store: FileStore, clock: Clock) -> None:
    one, two = stored(store, b"one" * 1000), stored(store, b"")
    other = opened(clock)  # of another process
    assert listed(other) == [one.id, two.id]
    assert listed(other, up=False, after=two.id) == [one.id]
    assert (content(other, one.id), content(other, two.id)) == (b"one" * 1000, b"")
    assert other.known("", [one.id, two.id, "file-x"]) == {one.id: one, two.id: two}
    assert listed(other, tenant="a") == []
    other.delete("", one.id)
    with pytest.raises(FileNotFound):
        store.get("", one.id)
    with pytest.raises(FileNotFound):
        store.delete("", one.id)


def test_upload_of_a_dead_process_is_never_shown_and_deleted_after_a_day(
    store: FileStore, clock: Clock, system: SharedFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    incoming = store.begin("", announced_nbytes=None)
    incoming.write(bytes(10_000))
    incoming._writer._file.close()  # type: ignore[attr-defined]
    dead = objects(system)
    assert len(dead) == 1
    other = opened(clock)
    assert listed(other) == []
    other.sweep()
    assert objects(system) == dead, "it may be another process's upload"
    later_ns = time.time_ns() + 86_401 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: later_ns)
    other.sweep()
    assert objects(system) == []


def test_object_without_its_end_is_not_shown(store: FileStore, system: SharedFileSystem) -> None:
    file = stored(store, b"whole")
    path = f"/files/_default/{file.id}"
    for data in (system.cat_file(path)[:-1], b"", b"x" * 10_000):
        system.pipe_file(path, data)
        assert listed(store) == []
        with pytest.raises(FileNotFound):
            store.open("", file.id)


def test_damaged_object_is_noticed(store: FileStore, system: SharedFileSystem) -> None:
    file = stored(store, b"whole")
    path = f"/files/_default/{file.id}"
    system.pipe_file(path, b"W" + system.cat_file(path)[1:])
    with pytest.raises(FileDamaged):
        content(store, file.id)


def test_failed_commit_is_no_file_and_leaves_nothing(
    store: FileStore, system: SharedFileSystem
) -> None:
    system.broken.add("mv")
    incoming = store.begin("", announced_nbytes=None)
    incoming.write(b"x")
    with pytest.raises(FilesUnavailable):
        incoming.commit(store.new_id("file-"), name="", media_type="a/b", purpose="")
    incoming.abort()
    assert objects(system) == []


def test_quota_counts_running_uploads_and_expired_files_make_space(
    system: SharedFileSystem, clock: Clock
) -> None:
    store = opened(clock, FileLimits(max_nbytes=1 << 20, quota=Quota(3 * TRAILER_NBYTES + 3, 2)))
    stored(store, b"a", lives_s=3600)
    running = store.begin("", announced_nbytes=10)
    with pytest.raises(StorageQuotaExceeded):
        store.begin("", announced_nbytes=10)
    with pytest.raises(StorageQuotaExceeded, match="--files-tenant-nbytes"):
        running.write(bytes(2 * TRAILER_NBYTES))
    running.abort()
    stored(store, b"b")
    with pytest.raises(StorageQuotaExceeded, match="--files-tenant-count"):
        stored(store, b"c")
    clock.now_ns += 3600 * 10**9
    stored(store, b"c")


@pytest.mark.parametrize("url", ["memory://files", "nothing://files", "s3:", "x"])
def test_url_that_is_no_store_is_a_wrong_setting(url: str) -> None:
    with pytest.raises(ConfigError, match="--files-store"):
        open_store(url, LIMITS)


def test_url_without_fsspec_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match="files"):
        open_store("s3://bucket/files", LIMITS)


def test_url_of_a_folder_is_a_local_store(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/s", LIMITS)
    file = stored(store, b"x")
    assert (tmp_path / "s" / "_default" / file.id).exists()
