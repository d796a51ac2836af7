"""The answers are those of a stock vLLM, token for token, in every API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest

from tests.server import Server
from tests.vllm.asking import ask_all
from tests.vllm.questions import Question, Said, questions, with_data
from tests.vllm.servers import SHAPES, TOOLS, Stock, supervised, wait_until_nothing_held

pytestmark = pytest.mark.vllm

SEED = 20261122
NUM_QUESTIONS = 400
_CLOSE = 1e-3
"""The order of two tokens may change if their log-probabilities differ by less."""
_KEYS = ("tools", "response_format", "text", "n", "logprobs")
"""Each of these is in some questions."""


@pytest.fixture(scope="module")
def stock() -> Iterator[Stock]:
    with Stock(SHAPES, *TOOLS, "--served-model-name", "shapes") as running:
        yield running


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    store_path = tmp_path_factory.mktemp("vllm") / "store.sock"
    with supervised(
        *("--store-path", str(store_path), "--embeddings-share", "0.2"), vllm=TOOLS
    ) as running:
        yield running, store_path


@pytest.mark.parametrize("has_data", [False, True], ids=["media", "media and data like media"])
def test_as_stock_answers(stock: Stock, ours: tuple[Server, Path], has_data: bool) -> None:
    print(f"seed {SEED}")
    asked = questions(NUM_QUESTIONS, SEED + has_data, "shapes", are_varied=True)
    if has_data:
        rng = np.random.default_rng(SEED)
        asked = [with_data(each, rng) for each in asked]
    server, store_path = ours
    expected = asyncio.run(ask_all(stock.url, [_whole(each) for each in asked]))
    found = asyncio.run(ask_all(server.url, asked))
    differ, num_failed, num_batched, num_compared = [], 0, 0, 0
    for question, theirs, our in zip(asked, expected, found, strict=True):
        assert theirs.said is not None
        if question.aborts is not None and our.said is None:
            continue
        if theirs.said.status >= 500:  # vLLM 0.31 sometimes fails for Responses
            num_failed += 1
            continue
        if our.said == theirs.said and our.said.logprobs == pytest.approx(
            theirs.said.logprobs, abs=_CLOSE
        ):
            num_compared += len(our.said.logprobs)
            continue
        if _is_close(stock, question, our.said, theirs.said):
            continue
        if _agree_alone(stock, server, question):
            num_batched += 1
            continue
        differ.append((question.path, question.is_stream, our, theirs.said))
    counts = [sum(each.path == path for each in asked) for path in {q.path for q in asked}]
    print(
        f"{len(asked)} questions, {counts} of each dialect; {len(differ)} differ, "
        f"stock failed on {num_failed}; {num_batched} differ beside others, and agree alone"
    )
    kinds = {key: sum(key in each.body for each in asked) for key in _KEYS}
    print(f"{kinds}, {num_compared} log-probabilities compared")
    for path, is_stream, our, theirs in differ[:5]:
        print(path, is_stream, our, asdict(theirs), sep="\n  ")
    assert not differ
    assert min(kinds.values()) > 5
    assert num_compared > 300
    assert num_failed <= NUM_QUESTIONS // 100
    assert num_batched <= NUM_QUESTIONS // 100
    wait_until_nothing_held(store_path)
    metrics = server.metrics()
    assert metrics['afferent_upstream_items_total{modality="image",way="features"}'] > 300
    assert metrics['afferent_upstream_items_total{modality="image",way="bytes"}'] == 0.0


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("features", {"max_pixels": 16_000}),
        ("bytes", {"max_pixels": 12_544, "min_pixels": 3_136}),
    ],
)
def test_options_of_the_processor(
    stock: Stock, ours: tuple[Server, Path], way: str, options: dict[str, int]
) -> None:
    """Known options are applied here; with other options, vLLM gets the bytes."""
    asked = questions(18, SEED + 1, "shapes")
    more = {"mm_processor_kwargs": options}
    changed = [
        Question(each.path, {**each.body, **more}, each.is_stream)
        for each in asked
        if each.path == "/v1/chat/completions"
    ]
    server, store_path = ours
    counted = f'afferent_upstream_items_total{{modality="image",way="{way}"}}'
    before = server.metrics().get(counted, 0.0)
    expected = asyncio.run(ask_all(stock.url, changed))
    found = asyncio.run(ask_all(server.url, changed))
    assert [each.said for each in found] == [each.said for each in expected]
    assert all(each.said is not None and each.said.status == 200 for each in found)
    assert server.metrics()[counted] > before
    wait_until_nothing_held(store_path)


def test_what_has_no_media_is_vllms(stock: Stock, ours: tuple[Server, Path]) -> None:
    server, _ = ours
    for path in ("/v1/models", "/version", "/ping"):
        assert server.get(path).status_code == httpx.get(stock.url + path).status_code == 200
    body = {"model": "shapes", "prompt": "What is", "max_tokens": 8, "temperature": 0}
    texts = [
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        for url in (stock.url, server.url)
    ]
    assert texts[0] == texts[1]
    page = server.get("/metrics").text
    assert "vllm:num_requests_running" in page
    assert "afferent_requests_total" in page


def test_nobody_reaches_vllm_by_a_url(ours: tuple[Server, Path]) -> None:
    """vLLM gets no URLs of clients, but only signed media handles."""
    server, _ = ours
    for url in ("http://127.0.0.1:1/x.png", "afferent:AAAA", "file:///etc/passwd"):
        body = {
            "model": "shapes",
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
            ],
        }
        answer = server.post(body)
        assert answer.status_code == 400, answer.text


def _whole(question: Question) -> Question:
    return Question(question.path, question.body, question.is_stream)


def _agree_alone(stock: Stock, server: Server, question: Question) -> bool:
    """Return whether both servers give the same answer three times when they are idle.

    With other requests in the batch, sums of floats have another order, and the order of tokens
    with similar probabilities may change.
    """
    alone = [_whole(question)]
    answers = [
        asyncio.run(ask_all(url, alone))[0].said
        for url in (stock.url, server.url)
        for _ in range(3)
    ]
    return answers[0] is not None and all(each == answers[0] for each in answers)


def _is_close(stock: Stock, question: Question, ours: Said | None, theirs: Said) -> bool:
    """Return whether the first differing tokens have nearly the same probability."""
    if ours is None or question.path != "/v1/chat/completions" or ours.status != 200:
        return False
    if "n" in question.body:  # three answers, which are drawn
        return False
    body = {**question.body, "stream": False, "logprobs": True, "top_logprobs": 2}
    body.pop("stream_options", None)
    answer = httpx.post(f"{stock.url}{question.path}", json=body, timeout=60).json()
    text, ours_text = "", "".join(ours.texts)
    for token in answer["choices"][0]["logprobs"]["content"]:
        text += token["token"]
        if not ours_text.startswith(text):
            one, other = (top["logprob"] for top in token["top_logprobs"][:2])
            return abs(one - other) < _CLOSE
    return False
