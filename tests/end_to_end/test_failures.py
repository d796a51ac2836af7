"""Processes die and clients disconnect: errors are retryable, and nothing stays pinned."""

from __future__ import annotations

import http.client
import json
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import numpy as np
import openai
import psutil
import pytest

from afferent.conformance.images import draw_image
from afferent.store.client.daemon_store import DaemonStore
from tests.server import TINY_ENGINE, WORKER, Server, ask, data_url, resume, suspended, wait_until

QUESTION = "What is in the picture?"


@pytest.fixture(scope="module")
def hurt_server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def own_server(hurt_server: Server) -> Server:
    """A server that tests may damage; the processes that the last test killed are running again."""
    wait_until(lambda: is_whole(hurt_server), timeout_s=120)
    return hurt_server


def is_whole(server: Server) -> bool:
    return (
        server.get("/ready").status_code == 200
        and len(server.processes()) == 9
        and server.metric("afferent_store_workers") == 2
        and server.metric("afferent_arena_pinned_bytes") == 0
    )


def new_request(rng: np.random.Generator) -> dict:
    return ask([data_url(draw_image(rng))], QUESTION)


def kill_maker(store: DaemonStore, workers: list[psutil.Process]) -> psutil.Process:
    """Kill the worker that has a job, and remove it from the list."""

    def maker() -> psutil.Process | None:
        holders = {client.pid for client in store.list_clients() if client.num_held}
        return next((worker for worker in workers if worker.pid in holders), None)

    wait_until(lambda: maker() is not None)
    found = maker()
    assert found is not None
    workers.remove(found)
    found.kill()
    return found


def test_a_preprocess_worker_is_killed_during_a_request(
    own_server: Server, rng: np.random.Generator
) -> None:
    """Another worker makes the item; the client gets its answer."""
    workers = own_server.idle_preprocess_workers()
    with ThreadPoolExecutor(1) as thread, own_server.store() as store, suspended(workers):
        response: Future[httpx.Response] = thread.submit(own_server.post, new_request(rng))
        kill_maker(store, workers)
        resume(workers)
        assert response.result().status_code == 200
    wait_until(lambda: len(own_server.preprocess_workers()) == 2)
    wait_until(lambda: own_server.metric("afferent_arena_pinned_bytes") == 0)
    assert own_server.metric("afferent_store_jobs_running") == 0


def test_preprocess_worker_has_no_way_to_the_supervisor(server: Server) -> None:
    """A compromised decoder must not report that the pool is ready, nor write its heartbeats."""
    workers = server.preprocess_workers()
    of_parent, *of_workers = (descriptors(each) for each in (workers[0].parent(), *workers))
    assert any(name.startswith("pipe:") for name in of_parent)
    shared = [of_parent & each for each in of_workers]
    assert not [name for each in shared for name in each if name.startswith(("pipe:", "/memfd:"))]


def descriptors(process: psutil.Process | None) -> set[str]:
    """Return what a process has open, except for its standard streams."""
    assert process is not None
    folder = Path(f"/proc/{process.pid}/fd")
    return {str(each.readlink()) for each in folder.iterdir() if int(each.name) > 2}


def test_an_item_that_kills_workers_is_refused(
    own_server: Server, rng: np.random.Generator
) -> None:
    request = new_request(rng)
    workers = own_server.idle_preprocess_workers()
    with ThreadPoolExecutor(1) as thread, own_server.store() as store, suspended(workers):
        response = thread.submit(own_server.post, request)
        kill_maker(store, workers)
        kill_maker(store, workers)
        failed = response.result()
    assert failed.status_code == 503
    assert failed.json()["error"]["code"] == "worker_died"
    assert failed.headers["retry-after"] == "1"
    refused = own_server.post(request)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "quarantined"
    assert own_server.post(new_request(rng)).status_code == 200


@pytest.mark.parametrize(
    "module",
    [
        WORKER,
        "afferent.builtin.engine.core.main",
        "afferent.store.daemon.main",
    ],
)
def test_a_process_is_killed_and_comes_back(
    own_server: Server, rng: np.random.Generator, module: str
) -> None:
    request = new_request(rng)
    before = own_server.post(request)
    (victim,) = own_server.engine_workers() if module == WORKER else own_server.find(module)
    keepers = [psutil.Process(own_server.popen.pid), victim.parent()]
    others = {process.pid for process in own_server.processes()} - {victim.pid}
    others -= {process.pid for process in own_server.preprocess_workers()}

    def is_ready() -> bool:
        return own_server.get("/ready").status_code == 200

    with suspended(keepers):  # otherwise the process may be back too early
        victim.kill()
        wait_until(lambda: not is_ready())
        response = own_server.post(request)
        assert response.status_code == 503, response.text
    wait_until(is_ready, timeout_s=120)
    if module == "afferent.store.daemon.main":
        assert others < {process.pid for process in own_server.processes()}
    assert own_server.post(request).json()["choices"] == before.json()["choices"]


def test_what_can_not_be_started_again_for_a_moment_is_tried_again(own_server: Server) -> None:
    """The other processes continue to work in the meantime."""
    supervisor, before = own_server.popen.pid, len(own_server.lines)
    _, most = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    (store,) = own_server.find("afferent.store.daemon.main")
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (3, most))
    try:
        store.kill()
        wait_until(lambda: any("can't be started" in line for line in own_server.lines[before:]))
        assert own_server.get("/health").status_code == 200
    finally:
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (most, most))
    wait_until(lambda: is_whole(own_server), timeout_s=120)


def test_the_engine_worker_is_killed_during_a_request(
    own_server: Server, rng: np.random.Generator
) -> None:
    (worker,) = own_server.engine_workers()
    with ThreadPoolExecutor(1) as thread, suspended([worker]):
        response = thread.submit(own_server.post, new_request(rng))
        wait_until(lambda: own_server.metric("afferent_engine_requests_running") == 1)
        assert 0 < own_server.metric("afferent_engine_kv_cache_usage") <= 1
        worker.kill()
        failed = response.result()
    assert failed.status_code == 503
    assert failed.json()["error"]["code"] in ("worker_died", "engine_unavailable")
    wait_until(lambda: own_server.metric("afferent_arena_pinned_bytes") == 0)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_is_forgotten(
    server: Server, rng: np.random.Generator, streamed: bool
) -> None:
    """The client disconnects before the answer has begun, and in the middle of a stream."""
    body = json.dumps({**new_request(rng), "stream": streamed})
    client = http.client.HTTPConnection(server.url.removeprefix("http://"))
    with suspended(server.idle_preprocess_workers()):
        client.request("POST", "/v1/chat/completions", body)
        wait_until(lambda: server.metric("afferent_store_jobs_running") == 1)
        client.close()
        # The workers are still stopped: the disconnect alone ends the request.
        wait_until(lambda: server.metrics()["afferent_requests_in_flight"] == 0)
    wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)
    assert server.post(new_request(rng)).status_code == 200
    stream = server.client().chat.completions.create(
        **ask([data_url(draw_image(rng))] * 3, "Name all pictures."), stream=True
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: server.metrics()["afferent_requests_in_flight"] == 0)
    wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)
    assert server.post(new_request(rng)).status_code == 200


def test_a_worker_that_hangs_is_replaced(rng: np.random.Generator) -> None:
    with Server(*TINY_ENGINE, "--preprocess-timeout-s", "3") as server:
        with suspended(server.idle_preprocess_workers()):
            failed = server.post(new_request(rng))
        assert failed.status_code == 503
        assert failed.json()["error"]["code"] == "worker_died"
        assert server.post(new_request(rng)).status_code == 200


@pytest.mark.parametrize(
    ("signum", "engine", "num_processes"),
    [(signal.SIGINT, TINY_ENGINE, 6), (signal.SIGKILL, (), 9)],
    ids=["SIGINT", "SIGKILL"],
)
def test_nothing_is_left_when_the_supervisor_ends(
    rng: np.random.Generator, signum: signal.Signals, engine: tuple[str, ...], num_processes: int
) -> None:
    """`test_sigterm_finishes_running_requests` stops the built-in engine's processes in order."""
    with Server(*engine) as server:
        assert server.post(new_request(rng)).status_code == 200
        processes = server.processes()
        assert len(processes) == num_processes
        server.popen.send_signal(signum)
        server.popen.wait(60)
        assert_gone(processes)


def assert_gone(processes: list[psutil.Process]) -> None:
    """Wait until every process has ended: the anonymous arena ends with the last of them."""
    wait_until(
        lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
    )


def test_the_port_is_taken(server: Server) -> None:
    with (
        pytest.raises(AssertionError, match="can't listen on"),
        Server("--port", server.url.rsplit(":", 1)[1]),
    ):
        pass


def test_retryable_errors_are_retried_by_the_official_client(
    own_server: Server, rng: np.random.Generator
) -> None:
    """The store dies during the first attempt."""
    workers = own_server.idle_preprocess_workers()
    # It waits a second before each attempt, and on a busy machine a store takes several to start.
    client = openai.OpenAI(base_url=f"{own_server.url}/v1", api_key="none", max_retries=30)
    picture = draw_image(rng, colour="yellow", shape="triangle")
    with client, ThreadPoolExecutor(1) as thread, suspended(workers):
        request = ask([data_url(picture)], QUESTION)
        answer = thread.submit(lambda: client.chat.completions.create(**request))
        wait_until(lambda: own_server.metric("afferent_store_jobs_running") == 1)
        own_server.find("afferent.store.daemon.main")[0].kill()
        resume(workers)
        assert answer.result().choices[0].message.content == "a yellow triangle"


def test_sigterm_finishes_running_requests(own_server: Server, rng: np.random.Generator) -> None:
    """This test comes last, because it ends the server."""
    processes = own_server.processes()
    engine = own_server.engine_workers()
    misses = own_server.metric("afferent_store_misses_total") or 0
    num_lines = len(own_server.lines)
    done: list[str] = []

    def ask_slowly() -> None:
        completion = own_server.client().chat.completions.create(**new_request(rng))
        done.append(completion.choices[0].message.content)

    with suspended(engine):
        thread = threading.Thread(target=ask_slowly)
        thread.start()
        wait_until(lambda: own_server.metric("afferent_store_misses_total") == misses + 1)
        own_server.popen.send_signal(signal.SIGTERM)
        wait_until(own_server.refuses)
    thread.join(60)
    assert done
    assert own_server.popen.wait(60) == 0
    wait_until(lambda: any("stopping" in line for line in own_server.lines[num_lines:]))
    assert_gone(processes)
