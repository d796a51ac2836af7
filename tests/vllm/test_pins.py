"""Pins of features end when vLLM has encoded them: answers that are being written hold none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from afferent.store.client.daemon_store import DaemonStore
from afferent.types import ObjectKind
from tests.images import encoded, photo
from tests.larger import larger_model
from tests.server import Server, data_url, wait_until
from tests.vllm.servers import TOOLS, supervised

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_REQUESTS = 8
TIMES, SIDE = 64, 1344
"""Pictures of 2,304 rows have features of 5.4 MB: four of them fit into an arena of 32 MiB."""
MAX_FIT = 4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("pins")
    path, model = folder / "store.sock", larger_model(folder, TIMES)
    arena = ("--arena-nbytes", "32MiB", "--admission-timeout-s", "600")
    with supervised("--store-path", str(path), *arena, model=model, vllm=TOOLS) as running:
        yield running, path


def body(number: int, **more: Any) -> dict[str, Any]:
    picture = encoded(photo(SIDE, SIDE - 28 * (number % 2), seed=number), "JPEG")
    url = data_url(picture, "image/jpeg")
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return {"model": "shapes", "messages": [{"role": "user", "content": parts}], **more}


def ask(server: Server, asked: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=600)


def num_running(server: Server) -> int:
    page = server.get("/metrics").text
    found = re.findall(r"(?m)^vllm:num_requests_running\{.*\} (\S+)$", page)
    return int(sum(map(float, found)))


def test_all_requests_are_in_vllm_at_the_same_time(small: tuple[Server, Path]) -> None:
    server, path = small
    with (
        ThreadPoolExecutor(NUM_REQUESTS) as threads,
        DaemonStore(str(path), name="looker") as store,
    ):
        capacity_nbytes = store.stat().kinds[ObjectKind.FEATURES].capacity_nbytes
        futures = [
            threads.submit(ask, server, body(number, max_tokens=100, ignore_eos=True))
            for number in range(NUM_REQUESTS)
        ]
        most = 0

        def all_are_there() -> bool:
            nonlocal most
            most = max(most, num_running(server))
            return most == NUM_REQUESTS or all(each.done() for each in futures)

        wait_until(all_are_there, timeout_s=600)
        held_nbytes = store.stat().kinds[ObjectKind.FEATURES].held_nbytes
        answers = [each.result() for each in futures]
        (largest,) = store.list_objects(ObjectKind.FEATURES, limit=1)
        assert (MAX_FIT + 1) * largest.handle.nbytes > capacity_nbytes
        print(f"{most} requests at a time, with {held_nbytes} of {capacity_nbytes} bytes pinned")
    assert [answer.status_code for answer in answers] == [200] * NUM_REQUESTS
    assert all(answer.json()["usage"]["completion_tokens"] == 100 for answer in answers)
    assert most == NUM_REQUESTS
    assert answers[0].json()["usage"]["prompt_tokens"] > 2300


def test_pins_of_a_request_with_several_answers_last(small: tuple[Server, Path]) -> None:
    """vLLM computes its prompt several times, and could need the features again."""
    server, path = small
    with (
        ThreadPoolExecutor(1) as threads,
        DaemonStore(str(path), name="looker") as store,
    ):
        wait_until(lambda: store.stat().held_nbytes == 0)
        asked = body(20, n=2, max_tokens=300, ignore_eos=True)
        future = threads.submit(ask, server, asked)
        wait_until(lambda: num_running(server) == 2 or future.done(), timeout_s=120)
        assert store.stat().kinds[ObjectKind.FEATURES].held_nbytes > 0
        assert future.result().status_code == 200
        wait_until(lambda: store.stat().held_nbytes == 0)
