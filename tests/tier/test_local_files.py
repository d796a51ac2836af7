"""A tier in a folder: foreign files, permissions, and whole values."""

from __future__ import annotations

import itertools
import os
import resource
import stat
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import fsspec.core
import pytest

from afferent.tier.folder_tier import FolderTier
from afferent.tier.local_files import LEFT_AFTER_S, File, LocalFiles
from afferent.tier.protocol import PART_NBYTES, Value
from afferent.tier.sealed import Sealer
from afferent.tier.vault import REJECTED, Body, Vault, Wish
from afferent.types import ContentKey, MiB, ObjectKind

NAME, OTHER = b"\xab" * 32, b"\xab" * 31 + b"\0"
KEY = ContentKey(b"k" * 32)
BODY = memoryview(os.urandom(2 * PART_NBYTES + 9))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def files(root: Path) -> LocalFiles:
    return LocalFiles(str(root))


@pytest.fixture
def vault(root: Path) -> Iterator[Vault]:
    vault = Vault(FolderTier(f"file://{root}"), Sealer(b"a secret"))
    yield vault
    vault.close()


def path_of(root: Path, name: bytes = NAME) -> Path:
    return root / name.hex()[:2] / name.hex()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def soon() -> float:
    return time.monotonic() + 20.0


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def an_empty_folder(path: Path) -> None:
    path.mkdir()


def a_full_folder(path: Path) -> None:
    (path / "more").mkdir(parents=True)


@pytest.mark.parametrize("put", [a_pipe, a_link, an_empty_folder, a_full_folder])
def test_read_of_what_is_no_file_is_no_value_and_is_replaced(
    files: LocalFiles, root: Path, put: Callable[[Path], None]
) -> None:
    files.write(OTHER, b"other")
    put(path_of(root))
    assert files.read(NAME, 100) == File(b"", None)
    can_be_replaced = put is not a_full_folder
    assert files.delete(NAME) == can_be_replaced
    if can_be_replaced:
        put(path_of(root))
    assert files.write(NAME, b"data") == can_be_replaced
    assert files.read(NAME, 100) == (File(b"data", 4) if can_be_replaced else File(b"", None))
    assert files.read(OTHER, 100) == File(b"other", 5)
    assert not list(root.glob("*/*.*")), "nothing else is left"


@pytest.mark.parametrize("put", [a_pipe, a_link])
def test_write_where_a_folder_is_expected_replaces_what_is_there(
    files: LocalFiles, root: Path, put: Callable[[Path], None]
) -> None:
    root.mkdir()
    put(path_of(root).parent)
    assert files.read(NAME, 100) is None
    assert list(files.names()) == [[]]
    assert not files.write(NAME, b"data")
    assert files.write(NAME, b"data")
    assert files.read(NAME, 100) == File(b"data", 4)


def test_read_of_a_long_file_ends_where_it_was_requested_to(files: LocalFiles, root: Path) -> None:
    files.write(NAME, b"data")
    with path_of(root).open("r+b") as file:
        file.truncate(1 << 40)
    assert files.read(NAME, 6) == File(b"data\0\0", 1 << 40)


def test_names_of_other_files_are_not_listed(files: LocalFiles, root: Path) -> None:
    files.write(NAME, b"data")
    files.write(OTHER, b"data")
    path_of(root).with_suffix(".0123").write_bytes(b"")
    (root / "ab" / "README").write_bytes(b"")
    (root / "ab" / ("zz" * 32)).write_bytes(b"")
    (root / "lost+found").mkdir()
    assert sorted(itertools.chain.from_iterable(files.names())) == [OTHER, NAME]
    assert list(LocalFiles(str(root / "absent")).names()) == []


# Permissions


@pytest.fixture
def lenient_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("lenient_umask")
def test_write_to_a_new_folder_keeps_it_private(files: LocalFiles, root: Path) -> None:
    files.write(NAME, b"data")
    path = path_of(root)
    assert [mode_of(each) for each in (root, path.parent, path)] == [0o700, 0o700, 0o600]


@pytest.mark.parametrize(
    ("mode", "of_folder", "of_file"),
    [(0o755, 0o700, 0o600), (0o770, 0o770, 0o640), (0o2770, 0o2770, 0o640), (0o777, 0o770, 0o640)],
)
def test_write_to_an_operators_folder_is_shared_with_those_who_may_write_there(
    files: LocalFiles, root: Path, mode: int, of_folder: int, of_file: int
) -> None:
    root.mkdir()
    root.chmod(mode)
    files.write(NAME, b"data")
    path = path_of(root)
    modes = [mode_of(each) for each in (root, path.parent, path)]
    assert modes == [mode, of_folder, of_file]


# Values are whole, with the length in their headers


def test_write_that_fails_midway_leaves_the_value_that_was_there(vault: Vault, root: Path) -> None:
    """If the folder is full, no reader gets a part of a value, and the old value stays."""
    put = Body(KEY, ObjectKind.RECORDS, BODY[:100])
    assert vault.put([put], ttl_s=60.0, deadline_s=soon()) == ["written"]
    longer, before = put._replace(data=BODY), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PART_NBYTES, before[1]))
    try:
        were_put = vault.put([longer], ttl_s=60.0, deadline_s=soon(), replaces=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert were_put == ["full"]
    assert fetch(vault) == bytes(BODY[:100])
    assert len(list(root.glob("*/*"))) == 1, "nothing else is left"


def test_write_while_a_value_is_read_does_not_change_it(files: LocalFiles, root: Path) -> None:
    """A reader gets one of the values as a whole, at any time."""
    values = [bytes([number]) * MiB for number in range(8)]
    files.write(NAME, values[0])
    with path_of(root).open("rb") as opened:
        is_over, wrong = threading.Event(), []

        def read() -> None:
            while not is_over.is_set():
                file = files.read(NAME, 2 * MiB)
                if file is None or file.data not in values:
                    wrong.append(None if file is None else len(file.data))

        reader = threading.Thread(target=read)
        reader.start()
        for value in values:
            assert files.write(NAME, value)
        is_over.set()
        reader.join()
        assert wrong == []
        assert opened.read() == values[0], "the file that was open is another one"


def rejected(what: str) -> float:
    return REJECTED.labels(what).values[0]


def fetch(vault: Vault) -> bytes | None:
    (head,) = vault.look_up([KEY], deadline_s=soon())
    assert head is not None
    wish = Wish(head, memoryview(bytearray(head.nbytes)))
    (is_good,) = vault.fetch([wish], deadline_s=soon())
    return bytes(wish.target) if is_good else None


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def too_short(path: Path) -> None:
    os.truncate(path, 9)


@pytest.mark.parametrize("change", [longer, shorter, too_short])
def test_look_up_of_a_file_of_another_length_is_rejected_and_deleted(
    vault: Vault, root: Path, change: Callable[[Path], None]
) -> None:
    vault.put([Body(KEY, ObjectKind.FEATURES, BODY)], ttl_s=60.0, deadline_s=soon())
    (path,) = root.glob("*/*")
    change(path)
    before = rejected("head")
    assert vault.look_up([KEY], deadline_s=soon()) == [None]
    assert (rejected("head"), path.exists()) == (before + 1, False)


@pytest.mark.parametrize("change", [longer, shorter, too_short])
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_fetch_of_a_file_of_another_length_is_rejected_and_deleted(
    root: Path, scheme: str, change: Callable[[Path], None]
) -> None:
    """The file has changed since the lookup, or the lookup does not know the length."""
    tier = FolderTier(f"{scheme}://{root}")
    vault = Vault(tier, Sealer(b"a secret"))
    vault.put([Body(KEY, ObjectKind.FEATURES, BODY)], ttl_s=60.0, deadline_s=soon())
    (head,) = vault.look_up([KEY], deadline_s=soon())
    assert head is not None
    change_file(tier, root, vault.name_of(KEY), change)
    before, target = rejected("body"), memoryview(bytearray(head.nbytes))
    assert vault.fetch([Wish(head, target)], deadline_s=soon()) == [False]
    assert rejected("body") == before + 1
    assert bytes(target) == bytes(len(target)), "nothing of it was copied"
    assert vault.look_up([KEY], deadline_s=soon()) == [None]
    vault.close()


def change_file(tier: FolderTier, root: Path, name: bytes, change: Callable[[Path], None]) -> None:
    """Change a file of the tier, local or in an object store."""
    file = tier._files.read(name, 1 << 30)
    assert file is not None
    copy = root / "copy"
    copy.parent.mkdir(exist_ok=True)
    copy.write_bytes(file.data)
    change(copy)
    assert tier._files.write(name, copy.read_bytes())


def test_values_of_many_requests_are_read_ahead_within_limits(tmp_path: Path) -> None:
    """More values than are read ahead at a time; each is read into the right memory."""
    tier = FolderTier(f"file://{tmp_path}")
    vault = Vault(tier, Sealer())
    keys = [ContentKey(bytes([number]) * 32) for number in range(24)]
    bodies = [memoryview(bytes([number]) * (2 * MiB + number)) for number in range(24)]
    puts = [Body(k, ObjectKind.FEATURES, b) for k, b in zip(keys, bodies, strict=True)]
    assert vault.put(puts, ttl_s=60.0, deadline_s=soon()) == ["written"] * 24
    tier.delete_many([vault.name_of(keys[5])], deadline_s=soon())
    heads = vault.look_up(keys, deadline_s=soon())
    assert [head is None for head in heads].count(True) == 1
    wishes = [Wish(head, memoryview(bytearray(head.nbytes))) for head in heads if head is not None]
    assert vault.fetch(wishes, deadline_s=soon()) == [True] * 23
    expected = [body for key, body in zip(keys, bodies, strict=True) if key != keys[5]]
    assert [bytes(wish.target) for wish in wishes] == [bytes(body) for body in expected]
    vault.close()


def test_a_value_longer_than_its_time_is_deleted_and_not_rejected(vault: Vault, root: Path) -> None:
    tier = vault.tier
    tier.put_many([Value(NAME, b"head", BODY[:10])], ttl_s=-10.0, deadline_s=soon())
    before = rejected("head")
    assert tier.exists_many([NAME], deadline_s=soon()) == [None]
    assert rejected("head") == before
    assert not path_of(root).exists()


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_listing_deletes_what_a_dead_writer_has_left(tmp_path: Path, scheme: str) -> None:
    root = tmp_path / "tier"
    tier = FolderTier(f"{scheme}://{root}")
    assert tier.put_many([Value(NAME, b"head", BODY)], ttl_s=60.0, deadline_s=soon()) == [True]
    system, at = fsspec.core.url_to_fs(f"{scheme}://{root}/{NAME.hex()[:2]}")
    left, fresh, foreign = (f"{NAME.hex()}.{end}" for end in ("0" * 16, "1" * 16, "old"))
    old_s = time.time() - LEFT_AFTER_S - 60.0
    for name in (left, fresh, foreign):
        system.pipe_file(f"{at}/{name}", b"a part")
        if scheme == "file" and name != fresh:
            os.utime(f"{at}/{name}", (old_s, old_s))
        elif name != fresh:
            system.store[f"{at}/{name}"].modified = datetime.fromtimestamp(old_s, UTC)
    assert list(tier.names(deadline_s=soon())) == [NAME]
    names = {str(path).rpartition("/")[2] for path in system.find(at)}
    assert names == {NAME.hex(), fresh, foreign}
    tier.close()
