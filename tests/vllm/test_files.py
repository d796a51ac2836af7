"""For image files of every format, the answers are those of a stock vLLM."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from afferent.conformance.images import draw_image
from tests.images import encoded, in_mode, oriented
from tests.vllm.servers import SHAPES, Stock, supervised

pytestmark = pytest.mark.vllm

FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AVIF", {}),
    ("AVIF", {"exif": oriented(8)}),
    ("TIFF", {}),
    ("TIFF", {"compression": "tiff_lzw", "exif": oriented(6)}),
    ("BMP", {}),
    ("ICO", {}),
    ("JPEG2000", {}),
    ("JPEG2000", {"no_jp2": True}),
    ("PPM", {}),
    ("TGA", {}),
    ("JPEG", {"xmp": b'<x tiff:Orientation="3"/>'}),
)


def parts() -> Iterator[dict[str, Any]]:
    drawn = draw_image(np.random.default_rng(3)).image.convert("RGB")
    files = [encoded(drawn, name, **parameters) for name, parameters in FORMATS]
    files += [encoded(in_mode(drawn, "I;16"), name) for name in ("PNG", "TIFF", "PPM")]
    files += [encoded(in_mode(drawn, "RGBA"), name) for name in ("TIFF", "AVIF", "TGA")]
    files.append(encoded(drawn.crop((0, 0, 1, 60)), "PNG"))
    for file in files:
        url = "data:image/any;base64," + base64.b64encode(file).decode()
        yield {"type": "image_url", "image_url": {"url": url}}
    frame = base64.b64encode(encoded(drawn, "JPEG")).decode()
    url = f"data:video/jpeg;base64,{frame},{frame},{frame},{frame}"
    yield {"type": "video_url", "video_url": {"url": url}}


def answers(url: str) -> list[tuple[int, str, int]]:
    found = []
    for part in parts():
        text = {"type": "text", "text": "What is in the picture?"}
        body = {
            "model": "shapes",
            "messages": [{"role": "user", "content": [part, text]}],
            "temperature": 0,
            "max_tokens": 12,
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        if answer.status_code != 200:
            found.append((answer.status_code, "", 0))
            continue
        said = answer.json()
        content = said["choices"][0]["message"]["content"]
        found.append((200, content, said["usage"]["prompt_tokens"]))
    return found


def test_files_of_every_format_are_answered_as_by_a_stock_vllm() -> None:
    with Stock(SHAPES, "--served-model-name", "shapes") as stock:
        expected = answers(stock.url)
    assert sum(status == 200 for status, _, _ in expected) >= len(FORMATS)
    with supervised() as server:
        assert answers(server.url) == expected
