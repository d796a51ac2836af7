"""Each family that features are made for: as stock vLLM answers on the same folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from afferent.testing.images import draw_image
from tests import models
from tests.engine import families
from tests.server import data_url
from tests.vllm.asking import ask_all
from tests.vllm.questions import Question
from tests.vllm.servers import Stock, supervised

pytestmark = pytest.mark.vllm

MAKERS: dict[str, Callable[[Path], None]] = {
    "qwen2_5_vl": lambda folder: families.make_qwen_vl(folder, "qwen2_5_vl"),
    "qwen3_vl": lambda folder: families.make_qwen_vl(folder, "qwen3_vl"),
    "llava": models.make_llava,
    "gemma3": families.make_gemma3,
    "internvl": families.make_internvl,
    "idefics3": families.make_idefics3,
}


def ask(number: int, seed: int) -> list[Question]:
    rng = np.random.default_rng(seed)
    asked = []
    for _ in range(number):
        shown = [draw_image(rng) for _ in range(int(rng.integers(1, 3)))]
        parts: list[Any] = [
            {"type": "image_url", "image_url": {"url": data_url(each)}} for each in shown
        ]
        body = {
            "model": "tiny",
            "messages": [
                {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}
            ],
            "max_tokens": 12,
            "temperature": 0,
        }
        asked.append(Question("/v1/chat/completions", body, False))
    return asked


@pytest.mark.parametrize("name", MAKERS)
def test_as_stock_answers(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    MAKERS[name](folder)
    asked = ask(8, 3)
    limits = ("--limit-mm-per-prompt", '{"image":4,"video":0}')
    with Stock(folder, "--served-model-name", "tiny", *limits) as stock:
        expected = asyncio.run(ask_all(stock.url, asked))
        rendered = [_rendered(stock.url, each) for each in asked]
    with supervised(model=folder, vllm=limits) as server:
        found = asyncio.run(ask_all(server.url, asked))
        assert [_rendered(server.url, each) for each in asked] == rendered
        ways = {k: v for k, v in server.metrics().items() if "upstream_items" in k}
    assert [each.said for each in found] == [each.said for each in expected]
    assert all(each.said is not None and each.said.status == 200 for each in found), found
    assert list(ways) == ['afferent_upstream_items_total{modality="image",way="features"}']


def _rendered(url: str, question: Question) -> Any:
    """The prompt's tokens."""
    path = f"{url}/v1/chat/completions/render"
    answer = httpx.post(path, json=question.body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["token_ids"]
