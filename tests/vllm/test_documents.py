"""A real vLLM answers questions about pages of documents and stored files, in each API."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from PIL import Image

from afferent.conformance.images import draw_image
from tests import animations, pdfs
from tests.server import data_url, image_part
from tests.vllm.servers import supervised
from tests.vllm.tiny_models import IMAGES, widen_heads

pytestmark = pytest.mark.vllm


def ask(url: str, path: str, key: str, content: list[Any]) -> Any:
    body = {"model": "shapes", "temperature": 0, key: [{"role": "user", "content": content}]}
    if key == "messages":
        body["max_tokens"] = 12
    answer = httpx.post(f"{url}{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_pages_of_documents_and_stored_files_are_named_by_a_real_vllm(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    drawn = [draw_image(rng, colour=colour, shape="circle") for colour in ("red", "blue", "green")]
    data = pdfs.of_images([each.image for each in drawn])
    encoded = base64.b64encode(data).decode()
    url = f"data:application/pdf;base64,{encoded}"
    scan = io.BytesIO()
    first, *others = (each.image for each in drawn)
    first.save(scan, "TIFF", save_all=True, append_images=others)
    text = "What is in picture 2?"
    with supervised("--files-store", str(tmp_path / "files")) as server:
        said = ask(
            *(server.url, "/v1/chat/completions", "messages"),
            [{"type": "file", "file": {"file_data": url}}, {"type": "text", "text": text}],
        )
        assert said["choices"][0]["message"]["content"] == "a blue circle"
        file = {"type": "input_file", "file_data": url, "filename": "a.pdf"}
        asked = [file, {"type": "input_text", "text": text}]
        said = ask(server.url, "/v1/responses", "input", asked)
        assert said["output"][-1]["content"][0]["text"] == "a blue circle"
        for media_type, content in (
            ("application/pdf", encoded),
            ("image/tiff", base64.b64encode(scan.getvalue()).decode()),
        ):
            source = {"type": "base64", "media_type": media_type, "data": content}
            block = {"type": "document", "source": source}
            asked = [block, {"type": "text", "text": text}]
            said = ask(server.url, "/v1/messages", "messages", asked)
            assert said["content"][0]["text"] == "a blue circle"
        stored = server.client().files.create(file=("a.pdf", data), purpose="user_data").id
        said = ask(
            *(server.url, "/v1/chat/completions", "messages"),
            [{"type": "file", "file": {"file_id": stored}}, {"type": "text", "text": text}],
        )
        assert said["choices"][0]["message"]["content"] == "a blue circle"
        png = server.client().files.create(file=("a.png", drawn[2].encode("PNG")), purpose="vision")
        asked = [
            {"type": "input_image", "file_id": png.id, "detail": "auto"},
            {"type": "input_text", "text": "What is in the picture?"},
        ]
        said = ask(server.url, "/v1/responses", "input", asked)
        assert said["output"][-1]["content"][0]["text"] == "a green circle"
        metrics = server.metrics()
        assert metrics['afferent_upstream_items_total{modality="image",way="bytes"}'] == 0.0
        assert metrics['afferent_document_pages_total{outcome="rendered"}'] == 6.0  # PDF and TIFF


def test_frames_of_a_video_are_images_of_a_model_without_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real vLLM with a LLaVA answers about a video as about its frames."""
    widen_heads(monkeypatch)
    IMAGES["llava"](folder := tmp_path / "llava")
    rng = np.random.default_rng(6)
    frames = [draw_image(rng).image.resize((120, 96)) for _ in range(3)]
    video = animations.saved("GIF", frames, duration=500)
    shown = [Image.fromarray(each) for each in animations.pillows_frames(video)]
    stills = [image_part(data_url(animations.saved("PNG", [each]), "png")) for each in shown]
    film = f"data:image/gif;base64,{base64.b64encode(video).decode()}"
    moving = {"type": "video_url", "video_url": {"url": film}}
    text = {"type": "text", "text": "What is it?"}
    with supervised(model=folder) as server:
        model = server.client().models.list().data[0].id

        def ask_about(parts: list[Any]) -> httpx.Response:
            messages = [{"role": "user", "content": [*parts, text]}]
            body = {"model": model, "messages": messages, "temperature": 0}
            options = {"max_tokens": 8, "logprobs": True}
            answer = httpx.post(
                f"{server.url}/v1/chat/completions", json={**body, **options}, timeout=120
            )
            assert answer.status_code == 200, answer.text
            return answer

        of_video, of_images = ask_about([moving]), ask_about(stills)
        assert of_video.headers["x-afferent-items"] == "made=3"
        assert ask_about([moving]).headers["x-afferent-items"] == "hit=3"
        for key in ("choices", "usage"):
            assert of_video.json()[key] == of_images.json()[key]
