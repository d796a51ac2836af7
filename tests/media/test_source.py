"""The sources of an item's bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from afferent import keys
from afferent.config import ServeConfig
from afferent.errors import ForbiddenUrl, InvalidMedia, StoreFull
from afferent.media.body.raw import HeapAllowance, RawBuffer, RawMedia
from afferent.media.body.shared_room import SharedRoom
from afferent.media.fetch.fetch import Fetcher
from afferent.media.fetch.source import MediaSource, WantedMedia
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.items import SealItem
from afferent.types import KiB, MiB, Modality, ObjectKind
from tests.media.media_host import Answer, media_host, send, send_raw


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("data:image/png;base64,aGVsbG8=", None),
        ("DATA:image/png;BASE64,aGVsbG8=", None),
        ("data:;base64,aGVsbG8=", None),
        ("data:;base64,aGVs\r\nbG8=\n", None),
        ("data:image/png;base64,aGVsbG8", InvalidMedia),
        ("data:image/png;base64,aGVs bG8=", InvalidMedia),
        ("data:image/png;base64,ä", InvalidMedia),
        ("data:image/png,hello", ForbiddenUrl),
        ("data:image/png;base64", ForbiddenUrl),
    ],
)
def test_data_urls(url: str, error: type[Exception] | None) -> None:
    limits = ServeConfig()

    async def main() -> bytes | None:
        fetcher = Fetcher(limits)
        try:
            (media,) = await MediaSource(
                None,  # type: ignore[arg-type]  # not used here
                "r",
                limits=limits,
                fetches=fetcher.session(max_nbytes=1),
            ).read_all([WantedMedia(url, Modality.IMAGE)])
        finally:
            await fetcher.close()
        assert (media.origin, media.handle) == ("data", None)
        return media.data

    if error is None:
        assert asyncio.run(main()) == b"hello"
    else:
        with pytest.raises(error):
            asyncio.run(main())


@pytest.mark.parametrize(
    "text", ["/9j/4AAQSkZJRgABAQAAAQABAAD/2wBD" * 9, "iVBORw0KGgoAAAANSUhEUgAA=="]
)
def test_base64_that_is_no_url(text: str) -> None:
    async def main() -> None:
        fetcher = Fetcher(ServeConfig())
        try:
            await MediaSource(
                None,  # type: ignore[arg-type]  # not used here
                "r",
                limits=ServeConfig(),
                fetches=fetcher.session(max_nbytes=1),
            ).read_all([WantedMedia(text, Modality.IMAGE)])
        finally:
            await fetcher.close()

    with pytest.raises(ForbiddenUrl, match=r"put data:image/\.\.\.;base64, in front of it"):
        asyncio.run(main())


class Counted:
    """A store that records its calls."""

    def __init__(self, store: AsyncDaemonStore) -> None:
        self._store = store
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("create", "seal", "discard"):
            self.calls.append(name)
        return getattr(self._store, name)


def bytes_of(store: AsyncDaemonStore, raw: RawMedia) -> bytes:
    if raw.handle is None:
        return raw.data or b""
    return bytes(store.block(raw.handle)[raw.start : raw.start + raw.nbytes])


def read(
    urls: Sequence[str],
    *,
    roots: Sequence[Path] = (),
    arena_nbytes: int = 16 * MiB,
    **settings: Any,
) -> tuple[list[bytes], list[str], int]:
    """Return the media, the calls of the store, and the pinned bytes after the last seal."""

    async def main(address: str) -> tuple[list[bytes], list[str], int]:
        store = await AsyncDaemonStore.connect(address, name="test", writable=True)
        counted = Counted(store)
        allow = tuple({urlsplit(url).netloc for url in urls if url.startswith("http:")})
        limits = ServeConfig(file_roots=tuple(map(str, roots)), fetch_allow=allow)
        fetcher = Fetcher(limits)
        source = MediaSource(
            cast(AsyncDaemonStore, counted),
            "r",
            limits=limits,
            fetches=fetcher.session(max_nbytes=64 * MiB),
            **settings,
        )
        try:
            media = await source.read_all([WantedMedia(url, Modality.IMAGE) for url in urls])
            for raw in media:
                assert raw.digest in (None, keys.digest(bytes_of(store, raw)))
            unsealed = {raw.handle for raw in media if raw.handle and not raw.is_sealed}
            if unsealed:
                await counted.seal("r", [SealItem(handle, handle.nbytes) for handle in unsealed])
            held_nbytes = (await store.stat()).held_nbytes
            return [bytes_of(store, raw) for raw in media], counted.calls, held_nbytes
        finally:
            await fetcher.close()
            await store.release("r")
            assert (await store.stat()).held_nbytes == 0
            await store.close()

    with StoreServer(arena_nbytes, shares={ObjectKind.RAW: 1.0}) as server:
        return asyncio.run(main(server.address))


CONTENTS = [bytes([number]) * (40_000 + number) for number in range(80)]


def test_many_files_are_allocated_and_sealed_together(tmp_path: Path) -> None:
    for number, data in enumerate(CONTENTS):
        (tmp_path / f"{number}").write_bytes(data)
    urls = [f"file://{tmp_path}/{number}" for number in range(80)]
    urls.insert(3, "data:image/png;base64,aGVsbG8=")
    came, calls, _ = read(urls, roots=[tmp_path])
    assert came == [*CONTENTS[:3], b"hello", *CONTENTS[3:]]
    assert calls == ["create"] * 3 + ["seal"]  # at most 32 files are open at a time


def test_a_few_small_files_come_on_the_heap(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "b").write_bytes(b"4567")
    came, calls, _ = read([f"file://{tmp_path}/{name}" for name in "ab"], roots=[tmp_path])
    assert (came, calls) == ([b"123", b"4567"], [])


def test_a_file_that_is_refused_refuses_all(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    with pytest.raises(ForbiddenUrl):
        read([f"file://{tmp_path}/a", "file:///etc/hostname"], roots=[tmp_path])


def test_media_of_a_host_lie_side_by_side() -> None:
    """The media share an object, which is no longer than necessary."""
    with media_host({f"/{n}": send(data) for n, data in enumerate(CONTENTS)}) as where:
        came, calls, held_nbytes = read([f"http://{where}/{number}" for number in range(80)])
    assert came == CONTENTS
    assert calls == ["create", "seal"]
    nbytes = sum(map(len, CONTENTS))
    assert nbytes - 256 * KiB <= held_nbytes <= nbytes


def test_media_whose_length_is_not_announced_have_objects_of_their_own() -> None:
    def unannounced(data: bytes) -> Answer:
        return send_raw(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + data)

    data = [bytes([number]) * 200_000 for number in range(4)]
    with media_host({f"/{n}": unannounced(one) for n, one in enumerate(data)}) as where:
        came, _, held_nbytes = read([f"http://{where}/{number}" for number in range(4)])
    assert came == data
    assert held_nbytes <= sum(map(len, data)) + 256 * KiB


def test_where_there_is_no_room_for_what_is_expected_there_is_for_what_is_needed() -> None:
    data = [bytes([number]) * 700_000 for number in range(4)]
    with media_host({f"/{n}": send(one) for n, one in enumerate(data)}) as where:
        urls = [f"http://{where}/{number}" for number in range(4)]
        came, _, _ = read([*urls, "data:image/png;base64,aGVsbG8="], arena_nbytes=3 * MiB)
        assert came == [*data, b"hello"]
        with pytest.raises(StoreFull):
            read(urls, arena_nbytes=2 * MiB)


def test_an_item_lies_in_an_object_as_a_whole() -> None:
    """An item is never split between objects, and unused bytes are freed."""

    async def main(address: str) -> None:
        store = await AsyncDaemonStore.connect(address, name="test", writable=True)
        room = SharedRoom(store, "r", num_items=3)
        first, second, third = [await room.take(nbytes) for nbytes in (1000, 1000, 1001)]
        assert (first.handle, first.start) == (second.handle, 0)
        assert (second.start, first.handle.nbytes) == (1000, 3000)
        assert (third.handle.nbytes, third.start, len(third.block)) == (1001, 0, 1001)
        assert room.settle({first.handle})[first.handle].nbytes == 2000
        assert (await store.stat()).num_objects == 1
        await store.close()

    with StoreServer(MiB, shares={ObjectKind.RAW: 1.0}) as server:
        asyncio.run(main(server.address))


def test_an_item_that_grows_leaves_those_beside_it() -> None:
    async def main(address: str) -> None:
        store = await AsyncDaemonStore.connect(address, name="test", writable=True)
        room, heap = SharedRoom(store, "r", num_items=2), HeapAllowance(0)
        grows, stays = (RawBuffer(store, "r", heap, room) for _ in range(2))
        for buffer in (grows, stays):
            await buffer.make_room(100)
            buffer.write(b"x" * 100)
        await grows.make_room(300)
        grows.write(b"y" * 200)
        one, other = [await each.finish_sealed(origin="fetch") for each in (grows, stays)]
        assert one.is_sealed
        assert one.handle != other.handle
        used = room.settle({other.handle} if other.handle else set())
        await store.seal("r", [SealItem(handle, handle.nbytes) for handle in used.values()])
        assert bytes_of(store, one) == b"x" * 100 + b"y" * 200
        assert bytes_of(store, other) == b"x" * 100
        await store.close()

    with StoreServer(MiB, shares={ObjectKind.RAW: 1.0}) as server:
        asyncio.run(main(server.address))
