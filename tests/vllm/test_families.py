"""Each family answers as a stock vLLM with the same model folder, and makes the same features."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2 as httpx
import numpy as np
import pytest

from afferent.engines.vllm.media import type_of
from tests.images import encoded, in_mode, oriented, photo
from tests.media_files import make_audio, make_video, tone
from tests.server import Server
from tests.vllm.models_page import read_table
from tests.vllm.servers import Stock, run_inside
from tests.vllm.tiny_models import (
    ARGUMENTS,
    BOTH,
    CLIPS,
    FILMS,
    IMAGES,
    SPOKEN,
    UPRIGHT,
    widen_heads,
)

pytestmark = pytest.mark.vllm

NUM_REQUESTS: Final = int(os.environ.get("TEST_FAMILY_REQUESTS", "100"))
FORMATS: Final = {
    "PNG": ("RGB", "L", "P", "RGBA", "LA", "1"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
}


@pytest.fixture(autouse=True)
def _heads(monkeypatch: pytest.MonkeyPatch) -> None:
    widen_heads(monkeypatch)


def ask(number: int, seed: int) -> list[dict[str, Any]]:
    """Return questions about one to three images of many sizes, formats, modes and orientations.

    Words separate the images, since stock vLLM can't render two adjacent images of Gemma 3.
    """
    return _ask(number, seed, may_be_turned=True)


def ask_upright(number: int, seed: int) -> list[dict[str, Any]]:
    """Return questions about one to three images without orientations.

    Mistral's own tokenizer does not turn images, and vLLM does: it fails where the sides differ.
    """
    return _ask(number, seed, may_be_turned=False)


def _ask(number: int, seed: int, *, may_be_turned: bool) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    asked = []
    for _ in range(number):
        urls = [_picture(rng, may_be_turned=may_be_turned) for _ in range(rng.integers(1, 4))]
        asked.append(_body([{"type": "image_url", "image_url": {"url": url}} for url in urls]))
    return asked


def _picture(rng: np.random.Generator, *, may_be_turned: bool = True) -> str:
    width, height = (int(side) for side in rng.integers(24, 240, 2))
    format_ = str(rng.choice(list(FORMATS)))
    image = in_mode(
        photo(width, height, int(rng.integers(1 << 30))), str(rng.choice(FORMATS[format_]))
    )
    options: dict[str, Any] = {}
    if may_be_turned and format_ in ("PNG", "JPEG") and rng.integers(3) == 0:
        options["exif"] = oriented(int(rng.integers(1, 9)))
    data = base64.b64encode(encoded(image, format_, **options)).decode()
    return f"data:image/{format_.lower()};base64,{data}"


def ask_clips(number: int, seed: int) -> list[dict[str, Any]]:
    """Return questions about clips of several lengths, one longer than the model's limit."""
    return _ask_clips(number, seed, max_channels=2)


def ask_mono(number: int, seed: int) -> list[dict[str, Any]]:
    """Return questions about clips of one channel: Mistral's own tokenizer refuses others."""
    return _ask_clips(number, seed, max_channels=1)


def _ask_clips(number: int, seed: int, *, max_channels: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    asked = []
    for index in range(number):
        long_s = 31.0 if index == 0 else None
        parts = [_clip(rng, long_s, max_channels) for _ in range(rng.integers(1, 3))]
        asked.append(_body(parts))
    return asked


def ask_both(number: int, seed: int) -> list[dict[str, Any]]:
    """Return questions about images, a clip, or both.

    There is one clip at most: stock vLLM fills up the clips of a request to the longest one, which
    changes the last spectrum of the others for Qwen3-Omni.
    """
    rng = np.random.default_rng(seed)
    asked = []
    for index in range(number):
        parts: list[Any] = []
        if index % 3:
            urls = [_picture(rng) for _ in range(rng.integers(1, 4))]
            parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        if index % 3 != 1:
            clip = _clip(rng, 6.0 if index == 0 else None)
            parts.insert(int(rng.integers(len(parts) + 1)), clip)
        asked.append(_body(parts))
    return asked


def _clip(
    rng: np.random.Generator, long_s: float | None = None, max_channels: int = 2
) -> dict[str, Any]:
    long_s = float(rng.uniform(0.2, 4.0)) if long_s is None else long_s
    sound = tone(
        long_s, channels=int(rng.integers(1, max_channels + 1)), seed=int(rng.integers(99))
    )
    sound += rng.normal(0, 0.05, sound.shape).astype(np.float32)
    form, subtype = [("WAV", None), ("WAV", "FLOAT"), ("FLAC", None)][int(rng.integers(3))]
    data = base64.b64encode(make_audio(sound, 16_000, form, subtype)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": form.lower()}}


def ask_videos(number: int, seed: int) -> list[dict[str, Any]]:
    """Return questions about videos of several lengths, rates and sizes, some beside an image.

    Frames have 66 pixels or more: with smaller ones, x265 writes beyond its memory.
    """
    rng = np.random.default_rng(seed)
    asked = []
    for index in range(number):
        video = make_video(
            ("h264", "hevc")[index % 2],
            num_frames=int(rng.integers(4, 90)),
            rate=(30, 25, 12)[index % 3],
            width=2 * int(rng.integers(33, 100)),
            height=2 * int(rng.integers(33, 100)),
        )
        url = "data:video/mp4;base64," + base64.b64encode(video).decode()
        parts: list[Any] = [{"type": "video_url", "video_url": {"url": url}}]
        if index % 3 == 2:
            image = {"type": "image_url", "image_url": {"url": _picture(rng)}}
            parts.insert(index % 2, image)
        asked.append(_body(parts))
    return asked


_MOST_OF_BOTH = '{"image":4,"audio":1,"video":0}'
CASES = [
    *((make, ask, {"image"}, '{"image":4,"video":0}') for make in IMAGES.values()),
    *((make, ask_clips, {"audio"}, '{"audio":4}') for make in CLIPS.values()),
    *((make, ask_both, {"image", "audio"}, _MOST_OF_BOTH) for make in BOTH.values()),
    *((make, ask_videos, {"image", "video"}, '{"image":4,"video":2}') for make in FILMS.values()),
    *((make, ask_upright, {"image"}, '{"image":4}') for make in UPRIGHT.values()),
    *((make, ask_mono, {"audio"}, '{"audio":4}') for make in SPOKEN.values()),
]


PROCESSED: Final = {**IMAGES, **CLIPS, **BOTH, **UPRIGHT, **SPOKEN}


@pytest.mark.parametrize("make", PROCESSED.values(), ids=PROCESSED)
def test_features_are_the_inputs_that_vllm_makes(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    """Prompt and inputs of the encoder are equal, to the last bit of images."""
    make(tmp_path)
    assert "are equal" in run_inside("tests.vllm.processors", str(tmp_path), "200")


@pytest.mark.parametrize(
    ("make", "asks", "kinds", "most"),
    CASES,
    ids=[*IMAGES, *CLIPS, *BOTH, *FILMS, *UPRIGHT, *SPOKEN],
)
def test_as_stock_answers(
    make: Callable[[Path], None],
    asks: Callable[[int, int], list[dict[str, Any]]],
    kinds: set[str],
    most: str,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    make(folder)
    asked = asks(NUM_REQUESTS, 3)
    common = ("--served-model-name", "tiny", "--limit-mm-per-prompt", most)
    common += ARGUMENTS.get(make, ())
    with Stock(folder, *common, "--enable-scale-out") as stock:
        expected = [_answer(stock.url, each) for each in asked]
        rendered = [_rendered(stock.url, each) for each in asked]
    store_path, uds = tmp_path / "store.sock", tmp_path / "vllm.sock"
    front = ["--engine", "vllm", "--engine-url", f"unix:{uds}", "--store-path", str(store_path)]
    place = {"AFFERENT_STORE_PATH": str(store_path)}
    with (
        Stock(folder, *common, "--enable-scale-out", uds=uds, **place),
        Server(str(folder), *front) as server,
    ):
        found = [_answer(server.url, each) for each in asked]
        assert [_rendered(server.url, each) for each in asked] == rendered
        ways = {k: v for k, v in server.metrics().items() if "upstream_items" in k}
    name = 'afferent_upstream_items_total{{modality="{}",way="features"}}'
    assert {each for each, number in ways.items() if number} == {
        name.format(kind) for kind in kinds
    }
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
    first = [each.logprobs[0] for each in expected]
    assert np.std(first) > 1e-3, "whatever the image is, the answer is the same"


def test_table_of_models_names_the_compared_media(tmp_path: Path) -> None:
    """Each row with features in docs/models.md is compared by this file, with exactly its media."""
    compared: dict[str, set[str]] = {"qwen2_vl": {"image"}}  # tests/vllm/test_oracle.py
    for number, (make, _, kinds, _) in enumerate(CASES):
        (folder := tmp_path / str(number)).mkdir()
        make(folder)
        compared.setdefault(type_of(folder), set()).update(kinds)
    assert {row.model_type: row.media for row in read_table() if row.media} == compared


def _body(parts: list[Any]) -> dict[str, Any]:
    shown = [each for part in parts for each in (part, {"type": "text", "text": "this"})]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": shown}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
    }


@dataclass(frozen=True, slots=True)
class _Answer:
    tokens: list[str]
    logprobs: list[float]


def _answer(url: str, body: dict[str, Any]) -> _Answer:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    content = answer.json()["choices"][0]["logprobs"]["content"]
    return _Answer([each["token"] for each in content], [each["logprob"] for each in content])


def _rendered(url: str, body: dict[str, Any]) -> Any:
    """Return the tokens of the prompt."""
    path = f"{url}/v1/chat/completions/render"
    answer = httpx.post(path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["token_ids"]
