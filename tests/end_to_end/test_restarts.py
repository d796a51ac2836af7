"""``afferent restart``: the frontends one after the other, and the engine, under load."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from afferent.conformance.images import draw_image
from tests.end_to_end.standing_in import StandIn
from tests.server import WORKER, Server, ask, data_url, suspended, wait_until

FRONTEND = "afferent.builtin.frontend"
QUESTION = "What is in the picture?"
NUM_CLIENTS, PER_SECOND = 10, 50
BODY = json.dumps({"model": "shapes", "prompt": "a green", "max_tokens": 1})


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--frontends", "2", "--arena-nbytes", "64MiB") as running:
        yield running


def restart(server: Server, what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "afferent.cli", "restart", what]
    command += ["--pid", str(server.popen.pid)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def frontends(server: Server) -> set[int]:
    return {process.pid for process in server.find(FRONTEND)}


class Load:
    """Clients that send a limited number of requests a second until they are stopped.

    Half of them reuse their connection, and half open a new one for each request.
    """

    def __init__(self, server: Server) -> None:
        self._host = server.url.removeprefix("http://")
        self._stop, self.outcomes = threading.Event(), list[int | str]()

    def __enter__(self) -> Load:
        self._threads = ThreadPoolExecutor(NUM_CLIENTS)
        self._clients = [self._threads.submit(self._run, n % 2 == 0) for n in range(NUM_CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.result(60)
        self._threads.shutdown()

    def _run(self, is_kept: bool) -> None:
        connection = http.client.HTTPConnection(self._host, timeout=60)
        while not self._stop.wait(NUM_CLIENTS / PER_SECOND):
            self.outcomes.append(self._ask(connection))
            if not is_kept:
                connection.close()
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection) -> int | str:
        try:
            connection.request("POST", "/v1/completions", BODY)
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return repr(error)
        return answer.status


def test_frontends_are_restarted_without_a_lost_request(server: Server) -> None:
    before = frontends(server)
    start_s = time.monotonic()
    with Load(server) as load:
        wait_until(lambda: len(load.outcomes) > 20)
        done = restart(server, "frontends")
        num_until_then = len(load.outcomes)
        wait_until(lambda: len(load.outcomes) > num_until_then + 20)
    took_s = time.monotonic() - start_s
    print(f"{len(load.outcomes)} requests in {took_s:.1f} s\n{done.stdout}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "done"
    assert set(load.outcomes) == {200}
    after = frontends(server)
    assert len(after) == len(before)
    assert not after & before


def test_a_successor_waits_for_word_of_its_upstream(tmp_path: Path) -> None:
    """A successor is ready only after its first health check of the upstream has succeeded."""
    store_path = tmp_path / "store.sock"
    with StandIn(tmp_path, store_path) as upstream:
        where = ("--engine", "vllm", "--engine-url", upstream.url, "--store-path", str(store_path))
        with Server(*where, "--arena-nbytes", "64MiB") as running:
            upstream.health_s = 0.5
            with Load(running) as load:
                wait_until(lambda: len(load.outcomes) > 20)
                assert restart(running, "frontends").returncode == 0
                num_until_then = len(load.outcomes)
                wait_until(lambda: len(load.outcomes) > num_until_then + 20)
    assert set(load.outcomes) == {200}


def test_an_answer_that_has_begun_is_finished_by_the_old_one(
    server: Server, rng: np.random.Generator
) -> None:
    """While the old frontend waits for the engine, its successor serves other requests."""
    before = frontends(server)
    body = ask([data_url(draw_image(rng, colour="green", shape="star"))], QUESTION)
    with ThreadPoolExecutor(2) as threads:
        with suspended(server.engine_workers()):
            answer = threads.submit(server.post, body)
            wait_until(lambda: server.metric("afferent_requests_in_flight") == 1)
            restarting = threads.submit(restart, server, "frontends")
            wait_until(lambda: bool(frontends(server) - before))
        assert answer.result(60).json()["choices"][0]["message"]["content"] == "a green star"
        assert restarting.result(120).returncode == 0


def test_the_engine_is_drained_then_away_then_back(
    server: Server, rng: np.random.Generator
) -> None:
    (before,) = server.engine_workers()
    picture = [ask([data_url(draw_image(rng))], QUESTION) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        with suspended([before]):
            first = threads.submit(server.post, picture[0])
            wait_until(lambda: server.metric("afferent_requests_in_flight") == 1)
            restarting = threads.submit(restart, server, "engine")
            wait_until(lambda: server.get("/ready").status_code == 503)
            refused = server.post(picture[1])
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_unavailable"
            assert int(refused.headers["retry-after"]) >= 1
            again = restart(server, "frontends")
            assert again.returncode == 1
            assert "is restarting its engine" in again.stdout
        assert first.result(60).status_code == 200, "who was inside has an answer"
        done = restarting.result(120)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "done")
    wait_until(lambda: server.get("/ready").status_code == 200)
    assert server.post(picture[1]).status_code == 200
    (after,) = server.engine_workers()
    assert after.pid != before.pid


@contextlib.contextmanager
def killed(server: Server, module: str) -> Iterator[None]:
    """Kill each new process of this module as soon as it appears."""
    before = {process.pid for process in server.find(module)}
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.01):
            for process in server.find(module):
                if process.pid not in before:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()

    with ThreadPoolExecutor(1) as threads:
        killing = threads.submit(kill)
        try:
            yield
        finally:
            stop.set()
            killing.result(30)


@contextlib.contextmanager
def without_descriptors(server: Server) -> Iterator[None]:
    """Allow the supervisor one more connection, and no other descriptor."""
    pid = server.popen.pid
    used = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
    free = itertools.filterfalse(used.__contains__, itertools.count())
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(free) + 1, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("trouble", ["killed", "without descriptors"])
def test_restart_frontends_without_successor_loses_nothing(server: Server, trouble: str) -> None:
    before = frontends(server)
    with Load(server) as load:
        wait_until(lambda: len(load.outcomes) > 20)
        is_killed = trouble == "killed"
        with killed(server, FRONTEND) if is_killed else without_descriptors(server):
            start_s = time.monotonic()
            done = restart(server, "frontends")
            took_s = time.monotonic() - start_s
        num_until_then = len(load.outcomes)
        wait_until(lambda: len(load.outcomes) > num_until_then + 20)
        assert (done.returncode, done.stderr) == (1, "")
        assert "; the old one goes on" in done.stdout
        assert took_s < 10
        assert frontends(server) == before
        assert restart(server, "frontends").returncode == 0, "it is not refused from now on"
    assert set(load.outcomes) == {200}
    assert not frontends(server) & before


@pytest.mark.timeout(240)
def test_restart_engine_that_does_not_start_is_retryable(
    server: Server, rng: np.random.Generator
) -> None:
    outcomes: list[tuple[int, bool]] = []
    stop = threading.Event()

    def keep_asking() -> None:
        bodies = itertools.cycle(ask([data_url(draw_image(rng))], QUESTION) for _ in range(4))
        while not stop.wait(1 / PER_SECOND):
            answer = server.post(next(bodies))
            outcomes.append((answer.status_code, "retry-after" in answer.headers))

    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(keep_asking)
        try:
            with killed(server, WORKER):
                start_s = time.monotonic()
                done = restart(server, "engine")
                took_s = time.monotonic() - start_s
            wait_until(lambda: server.get("/ready").status_code == 200)
            again = restart(server, "engine")
            wait_until(lambda: server.get("/ready").status_code == 200)
            num_until_then = len(outcomes)
            wait_until(lambda: (200, False) in outcomes[num_until_then:])
        finally:
            stop.set()
        asking.result(60)
    assert (done.returncode, done.stderr) == (1, "")
    assert "worker: did not start; the server tries again" in done.stdout
    assert took_s < 10
    assert again.returncode == 0
    assert set(outcomes) == {(200, False), (503, True)}


def test_of_no_server() -> None:
    command = [sys.executable, "-m", "afferent.cli", "restart", "engine", "--pid", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "error: --pid 1: is no server\n")
