"""Two servers with an arena each, and one tier: each server finds the other's results there.

No failure of the tier makes a request fail.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from PIL import Image

from afferent.conformance.images import DrawnImage, draw_image
from tests.server import Server, ask, data_url, suspended, wait_until
from tests.tier.servers import BadLink, RedisServer

QUESTION = "What is in the picture?"
SECRET = "a secret that both of them have"
SIDE, LARGE_SIDE = 2400, 4000
"""Large enough that a picture takes longer to decode than its features take to fetch.

For the larger side, it also pays to wait while another node decodes.
"""
TIMEOUT_S, WAIT_S = 1.5, 4.0
LONGEST_S = WAIT_S + 3 * TIMEOUT_S + 2.0
_TIER = "afferent.tier.main"


class Fleet:
    """Two nodes; faults can be injected into the second node's link."""

    def __init__(self, redis: RedisServer, link: BadLink, one: Server, two: Server) -> None:
        self.redis, self.link, self.one, self.two = redis, link, one, two
        self._seeds = itertools.count(1)

    def picture(self, side: int = SIDE) -> str:
        """Return a new picture."""
        drawn = draw_image(np.random.default_rng(next(self._seeds)), max_side=400)
        large = drawn.image.resize((side, side), Image.Resampling.NEAREST)
        one = DrawnImage(colour=drawn.colour, shape=drawn.shape, image=large)
        return data_url(one.encode(quality=60))

    def settle(self) -> None:
        """Wait until both nodes have a working tier."""
        self.link.fault = None
        wait_until(lambda: self.one.metric("afferent_tier_up") == 1)
        wait_until(lambda: self.two.metric("afferent_tier_up") == 1)


@pytest.fixture(scope="module")
def servers() -> Iterator[Fleet]:
    settings = ("--fleet-secret", SECRET.replace(" ", "-"), "--tier-timeout-s", str(TIMEOUT_S))
    settings += ("--tier-wait-s", str(WAIT_S), "--embeddings-share", "0.1")
    with RedisServer() as redis, BadLink(redis.port) as link:
        one = Server("--tier", redis.url, *settings)
        two = Server("--tier", link.url, *settings)
        with one, two:
            yield Fleet(redis, link, one, two)


@pytest.fixture
def fleet(servers: Fleet) -> Iterator[Fleet]:
    servers.settle()
    yield servers
    servers.link.fault = None


def answer(server: Server, url: str) -> str:
    """Return the answer to a request that must not fail."""
    response = server.post(ask([url], QUESTION, temperature=0))
    assert response.status_code == 200, response.text
    said: str = response.json()["choices"][0]["message"]["content"]
    return said


def count(server: Server, name: str, **labels: str) -> float:
    """Return the sum of a metric's series with these labels."""
    wanted = {f'{label}="{word}"' for label, word in labels.items()}
    return sum(
        value
        for key, value in server.metrics().items()
        if key.partition("{")[0] == name and all(pair in key for pair in wanted)
    )


def made(server: Server) -> float:
    return count(server, "afferent_items_total", outcome="made")


def fetched(server: Server) -> float:
    return count(server, "afferent_items_total", outcome="fetched")


def kept(server: Server) -> float:
    return count(server, "afferent_tier_kept_total", outcome="kept")


def make_and_keep(fleet: Fleet) -> tuple[str, str]:
    """Return a picture that the first node has made, and whose features are in the tier."""
    before = kept(fleet.one)
    url = fleet.picture()
    said = answer(fleet.one, url)
    wait_until(lambda: kept(fleet.one) >= before + 2)  # its features and its embeddings
    return url, said


def test_what_one_node_has_made_the_other_does_not_make(fleet: Fleet) -> None:
    url, said = make_and_keep(fleet)
    before = made(fleet.two), fetched(fleet.two)
    assert answer(fleet.two, url) == said
    assert (made(fleet.two), fetched(fleet.two)) == (before[0], before[1] + 1)
    assert answer(fleet.two, url) == said, "and now it is here"
    assert fetched(fleet.two) == before[1] + 1


def test_what_both_are_asked_for_at_once_one_of_them_makes(fleet: Fleet) -> None:
    num_made = 0
    for _ in range(10):  # the nodes estimate how long it takes; a busy machine takes longer
        url = fleet.picture(LARGE_SIDE)
        before = made(fleet.one) + made(fleet.two)
        with ThreadPoolExecutor(2) as threads:
            said = set(threads.map(answer, (fleet.one, fleet.two), (url, url)))
        assert len(said) == 1
        num_made = made(fleet.one) + made(fleet.two) - before
        assert 1 <= num_made <= 2
        if num_made == 1:
            return
    assert num_made == 1


def test_conversations_that_go_from_node_to_node(
    fleet: Fleet, request: pytest.FixtureRequest
) -> None:
    """Each picture is made once, whichever node a request reaches.

    A single one may be made twice, if a busy machine takes longer than the other node waits.
    """
    number = 200 if request.config.getoption("--storm") else 4
    before = made(fleet.one) + made(fleet.two)

    def converse(index: int) -> None:
        url, answers = fleet.picture(LARGE_SIDE), set()
        for turn in range(3):
            answers.add(answer((fleet.one, fleet.two)[(index + turn) % 2], url))
        assert len(answers) == 1

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(converse, range(number)))
    assert number <= made(fleet.one) + made(fleet.two) - before <= number + 1


def test_a_flipped_byte_is_never_believed(fleet: Fleet) -> None:
    url, said = make_and_keep(fleet)
    before, rejected = made(fleet.two), count(fleet.two, "afferent_tier_rejected_total")

    def flip(piece: bytes) -> bytes:
        """Flip a bit in the middle of a long piece, which belongs to a body."""
        if len(piece) < 10_000:
            return piece
        changed = bytearray(piece)
        changed[len(piece) // 2] ^= 1
        return bytes(changed)

    fleet.link.fault = flip
    assert answer(fleet.two, url) == said
    assert made(fleet.two) == before + 1
    wait_until(lambda: count(fleet.two, "afferent_tier_rejected_total") > rejected)


@pytest.mark.parametrize("fault", ["half-open", "slow", "nonsense"])
def test_a_bad_link_costs_its_time_out_and_then_nothing(fleet: Fleet, fault: str) -> None:
    url, said = make_and_keep(fleet)
    outages = count(fleet.two, "afferent_tier_outages_total")

    def slow(piece: bytes) -> bytes:
        time.sleep(3 * TIMEOUT_S)  # longer than the timeout, even for a reader that is late itself
        return piece

    fleet.link.fault = {
        "half-open": lambda _: None,
        "slow": slow,
        "nonsense": lambda piece: b"$-9\r\n" + piece,
    }[fault]
    assert answer(fleet.two, url) == said
    took_s = []
    for _ in range(6):
        url = fleet.picture()
        start_s = time.monotonic()
        answer(fleet.two, url)
        took_s.append(time.monotonic() - start_s)
    print(f"{fault}: {took_s}")
    assert max(took_s) < LONGEST_S + 5.0
    wait_until(lambda: count(fleet.two, "afferent_tier_outages_total") > outages)
    fleet.settle()


def test_a_server_that_dies_fails_no_request_and_is_used_again(fleet: Fleet) -> None:
    fleet.redis.kill()
    try:
        for server in (fleet.one, fleet.two):
            for _ in range(4):
                url = fleet.picture()
                answer(server, url)
        wait_until(lambda: fleet.one.metric("afferent_tier_up") == 0)
    finally:
        fleet.redis.start()
    fleet.settle()
    url, said = make_and_keep(fleet)
    before = fetched(fleet.two)
    assert answer(fleet.two, url) == said
    assert fetched(fleet.two) == before + 1


def test_a_full_server_is_no_failure(fleet: Fleet) -> None:
    with fleet.redis.client() as client:
        client.config_set("maxmemory", 1)
        client.config_set("maxmemory-policy", "noeviction")
        try:
            before = count(fleet.one, "afferent_tier_kept_total", outcome="full")
            url = fleet.picture()
            answer(fleet.one, url)
            wait_until(
                lambda: count(fleet.one, "afferent_tier_kept_total", outcome="full") > before
            )
        finally:
            client.config_set("maxmemory", 0)


def tier_of(server: Server) -> psutil.Process:
    (process,) = server.find(_TIER)
    return process


def test_the_tiers_process_dies_and_comes_again(fleet: Fleet) -> None:
    url, said = make_and_keep(fleet)
    old = tier_of(fleet.two)
    seen: list[float | None] = []

    def is_up_again() -> bool:
        seen.append(fleet.two.metrics().get("afferent_tier_up"))
        return seen[-1] == 1 and seen.count(0) > 0

    with ThreadPoolExecutor(1) as threads:
        watching = threads.submit(wait_until, is_up_again)
        wait_until(lambda: len(seen) > 0)
        old.kill()
        assert answer(fleet.two, url) == said
        watching.result()
    assert set(seen) <= {0, 1}, "it is there while the process is not, so that an alert fires"
    wait_until(lambda: [p.pid for p in fleet.two.find(_TIER)] not in ([], [old.pid]))
    fleet.settle()
    url, said = make_and_keep(fleet)
    before = fetched(fleet.two)
    assert answer(fleet.two, url) == said
    assert fetched(fleet.two) == before + 1


def test_the_tiers_process_hangs_and_is_replaced(fleet: Fleet) -> None:
    """Requests are answered in the meantime, and the server stays ready."""
    url, said = make_and_keep(fleet)
    old = tier_of(fleet.two)
    with suspended([old]):
        start_s = time.monotonic()
        assert answer(fleet.two, url) == said
        took_s = time.monotonic() - start_s
        print(f"answered in {took_s:.2f} s")
        assert took_s < TIMEOUT_S + 3.0, "one time-out, and what it takes to make it"
        assert fleet.two.get("/ready").json()["preprocess"] is True
        wait_until(lambda: not psutil.pid_exists(old.pid))
    fleet.settle()


def test_who_asks_meanwhile_holds_nothing_at_the_end(fleet: Fleet) -> None:
    """A link that is cut at random moments leaks no pin and no reservation."""
    stop_s = time.monotonic() + 4.0
    numbers = itertools.count()
    with ThreadPoolExecutor(2) as threads:

        def work(server: Server) -> None:
            while time.monotonic() < stop_s:
                url = fleet.picture()
                answer(server, url)
                next(numbers)

        futures = [threads.submit(work, server) for server in (fleet.one, fleet.two)]
        while time.monotonic() < stop_s:
            fleet.link.cut()
            time.sleep(0.05)
        for future in futures:
            future.result()
    assert next(numbers) > 0
    for server in (fleet.one, fleet.two):
        with server.store() as store:
            wait_until(lambda: store.stat().held_nbytes == store.stat().reserved_nbytes == 0)


def test_ctrl_c_ends_a_server_whose_tier_hangs(fleet: Fleet) -> None:
    """This test comes last, because it ends the second node."""
    fleet.link.fault = lambda _: None
    url = fleet.picture()
    answer(fleet.two, url)
    os.kill(fleet.two.popen.pid, signal.SIGTERM)
    assert fleet.two.popen.wait(30.0) == 0
