"""Files by ``file:`` URL: only those in the configured folders."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from afferent import keys
from afferent.config import ServeConfig
from afferent.errors import ConfigError, FetchFailed, ForbiddenUrl, MediaTooLarge
from afferent.files.stored_file import ReadFile
from afferent.media.fetch.fetch import Fetcher, WantedFile

MAX_NBYTES = 200_000
IMAGE = bytes(range(256)) * 500


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with files; there are other files beside it."""
    folder = tmp_path / "media"
    (folder / "in" / "deep").mkdir(parents=True)
    (folder / "a b.png").write_bytes(IMAGE)
    (folder / "in" / "deep" / "ü").write_bytes(b"deep")
    (folder / "empty").write_bytes(b"")
    (folder / "large").write_bytes(bytes(MAX_NBYTES + 1))
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "secret").write_bytes(b"secret")
    return folder


class Room:
    """Blocks on the heap."""

    def __init__(self) -> None:
        self.blocks: list[memoryview] = []

    async def make(self, sizes: Sequence[int]) -> list[memoryview]:
        self.blocks = [memoryview(bytearray(nbytes)) for nbytes in sizes]
        return self.blocks


def get(url: str, *roots: Path, max_nbytes: int = MAX_NBYTES) -> bytes:
    async def main() -> bytes:
        fetcher = Fetcher(ServeConfig(file_roots=tuple(map(str, roots))))
        session = fetcher.session(max_nbytes=MAX_NBYTES * 2)
        room = Room()
        try:
            (read,) = await session.read_files([WantedFile(url, max_nbytes)], room.make)
            (block,) = room.blocks
            data = bytes(block[: read.nbytes])
            assert read.digest == keys.digest(data)
            return data
        finally:
            await fetcher.close()

    return asyncio.run(main())


def test_files_under_a_root(root: Path) -> None:
    assert get(f"file://{root}/a%20b.png", root) == IMAGE
    assert get(f"FILE://localhost{root}/a%20b.png", root) == IMAGE
    assert get(f"file:{root}/in/deep/%C3%BC", root) == b"deep"
    assert get(f"file://{root}/in/deep/%C3%BC", root / "in", root) == b"deep"
    assert get(f"file://{root}/empty", root) == b""


def test_the_innermost_root_counts(root: Path, tmp_path: Path) -> None:
    """The inner folder may be a link, which is not followed from the outer one."""
    (root / "other").symlink_to(tmp_path / "media2")
    for roots in ((root, root / "other"), (root / "other", root)):
        assert get(f"file://{root}/other/secret", *roots) == b"secret"
    with pytest.raises(ForbiddenUrl):
        get(f"file://{root}/other/secret", root)


def test_nothing_is_served_without_roots(root: Path) -> None:
    with pytest.raises(ForbiddenUrl):
        get(f"file://{root}/a%20b.png")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/in",
        "/../secret",
        "/in/../empty",
        "/%2e%2e/secret",
        "/in/%2E%2e/empty",
        "/in/..%2fempty",
        "/in%2fdeep%2f%C3%BC",
        "/./empty",
        "//empty",
        "/in//deep",
        "/empty?x",
        "/empty#x",
        "/empty%00",
        "/a b.png",
        "/in\\deep",
        "/in/deep/ü",
        "2/secret",
        "/empty/x",
    ],
)
def test_ways_out_and_around(root: Path, path: str) -> None:
    with pytest.raises(ForbiddenUrl):
        get(f"file://{root}{path}", root)


@pytest.mark.parametrize(
    "url", ["file://example.com/a", "file:a", "file:", "file:////a", "file://user@localhost/a"]
)
def test_urls_of_other_forms(root: Path, url: str) -> None:
    with pytest.raises(ForbiddenUrl):
        get(url, root, Path("/"))


def test_links_are_not_followed(root: Path) -> None:
    (root / "link").symlink_to(root.parent / "secret")
    (root / "inner").symlink_to(root / "empty")
    (root / "folder").symlink_to(root.parent)
    (root / "in" / "up").symlink_to("..")
    for path in ("link", "inner", "folder/secret", "in/up/empty"):
        with pytest.raises(ForbiddenUrl):
            get(f"file://{root}/{path}", root)


def test_a_root_may_be_a_link_itself(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    assert get(f"file://{link}/in/deep/%C3%BC", link) == b"deep"


def test_only_regular_files_are_read(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(os.path.relpath(root / "socket"))
        for name in ("pipe", "socket"):
            with pytest.raises(ForbiddenUrl):
                get(f"file://{root}/{name}", root)
    with pytest.raises(ForbiddenUrl):
        get("file:///dev/zero", Path("/dev"))


def test_files_that_cannot_be_read(root: Path) -> None:
    with pytest.raises(FetchFailed):
        get(f"file://{root}/missing", root)
    with pytest.raises(FetchFailed):
        get(f"file://{root}/" + "x" * 300, root)


def test_sizes_are_limited(root: Path) -> None:
    with pytest.raises(MediaTooLarge):
        get(f"file://{root}/large", root)
    with pytest.raises(MediaTooLarge):
        get(f"file://{root}/in/deep/%C3%BC", root, max_nbytes=3)


def test_files_count_towards_the_requests_budget(root: Path) -> None:
    async def main() -> None:
        fetcher = Fetcher(ServeConfig(file_roots=(str(root),)))
        session, room = fetcher.session(max_nbytes=len(IMAGE) + 3), Room()
        image = WantedFile(f"file://{root}/a%20b.png", MAX_NBYTES)
        (read,) = await session.read_files([image], room.make)
        assert bytes(room.blocks[0]) == IMAGE
        assert read == ReadFile(len(IMAGE), keys.digest(IMAGE))
        with pytest.raises(MediaTooLarge):
            await session.read_files([WantedFile(f"file://{root}/in/deep/%C3%BC", 10)], room.make)
        await fetcher.close()

    asyncio.run(main())


def test_many_files_have_their_room_made_once(root: Path) -> None:
    contents = {f"{number}": bytes([number]) * (number + 1) for number in range(40)}
    for name, data in contents.items():
        (root / name).write_bytes(data)
    asked: list[Sequence[int]] = []

    async def main() -> None:
        fetcher = Fetcher(ServeConfig(file_roots=(str(root),)))
        session, room = fetcher.session(max_nbytes=MAX_NBYTES), Room()

        async def make(sizes: Sequence[int]) -> list[memoryview]:
            asked.append(sizes)
            return await room.make(sizes)

        wanted = [WantedFile(f"file://{root}/{name}", MAX_NBYTES) for name in contents]
        read = await session.read_files(wanted, make)
        assert asked == [[len(data) for data in contents.values()]]
        assert list(map(bytes, room.blocks)) == list(contents.values())
        assert [file.digest for file in read] == [*map(keys.digest, contents.values())]
        await fetcher.close()

    asyncio.run(main())


def test_a_file_that_has_changed_is_what_was_read(root: Path) -> None:
    """The file becomes longer or shorter after its space was reserved."""
    path = root / "changes"

    async def main(now: bytes) -> tuple[bytes, ReadFile]:
        fetcher = Fetcher(ServeConfig(file_roots=(str(root),)))
        session, room = fetcher.session(max_nbytes=MAX_NBYTES), Room()
        path.write_bytes(b"12345678")

        async def make(sizes: Sequence[int]) -> list[memoryview]:
            path.write_bytes(now)
            return await room.make(sizes)

        (read,) = await session.read_files([WantedFile(f"file://{path}", 100)], make)
        await fetcher.close()
        return bytes(room.blocks[0][: read.nbytes]), read

    for now in (b"123", b"", b"1234567890"):
        data, read = asyncio.run(main(now))
        assert data == now[:8]
        assert read.digest == keys.digest(now[:8])


def test_a_cancelled_read_has_closed_its_files(root: Path) -> None:
    async def main() -> None:
        fetcher = Fetcher(ServeConfig(file_roots=(str(root),)))
        session, waits = fetcher.session(max_nbytes=MAX_NBYTES), asyncio.Event()
        before = num_open()

        async def make(sizes: Sequence[int]) -> list[memoryview]:
            assert num_open() == before + 1
            waits.set()
            return await asyncio.get_running_loop().create_future()

        wanted = [WantedFile(f"file://{root}/a%20b.png", MAX_NBYTES)]
        task = asyncio.create_task(session.read_files(wanted, make))
        await waits.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert num_open() == before
        await fetcher.close()

    asyncio.run(main())


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("root", ["media", "/no/such/folder", "/etc/../etc", "/etc/hostname", ""])
def test_roots_that_are_refused(root: str) -> None:
    with pytest.raises(ConfigError):
        Fetcher(ServeConfig(file_roots=(root,)))


def test_descriptors_are_closed(root: Path) -> None:
    def fetch_all() -> None:
        get(f"file://{root}/a%20b.png", root)
        for path in ("missing", "in", "large", "in/deep/missing"):
            expected: Any = (FetchFailed, ForbiddenUrl, MediaTooLarge)
            with pytest.raises(expected):
                get(f"file://{root}/{path}", root)

    fetch_all()
    before = num_open()
    fetch_all()
    assert num_open() == before
