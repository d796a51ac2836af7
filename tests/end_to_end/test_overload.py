"""A burst of many times the capacity of the arena: each request is served or gets a 503.

The short form is a part of the tests; ``--storm`` (`make storm`) chooses a long one.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx
import pytest

from afferent.types import GiB, MiB, ObjectKind, ReserveItem
from benchmarks.gate_memory import private_nbytes
from tests import plain_http
from tests.callbacks import SLACK, MeterOfServer
from tests.end_to_end.burst import Outcome, send
from tests.end_to_end.standing_in import StandIn
from tests.end_to_end.steady import load
from tests.images import encoded, photo
from tests.server import TINY_ENGINE, Server, ask, data_url, wait_until

pytestmark = pytest.mark.alone


@dataclass(frozen=True)
class Burst:
    num_requests: int
    num_pictures: int
    arena_mib: int
    min_served: int
    most_ms: float
    """For ``/health`` and for refusals; the short form is generous, for busy machines."""
    slack: float
    """The factor by which callbacks may exceed their goal."""


SHORT = Burst(24, num_pictures=8, arena_mib=8, min_served=6, most_ms=5000.0, slack=SLACK)
LONG = Burst(200, num_pictures=28, arena_mib=256, min_served=30, most_ms=250.0, slack=1.0)
LOAD_S, NUM_CLIENTS = 60.0, 256
NUM_REFUSED = 8
DECODE_NBYTES = 64 * MiB  # an upper bound for one picture
ENCODER_CACHE_NBYTES = 16 * MiB  # the engine fills it


@pytest.fixture
def burst(request: pytest.FixtureRequest) -> Burst:
    return LONG if request.config.getoption("--storm") else SHORT


@pytest.fixture
def own_server(burst: Burst) -> Iterator[Server]:
    with Server(*arguments(burst)) as server:
        yield server


def arguments(burst: Burst) -> list[str]:
    found = ["--arena-nbytes", f"{burst.arena_mib}MiB", "--admission-timeout-s", "60"]
    found += ["--prefix-cache-tokens", "0"]
    return [*found, "--encoder-cache-nbytes", str(ENCODER_CACHE_NBYTES)]


def send_burst(server: Server, burst: Burst) -> list[Outcome]:
    sizes = {"num_requests": burst.num_requests, "num_pictures": burst.num_pictures}
    return send(f"{server.url}/v1/chat/completions", **sizes)


@pytest.mark.storm
@pytest.mark.timeout(500)
def test_callbacks_of_a_burst(burst: Burst, tmp_path: Path) -> None:
    """No callback of a frontend's event loop takes long, so no request waits behind another."""
    meter = MeterOfServer(tmp_path / "callbacks")
    with Server(*arguments(burst), env=meter.env) as server:
        server.post(ask([data_url(encoded(photo(64, 64), "JPEG"))], "What?"))
        with meter.watching() as found:
            outcomes = send_burst(server, burst)
        assert {status for status, _, _ in outcomes} <= {200, 503}
    found.check(f"{burst.num_requests} requests", slack=burst.slack)


@pytest.mark.storm
@pytest.mark.timeout(500)
def test_callbacks_of_a_steady_load(tmp_path: Path) -> None:
    """A minute of new and known pictures, metrics and health, from many clients."""
    meter = MeterOfServer(tmp_path / "callbacks")
    with Server(*TINY_ENGINE, "--arena-nbytes", "256MiB", env=meter.env) as server:
        _check_callbacks(server, meter)


@pytest.mark.storm
@pytest.mark.timeout(500)
def test_callbacks_of_a_steady_load_in_front_of_an_engine(tmp_path: Path) -> None:
    meter, store_path = MeterOfServer(tmp_path / "callbacks"), tmp_path / "store.sock"
    with StandIn(tmp_path, store_path) as engine:
        front = ["--engine", "vllm", "--engine-url", engine.url, "--store-path", str(store_path)]
        with Server(*front, "--arena-nbytes", "256MiB", env=meter.env) as server:
            _check_callbacks(server, meter)


def _check_callbacks(server: Server, meter: MeterOfServer) -> None:
    server.post(ask([data_url(encoded(photo(64, 64), "JPEG"))], "What?"))
    with meter.watching() as found:
        counts = load(server.url, seconds=LOAD_S, num_clients=NUM_CLIENTS)
    print(counts)
    assert {name.split()[0] for name in counts} == {"new", "known", "metrics", "health"}
    assert {name.split()[1] for name in counts} <= {"200", "503"}
    assert counts["known 200"] > NUM_CLIENTS
    found.check(f"{LOAD_S:g} s, {NUM_CLIENTS} clients", slack=1.0)


@dataclass
class Watch:
    """Measures latency and memory of the server in the meantime."""

    server: Server
    stop: threading.Event = field(default_factory=threading.Event)
    health_ms: list[float] = field(default_factory=list)
    refusal_ms: list[float] = field(default_factory=list)
    most_private_nbytes: int = 0

    def run(self) -> None:
        with plain_http.Client(timeout=30) as client:
            while not self.stop.wait(0.05):
                start = time.perf_counter()
                assert client.get(f"{self.server.url}/health").status_code == 200
                self.health_ms.append((time.perf_counter() - start) * 1e3)
                self.refusal_ms.append(self._refusal_ms())
                if len(self.health_ms) % 4 == 0:
                    private = private_nbytes([self.server.popen.pid])
                    self.most_private_nbytes = max(self.most_private_nbytes, private)

    def _refusal_ms(self) -> float:
        """Return the time until a body is refused by its announced length; it is never sent."""
        host, port = self.server.url.removeprefix("http://").split(":")
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Length: {GiB}\r\n\r\n"
        )
        with socket.create_connection((host, int(port)), timeout=30) as sock:
            start = time.perf_counter()
            sock.sendall(head.encode())
            assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")
            return (time.perf_counter() - start) * 1e3


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


@pytest.mark.timeout(500)
def test_a_burst(own_server: Server, burst: Burst) -> None:
    own_server.post(ask([data_url(encoded(photo(64, 64), "JPEG"))], "What?"))
    base_nbytes = private_nbytes([own_server.popen.pid])
    watch = Watch(own_server)
    watcher = threading.Thread(target=watch.run)
    watcher.start()
    start = time.perf_counter()
    try:
        outcomes = send_burst(own_server, burst)
    finally:
        watch.stop.set()
        watcher.join()
    took_s = time.perf_counter() - start
    statuses = Counter(status for status, _, _ in outcomes)
    codes = Counter(code for _, code, _ in outcomes if code)
    growth_nbytes = watch.most_private_nbytes - base_nbytes
    print(f"{took_s:.1f} s: {dict(statuses)} {dict(codes)}; memory {growth_nbytes / MiB:+.0f} MiB")
    for what, took_ms in (("/health", watch.health_ms), ("refusals", watch.refusal_ms)):
        print(f"{what}: p50 {statistics.median(took_ms):.0f} ms, p99 {p99(took_ms):.0f} ms", end="")
        print(f", most {max(took_ms):.0f} ms")
    assert statuses.keys() <= {200, 503}
    assert statuses[200] >= burst.min_served
    assert codes.keys() <= {"deadline_exceeded", "store_full"}
    assert all(after for status, _, after in outcomes if status == 503)
    assert growth_nbytes < 2 * DECODE_NBYTES + ENCODER_CACHE_NBYTES + 64 * MiB
    assert p99(watch.health_ms) <= burst.most_ms
    assert p99(watch.refusal_ms) <= burst.most_ms
    wait_until(lambda: own_server.metric("afferent_arena_pinned_bytes") == 0)
    for name in ("arena_reserved_bytes", "store_reservations_queued", "store_jobs_queued"):
        assert own_server.metric(f"afferent_{name}") == 0


def test_refusals_come_when_they_are_decided(burst: Burst) -> None:
    """No byte of the arena is free: each request is refused as soon as its timeout is over."""
    timeout_s = 1.0
    body = ask([data_url(encoded(photo(500, 400), "PNG"))], "What?")
    limits = ("--arena-nbytes", "32MiB", "--admission-timeout-s", str(timeout_s))
    with Server(*TINY_ENGINE, *limits) as server:
        url = f"{server.url}/v1/chat/completions"

        def refused_s(_: int) -> float:
            with plain_http.Client(timeout=60) as client:
                start = time.perf_counter()
                response = client.post(url, json=body)
                took_s = time.perf_counter() - start
            assert (response.status_code, code_of(response)) == (503, "deadline_exceeded")
            assert 1 <= int(response.headers["retry-after"]) <= 60
            return took_s

        with server.store() as store, ThreadPoolExecutor(NUM_REFUSED) as threads:
            room = store.stat().kinds[ObjectKind.RAW].capacity_nbytes
            store.reserve("all", [ReserveItem(ObjectKind.RAW, room)])
            took_s = list(threads.map(refused_s, range(NUM_REFUSED)))
        late_ms = [(took - timeout_s) * 1e3 for took in took_s]
        print(f"late by {statistics.median(late_ms):.0f} ms, at most {max(late_ms):.0f} ms")
        assert max(late_ms) <= burst.most_ms
        assert server.metric("afferent_store_reservations_queued") == 0


def code_of(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])
