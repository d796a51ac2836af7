"""Preprocess workers are killed under load: only their own items may fail, with retryable errors.

The short form is a part of the tests; ``--storm`` (`make storm`) chooses two minutes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import numpy as np
import pytest

from afferent.conformance.images import draw_image
from tests import plain_http
from tests.server import TINY_ENGINE, Server, ask, data_url, wait_until

QUESTION = "What is in the picture?"
NUM_CLIENTS = 4


@pytest.fixture
def own_server() -> Iterator[Server]:
    with Server(*TINY_ENGINE, "--preprocess-memory-nbytes", "256MiB") as server:
        yield server


class Load:
    """Clients that ask about new pictures until they are stopped."""

    def __init__(self, server: Server, rng: np.random.Generator) -> None:
        self._server, self._rng, self._lock = server, rng, threading.Lock()
        self.stop = threading.Event()
        self.statuses: Counter[int] = Counter()
        self.codes: Counter[str] = Counter()
        self.num_without_retry = 0
        self.answers: list[tuple[bytes, str]] = []

    def run(self) -> None:
        with plain_http.Client(timeout=60) as client:
            while not self.stop.is_set():
                with self._lock:
                    picture = draw_image(self._rng)
                file = picture.encode()
                response = self._post(client, file)
                with self._lock:
                    self._judge(response, file)

    def count_wrong(self) -> int:
        """Return the number of answers that the server, now undisturbed, does not give.

        It makes each picture again: to a decoder, bytes after the end of a JPEG do not count.
        """
        with plain_http.Client(timeout=60) as client:
            truths = [said_in(self._post(client, file + b"again")) for file, _ in self.answers]
        return sum(said != truth for (_, said), truth in zip(self.answers, truths, strict=True))

    def _post(self, client: httpx.Client, file: bytes) -> httpx.Response:
        body = ask([data_url(file)], QUESTION)
        return client.post(f"{self._server.url}/v1/chat/completions", json=body)

    def _judge(self, response: httpx.Response, file: bytes) -> None:
        self.statuses[response.status_code] += 1
        if response.status_code == 200:
            self.answers.append((file, said_in(response)))
        else:
            self.codes[response.json()["error"]["code"]] += 1
            self.num_without_retry += "retry-after" not in response.headers


def said_in(response: httpx.Response) -> str:
    said: str = response.json()["choices"][0]["message"]["content"]
    return said


@pytest.mark.timeout(400)
def test_workers_are_killed_under_load(
    own_server: Server, rng: np.random.Generator, request: pytest.FixtureRequest
) -> None:
    num_kills, kill_every_s = (24, 5.0) if request.config.getoption("--storm") else (2, 1.0)
    load = Load(own_server, rng)
    seen: set[int] = set()
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        running = [threads.submit(load.run) for _ in range(NUM_CLIENTS)]
        try:
            for number in range(num_kills):
                wait_until(lambda: len(own_server.preprocess_workers()) == 2)
                workers = own_server.preprocess_workers()
                seen |= {worker.pid for worker in workers}
                victim = workers[number % 2]
                victim.kill()
                died_s = time.monotonic()
                victim.wait(60)
                load.stop.wait(kill_every_s - (time.monotonic() - died_s))
                wait_until(lambda: load.statuses[200] > 5 * (number + 1))  # noqa: B023
        finally:
            load.stop.set()
        for client in running:
            client.result()
    total = load.statuses.total()
    print(f"{num_kills} workers killed, {total} requests: {dict(load.statuses)} {dict(load.codes)}")
    assert len(seen) == num_kills + 1
    # An item moves to another worker; it is rare that an item loses two workers in a row.
    assert load.statuses.keys() <= {200, 503}
    assert load.codes.keys() <= {"worker_died", "quarantined"}
    assert load.num_without_retry == 0
    assert load.count_wrong() == 0
    wait_until(lambda: len(own_server.preprocess_workers()) == 2)
    wait_until(lambda: own_server.metric("afferent_arena_pinned_bytes") == 0)
    assert own_server.metric("afferent_store_jobs_running") == 0
    assert own_server.metric("afferent_arena_reserved_bytes") == 0
