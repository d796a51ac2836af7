"""Processes are stopped, one after another: the server reports and replaces them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import numpy as np
import psutil
import pytest

from afferent.conformance.images import draw_image
from tests import plain_http
from tests.end_to_end.test_kill_storm import (
    FAILURES,
    Load,
    assert_nothing_is_held,
    make_bodies,
)
from tests.server import Server, ask, data_url, suspended, wait_until

QUESTION = "What is in the picture?"
FROZEN_TIMEOUT_S = 4.0
SEEN_WITHIN_S = 60.0
"""A limit for busy machines: each wait ends as soon as its condition is true."""
ANSWERED_WITHIN_S = 1.0
NO_HANG_S = 30.0
NUM_TRIES = 3
NUM_PROBES = 16
"""Concurrent: all of them reach the frozen one of two frontends once in 65,536 times."""
NUM_CLIENTS = 4
FREEZE_EVERY_S = 5.0

Victims = dict[str, Callable[[], list[psutil.Process]]]


@pytest.fixture(scope="module")
def short_server() -> Iterator[Server]:
    with Server("--frozen-timeout-s", str(FROZEN_TIMEOUT_S), "--frontends", "2") as server:
        yield server


def find_victims(server: Server) -> Victims:
    """Return the processes of each kind by the name with which the server reports them."""

    def zygote() -> list[psutil.Process]:
        pool = server.find("afferent.media.workers.pool")
        return [process for process in pool if process.parent() not in pool]

    return {
        "core": lambda: server.find("afferent.builtin.engine.core.main"),
        "preprocess-": server.preprocess_workers,
        "store": lambda: server.find("afferent.store.daemon.main"),
        "frontend-": lambda: server.find("afferent.builtin.frontend"),
        "preprocess": zygote,
        "worker": server.engine_workers,
        "forms": lambda: server.find("afferent.builtin.engine.form.main"),
    }


def get_soon(server: Server, path: str) -> httpx.Response:
    """Return an answer within a second, or retry: a connection may reach the frozen frontend."""
    for last in (*[False] * (NUM_TRIES - 1), True):
        try:
            return plain_http.get(f"{server.url}{path}", timeout=ANSWERED_WITHIN_S)
        except httpx.TransportError:
            if last:
                raise
    raise AssertionError


def readiness(server: Server) -> dict[str, Any]:
    """Return the readiness report of a frontend; some connections may reach a frozen frontend."""

    async def ask_many() -> dict[str, Any]:
        async with plain_http.AsyncClient(timeout=ANSWERED_WITHIN_S) as client:
            asked = [
                asyncio.create_task(client.get(f"{server.url}/ready")) for _ in range(NUM_PROBES)
            ]
            try:
                for answer in asyncio.as_completed(asked):
                    with contextlib.suppress(httpx.TransportError):
                        return dict((await answer).json())
            finally:
                for task in asked:
                    task.cancel()
                await asyncio.wait(asked)
        return {}

    deadline = time.monotonic() + SEEN_WITHIN_S
    while not (found := asyncio.run(ask_many())):
        assert time.monotonic() < deadline, "no frontend answers"
    return found


def is_well(server: Server) -> bool:
    """Return whether both frontends are ready, and all processes are running."""
    with contextlib.suppress(httpx.TransportError):
        answers = [
            plain_http.get(f"{server.url}/ready", timeout=ANSWERED_WITHIN_S)
            for _ in range(NUM_PROBES)
        ]
        is_ready = all(answer.status_code == 200 for answer in answers)
        return is_ready and len(server.processes()) == 10
    return False


def wait_until_seen(server: Server, kinds: Sequence[str]) -> list[str]:
    """Wait until all of these were reported as frozen, and return all reported names.

    One may be replaced already when the next one is noticed.
    """
    said: list[str] = []

    def are_seen() -> bool:
        said.extend(name for name in readiness(server)["frozen"] if name not in said)
        return all(any(name.startswith(kind) for name in said) for kind in kinds)

    wait_until(are_seen, timeout_s=SEEN_WITHIN_S)
    return said


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def outcome_of(server: Server, rng: np.random.Generator) -> Callable[[], str]:
    """Prepare a request about a new picture, and return a function that posts it."""
    body = ask([data_url(draw_image(rng))], QUESTION)

    def post() -> str:
        try:
            answer = plain_http.post(
                f"{server.url}/v1/chat/completions", json=body, timeout=NO_HANG_S
            )
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            return "cut off"
        retryable = answer.status_code == 503 and "retry-after" in answer.headers
        return "refused" if retryable else str(answer.status_code)

    return post


@pytest.mark.parametrize(
    "kinds",
    [["core", "worker", "preprocess-"], ["store", "forms"], ["frontend-", "preprocess"]],
    ids="+".join,
)
def test_what_freezes_is_named_and_replaced(
    short_server: Server, rng: np.random.Generator, kinds: list[str]
) -> None:
    """Kinds that do not hide each other freeze together; the long form freezes each kind alone."""
    server, victims = short_server, find_victims(short_server)
    wait_until(lambda: is_well(server), timeout_s=120)
    frozen = {kind: victims[kind]()[0] for kind in kinds}
    with ThreadPoolExecutor(1) as thread:
        start_s = time.monotonic()
        for victim in frozen.values():
            victim.suspend()
        outcome = thread.submit(outcome_of(server, rng))
        said = wait_until_seen(server, kinds)
        seen_s = time.monotonic() - start_s
        for path in ("/health", "/metrics"):
            assert get_soon(server, path).status_code in (200, 503)
        wait_until(lambda: not any(map(is_alive, frozen.values())))
        killed_s = time.monotonic() - start_s
        wait_until(lambda: is_well(server), timeout_s=120)
        print(
            f"\n{', '.join(said)}: seen after {seen_s:.1f} s, killed after {killed_s:.1f} s, well "
            f"after {time.monotonic() - start_s:.1f} s; the request: {outcome.result()}"
        )
        assert len(said) == len(kinds)
        expected = {"200", "refused"} | ({"cut off"} if "frontend-" in kinds else set())
        assert outcome.result() in expected
    assert outcome_of(server, rng)() == "200"


def test_a_frozen_supervisor_is_named_and_nobody_is_killed_for_it(short_server: Server) -> None:
    """After a pause of its own, the supervisor does not trust the heartbeats that it has missed."""
    server = short_server
    wait_until(lambda: is_well(server), timeout_s=120)
    before = {process.pid for process in server.processes()}
    (core,) = find_victims(server)["core"]()
    with suspended([psutil.Process(server.popen.pid), core]):
        wait_until(lambda: readiness(server)["frozen"] == ["supervisor", "core"])
    wait_until(lambda: is_well(server))
    assert {process.pid for process in server.processes()} == before


@pytest.mark.storm
@pytest.mark.timeout(900)
def test_every_process_freezes_under_load(rng: np.random.Generator) -> None:
    """Each freezes twice: no request hangs for long, and all answers are right."""
    with Server("--frozen-timeout-s", "8", "--frontends", "2") as server:
        load = Load(server, make_bodies(rng))
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            running = [threads.submit(load.run) for _ in range(NUM_CLIENTS)]
            try:
                for kind in itertools.chain(*[find_victims(server)] * 2):
                    wait_until(lambda: is_well(server), timeout_s=120)
                    assert not load.stop.wait(FREEZE_EVERY_S)
                    victim = find_victims(server)[kind]()[0]
                    start_s = time.monotonic()
                    victim.suspend()
                    (said,) = wait_until_seen(server, [kind])
                    seen_s = time.monotonic() - start_s
                    wait_until(lambda: not is_alive(victim))  # noqa: B023
                    killed_s = time.monotonic() - start_s
                    wait_until(lambda: is_well(server), timeout_s=120)
                    print(
                        f"{said}: seen after {seen_s:.1f} s, killed after {killed_s:.1f} s, "
                        f"well after {time.monotonic() - start_s:.1f} s"
                    )
                wait_until(lambda: is_well(server), timeout_s=120)
            finally:
                load.stop.set()
            for client in running:
                client.result()
        num_answers, num_wrong = load.count_lies()
        print(json.dumps(load.outcomes), f"the longest took {load.longest_s:.1f} s")
        assert load.longest_s < NO_HANG_S
        assert load.outcomes["ok"] > 0
        assert load.outcomes.keys() <= {"ok", "connection"} | FAILURES
        assert num_wrong <= num_answers * 0.01
        assert_nothing_is_held(server)
