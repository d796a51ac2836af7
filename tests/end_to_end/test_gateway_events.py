"""A gateway that follows item events sends an image to the replica that has it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from afferent.engines.http_upstream.placement import rank
from afferent.keys import placement_digest
from afferent.types import Modality
from tests.images import encoded, photo
from tests.ports import free_pair
from tests.server import TINY_ENGINE, Server, ask, data_url, wait_until

HOSTS = ("127.0.0.2", "127.0.0.3")
NUM_IMAGES = 6
KNOWN, FIRST = (
    f'afferent_upstream_placements_total{{choice="{choice}"}}' for choice in ("known", "first")
)
HITS, MADE = (
    f'afferent_items_total{{modality="image",outcome="{outcome}"}}' for outcome in ("hit", "made")
)


@pytest.fixture(scope="module")
def port() -> int:
    return free_pair(*HOSTS)


@pytest.fixture(scope="module")
def replicas(port: int) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Server(*TINY_ENGINE, "--host", host, "--item-events", f"tcp://{host}:{port}")
            )
            for host in HOSTS
        ]


@pytest.fixture(scope="module")
def gateway(replicas: list[Server], port: int) -> Iterator[Server]:
    urls = ",".join(replica.url for replica in replicas)
    arguments = ("--engine", "openai", "--engine-url", urls, "--engine-events-port", str(port))
    with Server(*arguments) as running:
        yield running


def image(number: int) -> bytes:
    return encoded(photo(64, 64, seed=number), "PNG")


def question(number: int) -> dict[str, object]:
    return ask([data_url(image(number))], "What?", max_tokens=2)


def of(replica: Server, replicas: list[Server]) -> Iterator[int]:
    """Yield the images that go to this replica by the order of their digests."""
    urls = [each.url for each in replicas]
    for number in itertools.count():
        digest = placement_digest(Modality.IMAGE, image(number))
        if max(urls, key=lambda url: rank(digest, url)) == replica.url:
            yield number


def count(server: Server, name: str) -> float:
    return server.metrics().get(name, 0.0)


def test_image_goes_to_the_replica_that_has_it(replicas: list[Server], gateway: Server) -> None:
    first, second = replicas
    images = list(itertools.islice(of(first, replicas), NUM_IMAGES))
    for number in images:
        second.post(question(number)).raise_for_status()
    probe = next(of(second, replicas))

    def follows() -> bool:
        """Whether the gateway has got the latest event of the second replica."""
        before = count(gateway, KNOWN)
        gateway.post(question(probe)).raise_for_status()
        return count(gateway, KNOWN) > before

    wait_until(follows)
    hits = count(second, HITS)
    for number in images:
        gateway.post(question(number)).raise_for_status()
    assert count(second, HITS) - hits == NUM_IMAGES
    assert count(first, MADE) == 0


def test_new_images_are_shared_by_all_replicas(replicas: list[Server], gateway: Server) -> None:
    before = [count(each, MADE) for each in replicas]
    known, first = count(gateway, KNOWN), count(gateway, FIRST)
    for number in range(1000, 1024):
        gateway.post(question(number)).raise_for_status()
    made = [
        count(each, MADE) - each_before for each, each_before in zip(replicas, before, strict=True)
    ]
    assert sum(made) == 24
    assert min(made) >= 2, "fewer by chance in one of 300,000 runs"
    assert (count(gateway, KNOWN) - known, count(gateway, FIRST) - first) == (0, 24)
