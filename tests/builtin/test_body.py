"""Bodies as they arrive: whole and in chunks, large and small, valid and invalid."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from PIL import Image

from afferent.config import Tenant
from afferent.items.receive import ItemReader
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import KiB, MiB, ObjectKind, ReserveItem
from tests.builtin.frontends import SHARES, frontend, post, post_in_chunks
from tests.builtin.test_holding import holds_nothing, request
from tests.images import encoded, photo
from tests.server import ask, data_url, wait_until

RAW, FEATURES = ObjectKind.RAW, ObjectKind.FEATURES
RAW_SHARE = int(32 * MiB * SHARES[RAW])
FEATURES_SHARE = int(32 * MiB * SHARES[FEATURES])


@pytest.fixture
def other(address: str) -> Iterator[DaemonStore]:
    """Return another client of the same arena."""
    with DaemonStore(address, name="other") as store:
        yield store


def send(address: str, body: Any, *, chunk_nbytes: int = 0, **limits: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        async with frontend(address, **limits) as client:
            if chunk_nbytes:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                return await post_in_chunks(client, data, chunk_nbytes)
            return await post(client, body)

    return asyncio.run(main())


@pytest.mark.parametrize("chunk_nbytes", [0, 1 << 20, 100_000, 7_777])
def test_however_a_body_arrives(address: str, other: DaemonStore, chunk_nbytes: int) -> None:
    body = request(1)
    assert send(address, body).status_code == 200
    misses = other.stat().num_misses
    response = send(address, body, chunk_nbytes=chunk_nbytes)
    assert response.status_code == 200, response.text
    assert other.stat().num_misses == misses, "the same bytes have the same key"
    escaped = json.dumps(body).replace("/", "\\/").encode()
    assert send(address, escaped, chunk_nbytes=chunk_nbytes or 50_000).status_code == 200
    assert other.stat().num_misses == misses
    wait_until(lambda: holds_nothing(other))


def test_small_images_that_are_there_touch_nothing_of_the_arena(
    address: str, other: DaemonStore
) -> None:
    body = ask([data_url(encoded(photo(60, 50), "JPEG"))], "What?")
    assert send(address, body).status_code == 200
    other.reserve("all", [ReserveItem(RAW, other.stat().kinds[RAW].capacity_nbytes)])
    assert send(address, body, admission_timeout_s=2.0).status_code == 200


def test_text_needs_no_room(address: str, other: DaemonStore) -> None:
    for kind in (RAW, FEATURES):
        other.reserve("all", [ReserveItem(kind, other.stat().kinds[kind].capacity_nbytes)])
    text = "word " * 70_000
    body = {"model": "shapes", "messages": [{"role": "user", "content": text}]}
    response = send(address, body, admission_timeout_s=2.0)
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("kind", [RAW, FEATURES])
def test_a_busy_arena(address: str, other: DaemonStore, kind: ObjectKind) -> None:
    """A request waits for space; after its timeout it is refused with the time of the next try."""
    other.reserve("all", [ReserveItem(kind, other.stat().kinds[kind].capacity_nbytes)])
    refused = send(address, request(2), admission_timeout_s=0.1)
    assert refused.status_code == 503, refused.text
    assert refused.json()["error"]["code"] == "deadline_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60

    async def main() -> httpx.Response:
        async with frontend(address) as client:
            waiting = asyncio.create_task(post(client, request(2)))
            while (await asyncio.to_thread(other.stat)).num_reservations_queued == 0:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(other.release, "all")
            return await waiting

    assert asyncio.run(main()).status_code == 200
    wait_until(lambda: holds_nothing(other))


def test_a_body_of_unknown_length_does_not_wait(address: str, other: DaemonStore) -> None:
    other.reserve("all", [ReserveItem(RAW, other.stat().kinds[RAW].capacity_nbytes)])
    refused = send(address, request(3), chunk_nbytes=50_000)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "store_full"


def test_what_never_fits(address: str, other: DaemonStore) -> None:
    filler = data_url(b"\xff\xd8\xff" + bytes(other.stat().kinds[RAW].capacity_nbytes), "jpeg")
    refused = send(address, ask([filler], "What?"))
    assert refused.status_code == 413, refused.text
    assert refused.json()["error"]["code"] == "arena_too_small"
    # A body of unknown length is copied when it grows, so it may fail for lack of space.
    refused = send(address, ask([filler], "What?"), chunk_nbytes=1 << 20)
    assert refused.status_code in (413, 503), refused.text
    wait_until(lambda: holds_nothing(other))


def test_limits_on_the_body(address: str) -> None:
    body = request(4)
    for chunk_nbytes in (0, 50_000):
        large = send(address, body, chunk_nbytes=chunk_nbytes, max_body_nbytes=300_000)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        text = {**body, "user": "x" * 3000}
        json_only = send(address, text, chunk_nbytes=chunk_nbytes, max_json_nbytes=2000)
        assert (json_only.status_code, json_only.json()["error"]["code"]) == (413, "body_too_large")
        item = send(address, body, chunk_nbytes=chunk_nbytes, max_image_nbytes=100_000)
        assert (item.status_code, item.json()["error"]["code"]) == (400, "media_too_large")


def test_each_item_has_a_limit_of_its_own(address: str) -> None:
    """The media of a request together are limited only by the size of the body."""
    images = [encoded(photo(200, 150, seed=seed), "PNG") for seed in (1, 2)]
    most = max(map(len, images))
    limits = dict.fromkeys(("max_image_nbytes", "max_audio_nbytes", "max_video_nbytes"), most)
    body = ask([data_url(data, "png") for data in images], "What?")
    for chunk_nbytes in (0, 10_000):
        assert send(address, body, chunk_nbytes=chunk_nbytes, **limits).status_code == 200
        less = {**limits, "max_image_nbytes": most - 1}
        refused = send(address, body, chunk_nbytes=chunk_nbytes, **less)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "media_too_large")


def test_a_body_that_comes_too_slowly(address: str, other: DaemonStore) -> None:
    data = json.dumps(request(5)).encode()

    async def main(pause_s: float, **limits: float) -> httpx.Response:
        async def chunks() -> Any:
            for start in range(0, len(data), 20_000):
                yield data[start : start + 20_000]
                await asyncio.sleep(pause_s)

        async with frontend(address, **limits) as client:
            return await client.post("/v1/chat/completions", content=chunks())

    for limits in ({"body_idle_timeout_s": 0.05}, {"body_timeout_s": 0.3}):
        slow = asyncio.run(main(0.1, **limits))
        assert (slow.status_code, slow.json()["error"]["code"]) == (408, "body_too_slow")
    wait_until(lambda: holds_nothing(other))


class Announced:
    """A body that announces its length, of which only the first bytes arrive."""

    def __init__(self, nbytes: int, sent_nbytes: int) -> None:
        image = data_url(b"\xff\xd8\xff" + bytes(nbytes), "jpeg")
        self._data = json.dumps(ask([image], "What?")).encode()
        self._sent_nbytes = sent_nbytes
        self.is_stalled = asyncio.Event()

    async def _chunks(self) -> AsyncIterator[bytes]:
        yield self._data[: self._sent_nbytes]
        self.is_stalled.set()
        await asyncio.Event().wait()

    async def post(self, client: httpx.AsyncClient, key: str = "none") -> httpx.Response:
        headers = {"content-length": str(len(self._data)), "x-api-key": key}
        return await client.post("/v1/chat/completions", content=self._chunks(), headers=headers)


@pytest.mark.parametrize("sent_nbytes", [50_000, 100_000, 400_000])
def test_room_is_for_those_who_send(address: str, other: DaemonStore, sent_nbytes: int) -> None:
    """A body has space only after some of it has arrived, and loses it if the rest is late."""

    async def main() -> float:
        async with frontend(address, body_timeout_s=30.0, body_idle_timeout_s=30.0) as client:
            body = Announced(4 * MiB, sent_nbytes)
            start_s = time.monotonic()
            posting = asyncio.create_task(body.post(client))
            await body.is_stalled.wait()
            await asyncio.sleep(0)
            if sent_nbytes < 64 * KiB:
                assert other.stat().kinds[RAW].held_nbytes == 0
                posting.cancel()
                return 0.0
            refused = await posting
            assert (refused.status_code, refused.json()["error"]["code"]) == (408, "body_too_slow")
            return time.monotonic() - start_s

    assert asyncio.run(main()) < 15.0
    wait_until(lambda: holds_nothing(other))


@pytest.mark.parametrize(("media_nbytes", "most"), [(600 * KiB, 6), (3 * MiB, 2)])
def test_waiting_body_is_not_read(
    address: str, other: DaemonStore, media_nbytes: int, most: int
) -> None:
    """Little of a large body that waits for the arena is taken from its client."""
    other.reserve("all", [ReserveItem(RAW, other.stat().kinds[RAW].capacity_nbytes)])
    file = np.random.default_rng(1).bytes(media_nbytes)
    data = json.dumps(ask([data_url(file, "png")], "What?")).encode()
    taken = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal taken
        for start in range(0, len(data), 64 * KiB):
            taken += 1
            yield data[start : start + 64 * KiB]

    async def main() -> httpx.Response:
        async with frontend(address, admission_timeout_s=0.2) as client:
            headers = {"content-length": str(len(data))}
            return await client.post("/v1/chat/completions", content=chunks(), headers=headers)

    refused = asyncio.run(main())
    assert refused.json()["error"]["code"] == "deadline_exceeded"
    assert taken <= most
    wait_until(lambda: other.stat().permits.get("uploads") is None)


def test_trickle_keeps_no_room(address: str, other: DaemonStore) -> None:
    """A client that goes on slowly after its reservation is refused, however small its pauses."""
    head = json.dumps(ask([data_url(bytes(3 * MiB), "png")], "What?")).encode()

    async def chunks() -> AsyncIterator[bytes]:
        yield head[:100_000]
        for start in range(100_000, len(head)):
            await asyncio.sleep(0.02)
            yield head[start : start + 1]

    async def main() -> float:
        async with frontend(address, body_timeout_s=30.0, body_idle_timeout_s=30.0) as client:
            headers, start_s = {"content-length": str(len(head))}, time.monotonic()
            refused = await client.post("/v1/chat/completions", content=chunks(), headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (408, "body_too_slow")
            return time.monotonic() - start_s

    assert asyncio.run(main()) < 15.0
    wait_until(lambda: holds_nothing(other))


def test_small_bodies_find_room_however_much_was_announced(
    address: str, other: DaemonStore
) -> None:
    """Half of the space for uploads is for small bodies; large ones wait for one another."""
    small = ask([data_url(encoded(photo(300, 200, seed=9), "PNG"), "png")], "What?")

    async def main() -> list[int]:
        async with frontend(address, body_timeout_s=10.0) as client:
            bodies = [Announced(3 * MiB, 400_000) for _ in range(3)]
            posting = [asyncio.create_task(body.post(client)) for body in bodies]
            await bodies[0].is_stalled.wait()  # the others wait before they reserve more
            while not (found := other.stat().permits.get("uploads")) or found.num_queued < 2:
                await asyncio.sleep(0.001)
            assert other.stat().kinds[RAW].held_nbytes <= RAW_SHARE / 2 + MiB
            answer = await post(client, small)
            assert answer.status_code == 200
            assert not any(each.done() for each in posting)
            return [(await each).status_code for each in posting]

    assert asyncio.run(main()) == [408] * 3
    wait_until(lambda: holds_nothing(other))


def test_large_bodies_that_have_come_leave_room_for_small_ones(
    address: str, other: DaemonStore
) -> None:
    """Large bodies that wait for feature memory fill at most half of the share for raw media."""
    other.reserve("all", [ReserveItem(FEATURES, other.stat().kinds[FEATURES].capacity_nbytes)])
    rng = np.random.default_rng(3)
    noise = [Image.fromarray(rng.integers(0, 256, (900, 900, 3), np.uint8)) for _ in range(3)]
    large = [ask([data_url(encoded(image, "PNG"), "png")], "What?") for image in noise]

    async def main() -> list[int]:
        async with frontend(address) as client:
            posting = [asyncio.create_task(post(client, body)) for body in large]
            await until_queued(posting)
            stat = await asyncio.to_thread(other.stat)
            uploads = stat.permits["uploads"]
            assert (uploads.num_held > 0, uploads.num_queued) == (True, 2)
            assert stat.kinds[RAW].held_nbytes <= RAW_SHARE / 2
            await asyncio.to_thread(other.release, "all")
            return [(await each).status_code for each in posting]

    async def until_queued(posting: list[asyncio.Task[httpx.Response]]) -> None:
        while (await asyncio.to_thread(other.stat)).num_reservations_queued == 0:
            assert not any(each.done() for each in posting)
            await asyncio.sleep(0.005)

    assert asyncio.run(main()) == [200] * 3
    wait_until(lambda: holds_nothing(other))


def test_a_tenant_leaves_room_for_the_bodies_of_others(address: str, other: DaemonStore) -> None:
    """A tenant's bodies take at most half of the space for uploads, however long they are."""
    tenants = [Tenant(name=name, api_keys=(f"{name}-0123456789abcdef",)) for name in ("one", "two")]
    one, two = (tenant.api_keys[0] for tenant in tenants)

    def uploads(name: str) -> tuple[int, int]:
        found = other.stat().permits.get(name)
        return (found.num_held, found.num_queued) if found else (0, 0)

    async def main() -> list[int]:
        async with frontend(address, tenants=tenants, body_timeout_s=10.0) as client:
            of_one = [Announced(2 * MiB - 200_000, 400_000) for _ in range(3)]
            of_two = Announced(2 * MiB - 200_000, 400_000)
            posting = [asyncio.create_task(body.post(client, one)) for body in of_one]
            while uploads("uploads_of") != (2, 2):
                await asyncio.sleep(0.001)
            posting.append(asyncio.create_task(of_two.post(client, two)))
            while uploads("uploads") != (4, 0):
                await asyncio.sleep(0.001)
            return [(await each).status_code for each in posting]

    assert asyncio.run(main()) == [408] * 4
    wait_until(lambda: holds_nothing(other))


@pytest.mark.parametrize(
    "place",
    [
        {"metadata": {"url": "MEDIA"}},
        {"user": "text", "metadata": {"data": "BARE"}},
    ],
)
def test_media_in_the_wrong_place(address: str, other: DaemonStore, place: Any) -> None:
    url = data_url(encoded(photo(60, 50), "JPEG"))
    text = json.dumps({**ask([url], "What?"), **place})
    text = text.replace("MEDIA", url).replace("BARE", url.partition(",")[2])
    refused = send(address, text.encode(), chunk_nbytes=1 << 20)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "there are media where the API expects none"


@pytest.mark.parametrize("cut", [10, 300_000, -5])
def test_a_body_that_breaks_off(address: str, other: DaemonStore, cut: int) -> None:
    data = json.dumps(request(6)).encode()[:cut]
    refused = send(address, data, chunk_nbytes=60_000)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")
    wait_until(lambda: holds_nothing(other))


def noisy(number: int) -> bytes:
    """Return an image of some 260 KiB that no compression makes smaller."""
    pixels = np.random.default_rng(number).integers(0, 256, (300, 300, 3), np.uint8)
    return encoded(Image.fromarray(pixels), "PNG")


def about(*images: bytes, **more: Any) -> dict[str, Any]:
    return ask([data_url(image, "png") for image in images], "What?", **more)


@pytest.mark.parametrize("after", [b"", b"small"])
def test_known_media_do_not_count(address: str, other: DaemonStore, after: bytes) -> None:
    """A conversation sends all its images again at each turn."""
    images = [noisy(number) for number in range(4)]
    last = encoded(photo(60, 50), "PNG") if after else noisy(4)
    limits = {"max_body_nbytes": 2 * len(images[0])}
    too_large = send(address, about(*images, last), **limits)
    assert too_large.json()["error"]["code"] == "body_too_large"
    for image in images:
        assert send(address, about(image), **limits).status_code == 200
    misses = other.stat().num_misses
    answer = send(address, about(*images, last), **limits)
    assert answer.status_code == 200, answer.text
    assert other.stat().num_misses == misses + 1, "only the last one is new"
    assert answer.headers["x-afferent-items"] == "hit=4, made=1"
    again = send(address, about(*images, last, images[0]), **limits)
    assert again.headers["x-afferent-items"] == "hit=5"
    more = send(address, about(*images, noisy(5), noisy(6)), **limits)
    assert (more.status_code, more.json()["error"]["code"]) == (413, "body_too_large")
    assert "besides known media" in more.json()["error"]["message"]
    wait_until(lambda: holds_nothing(other))


def test_media_that_are_known_no_more_come_at_the_second_time(
    address: str, other: DaemonStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features are evicted while a body comes, or are needed in another form."""

    async def knows(self: ItemReader, request_id: str, tenant: str, digest: bytes) -> bool:
        return digest not in self._needed

    monkeypatch.setattr(ItemReader, "knows", knows)
    known, gone = noisy(7), noisy(8)
    assert send(address, about(known)).status_code == 200
    limits = {"max_body_nbytes": 2 * len(known)}

    async def main() -> list[httpx.Response]:
        async with frontend(address, **limits) as client:
            return [await post(client, about(known, gone)) for _ in range(2)]

    first, second = asyncio.run(main())
    assert (first.status_code, first.json()["error"]["code"]) == (503, "store_full"), first.text
    assert second.status_code == 200, second.text
    assert second.headers["x-afferent-items"] == "hit=1, made=1"
    wait_until(lambda: holds_nothing(other))
