"""A URL that is used again is not fetched again while its host allows it, nor twice at a time."""

from __future__ import annotations

import asyncio
import io
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import pytest
from PIL import Image

from afferent.config import Tenant
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import ObjectKind
from tests.builtin.frontends import frontend, post
from tests.media.media_host import media_host, send


def png(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (60, 80, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


class Host:
    """A media host with one image for each path; it counts the requests."""

    def __init__(self, **headers: str) -> None:
        self.asked: Counter[str] = Counter()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._headers, self._lock = headers, threading.Lock()
        self.bodies = {f"/{n}.png": png(n) for n in range(3)}

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        with self._lock:
            self.asked[request.path] += 1
        self.goes_on.wait(20)
        send(self.bodies[request.path], **self._headers)(request)

    @contextmanager
    def running(self) -> Iterator[str]:
        with media_host(dict.fromkeys(self.bodies, self.answer)) as where:
            yield where


def asking(where: str, *numbers: int) -> dict[str, Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": f"http://{where}/{number}.png"}}
        for number in numbers
    ]
    content = [*parts, {"type": "text", "text": "What?"}]
    return {"model": "shapes", "messages": [{"role": "user", "content": content}]}


def test_a_url_that_comes_again_is_not_fetched_again(address: str) -> None:
    host = Host()

    async def main() -> None:
        async with frontend(address, fetch_allow=(where,)) as client:
            for numbers in ((0,), (0,), (1, 0), (0, 1, 0)):
                assert (await post(client, asking(where, *numbers))).status_code == 200

    with host.running() as where:
        asyncio.run(main())
    assert host.asked == {"/0.png": 1, "/1.png": 1}


@pytest.mark.parametrize(("headers", "fresh_s"), [({"Cache_Control": "no-store"}, 10.0), ({}, 0.0)])
def test_what_may_not_be_kept_is_fetched_each_time(
    address: str, headers: dict[str, str], fresh_s: float
) -> None:
    host = Host(**headers)

    async def main() -> None:
        limits = {"fetch_allow": (where,), "fetch_fresh_s": fresh_s}
        async with frontend(address, **limits) as client:
            for _ in range(3):
                assert (await post(client, asking(where, 0))).status_code == 200

    with host.running() as where:
        asyncio.run(main())
    assert host.asked == {"/0.png": 3}


def test_another_tenant_has_to_fetch_it(address: str) -> None:
    host = Host()
    tenants = [Tenant(name=name, api_keys=(name * 16,)) for name in "ab"]

    async def main() -> None:
        async with frontend(address, fetch_allow=(where,), tenants=tenants) as client:
            for name in "abab":
                answer = await post(client, asking(where, 0), key=name * 16)
                assert answer.status_code == 200

    with host.running() as where:
        asyncio.run(main())
    assert host.asked == {"/0.png": 2}


def test_what_was_evicted_is_fetched_again(address: str) -> None:
    host = Host()

    async def main() -> None:
        async with frontend(address, fetch_allow=(where,)) as client:
            assert (await post(client, asking(where, 0))).status_code == 200
            with DaemonStore(address, name="operator", writable=True) as store:
                await asyncio.to_thread(store.evict, ObjectKind.FEATURES)
            assert (await post(client, asking(where, 0))).status_code == 200

    with host.running() as where:
        asyncio.run(main())
    assert host.asked == {"/0.png": 2}


def test_requests_side_by_side_fetch_a_url_once(address: str) -> None:
    host = Host()
    host.goes_on.clear()

    async def main() -> None:
        async with frontend(address, fetch_allow=(where,)) as client:
            asking_all = [
                asyncio.create_task(post(client, asking(where, *numbers)))
                for numbers in ((0, 1), (1, 0), (0,), (2, 1), (0, 2))
            ]
            while host.asked.total() < 2:
                await asyncio.sleep(0.01)
            host.goes_on.set()
            answers = await asyncio.gather(*asking_all)
            assert [answer.status_code for answer in answers] == [200] * 5

    with host.running() as where:
        asyncio.run(asyncio.wait_for(main(), 30))
    assert host.asked == {"/0.png": 1, "/1.png": 1, "/2.png": 1}


def test_nobody_waits_for_a_request_that_has_failed(address: str) -> None:
    """The first request fails for another item, after the fetch of the shared image has begun."""
    host = Host()
    host.bodies["/1.png"] = b"no image"
    host.goes_on.clear()

    async def main() -> None:
        async with frontend(address, fetch_allow=(where,)) as client:
            bad = asyncio.create_task(post(client, asking(where, 0, 1)))
            while host.asked.total() < 2:
                await asyncio.sleep(0.01)
            good = asyncio.create_task(post(client, asking(where, 0)))
            gone = asyncio.create_task(post(client, asking(where, 0)))
            await asyncio.sleep(0)
            gone.cancel()
            host.goes_on.set()
            assert (await bad).status_code == 400
            assert (await good).status_code == 200

    with host.running() as where:
        asyncio.run(asyncio.wait_for(main(), 30))
