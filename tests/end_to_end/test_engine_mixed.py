"""Many concurrent requests, chunked prefill, little memory, and clients that disconnect.

Each answer is the one that the request gets alone. ``--storm`` sends 500 requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from afferent.conformance.images import draw_image
from tests import plain_http
from tests.server import Server, ask, data_url, wait_until

NUM_THREADS = 8


@pytest.fixture(scope="module")
def tight() -> Iterator[Server]:
    """A server that has to divide prompts, preempt sequences and evict embeddings."""
    with Server("--arena-nbytes", "64MiB", "--max-num-batched-tokens", "48", "--max-num-seqs", "8",
                "--kv-cache-tokens", "400", "--max-model-len", "400",
                "--encoder-cache-nbytes", "1MiB",
                "--preprocess-memory-nbytes", "256MiB") as server:  # fmt: skip
        yield server


def make_request(rng: np.random.Generator, urls: list[str]) -> dict[str, Any]:
    """Return a request about 0 to 8 of these pictures, some of them twice."""
    chosen = [urls[index] for index in rng.integers(0, len(urls), int(rng.integers(0, 9)))]
    number = int(rng.integers(1, len(chosen) + 1)) if chosen else 0
    questions = ["Name all pictures.", f"What is in picture {number}?"]
    question = questions[int(rng.integers(2))] if chosen else "What is in the picture?"
    return ask(chosen, question, max_tokens=int(rng.integers(1, 80)))


def answer_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.timeout(900)
def test_many_at_a_time_answer_as_each_alone(
    server: Server, tight: Server, rng: np.random.Generator, request: pytest.FixtureRequest
) -> None:
    """Another order of floating-point sums may change a close decision."""
    is_storm = request.config.getoption("--storm")
    num_requests = 500 if is_storm else 40
    urls = [data_url(draw_image(rng, max_side=300)) for _ in range(60)]
    requests = [make_request(rng, urls) for _ in range(num_requests)]
    leaves = rng.random(num_requests) < 0.2
    patience_s = rng.uniform(0.02, 0.6, num_requests)

    def ask_tight(number: int) -> str | None:
        """Return ``None`` if the client has disconnected before the answer."""
        if not leaves[number]:
            return answer_of(tight.post(requests[number]))
        url = f"{tight.url}/v1/chat/completions"
        with contextlib.suppress(httpx.TimeoutException):
            return answer_of(
                plain_http.post(url, json=requests[number], timeout=patience_s[number])
            )
        return None

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        answers = list(threads.map(ask_tight, range(num_requests)))
    pairs = [
        (said, answer_of(server.post(requests[number])))
        for number, said in enumerate(answers)
        if said is not None
    ]
    wrong = [(said, alone) for said, alone in pairs if said != alone]
    wait_until(lambda: tight.metric("afferent_engine_requests_running") == 0)
    stats = {
        name: tight.metric(f"afferent_engine_{name}_total") or 0
        for name in ("steps", "prompt_tokens", "preemptions")
    }
    print(f"\n{len(pairs)} answers, {len(requests) - len(pairs)} left; {stats}; unlike: {wrong}")
    assert len(pairs) >= num_requests * 0.6
    assert len(wrong) <= max(1, len(pairs) // 100), wrong
    assert stats["preemptions"] > 0 or not is_storm
    wait_until(lambda: tight.metrics()["afferent_requests_in_flight"] == 0)
    wait_until(lambda: tight.metric("afferent_arena_pinned_bytes") == 0)
    wait_until(lambda: tight.metric("afferent_arena_reserved_bytes") == 0)
