"""Prompts of Afferent's renderer against those of ``vllm launch render``."""

from __future__ import annotations

import base64
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from PIL import Image

from tests.images import in_mode, photo
from tests.server import Server
from tests.vllm.servers import SHAPES, Stock
from tests.vllm.test_families import MAKERS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SEED = 11
TEXTS = ("What is in the picture?", "Name  the\ncolour – and the shape.", "", "a<|im_end|>b", "é🎈")
FORMATS: dict[str, tuple[str, ...]] = {
    "PNG": ("RGB", "L", "P", "RGBA", "LA", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
}
_OWN_FAILURE = "mm_placeholders must be globally non-overlapping and sorted"
"""vLLM's renderer fails so for several images with Gemma 3."""
PATHS = {"chat": "/v1/chat/completions/render", "completion": "/v1/completions/render"}


def picture(rng: np.random.Generator) -> str:
    """Return a small picture of any mode, format, size and orientation, as a URL."""
    source = photo(int(rng.integers(30, 200)), int(rng.integers(30, 200)), int(rng.integers(1000)))
    format_ = str(rng.choice(list(FORMATS)))
    image = in_mode(source, str(rng.choice(FORMATS[format_])))
    options: dict[str, Any] = {}
    if format_ in ("PNG", "JPEG") and rng.integers(3) == 0:
        exif = Image.Exif()
        exif[0x0112] = int(rng.integers(1, 9))
        options["exif"] = exif
    if format_ == "WEBP":
        options["lossless"] = bool(rng.integers(2))
    out = io.BytesIO()
    image.save(out, format_, **options)
    data = base64.b64encode(out.getvalue()).decode()
    return f"data:image/{format_.lower()};base64,{data}"


def request(rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
    if rng.integers(12) == 0:
        return "completion", {"model": "tiny", "prompt": TEXTS[0] * int(rng.integers(1, 4))}
    messages: list[dict[str, Any]] = []
    if rng.integers(3) == 0:
        messages.append({"role": "system", "content": "Answer shortly."})
    for turn in range(int(rng.integers(1, 3))):
        if turn:
            messages.append({"role": "assistant", "content": "a red circle"})
        parts: list[Any] = []
        for _ in range(int(rng.integers(0, 4))):
            parts.append({"type": "image_url", "image_url": {"url": picture(rng)}})
            if rng.integers(2):
                parts.append({"type": "text", "text": TEXTS[int(rng.integers(len(TEXTS)))]})
        parts.append({"type": "text", "text": TEXTS[int(rng.integers(len(TEXTS)))]})
        messages.append({"role": "user", "content": parts})
    return "chat", {"model": "tiny", "messages": messages}


def rendered(url: str, kind: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Return the status, and tokens, hashes and placeholders, or the error."""
    answer = httpx.post(f"{url}{PATHS[kind]}", json={**body, "mm_payload": "none"}, timeout=120)
    if answer.status_code != 200:
        return answer.status_code, answer.json().get("error", {}).get("message", "")
    found = answer.json()
    one = found[0] if isinstance(found, list) else found
    features = one.get("features") or {}
    places = features.get("mm_placeholders") or {}
    return 200, {
        "token_ids": one["token_ids"],
        "hashes": features.get("mm_hashes") or {},
        "places": {
            kind: [(each["offset"], each["length"]) for each in found]
            for kind, found in places.items()
        },
    }


def _shapes(folder: Path) -> None:
    for file in SHAPES.iterdir():
        (folder / file.name).symlink_to(file)


@pytest.fixture(params=["shapes", *MAKERS])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str, str]]:
    """A model, and the URLs of vLLM's renderer and of ours."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    make: Callable[[Path], None] = {"shapes": _shapes, **MAKERS}[request.param]
    make(folder)
    arguments = ("--served-model-name", "tiny", "--limit-mm-per-prompt", '{"image":16,"video":0}')
    ours = ("--served-model-name", "tiny", "--render-hashes", "vllm-blake3", "--max-images", "16")
    with (
        Stock(folder, *arguments, command=("launch", "render")) as stock,
        Server(str(folder), *ours, command="render") as server,
    ):
        yield request.param, stock.url, server.url


def test_prompts_are_those_of_vllm(both: tuple[str, str, str]) -> None:
    name, stock, ours = both
    request_count = int(os.environ.get("TEST_RENDER_REQUESTS", "60"))
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    asked = [request(rng) for _ in range(request_count)]
    counts, examples = Counter[str](), dict[str, Any]()

    def compare(each: tuple[str, dict[str, Any]]) -> None:
        (their_status, theirs), (our_status, mine) = rendered(stock, *each), rendered(ours, *each)
        if their_status == 400 and _OWN_FAILURE in theirs:
            what = "vLLM fails"
        elif (their_status, our_status) == (400, 400):
            what = "refused by both"
        elif our_status != 200 or their_status != 200:
            what = f"status {their_status} there, {our_status} here"
        else:
            wrong = [part for part in theirs if theirs[part] != mine[part]]
            what = "other " + ", ".join(wrong) if wrong else "equal"
        counts[what] += 1
        if what not in ("equal", "refused by both", "vLLM fails"):
            examples.setdefault(what, (theirs, mine, json.dumps(each[1])[:300]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compare, asked))
    print(f"{name}: {dict(counts)}")
    for what, example in examples.items():
        print(what, str(example)[:1500])
    assert counts.keys() <= {"equal", "refused by both", "vLLM fails"}
    assert name == "gemma3" or not counts["vLLM fails"]
    assert counts["refused by both"] <= request_count / 20
