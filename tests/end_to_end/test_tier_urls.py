"""Two nodes and one tier: media that one node has fetched from a host come from the tier."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest

from afferent.conformance.images import draw_image
from tests.media.media_host import Answer, media_host, send
from tests.server import TINY_ENGINE, Server, ask, wait_until
from tests.tier.servers import RedisServer

AWAY_S = 0.2
"""The delay of the media host, long enough that the other node's copy is faster."""


@dataclass(eq=False)
class Fleet:
    one: Server
    two: Server
    redis: RedisServer
    where: str
    answers: dict[str, Answer]
    asked: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def hosts(self, *, cache_control: str) -> tuple[str, int]:
        """Host a new picture, and return its path and the length of its file."""
        number = next(self._numbers)
        path = f"/{number}.png"
        return path, self.replace(path, number, cache_control=cache_control)

    def replace(self, path: str, number: int, *, cache_control: str) -> int:
        """Host another picture at a path, and return the length of its file."""
        data = draw_image(np.random.default_rng(number)).encode("PNG")
        reply = send(data, Cache_Control=cache_control)

        def slowly(request: BaseHTTPRequestHandler) -> None:
            self.asked.append(path)
            time.sleep(AWAY_S)
            reply(request)

        self.answers[path] = slowly
        return len(data)

    def answer(self, server: Server, path: str) -> str:
        """Return the answer to a request that must not fail."""
        url = f"http://{self.where}{path}"
        response = server.post(ask([url], "What is in the picture?"))
        assert response.status_code == 200, response.text
        said: str = response.json()["choices"][0]["message"]["content"]
        return said


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    answers: dict[str, Answer] = {}
    with media_host(answers) as where, RedisServer() as redis:
        settings = (
            *TINY_ENGINE,
            "--tier",
            redis.url,
            "--fleet-secret",
            "a-secret-of-both",
            "--fetch-allow",
            where,
        )
        with Server(*settings) as one, Server(*settings) as two:
            for server in (one, two):
                wait_until(lambda server=server: server.metric("afferent_tier_up") == 1)  # type: ignore[misc]
            yield Fleet(one, two, redis, where, answers)


def from_tier(server: Server) -> float:
    """Return the number of media bytes that another node had fetched."""
    found = server.metrics()
    return sum(
        value for key, value in found.items() if "media_bytes_total{" in key and '"tier"' in key
    )


def kept(server: Server) -> float:
    return server.metrics().get('afferent_tier_kept_total{outcome="kept"}', 0.0)


def test_a_media_host_is_asked_once_for_both_nodes(fleet: Fleet) -> None:
    path, nbytes = fleet.hosts(cache_control="max-age=600")
    before = kept(fleet.one)
    said = fleet.answer(fleet.one, path)
    wait_until(lambda: kept(fleet.one) >= before + 2)  # the file, and the entry for its URL
    come = from_tier(fleet.two)
    assert fleet.answer(fleet.two, path) == said
    assert from_tier(fleet.two) == come + nbytes
    assert fleet.answer(fleet.two, path) == said
    assert fleet.asked.count(path) == 1


@pytest.mark.parametrize("cache_control", ["no-store", "max-age=0"])
def test_what_its_host_wants_nobody_to_keep_is_not_left(fleet: Fleet, cache_control: str) -> None:
    path, _ = fleet.hosts(cache_control=cache_control)
    said = fleet.answer(fleet.one, path)
    assert fleet.answer(fleet.two, path) == said
    assert fleet.asked.count(path) == 2


def test_what_counts_no_more_is_fetched_again_and_replaced(fleet: Fleet) -> None:
    path, _ = fleet.hosts(cache_control="max-age=2")
    before = kept(fleet.one)
    fleet.answer(fleet.one, path)
    wait_until(lambda: kept(fleet.one) >= before + 2)
    new_nbytes = fleet.replace(path, 1000, cache_control="max-age=600")
    time.sleep(2.1)  # the lifetime of the first picture
    fleet.answer(fleet.two, path)
    assert fleet.asked.count(path) == 2
    wait_until(lambda: kept(fleet.two) >= 2)
    come = from_tier(fleet.one)
    fleet.answer(fleet.one, path)
    assert from_tier(fleet.one) == come + new_nbytes
    assert fleet.asked.count(path) == 2


def test_without_a_tier_each_node_fetches(fleet: Fleet) -> None:
    path, _ = fleet.hosts(cache_control="max-age=600")
    fleet.redis.kill()
    try:
        said = fleet.answer(fleet.one, path)
        assert fleet.answer(fleet.two, path) == said
        assert fleet.asked.count(path) == 2
    finally:
        fleet.redis.start()


def test_nothing_is_held_at_the_end(fleet: Fleet) -> None:
    for server in (fleet.one, fleet.two):
        with server.store() as store:
            wait_until(lambda store=store: store.stat().held_nbytes == 0)  # type: ignore[misc]
