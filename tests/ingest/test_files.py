"""Files by ``file:`` URL: what is under the configured folders, and nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from afferent.config import ServeConfig
from afferent.errors import ConfigError, FetchFailed, ForbiddenUrl, MediaTooLarge
from afferent.ingest.fetch import Fetched, Fetcher

MAX_NBYTES = 200_000
IMAGE = bytes(range(256)) * 500


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a file in it, and others beside it."""
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


def get(url: str, *roots: Path, max_nbytes: int = MAX_NBYTES) -> bytes:
    async def main() -> bytes:
        fetcher = Fetcher(ServeConfig(file_roots=tuple(map(str, roots))))
        session = fetcher.session(max_nbytes=MAX_NBYTES * 2)
        try:
            return await session.fetch(url, modality="image", max_nbytes=max_nbytes)
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
    """It may be a link, which the outer one would not follow."""
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
        session = fetcher.session(max_nbytes=len(IMAGE) + 3)
        url = f"file://{root}/a%20b.png"
        pieces: list[bytes] = []
        fetched = await session.fetch_into(
            url, pieces.append, modality="image", max_nbytes=MAX_NBYTES
        )
        assert fetched == Fetched(len(IMAGE), fresh_s=0.0)
        assert b"".join(pieces) == IMAGE
        assert max(map(len, pieces)) <= 64 << 10
        with pytest.raises(MediaTooLarge):
            await session.fetch(f"file://{root}/in/deep/%C3%BC", modality="image", max_nbytes=10)
        await fetcher.close()

    asyncio.run(main())


def test_a_cancelled_read_has_stopped(root: Path) -> None:
    """Nothing reaches the sink once the cancellation has come through."""
    calls = 0
    begun, go_on = threading.Event(), threading.Event()

    def sink(data: bytes) -> None:
        nonlocal calls
        begun.set()
        go_on.wait(60)
        calls += 1

    async def main() -> None:
        fetcher = Fetcher(ServeConfig(file_roots=(str(root),)))
        session = fetcher.session(max_nbytes=MAX_NBYTES)
        task = asyncio.create_task(
            session.fetch_into(
                f"file://{root}/a%20b.png", sink, modality="image", max_nbytes=MAX_NBYTES
            )
        )
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        asyncio.get_running_loop().call_later(0.05, go_on.set)  # when the task has heard of it
        with pytest.raises(asyncio.CancelledError):
            await task
        assert calls == 1
        await fetcher.close()

    asyncio.run(main())
    assert calls == 1


@pytest.mark.parametrize("root", ["media", "/no/such/folder", "/etc/../etc", "/etc/hostname", ""])
def test_roots_that_are_refused(root: str) -> None:
    with pytest.raises(ConfigError):
        Fetcher(ServeConfig(file_roots=(root,)))


def test_descriptors_are_closed(root: Path) -> None:
    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

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
