"""Video through the official client, and features of the model's own processor."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from afferent.conformance.images import draw_image
from tests.media_files import make_audio, make_video, tone
from tests.server import Server, ask, data_url, wait_until

QUESTION = "What is in the picture?"


def media_part(kind: str, data: bytes) -> dict[str, Any]:
    url = f"data:{kind}/any;base64," + base64.b64encode(data).decode()
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def chat(server: Server, model: str, content: list[dict[str, Any]], **parameters: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    return server.client().chat.completions.create(model=model, messages=messages, **parameters)


def test_a_video_and_a_picture(server: Server, rng: np.random.Generator) -> None:
    """The video's features are made once, though the built-in model was not trained on videos."""
    picture = draw_image(rng)
    video = media_part("video", make_video(num_frames=90, rate=30))
    content = [video, *ask([data_url(picture)], QUESTION)["messages"][0]["content"]]
    before = server.metrics()
    first = chat(server, "shapes", content)
    again = chat(server, "shapes", content)
    assert first.choices[0].message.content == again.choices[0].message.content
    # 3 s at 2 frames a second: 3 pairs of 160 x 96, which become 9 x 5 patches, merged by fours.
    alone = chat(server, "shapes", [video], max_tokens=1)
    silent = chat(server, "shapes", [{"type": "text", "text": ""}], max_tokens=1)
    label = 'afferent_items_total{modality="video",outcome='
    grown = {
        outcome: server.metrics()[f'{label}"{outcome}"}}']
        - before.get(f'{label}"{outcome}"}}', 0.0)
        for outcome in ("made", "hit")
    }
    assert grown == {"made": 1, "hit": 2}
    assert alone.usage.prompt_tokens - silent.usage.prompt_tokens > 3 * 10
    wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)


def test_a_picture_that_is_there_is_no_video(server: Server, rng: np.random.Generator) -> None:
    data = draw_image(rng).encode()
    assert server.post(ask([data_url(data)], QUESTION)).status_code == 200
    with pytest.raises(openai.BadRequestError, match="video"):
        chat(server, "shapes", [media_part("video", data)])


def test_no_thread_of_a_preprocess_worker_has_capabilities(
    server: Server,
) -> None:
    workers = server.idle_preprocess_workers()
    assert workers
    for worker in workers:
        for thread in Path(f"/proc/{worker.pid}/task").iterdir():
            assert re.search(r"^CapPrm:\t0+$", (thread / "status").read_text(), re.MULTILINE)


def test_what_the_model_does_not_take(server: Server) -> None:
    sound = make_audio(tone(0.5), 16_000)
    with pytest.raises(openai.BadRequestError, match="takes no audio"):
        chat(server, "shapes", [media_part("audio", sound)])
    too_many = [media_part("video", b"x")] * 9
    with pytest.raises(openai.BadRequestError, match="9 videos; at most 8"):
        chat(server, "shapes", too_many)
    with pytest.raises(openai.BadRequestError, match="video"):
        chat(server, "shapes", [media_part("video", sound)])


def test_features_of_the_models_own_processor(rng: np.random.Generator) -> None:
    """The answer is the same, and the features need more bytes."""
    picture = draw_image(rng)
    with Server("--processor", "reference", "--preprocess-workers", "1", "--explain") as server:
        answer = server.post(ask([data_url(picture)], QUESTION)).json()
        assert answer["choices"][0]["message"]["content"] == picture.answer
        with server.store() as store:
            sizes = [info.handle.nbytes for info in store.list_objects()]
        tokens = answer["usage"]["prompt_tokens"]
        assert max(sizes) > 10 * 4 * 1176 * 4, f"{sizes} for {tokens} tokens: not floats"
