"""Every process but the supervisor is killed under load: no request hangs or gets a wrong answer.

Nothing stays pinned. The tests run with ``--storm`` only: a new engine has to import torch.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import numpy as np
import psutil
import pytest

from afferent.conformance.images import draw_image
from tests import plain_http
from tests.server import Server, ask, data_url, wait_until

NUM_CLIENTS = 4
NUM_BODIES = 120
STORM_S = 300.0
KILL_EVERY_S = 15.0
AFTER_A_503_S = 0.1
FAILURES = {
    "worker_died",
    "quarantined",
    "engine_unavailable",
    "store_unavailable",
    "store_restarted",
    "connection_closed",
    "client_gone",
}


@pytest.fixture
def own_server() -> Iterator[Server]:
    with Server("--tensor-parallel-size", "2", "--arena-nbytes", "96MiB",
                "--embeddings-share", "0.1",
                "--preprocess-memory-nbytes", "256MiB") as server:  # fmt: skip
        yield server


def make_bodies(rng: np.random.Generator) -> list[bytes]:
    """Return the bodies of requests with one to four pictures."""
    bodies = []
    for number in range(NUM_BODIES):
        urls = [data_url(draw_image(rng)) for _ in range(1 + number % 4)]
        question = "Name all pictures." if len(urls) > 1 else "What is in the picture?"
        bodies.append(json.dumps(ask(urls, question)).encode())
    return bodies


class Load:
    """Clients that each send one request after the other until they are stopped."""

    def __init__(self, server: Server, bodies: list[bytes]) -> None:
        self._server, self._bodies = server, bodies
        self._next = itertools.count()
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.answers: dict[int, Counter[str]] = {}
        self.outcomes: Counter[str] = Counter()
        self.longest_s = 0.0

    def run(self) -> None:
        client = plain_http.Client(timeout=90)
        try:
            while not self.stop.is_set():
                number = next(self._next) % len(self._bodies)
                start_s = time.monotonic()
                try:
                    response = self._post(client, number)
                    outcome = self._judge(number, response)
                except httpx.TimeoutException:
                    outcome = "no answer in time"
                except httpx.TransportError:  # the frontend was killed
                    outcome = "connection"
                    client.close()
                    client = plain_http.Client(timeout=90)
                with self._lock:
                    self.outcomes[outcome] += 1
                    self.longest_s = max(self.longest_s, time.monotonic() - start_s)
                if outcome != "ok":
                    self.stop.wait(AFTER_A_503_S)
        finally:
            client.close()

    def _post(self, client: httpx.Client, number: int) -> httpx.Response:
        return client.post(f"{self._server.url}/v1/chat/completions", content=self._bodies[number])

    def _judge(self, number: int, response: httpx.Response) -> str:
        if response.status_code != 200:
            retryable = response.status_code == 503 and "retry-after" in response.headers
            code = str(response.json()["error"]["code"])
            return code if retryable else f"{response.status_code} {code}"
        said = response.json()["choices"][0]["message"]["content"]
        with self._lock:
            self.answers.setdefault(number, Counter())[said] += 1
        return "ok"

    def count_lies(self) -> tuple[int, int]:
        """Return the number of answers, and of those that an undisturbed server does not give."""
        num_answers = num_wrong = 0
        with plain_http.Client(timeout=90) as client:
            for number, said in self.answers.items():
                response = self._post(client, number)
                truth = response.json()["choices"][0]["message"]["content"]
                num_answers += said.total()
                num_wrong += said.total() - said[truth]
        return num_answers, num_wrong


def find_victims(server: Server) -> dict[str, Callable[[], list[psutil.Process]]]:
    """Return functions that find the processes of each kind, the engine workers separately."""

    def worker(rank: int) -> list[psutil.Process]:
        return sorted(server.engine_workers(), key=lambda p: p.pid)[rank : rank + 1]

    def zygote() -> list[psutil.Process]:
        pool = server.find("afferent.media.workers.pool")
        return [process for process in pool if process.parent() not in pool]

    return {
        "core": lambda: server.find("afferent.builtin.engine.core.main"),
        "frontend": lambda: server.find("afferent.builtin.frontend"),
        "preprocess worker": server.preprocess_workers,
        "engine worker": lambda: worker(0),
        "zygote": zygote,
        "store": lambda: server.find("afferent.store.daemon.main"),
        "other engine worker": lambda: worker(1),
        "forms": lambda: server.find("afferent.builtin.engine.form.main"),
    }


def assert_nothing_is_held(server: Server) -> None:
    wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)
    for name in ("arena_reserved_bytes", "store_jobs_running", "store_jobs_queued"):
        assert server.metric(f"afferent_{name}") == 0, name
    with server.store() as store:
        assert not [each for each in store.list_objects(limit=4096) if each.pins or each.writer]
        assert not [each for each in store.list_clients() if each.num_held or each.reserved_nbytes]
    assert server.metrics()["afferent_engine_requests_running"] == 0
    assert server.metrics()["afferent_engine_requests_waiting"] == 0


@pytest.mark.storm
@pytest.mark.timeout(900)
def test_every_process_is_killed_under_load(own_server: Server, rng: np.random.Generator) -> None:
    num_processes = len(own_server.processes())
    load = Load(own_server, make_bodies(rng))
    kills: Counter[str] = Counter()
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        running = [threads.submit(load.run) for _ in range(NUM_CLIENTS)]
        try:
            end_s = time.monotonic() + STORM_S
            for kind, find in itertools.cycle(find_victims(own_server).items()):
                if load.stop.wait(KILL_EVERY_S) or time.monotonic() > end_s:
                    break
                for victim in find()[:1]:  # none, if it has not restarted yet
                    victim.kill()
                    kills[kind] += 1
        finally:
            load.stop.set()
        for client in running:
            client.result()
    print(own_server.log())
    print(
        f"\nkilled: {dict(kills)}\n{dict(load.outcomes)}, the longest took {load.longest_s:.1f} s"
    )
    wait_until(lambda: own_server.get("/ready").status_code == 200, timeout_s=120)
    wait_until(lambda: len(own_server.processes()) == num_processes, timeout_s=60)
    num_answers, num_wrong = load.count_lies()
    print(f"{num_answers} answers to {len(load.answers)} requests, {num_wrong} unlike undisturbed")
    assert_nothing_is_held(own_server)
    assert len(kills) == len(find_victims(own_server))
    assert load.outcomes["ok"] > kills.total()
    assert load.outcomes.keys() <= {"ok", "connection"} | FAILURES
    assert num_wrong <= num_answers * 0.01  # close decisions may differ
