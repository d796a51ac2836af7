"""A burst of many times what the arena holds: everybody is served or told to come back.

The short form is a part of the tests; ``--storm`` (`make storm`) chooses a long one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx2 as httpx
import numpy as np
import psutil
import pytest

from afferent.types import MiB
from tests.pictures import encoded, photo
from tests.server import Server, ask, data_url, wait_until


@dataclass(frozen=True)
class Burst:
    num_requests: int
    num_pictures: int
    arena_mib: int
    min_served: int


SHORT = Burst(num_requests=24, num_pictures=8, arena_mib=8, min_served=6)
LONG = Burst(num_requests=200, num_pictures=28, arena_mib=256, min_served=30)
DECODE_NBYTES = 64 * MiB  # of one picture, generously
DEADLINE_S = 300.0


@pytest.fixture
def burst(request: pytest.FixtureRequest) -> Burst:
    return LONG if request.config.getoption("--storm") else SHORT


@pytest.fixture
def own_server(burst: Burst) -> Iterator[Server]:
    arguments = ["--arena-nbytes", f"{burst.arena_mib}MiB", "--admission-timeout-s", "60"]
    with Server(*arguments) as server:
        yield server


@dataclass
class Watch:
    """What the server looks like from outside, in the meantime."""

    server: Server
    stop: threading.Event = field(default_factory=threading.Event)
    health_ms: list[float] = field(default_factory=list)
    most_private_nbytes: int = 0

    def run(self) -> None:
        with httpx.Client(timeout=30) as client:
            while not self.stop.wait(0.05):
                start = time.perf_counter()
                assert client.get(f"{self.server.url}/health").status_code == 200
                self.health_ms.append((time.perf_counter() - start) * 1e3)
                if len(self.health_ms) % 4 == 0:
                    private = private_nbytes(self.server)
                    self.most_private_nbytes = max(self.most_private_nbytes, private)


def private_nbytes(server: Server) -> int:
    total = 0
    for process in server.processes():
        try:
            total += process.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue
    return total


async def send_all(server: Server, burst: Burst, seed: int) -> list[httpx.Response]:
    rng = np.random.default_rng(seed)
    pictures = [encoded(photo(644, 364, seed=n), "JPEG", quality=82) for n in range(8)]

    def body(number: int) -> dict:
        """All pictures differ: a few bytes behind the end of a JPEG are no part of it."""
        urls = []
        for index in range(burst.num_pictures):
            data = pictures[int(rng.integers(len(pictures)))] + f"{number} {index}".encode()
            urls.append(data_url(data))
        return ask(urls, "Name all pictures.", max_tokens=2)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=DEADLINE_S, limits=limits) as client:
        url = f"{server.url}/v1/chat/completions"
        sends = [client.post(url, json=body(number)) for number in range(burst.num_requests)]
        return await asyncio.gather(*sends)


@pytest.mark.timeout(500)
def test_a_burst(own_server: Server, burst: Burst) -> None:
    own_server.post(ask([data_url(encoded(photo(64, 64), "JPEG"))], "What?"))
    base_nbytes = private_nbytes(own_server)
    watch = Watch(own_server)
    watcher = threading.Thread(target=watch.run)
    watcher.start()
    start = time.perf_counter()
    try:
        responses = asyncio.run(send_all(own_server, burst, seed=1))
    finally:
        watch.stop.set()
        watcher.join()
    took_s = time.perf_counter() - start
    statuses = Counter(response.status_code for response in responses)
    codes = Counter(
        response.json()["error"]["code"] for response in responses if response.status_code != 200
    )
    growth_nbytes = watch.most_private_nbytes - base_nbytes
    health_ms = sorted(watch.health_ms)
    print(f"{took_s:.1f} s: {dict(statuses)} {dict(codes)}; memory {growth_nbytes / MiB:+.0f} MiB")
    print(f"/health p50 {health_ms[len(health_ms) // 2]:.0f} ms, ", end="")
    print(f"p99 {health_ms[int(len(health_ms) * 0.99)]:.0f} ms, most {health_ms[-1]:.0f} ms")
    assert statuses.keys() <= {200, 503}
    assert statuses[200] >= burst.min_served
    assert codes.keys() <= {"deadline_exceeded", "store_full"}
    assert all("retry-after" in r.headers for r in responses if r.status_code == 503)
    assert growth_nbytes < 2 * DECODE_NBYTES + 64 * MiB
    wait_until(lambda: own_server.store_figure("held_nbytes") == 0)
    for figure in ("granted_nbytes", "num_reservations_queued", "num_jobs_queued"):
        assert own_server.store_figure(figure) == 0
