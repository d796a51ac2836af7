"""vLLM's scheduler with preemptions, and with speculative decoding."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

from afferent.conformance.images import draw_image
from tests.server import Server, data_url
from tests.vllm.asking import ask_all
from tests.vllm.questions import Question, Said
from tests.vllm.servers import SHAPES, Stock, supervised, wait_until_nothing_held

pytestmark = pytest.mark.vllm

SEED = 11
NUM_QUESTIONS = 16
_BEGINNING = "Look at what is shown here, and then say what it is. " * 8
"""Longer than one of vLLM's blocks, so that prefixes are cached."""
_MODES = {
    # Memory for about three questions: most of eight concurrent ones are preempted.
    "num_preemptions": ("--max-model-len", "768", "--num-gpu-blocks-override", "8"),
    "spec_decode_num_accepted_tokens": (
        "--speculative-config",
        '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3,"prompt_lookup_min":1}',
    ),
}
"""Arguments by the name of the counter that shows their effect."""


@pytest.fixture(scope="module")
def expected() -> list[Said | None]:
    """Return the answers of a stock vLLM without these modes, one question at a time."""
    with Stock(SHAPES, "--served-model-name", "shapes", "--no-enable-prefix-caching") as stock:
        found = asyncio.run(ask_all(stock.url, _questions(), num_at_once=1))
    assert all(each.said is not None and each.said.status == 200 for each in found), found
    return [each.said for each in found]


@pytest.mark.parametrize("counter", _MODES)
def test_the_answers_are_the_same(
    counter: str, expected: list[Said | None], tmp_path: Path
) -> None:
    """Prefix caching and chunked prefill are on, as they are by default."""
    store_path = tmp_path / "store.sock"
    chunks = ("--max-num-batched-tokens", "256", "--enable-chunked-prefill")
    with supervised(
        *("--store-path", str(store_path), "--embeddings-share", "0.2"),
        vllm=(*_MODES[counter], *chunks),
    ) as server:
        for _ in range(2):
            found = asyncio.run(ask_all(server.url, _questions(), num_at_once=8))
            assert [each.said for each in found] == expected
        happened, prefixes = (_counted(server, name) for name in (counter, "prefix_cache_hits"))
        print(f"{counter} {happened:g}, tokens of prefixes found {prefixes:g}")
        assert happened > 0
        assert prefixes > 0
        wait_until_nothing_held(store_path)


def _questions() -> list[Question]:
    """Return questions with long answers."""
    rng = np.random.default_rng(SEED)
    asked = []
    for _ in range(NUM_QUESTIONS):
        shown = [draw_image(rng) for _ in range(int(rng.integers(1, 4)))]
        parts = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in shown]
        text = {"type": "text", "text": "What is in the picture?"}
        content = [{"type": "text", "text": _BEGINNING}, *parts, text]
        body = {
            "model": "shapes",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 150,
            "ignore_eos": True,
            "temperature": 0,
        }
        asked.append(Question("/v1/chat/completions", body, is_stream=False))
    return asked


def _counted(server: Server, name: str) -> float:
    page = server.get("/metrics").text
    return sum(float(each) for each in re.findall(rf"^vllm:{name}_total\S* (\S+)$", page, re.M))
