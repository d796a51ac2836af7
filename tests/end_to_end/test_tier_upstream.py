"""Two nodes with an upstream each, and one tier: embeddings of one encoder are found by the other.

Each upstream is a stand-in that looks for embeddings in the arena only, as the plugin of vLLM does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from afferent.conformance.images import DrawnImage, draw_image
from afferent.errors import AfferentError
from tests import plain_http
from tests.end_to_end.standing_in import StandIn
from tests.larger import larger_model
from tests.server import Server, data_url, wait_until
from tests.tier.servers import BadLink, RedisServer

ENCODES_S = 0.2
NUM_TRIES, NUM_EXPLORED = 20, 20
"""After a fault the tier seems slow; a node then tries it for every eighth object only."""
TIMEOUT_S, WAIT_S = 0.4, 2.0
LONGEST_S = WAIT_S + 3 * TIMEOUT_S + 2.0
"""Limit of one fetch from a tier in any state; a request waits for at most two."""
_TIER = "afferent.tier.main"


@dataclass(slots=True)
class Node:
    server: Server
    engine: StandIn

    def ask(self, url: str) -> tuple[int, float]:
        """Return the sum of the item's embeddings, and the time; the request must not fail."""
        start_s = time.monotonic()
        content = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"model": "any", "messages": [{"role": "user", "content": content}]}
        answer = plain_http.post(f"{self.server.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        (said,) = answer.json()["said"]
        assert said["embeddings"] == said["sum"], "embeddings of something else"
        return said["embeddings"], time.monotonic() - start_s

    def kept(self) -> float:
        return self.server.metrics().get('afferent_tier_kept_total{outcome="kept"}', 0.0)


@dataclass(slots=True)
class Fleet:
    one: Node
    two: Node
    redis: RedisServer
    link: BadLink
    _seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def picture(self) -> str:
        """Return a new picture that takes longer to decode than to fetch."""
        drawn = draw_image(np.random.default_rng(next(self._seeds)), max_side=400)
        large = drawn.image.resize((2400, 2400), Image.Resampling.NEAREST)
        one = DrawnImage(colour=drawn.colour, shape=drawn.shape, image=large)
        return data_url(one, "png")

    def encoded_and_kept(self) -> tuple[str, int]:
        """Return a picture whose features and embeddings the first node has left in the tier."""
        for _ in range(NUM_TRIES):
            before, url = self.one.kept(), self.picture()
            said, _ = self.one.ask(url)
            until_s = time.monotonic() + 3.0  # kept within a second, or not at all
            while time.monotonic() < until_s:
                if self.one.kept() >= before + 2:
                    return url, said
                time.sleep(0.02)
        figures = self.one.server.metrics()
        tier = {name: value for name, value in figures.items() if name.startswith("afferent_tier")}
        raise AssertionError(f"the first node leaves nothing in the tier: {tier}")

    def is_found_by_the_other(self) -> bool:
        """Return whether the second node finds the first one's embeddings of one of a few pictures.

        On a busy machine, the node may expect encoding to be faster than the tier.
        """
        for _ in range(NUM_EXPLORED):
            url, said = self.encoded_and_kept()
            before = self.two.engine.num_found, self.two.engine.num_encoded
            assert self.two.ask(url)[0] == said
            after = self.two.engine.num_found, self.two.engine.num_encoded
            if after == (before[0] + 1, before[1]):
                return True
        return False

    def settle(self) -> None:
        self.link.fault = None
        for node in (self.one, self.two):
            wait_until(lambda node=node: node.server.metric("afferent_tier_up") == 1)  # type: ignore[misc]


@contextlib.contextmanager
def _node(folder: Path, url: str) -> Iterator[Node]:
    store_path = folder / "store.sock"
    engine = StandIn(folder, store_path, encodes_s=ENCODES_S)
    where = ["--engine", "vllm", "--engine-url", engine.url, "--store-path", str(store_path)]
    tier = ["--tier", url, "--fleet-secret", "a-secret-of-both", "--embeddings-share", "0.1"]
    limits = ["--tier-timeout-s", str(TIMEOUT_S), "--tier-wait-s", str(WAIT_S)]
    with engine, Server(str(larger_model(folder, 64)), *where, *tier, *limits) as server:
        engine.announce()
        yield Node(server, engine)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        link = stack.enter_context(BadLink(redis.port))
        one = stack.enter_context(_node(tmp_path_factory.mktemp("one"), redis.url))
        two = stack.enter_context(_node(tmp_path_factory.mktemp("two"), link.url))
        yield Fleet(one, two, redis, link)


@pytest.fixture
def fleet(servers: Fleet) -> Iterator[Fleet]:
    servers.settle()
    yield servers
    servers.link.fault = None


def test_what_one_encoder_has_made_the_others_finds(fleet: Fleet) -> None:
    assert fleet.is_found_by_the_other()


def test_what_nobody_has_made_is_encoded(fleet: Fleet) -> None:
    before = fleet.two.engine.num_encoded
    url = fleet.picture()
    fleet.two.ask(url)
    assert fleet.two.engine.num_encoded == before + 1
    fleet.two.ask(url)
    assert fleet.two.engine.num_encoded == before + 1, "now it is here"


@pytest.mark.parametrize("fault", ["half-open", "slow", "nonsense", "flipped"])
def test_no_request_fails_whatever_the_link_does(fleet: Fleet, fault: str) -> None:
    url, said = fleet.encoded_and_kept()

    def slow(piece: bytes) -> bytes:
        time.sleep(3 * TIMEOUT_S)  # longer than the timeout, even for a reader that is late itself
        return piece

    def flip(piece: bytes) -> bytes:
        if len(piece) < 10_000:
            return piece
        return piece[:5000] + bytes([piece[5000] ^ 1]) + piece[5001:]

    fleet.link.fault = {
        "half-open": lambda _: None,
        "slow": slow,
        "nonsense": lambda piece: b"$-9\r\n" + piece,
        "flipped": flip,
    }[fault]
    again, took_s = fleet.two.ask(url)
    assert again == said
    assert took_s < 2 * LONGEST_S + 5.0
    for _ in range(3):
        assert fleet.two.ask(fleet.picture())[1] < 2 * LONGEST_S + 5.0


def test_no_request_fails_without_a_server(fleet: Fleet) -> None:
    fleet.redis.kill()
    try:
        for node in (fleet.one, fleet.two, fleet.two):
            assert node.ask(fleet.picture())[1] < 2 * LONGEST_S + 5.0
    finally:
        fleet.redis.start()
    fleet.settle()
    assert fleet.is_found_by_the_other()


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_no_request_fails_without_the_tiers_process(fleet: Fleet, stop: signal.Signals) -> None:
    url, said = fleet.encoded_and_kept()
    (process,) = fleet.two.server.find(_TIER)
    os.kill(process.pid, stop)
    again, took_s = fleet.two.ask(url)
    assert again == said
    assert took_s < 2 * LONGEST_S + 10.0
    wait_until(lambda: [p.pid for p in fleet.two.server.find(_TIER)] not in ([], [process.pid]))
    fleet.settle()


def test_a_store_that_was_started_again_hears_of_the_encoder_again(fleet: Fleet) -> None:
    """The worker announces its encoder each second; no request fails until then."""
    (daemon,) = fleet.two.server.find("afferent.store.daemon.main")
    daemon.kill()

    def is_said() -> bool:
        with contextlib.suppress(AfferentError, OSError):
            fleet.two.engine.announce()
            return True
        return False

    wait_until(is_said)
    wait_until(lambda: fleet.two.server.get("/ready").status_code == 200)
    fleet.settle()
    assert fleet.is_found_by_the_other()


def test_nothing_is_held_at_the_end(fleet: Fleet) -> None:
    for node in (fleet.one, fleet.two):
        with node.server.store() as store:
            wait_until(lambda store=store: store.stat().held_nbytes == 0)  # type: ignore[misc]
