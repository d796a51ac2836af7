"""Several frontends on one port: one store, one gate, one engine and one set of metrics."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest

from afferent.conformance.images import draw_image
from afferent.types import MiB, ObjectKind
from tests.images import encoded, photo
from tests.server import TINY, TINY_ENGINE, Server, ask, data_url, resume, suspended, wait_until

QUESTION = "What is in the picture?"
NUM = 3
LIMIT = 2
REQUESTS = 'afferent_requests_total{api="openai_chat",outcome="ok"}'


@pytest.fixture(scope="module")
def files_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frontends") / "files"


@pytest.fixture(scope="module")
def server(files_folder: Path) -> Iterator[Server]:
    """A server with a limit on concurrent requests, and an arena that a few large pictures fill."""
    with Server(
        *TINY_ENGINE,
        "--files-store",
        str(files_folder),
        "--frontends",
        str(NUM),
        "--max-mm-preprocess-concurrency",
        str(LIMIT),
        "--arena-nbytes",
        "32MiB",
        "--admission-timeout-s",
        "60",
    ) as running:
        yield running


class Line:
    """A connection to one of the frontends, which has the process id ``pid``."""

    def __init__(self, server: Server) -> None:
        host, port = re.findall(r"//(\S+):(\d+)", server.url)[0]
        self._connection = http.client.HTTPConnection(host, int(port), timeout=60)
        self.connect(server)

    def connect(self, server: Server) -> None:
        self._connection.connect()
        assert self.get("/health")[0] == 200  # it has been accepted
        mine = self._connection.sock.getsockname()
        (self.pid,) = [
            process.pid
            for process in server.find("afferent.builtin.frontend")
            for found in process.net_connections("tcp")
            if found.raddr and tuple(found.raddr) == mine
        ]

    def get(self, path: str) -> tuple[int, str]:
        self._connection.request("GET", path)
        response = self._connection.getresponse()
        return response.status, response.read().decode()

    def send(self, body: dict) -> None:
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body))

    def receive(self) -> tuple[int, dict]:
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())

    def ask(self, body: dict) -> str:
        self.send(body)
        status, answer = self.receive()
        assert status == 200, answer
        text: str = answer["choices"][0]["message"]["content"]
        return text

    def samples(self) -> dict[str, float]:
        status, text = self.get("/metrics")
        assert status == 200
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def lines(server: Server, num: int = NUM) -> Iterator[list[Line]]:
    """Open a connection to each frontend."""
    found: dict[int, Line] = {}
    try:
        for _ in range(200):
            line = Line(server)
            if line.pid in found:
                line.close()
            found.setdefault(line.pid, line)
            if len(found) == num:
                break
        yield list(found.values())
    finally:
        for line in found.values():
            line.close()


def samples_of(each: list[Line]) -> list[dict[str, float]]:
    """Return the metrics by each frontend; those of the other frontends may be older."""
    return [line.samples() for line in each]


def new_request(rng: np.random.Generator, **parameters: int) -> dict:
    return ask([data_url(draw_image(rng))], QUESTION, **parameters)


def test_the_same_new_picture_sent_to_all_at_once_is_made_once(
    server: Server, rng: np.random.Generator
) -> None:
    with lines(server) as each:
        assert len({line.pid for line in each}) == NUM
        for _ in range(3):
            request = new_request(rng)
            misses = server.metric("afferent_store_misses_total")
            for line in each:
                line.send(request)
            answers = [line.receive() for line in each]
            assert {status for status, _ in answers} == {200}
            assert len({json.dumps(answer["choices"]) for _, answer in answers}) == 1
            assert server.metric("afferent_store_misses_total") == misses + 1


def test_connections_spread_over_all(server: Server) -> None:
    made = [Line(server) for _ in range(30)]
    by_pid = [sum(line.pid == pid for line in made) for pid in {line.pid for line in made}]
    for line in made:
        line.close()
    assert len(by_pid) == NUM
    assert max(by_pid) <= 2 * 30 / NUM  # by a hash of the client's port


def test_the_same_metrics_wherever_they_are_asked_for(
    server: Server, rng: np.random.Generator
) -> None:
    with lines(server) as each:
        before = samples_of(each)[-1].get(REQUESTS, 0.0)
        for number, line in enumerate(each):
            for _ in range(number + 1):
                line.ask(new_request(rng))
        expected = before + sum(range(1, NUM + 1))

        def agree() -> bool:
            first, *others = samples_of(each)
            return first[REQUESTS] == expected and all(other == first for other in others)

        wait_until(agree)
        first = each[0].samples()
        assert first["afferent_requests_in_flight"] == 0
        assert first['afferent_stage_seconds_count{media="image",stage="decode"}'] >= 3
        assert first['afferent_time_to_first_token_seconds_count{media="image"}'] >= 6
        assert not [name for name in first if '"other"' in name]


def test_the_count_gate_counts_over_all(server: Server, rng: np.random.Generator) -> None:
    def slots() -> tuple[float, float]:
        found = server.metrics()
        taken, queued = [
            found[f'afferent_permits_{part}{{semaphore="preprocess"}}']
            for part in ("taken", "queued")
        ]
        return taken, queued

    with lines(server) as each, suspended(server.idle_preprocess_workers()) as workers:
        others = [Line(server) for _ in range(NUM)]
        waiting = [*each, *others]
        for number, line in enumerate(waiting, start=1):
            line.send(new_request(rng))
            wait_until(lambda: slots() == (min(LIMIT, number), max(0, number - LIMIT)))  # noqa: B023
        assert server.metric("afferent_store_jobs_queued") <= LIMIT
        assert server.post(ask([], "hi")).status_code == 200, "text passes"
        leaves = waiting.pop()
        leaves.close()
        wait_until(lambda: slots() == (LIMIT, len(waiting) - LIMIT))
        resume(workers)
        assert [line.receive()[0] for line in waiting] == [200] * len(waiting)
        for line in others:
            line.close()
    wait_until(lambda: slots() == (0, 0))
    wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)


def test_reservations_of_all_stay_within_the_arena(server: Server) -> None:
    """All frontends together get more large pictures than fit into the raw region at once."""
    bodies = [
        ask([data_url(encoded(photo(900, 700, seed=seed), "PNG"), "png")], QUESTION, max_tokens=2)
        for seed in range(12)
    ]

    with (
        ThreadPoolExecutor(12) as threads,
        server.store() as store,
        suspended(server.idle_preprocess_workers()) as workers,
    ):

        def raw_in_use() -> int:
            """Return the used and reserved bytes of raw media; check the limit of each kind."""
            in_use = {}
            for kind, its in store.stat().kinds.items():
                in_use[kind] = its.held_nbytes + its.reserved_nbytes
                assert in_use[kind] <= its.capacity_nbytes
            return in_use[ObjectKind.RAW]

        posts = [threads.submit(server.post, body) for body in bodies]
        wait_until(lambda: raw_in_use() > 2 * MiB)
        resume(workers)
        while not all(post.done() for post in posts):
            raw_in_use()
            time.sleep(0.001)
    assert [post.result().status_code for post in posts] == [200] * 12
    wait_until(lambda: server.metrics()["afferent_admission_seconds_count"] >= 12)


def test_one_is_killed_and_the_others_serve(server: Server, rng: np.random.Generator) -> None:
    """The counters of the killed frontend stay, and its pins are dropped."""
    with lines(server) as (victim, *others):
        victim.ask(new_request(rng))
        seen = [samples_of([*others, victim])[-1]]
        with suspended(server.idle_preprocess_workers()):
            victim.send(new_request(rng))
            wait_until(lambda: server.metric("afferent_store_jobs_running") == 1)
            psutil.Process(victim.pid).kill()
            wait_until(lambda: "has ended (SIGKILL)" in server.log())
        is_back = False
        while not is_back:
            is_back = "frontend-" in server.log().rpartition("has ended (SIGKILL)")[2]
            for line in others:
                assert line.ask(new_request(rng))
                seen.append(line.samples())
        for name in filter(re.compile(r"\w+(_total|_count|_sum|_bucket)\b").match, seen[0]):
            assert all(a <= b for a, b in pairwise([samples[name] for samples in seen])), name
        assert seen[-1][REQUESTS] == seen[0][REQUESTS] + len(seen) - 1
        pinned = 'afferent_arena_pinned_bytes{kind="features"}'
        wait_until(lambda: others[0].samples()[pinned] == 0)
    with lines(server) as each:
        assert len(each) == NUM, "it is there again"


def test_frontend_killed_during_an_upload_leaves_no_file(
    server: Server, files_folder: Path
) -> None:
    client = server.client()
    kept = client.files.create(file=("a.png", encoded(photo(40, 30), "PNG")), purpose="vision")
    line = Line(server)
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000000\r\n"
        "content-type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
        'content-disposition: form-data; name="file"; filename="b"\r\n\r\n'
    )
    line._connection.sock.sendall(head.encode() + bytes(3_000_000))
    folder = files_folder / "_default"
    wait_until(lambda: any(path.stat().st_blocks > 2000 for path in folder.glob(".new-*")))
    num_ready = server.log().count("ready: HTTP")
    process = psutil.Process(line.pid)
    process.kill()
    process.wait(30)
    line._connection.close()
    wait_until(lambda: server.log().count("ready: HTTP") > num_ready)
    assert [file.id for file in client.files.list()] == [kept.id]
    again = client.files.create(file=("c.png", b"x"), purpose="vision")
    left = sorted(path.name for path in folder.iterdir())
    assert left == sorted([".lock", kept.id, again.id]), "what the process has left is deleted"
    part = {"type": "file", "file": {"file_id": kept.id}}
    body = {"model": "shapes", "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}
    for _ in range(NUM):
        answer = client.chat.completions.create(**body)
        assert answer.usage is not None
    for id in (kept.id, again.id):
        client.files.delete(id)


def test_all_finish_what_they_have_begun(server: Server, rng: np.random.Generator) -> None:
    with lines(server) as each:
        (engine,) = server.find(TINY)
        with suspended([engine]):
            for line in each:
                line.send(new_request(rng))
            wait_until(lambda: server.metrics()["afferent_requests_in_flight"] == NUM)
            server.popen.send_signal(signal.SIGTERM)
            wait_until(server.refuses)
        assert [line.receive()[0] for line in each] == [200] * NUM
    assert server.popen.wait(60) == 0
