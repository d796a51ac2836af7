"""The built-in engine with two workers that share the model: right answers, and recovery."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import numpy as np
import psutil
import pytest

from afferent.builtin.engine.launch import check_workers
from afferent.conformance.images import draw_image
from afferent.errors import ConfigError
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from tests.server import Server, ask, data_url, suspended, wait_until

QUESTION = "What is in the picture?"
CORE = "afferent.builtin.engine.core.main"


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    """A server with two workers and an embeddings region."""
    with Server("--tensor-parallel-size", "2", "--arena-nbytes", "128MiB",
                "--embeddings-share", "0.2", "--engine-step-timeout-s", "8") as server:  # fmt: skip
        yield server


def new_request(rng: np.random.Generator) -> dict[str, Any]:
    return ask([data_url(draw_image(rng))], QUESTION)


def answer_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def samples_of(server: Server) -> dict[str, float]:
    """Poll until the metrics include the engine's, which are missing while it is slow to answer."""
    samples: dict[str, float] = {}

    def has_answered() -> bool:
        samples.update(server.metrics())
        return any(name.startswith("afferent_engine_steps_total") for name in samples)

    wait_until(has_answered)
    return samples


def stat(server: Server, name: str) -> float:
    return samples_of(server)[f"afferent_engine_{name}"]


def encoded(server: Server) -> list[float]:
    samples = samples_of(server)
    names = [f'afferent_engine_encoded_items_total{{worker="{rank}"}}' for rank in range(2)]
    return [samples.get(name, 0.0) for name in names]


def num_items_made(server: Server) -> float:
    return server.metrics().get('afferent_items_total{modality="image",outcome="made"}', 0.0)


def is_ready(server: Server) -> bool:
    return server.get("/ready").status_code == 200


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_others(server: Server, old: list[psutil.Process]) -> None:
    """Wait until all of these processes are gone, and their replacements are ready."""
    wait_until(lambda: all(is_gone(process) for process in old))
    wait_until(lambda: len(server.engine_workers()) == len(old))
    wait_until(lambda: is_ready(server), timeout_s=120)
    wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)
    wait_until(lambda: server.metric("afferent_arena_reserved_bytes") == 0)


def test_two_workers_answer_as_one_does(
    server: Server, pair: Server, rng: np.random.Generator
) -> None:
    """Another order of floating-point sums may change a close decision."""
    urls = [data_url(draw_image(rng)) for _ in range(12)]
    requests = [ask([url], QUESTION) for url in urls]
    requests += [ask(urls[start : start + 4], "Name all pictures.") for start in (0, 4, 8)]
    with ThreadPoolExecutor(6) as threads:
        one, two = (
            list(threads.map(lambda request: answer_of(which.post(request)), requests))  # noqa: B023
            for which in (server, pair)
        )
    same = sum(a == b for a, b in zip(one, two, strict=True))
    assert same >= len(requests) - 1, list(zip(one, two, strict=True))


def test_forms_of_answers_are_followed_together(pair: Server) -> None:
    """Rank 0 applies the token mask, and its choice is used by both."""
    form = {"structured_outputs": {"regex": "[a-f]{8}-[0-9]{4}"}, "temperature": 1}
    with ThreadPoolExecutor(4) as threads:
        texts = threads.map(
            lambda seed: answer_of(pair.post(ask([], QUESTION, **form, seed=seed))), range(4)
        )
    assert all(re.fullmatch("[a-f]{8}-[0-9]{4}", text) for text in texts)


def test_one_picture_is_made_and_encoded_once(pair: Server, rng: np.random.Generator) -> None:
    request = new_request(rng)
    before, num_made = encoded(pair), num_items_made(pair)
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(pair.post, [request] * 3))
    assert len({answer_of(answer) for answer in answers}) == 1
    assert [after - count for after, count in zip(encoded(pair), before, strict=True)] == [1, 1]
    assert num_items_made(pair) == num_made + 1
    wait_until(lambda: pair.metric("afferent_arena_pinned_bytes") == 0)


def test_what_dies_is_replaced_together(pair: Server, rng: np.random.Generator) -> None:
    """The new workers find in the store the embeddings that the old ones computed."""
    seen, unseen = new_request(rng), new_request(rng)
    before = answer_of(pair.post(seen))
    workers = pair.engine_workers()
    num_made = num_items_made(pair)
    with ThreadPoolExecutor(1) as thread, suspended(workers[1:]):
        response: Future[httpx.Response] = thread.submit(pair.post, unseen)
        wait_until(lambda: stat(pair, "requests_running") == 1)
        workers[1].kill()
        failed = response.result()
    assert failed.status_code == 503
    assert failed.json()["error"]["code"] == "worker_died"
    wait_for_others(pair, workers)
    num_encoded, num_found = encoded(pair), stat(pair, "embeddings_found_total")
    assert answer_of(pair.post(seen)) == before
    assert encoded(pair) == num_encoded
    assert stat(pair, "embeddings_found_total") == num_found + 1
    said = answer_of(pair.post(unseen))
    assert said == answer_of(pair.post(unseen))
    assert num_items_made(pair) == num_made + 1, "features survive the engine"


def test_a_worker_that_hangs_is_replaced(pair: Server, rng: np.random.Generator) -> None:
    workers = pair.engine_workers()
    with suspended(workers[:1]):
        failed = pair.post(new_request(rng))
    assert failed.status_code == 503
    assert failed.json()["error"]["code"] == "worker_died"
    wait_for_others(pair, workers)
    answer_of(pair.post(new_request(rng)))


def test_the_core_is_killed_during_a_request(pair: Server, rng: np.random.Generator) -> None:
    workers, (core,) = pair.engine_workers(), pair.find(CORE)
    with ThreadPoolExecutor(1) as thread, suspended(workers):
        response = thread.submit(pair.post, new_request(rng))
        wait_until(lambda: stat(pair, "requests_running") == 1)
        core.kill()
        failed = response.result()
        assert failed.status_code == 503
        assert failed.json()["error"]["code"] == "engine_unavailable"
        assert pair.post(new_request(rng)).status_code == 503
    wait_for_others(pair, workers)
    answer_of(pair.post(new_request(rng)))


def test_workers_that_can_not_share_the_model_are_refused() -> None:
    check_workers(BUILT_IN_MODELS / "shapes", 2)
    with pytest.raises(ConfigError, match=r"4 attention heads .* 3 engine workers"):
        check_workers(BUILT_IN_MODELS / "shapes", 3)
    with pytest.raises(ConfigError, match=r"2 key-value heads .* 4 engine workers"):
        check_workers(BUILT_IN_MODELS / "shapes", 4)
