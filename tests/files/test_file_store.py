"""The store of files: what is written is read, for its tenant alone, within quotas."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import secrets
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afferent.errors import (
    BodyTooLarge,
    ConfigError,
    FileDamaged,
    FileNotFound,
    FilesUnavailable,
    StorageQuotaExceeded,
)
from afferent.files.file_store import FileLimits, FileStore, Quota, open_store
from afferent.files.local_folder import LocalFolder
from afferent.files.stored_file import (
    FILE,
    TRAILER_NBYTES,
    ReadFile,
    StoredFile,
    created_ns,
    expires_s,
    is_id,
    new_id,
    read_trailer,
    trailer_of,
)

NS = 10**9
LIMITS = FileLimits(max_nbytes=1 << 20)


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1_800_000_000 * NS

    def __call__(self) -> int:
        self.now_ns += 1
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "files"


@contextlib.contextmanager
def opened(folder: Path, limits: FileLimits, clock: Clock) -> Iterator[FileStore]:
    backend = LocalFolder(folder)
    backend.check()
    store = FileStore(backend, limits, now_ns=clock)
    yield store
    store.close()


@pytest.fixture
def store(folder: Path, clock: Clock) -> Iterator[FileStore]:
    with opened(folder, LIMITS, clock) as store:
        yield store


def stored(
    store: FileStore, data: bytes, *, tenant: str = "", lives_s: int = 0, name: str = "a.png"
) -> StoredFile:
    incoming = store.begin(tenant, announced_nbytes=None)
    incoming.write(data)
    id = store.new_id(FILE, lives_s=lives_s)
    return incoming.commit(id, name=name, media_type="image/png", purpose="vision")


def content(store: FileStore, id: str, *, tenant: str = "") -> bytes:
    file = store.open(tenant, id)
    try:
        return b"".join(file.pieces(1000))
    finally:
        file.close()


def listed(store: FileStore, *, tenant: str = "", after: str = "", up: bool = True) -> list[str]:
    batches = store.batches(tenant, after=after, is_ascending=up)
    return [file.id for batch in batches for file in batch]


# Records


@given(st.integers(0, 2**63), st.integers(0, 2**39))
def test_id_contains_its_times(now_ns: int, end_s: int) -> None:
    id = new_id(FILE, now_ns=now_ns, expires_s=end_s)
    assert is_id(id, FILE)
    assert (created_ns(id), expires_s(id)) == (now_ns, end_s)


@pytest.mark.parametrize("id", ["", "file-", "../x", "file-" + "0" * 47, "file-" + "G" * 48, "a/b"])
def test_malformed_id_is_no_id(id: str, store: FileStore) -> None:
    assert not is_id(id, FILE)
    with pytest.raises(FileNotFound):
        store.get("", id)
    with pytest.raises(FileNotFound):
        store.delete("", id)
    assert store.known("", [id]) == {}


@given(st.text(max_size=255), st.binary(max_size=64))
def test_trailer_is_read_as_it_was_written(name: str, noise: bytes) -> None:
    record = StoredFile("file-1", name, "image/png", "vision", 5, bytes(32))
    trailer = trailer_of(record)
    assert len(trailer) == TRAILER_NBYTES
    assert read_trailer(trailer) == record
    at = random.Random(len(noise)).randrange(60)
    damaged = trailer[:at] + bytes([trailer[at] ^ 1]) + trailer[at + 1 :]
    assert read_trailer(damaged) is None
    assert read_trailer(noise) is None
    assert read_trailer(noise.ljust(TRAILER_NBYTES, b"\xff")) is None


# Files


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(st.binary(max_size=5000), max_size=6), st.one_of(st.none(), st.integers(0, 40_000)))
def test_file_written_in_pieces_is_read_back(
    store: FileStore, pieces: list[bytes], announced: int | None
) -> None:
    incoming = store.begin("", announced_nbytes=announced)
    for piece in pieces:
        incoming.write(piece)
    id = store.new_id(FILE)
    file = incoming.commit(id, name="ü.png", media_type="image/png", purpose="vision")
    assert file == store.get("", id)
    assert content(store, id) == b"".join(pieces)
    opened = store.open("", id)
    block = bytearray(opened.nbytes)
    assert opened.read_into(memoryview(block)) == ReadFile(file.nbytes, file.digest)
    opened.close()
    assert bytes(block) == b"".join(pieces)


def test_aborted_file_leaves_nothing(store: FileStore, folder: Path) -> None:
    incoming = store.begin("a", announced_nbytes=100)
    incoming.write(b"x" * 100)
    assert listed(store, tenant="a") == []
    incoming.abort()
    incoming.abort()
    assert [path.name for path in (folder / "a").iterdir()] == [".lock"]


def test_tenants_never_see_each_other(store: FileStore) -> None:
    mine = stored(store, b"mine", tenant="a")
    for other in ("", "b"):
        assert listed(store, tenant=other) == []
        assert store.known(other, [mine.id]) == {}
        for refused in (store.get, store.open, store.delete):
            with pytest.raises(FileNotFound):
                refused(other, mine.id)
    assert content(store, mine.id, tenant="a") == b"mine"


OPERATIONS = st.tuples(
    st.sampled_from(["store", "store", "short", "abort", "delete", "wait", "sweep", "reopen"]),
    st.sampled_from(["", "a"]),
    st.integers(0, 1),
    st.integers(0, 20),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(OPERATIONS, max_size=25))
def test_two_stores_of_one_folder_agree_with_a_model(
    memory_folder: Path, operations: list[tuple[str, str, int, int]]
) -> None:
    clock, root = Clock(), memory_folder / secrets.token_hex(8)
    stores = [open_store(str(root), LIMITS) for _ in range(2)]
    model: dict[tuple[str, str], bytes] = {}
    for store in stores:
        store._now_ns = clock
    for index, (what, tenant, which, number) in enumerate(operations):
        store, data = stores[which], bytes([index]) * number
        known = [id for owner, id in model if owner == tenant]
        match what:
            case "store" | "short":
                lives_s = 3600 if what == "short" else 0
                model[tenant, stored(store, data, tenant=tenant, lives_s=lives_s).id] = data
            case "abort":
                incoming = store.begin(tenant, announced_nbytes=None)
                incoming.write(data)
                incoming.abort()
            case "delete" if known:
                store.delete(tenant, id := known[number % len(known)])
                del model[tenant, id]
            case "wait":
                clock.now_ns += 2000 * NS
                now_s = clock.now_ns // NS
                ended = [key for key in model if 0 < expires_s(key[1]) <= now_s]
                for key in ended:
                    del model[key]
            case "sweep":
                store.sweep()
            case "reopen":
                stores[which] = open_store(str(root), LIMITS)
                stores[which]._now_ns = clock
    for owner in ("", "a"):
        expected = [id for tenant, id in model if tenant == owner]
        for store in stores:
            assert listed(store, tenant=owner) == expected
            assert listed(store, tenant=owner, up=False) == expected[::-1]
            for id in expected:
                assert content(store, id, tenant=owner) == model[owner, id]
    stores[0].sweep()
    left = [path.name for path in root.glob("*/*") if path.name != ".lock"]
    assert sorted(left) == sorted(id for _, id in model)


def test_deleted_file_is_gone_and_an_open_one_stays_readable(store: FileStore) -> None:
    file = stored(store, b"some bytes")
    reading = store.open("", file.id)
    store.delete("", file.id)
    assert b"".join(reading.pieces(3)) == b"some bytes"
    reading.close()
    with pytest.raises(FileNotFound):
        store.delete("", file.id)
    assert listed(store) == []


def test_expired_file_is_invisible_and_then_deleted(
    store: FileStore, clock: Clock, folder: Path
) -> None:
    file, other = stored(store, b"short-lived", lives_s=3600), stored(store, b"stays")
    assert file.expires_s == file.created_s + 3600
    clock.now_ns += 3599 * NS
    assert listed(store) == [file.id, other.id]
    clock.now_ns += NS
    assert listed(store) == [other.id]
    assert store.known("", [file.id]) == {}
    for refused in (store.get, store.open, store.delete):
        with pytest.raises(FileNotFound):
            refused("", file.id)
    store.sweep()
    assert sorted(path.name for path in (folder / "_default").iterdir()) == [".lock", other.id]


@pytest.mark.parametrize("up", [True, False])
def test_list_is_by_time_and_continues_after_any_id(
    store: FileStore, up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("afferent.files.file_store._BATCH", 3)
    ids = [stored(store, b"").id for _ in range(8)]
    ids = ids if up else ids[::-1]
    assert listed(store, up=up) == ids
    store.delete("", ids[2])
    for index, after in enumerate(ids):
        rest = [id for id in ids[index + 1 :] if id != ids[2]]
        assert listed(store, after=after, up=up) == rest


def peak_of_list(store: FileStore, tenant: str, num_files: int) -> int:
    """Return the most memory that listing takes: the least of three, as other threads allocate."""
    peaks = []
    for _ in range(3):
        gc.collect()
        tracemalloc.start()
        try:
            assert sum(map(len, store.batches(tenant))) == num_files
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return min(peaks)


def test_list_of_10000_files_needs_the_memory_of_2000(memory_folder: Path, clock: Clock) -> None:
    peaks = {}
    with opened(memory_folder / "s", LIMITS, clock) as store:
        record = StoredFile(store.new_id(FILE), "a" * 200, "image/png", "vision", 0, bytes(32))
        first = memory_folder / "first"
        first.write_bytes(trailer_of(record))
        for num in (2000, 10_000):
            folder = memory_folder / "s" / f"t{num}"
            folder.mkdir(parents=True, exist_ok=True)
            for _ in range(num):
                (folder / store.new_id(FILE)).hardlink_to(first)
            peaks[num] = peak_of_list(store, folder.name, num)
    assert peaks[10_000] < 1.5 * peaks[2000]


# Damage


@pytest.mark.parametrize("at", [0, 2500, 4999])
def test_damaged_bytes_are_never_returned_as_complete(
    store: FileStore, folder: Path, at: int
) -> None:
    file = stored(store, bytes(5000))
    path = folder / "_default" / file.id
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    pieces = []
    reading = store.open("", file.id)
    with pytest.raises(FileDamaged):
        pieces.extend(reading.pieces(1000))
    with pytest.raises(FileDamaged):
        reading.read_into(memoryview(bytearray(5000)))
    reading.close()
    assert sum(map(len, pieces)) <= 4000, "the last piece is held back"


@pytest.mark.parametrize("kind", ["cut", "empty", "longer", "link", "folder", "pipe"])
def test_object_that_is_no_stored_file_is_not_shown(
    store: FileStore, folder: Path, kind: str
) -> None:
    file = stored(store, b"whole")
    path = folder / "_default" / file.id
    data = path.read_bytes()
    path.unlink()
    match kind:
        case "cut":
            path.write_bytes(data[:-1])
        case "empty":
            path.write_bytes(b"")
        case "longer":
            path.write_bytes(b"x" + data)
        case "link":
            path.symlink_to("/etc/passwd")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
    assert listed(store) == []
    with pytest.raises(FileNotFound):
        store.get("", file.id)


def test_full_disk_fails_the_upload_and_leaves_nothing(folder: Path, clock: Clock) -> None:
    with opened(folder, FileLimits(max_nbytes=1 << 30), clock) as store:
        incoming = store.begin("", announced_nbytes=None)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            with pytest.raises(FilesUnavailable):
                incoming.write(bytes(1 << 20))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        incoming.abort()
        assert listed(store) == []


def test_sweep_leaves_foreign_folders_and_files_alone(store: FileStore, folder: Path) -> None:
    file = stored(store, b"x")
    (folder / "lost+found").mkdir()
    (folder / "_default" / "notes").write_bytes(b"mine")
    store.sweep()
    assert list((folder / "lost+found").iterdir()) == []
    assert (folder / "_default" / "notes").read_bytes() == b"mine"
    assert listed(store) == [file.id]


def test_folder_that_can_not_be_used_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for wrong in (f"{tmp_path}/no/parent", f"{tmp_path}/file", "relative"):
        with pytest.raises(ConfigError, match="--files-store"):
            open_store(wrong, LIMITS)


# Limits


def test_file_larger_than_the_limit_is_refused(store: FileStore) -> None:
    incoming = store.begin("", announced_nbytes=None)
    incoming.write(bytes(1 << 20))
    with pytest.raises(BodyTooLarge, match="--files-max-nbytes"):
        incoming.write(b"x")
    incoming.abort()


def test_quota_of_files_counts_those_that_are_being_written(folder: Path, clock: Clock) -> None:
    limits = FileLimits(
        max_nbytes=1 << 20, quota=Quota(0, 2), quotas={"rich": Quota(0, 3), "free": Quota()}
    )
    with opened(folder, limits, clock) as store:
        stored(store, b"one")
        writing = store.begin("", announced_nbytes=None)
        with pytest.raises(StorageQuotaExceeded, match="--files-tenant-count"):
            store.begin("", announced_nbytes=None)
        writing.abort()
        stored(store, b"two")
        for tenant, most in (("rich", 3), ("free", 9)):
            for _ in range(most):
                stored(store, b"", tenant=tenant)
        with pytest.raises(StorageQuotaExceeded):
            stored(store, b"", tenant="rich")


def test_quota_of_bytes_is_never_exceeded_by_concurrent_stores(folder: Path, clock: Clock) -> None:
    """Two stores are two frontends; their uploads have no announced length."""
    quota = 40 * (10_000 + TRAILER_NBYTES)
    limits = FileLimits(max_nbytes=1 << 20, quota=Quota(quota, 0))
    num_stored, num_refused = [], []

    def upload(seed: int) -> None:
        rng = random.Random(seed)
        with opened(folder, limits, clock) as store:
            for _ in range(20):
                incoming = store.begin("", announced_nbytes=rng.choice([None, 10_000]))
                try:
                    for _ in range(10):
                        incoming.write(bytes(1000))
                except StorageQuotaExceeded:
                    incoming.abort()
                    num_refused.append(1)
                    continue
                incoming.commit(store.new_id(FILE), name="", media_type="a/b", purpose="")
                num_stored.append(1)

    def attempts(seed: int) -> None:
        with contextlib.suppress(StorageQuotaExceeded):
            upload(seed)

    threads = [threading.Thread(target=attempts, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sizes = [path.stat().st_size for path in (folder / "_default").iterdir()]
    assert sum(sizes) <= quota
    assert len(num_stored) <= 40
    with opened(folder, limits, clock) as store:
        left = quota - sum(sizes)
        if left >= 10_000 + TRAILER_NBYTES:
            stored(store, bytes(10_000))
