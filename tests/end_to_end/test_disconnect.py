"""Clients that disconnect at each stage of a request: the server releases everything at once."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler

import httpx2 as httpx
import numpy as np
import pytest

from afferent.conformance.images import draw_image
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol.results import ClientInfo
from afferent.types import KiB, MiB, ObjectKind, ReserveItem
from tests import plain_http
from tests.images import encoded, photo
from tests.media.media_host import media_host
from tests.server import TINY_ENGINE, Server, ask, data_url, suspended, wait_until

BOUND_S = 10.0
"""A limit for busy machines; the goal is 0.2 s, and the measured time is printed."""
PATIENCE_S = "60"
"""A timeout too long to release anything before the disconnect does."""


@pytest.fixture(scope="module")
def stalling_host() -> Iterator[str]:
    """A media host that sends 400 KiB of a picture, and then nothing."""
    over = threading.Event()

    def stall(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(MiB))
        request.end_headers()
        request.wfile.write(b"\xff\xd8\xff" + bytes(400 * KiB))
        over.wait(60)

    with media_host({"/": stall}) as where:
        yield where
        over.set()


@pytest.fixture(scope="module")
def own_server(stalling_host: str) -> Iterator[Server]:
    arguments = ["--arena-nbytes", "64MiB", "--fetch-allow", stalling_host]
    for what in ("fetch-idle", "fetch-total", "body-idle", "admission"):
        arguments += [f"--{what}-timeout-s", PATIENCE_S]
    with Server(*TINY_ENGINE, *arguments) as own:
        yield own


@dataclass(frozen=True)
class Place:
    """The server and tools with which a stage brings a request to a certain point."""

    server: Server
    store: DaemonStore
    http: httpx.Client
    host: str
    rng: np.random.Generator

    def large(self) -> str:
        """Return a picture that is too large for the heap."""
        return data_url(encoded(photo(500, 400, seed=int(self.rng.integers(1 << 30))), "PNG"))

    def drawn(self, number: int) -> list[str]:
        return [data_url(draw_image(self.rng)) for _ in range(number)]

    @property
    def frontend(self) -> ClientInfo:
        (found,) = [c for c in self.store.list_clients() if c.name.startswith("frontend")]
        return found

    def is_back(self, *, still_held: int = 0) -> bool:
        """Return whether the frontend holds and awaits nothing, and others pin so many objects."""
        stat = self.store.stat()
        return (
            self.frontend.num_held == self.frontend.reserved_nbytes == 0
            and stat.num_reservations_queued == stat.num_jobs_queued == 0
            and sum(client.num_held for client in self.store.list_clients()) == still_held
        )

    def num_gone(self) -> float:
        """Return the number of requests whose client has disconnected."""
        name = 'afferent_requests_total{api="openai_chat",outcome="client_gone"} '
        lines = self.http.get(f"{self.server.url}/metrics").text.splitlines()
        return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0)

    def connect(self) -> socket.socket:
        host, port = self.server.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)))

    def send(self, urls: list[str], *, most: int | None = None, **more: object) -> socket.socket:
        """Send a request, or its first ``most`` bytes."""
        body = json.dumps(ask(urls, "Name all pictures.", **more)).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Length: {len(body)}\r\n"
        )
        sock = self.connect()
        sock.sendall((head.encode() + b"\r\n" + body)[:most])
        return sock

    @contextlib.contextmanager
    def without_room(self, kind: ObjectKind) -> Iterator[None]:
        self.store.reserve(
            "all", [ReserveItem(kind, self.store.stat().kinds[kind].capacity_nbytes)]
        )
        try:
            yield
        finally:
            self.store.release("all")


@contextlib.contextmanager
def place_at(server: Server, host: str, rng: np.random.Generator) -> Iterator[Place]:
    with server.store() as store, plain_http.Client(timeout=30) as http:
        yield Place(server, store, http, host, rng)


@pytest.fixture
def place(own_server: Server, stalling_host: str, rng: np.random.Generator) -> Iterator[Place]:
    with place_at(own_server, stalling_host, rng) as found:
        yield found


At = Callable[[Place], Iterator[socket.socket]]


@dataclass(frozen=True)
class Stage:
    """Yields the client's connection when its request has reached a stage.

    After the disconnect, stopped processes still pin ``still_held`` objects. A stage inside of the
    built-in engine runs on the server of all tests, and each other one on a server without it.
    """

    at: At
    still_held: int
    num_requests: int
    is_inside: bool


STAGES: dict[str, Stage] = {}


def stage(
    *, still_held: int = 0, num_requests: int = 1, is_inside: bool = False
) -> Callable[[At], At]:
    def add(function: At) -> At:
        STAGES[function.__name__] = Stage(function, still_held, num_requests, is_inside)
        return function

    return add


@stage(num_requests=0)
def half_a_header(place: Place) -> Iterator[socket.socket]:
    (frontend,) = place.server.find("afferent.builtin.frontend")
    with place.connect() as sock:
        mine = sock.getsockname()

        def is_connected() -> bool:
            return any(tuple(its.raddr) == mine for its in frontend.net_connections("tcp"))

        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX: ")
        wait_until(is_connected)
        yield sock
        wait_until(lambda: not is_connected())


@stage()
def half_a_body(place: Place) -> Iterator[socket.socket]:
    with place.send([place.large()], most=400 * KiB) as sock:
        wait_until(lambda: place.frontend.num_held == 1)
        yield sock


@stage()
def waiting_for_room(place: Place) -> Iterator[socket.socket]:
    """The server does not read the client's socket while the request waits."""
    with place.without_room(ObjectKind.RAW), place.send([place.large()]) as sock:
        wait_until(lambda: place.store.stat().num_reservations_queued == 1)
        yield sock


@stage()
def fetching(place: Place) -> Iterator[socket.socket]:
    with place.send([f"http://{place.host}/"]) as sock:
        wait_until(lambda: place.frontend.num_held == 1)
        yield sock


@stage()
def waiting_for_room_for_features(place: Place) -> Iterator[socket.socket]:
    with place.without_room(ObjectKind.FEATURES), place.send(place.drawn(1)) as sock:
        wait_until(lambda: place.store.stat().num_reservations_queued == 1)
        yield sock


@stage(still_held=2)
def decoding(place: Place) -> Iterator[socket.socket]:
    """A worker that decodes can't be stopped; it alone keeps its block."""
    idle = place.server.idle_preprocess_workers()
    with suspended(idle), place.send(place.drawn(1)) as sock:
        wait_until(lambda: place.store.stat().num_jobs_running == 1)
        yield sock
        (held,) = [c.name for c in place.store.list_clients() if c.num_held]
        assert held.startswith("preprocess")


@stage(still_held=4)
def waiting_for_a_worker(place: Place) -> Iterator[socket.socket]:
    idle = place.server.idle_preprocess_workers()
    with suspended(idle), place.send(place.drawn(5)) as sock:
        wait_until(lambda: place.store.stat().num_jobs_queued == 3)
        yield sock


# The core, and the worker through it, pin the items of the first request.
@stage(still_held=2, is_inside=True)
def waiting_for_the_engine(place: Place) -> Iterator[socket.socket]:
    engine = place.server.engine_workers()
    with suspended(engine), ThreadPoolExecutor(1) as thread:
        try:
            first = thread.submit(place.server.post, ask(place.drawn(1), "What?"))
            wait_until(lambda: core_holds(place) == 1)
            with place.send(place.drawn(2)) as sock:
                wait_until(lambda: core_holds(place) == 3)
                yield sock
                assert core_holds(place) == 1
        finally:
            engine[0].resume()
        assert first.result().status_code == 200


@stage(is_inside=True)
def streaming(place: Place) -> Iterator[socket.socket]:
    engine = place.server.engine_workers()
    with place.send(place.drawn(40), stream=True) as sock:
        assert sock.recv(100)
        with suspended(engine):
            assert place.server.metrics()["afferent_requests_in_flight"] == 1
            yield sock
            wait_until(lambda: place.server.metrics()["afferent_requests_in_flight"] == 0)


def core_holds(place: Place) -> int:
    (core,) = [client for client in place.store.list_clients() if client.name == "core"]
    return core.num_held


def leave(sock: socket.socket) -> None:
    sock.close()


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


def leaves(place: Place, stage: Stage, how: Callable[[socket.socket], None]) -> float:
    """Return the milliseconds until everything is released, including the cost of polling."""
    gone = place.num_gone()
    with contextlib.contextmanager(stage.at)(place) as sock:
        start = time.perf_counter()
        how(sock)
        wait_until(lambda: place.is_back(still_held=stage.still_held), timeout_s=BOUND_S)
        wait_until(lambda: place.num_gone() == gone + stage.num_requests, timeout_s=BOUND_S)
        took_ms = (time.perf_counter() - start) * 1e3
    wait_until(lambda: place.store.stat().held_nbytes == place.store.stat().reserved_nbytes == 0)
    return took_ms


@pytest.mark.parametrize("how", [leave, reset])
@pytest.mark.parametrize("name", STAGES)
def test_a_client_leaves(
    server: Server,
    own_server: Server,
    stalling_host: str,
    rng: np.random.Generator,
    request: pytest.FixtureRequest,
    name: str,
    how: Callable[[socket.socket], None],
) -> None:
    num_times = 9 if request.config.getoption("--storm") else 1
    stage = STAGES[name]
    where = server if stage.is_inside else own_server
    with place_at(where, stalling_host, rng) as place:
        took_ms = [leaves(place, stage, how) for _ in range(num_times)]
    print(f"{name}, {how.__name__}: back after {statistics.median(took_ms):.0f} ms", end=" ")
    print(f"({min(took_ms):.0f} to {max(took_ms):.0f})")
    assert where.post(ask([], "Hello!")).status_code == 200


def test_a_large_body_whose_client_was_killed(place: Place) -> None:
    """The server has read ahead only a part of the body, so it notices the end late."""
    with place.without_room(ObjectKind.RAW):
        url = data_url(b"\xff\xd8\xff" + bytes(12 * MiB))
        with ThreadPoolExecutor(1) as thread:
            sock = place.connect()

            def send() -> None:
                body = json.dumps(ask([url], "What?")).encode()
                head = (
                    "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                    f"Content-Length: {len(body)}"
                )
                with contextlib.suppress(OSError):
                    sock.sendall(head.encode() + b"\r\n\r\n" + body)

            sending = thread.submit(send)
            wait_until(lambda: place.store.stat().num_reservations_queued == 1)
            sock.shutdown(socket.SHUT_RDWR)
            sock.close()
            sending.result()
    wait_until(place.is_back, timeout_s=BOUND_S)
    wait_until(lambda: place.store.stat().held_nbytes == 0)
