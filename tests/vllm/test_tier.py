"""Two nodes with a vLLM each and one tier: an item is encoded by one of them only."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from afferent.conformance.images import DrawnImage, draw_image
from tests.larger import larger_model
from tests.server import Server, data_url, wait_until
from tests.tier.servers import RedisServer
from tests.vllm.asking import ask_all
from tests.vllm.questions import Question, Said
from tests.vllm.servers import supervised, wait_until_nothing_held

pytestmark = pytest.mark.vllm

NUM_PICTURES = 6
SIDE = 1600
"""So large that a fetch of the embeddings is worth its time from the first one on."""


def questions(first: int, number: int) -> list[Question]:
    """Return questions about one new image each."""
    asked = []
    for seed in range(first, first + number):
        drawn = draw_image(np.random.default_rng(seed), max_side=400)
        large = drawn.image.resize((SIDE, SIDE), Image.Resampling.NEAREST)
        shown = DrawnImage(colour=drawn.colour, shape=drawn.shape, image=large)
        part = {"type": "image_url", "image_url": {"url": data_url(shown.encode(quality=60))}}
        content = [part, {"type": "text", "text": "What is in the picture?"}]
        body = {
            "model": "shapes",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 12,
            "temperature": 0,
        }
        asked.append(Question("/v1/chat/completions", body, is_stream=False))
    return asked


def answers(server: Server, asked: list[Question]) -> list[Said | None]:
    found = asyncio.run(ask_all(server.url, asked, num_at_once=1))
    assert all(each.said is not None and each.said.status == 200 for each in found), found
    return [each.said for each in found]


def count(server: Server, name: str, outcome: str) -> float:
    return server.metrics().get(f'{name}{{outcome="{outcome}"}}', 0.0)


def items(server: Server, outcome: str) -> float:
    """Return a count of vLLM's worker."""
    return count(server, "afferent_vllm_items_total", outcome)


def test_what_one_vllm_has_encoded_the_other_finds(tmp_path: Path) -> None:
    """Without the tier, each node encodes for itself, without failures or leaked pins."""
    model = larger_model(tmp_path)
    stores = [tmp_path / "one.sock", tmp_path / "two.sock"]
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        one, two = (
            stack.enter_context(
                supervised(
                    *("--store-path", str(path), "--embeddings-share", "0.2"),
                    *("--tier", redis.url, "--fleet-secret", "a-secret-of-both"),
                    model=model,
                )
            )
            for path in stores
        )
        wait_until(lambda: two.metric("afferent_tier_up") == 1)
        known = questions(1, NUM_PICTURES)
        expected = answers(one, known)
        wait_until(lambda: items(one, "encoded") == NUM_PICTURES)
        wait_until(lambda: count(one, "afferent_tier_kept_total", "kept") == 2 * NUM_PICTURES)
        assert answers(two, known) == expected
        time.sleep(3)  # counters of vLLM's worker are sent once a second
        print({word: items(two, word) for word in ("encoded", "found", "lost")})
        assert items(two, "found") == NUM_PICTURES
        assert items(two, "encoded") == 0
        redis.kill()
        new = questions(100, 3)
        expected = answers(one, new)
        assert answers(two, new) == expected
        time.sleep(3)
        assert items(two, "encoded") == 3
        for path in stores:
            wait_until_nothing_held(path)
