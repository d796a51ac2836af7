"""Transcriptions of a real vLLM whose audio is in the arena: equal to those of a stock one."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import soundfile  # type: ignore[import-untyped]

from tests.media_files import make_av_audio, tone
from tests.server import Server, wait_until
from tests.vllm.servers import Stock, supervised
from tests.vllm.tiny_models import make_qwen3_asr, make_whisper

pytestmark = pytest.mark.vllm

NAME = "asr"
NUM_REQUESTS = 100
SEED = 20261128
FORMATS = ("WAV", "FLAC", "OGG", "MP3", "M4A")
MODELS: Mapping[str, Callable[[Path], None]] = {
    "whisper": make_whisper,
    "qwen3_asr": make_qwen3_asr,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One form."""

    path: str
    fields: Sequence[tuple[str, str]]
    file: bytes
    name: str


def audio(seconds: float, rate_hz: int, channels: int, format: str, seed: int) -> bytes:
    samples = tone(seconds, rate_hz, channels=channels, seed=seed)
    if format == "M4A":
        return make_av_audio(samples, rate_hz, "aac", "mp4")
    soundfile.write(file := io.BytesIO(), samples, rate_hz, format=format)
    return file.getvalue()


def forms(model: str) -> Iterator[Asked]:
    """Yield forms with clips of many lengths and formats, some longer than the model takes."""
    rng = np.random.default_rng(SEED)
    formats = ["json", "text", *(["verbose_json"] if model == "whisper" else [])]
    for index in range(NUM_REQUESTS):
        is_stream = bool(rng.random() < 0.2)
        fields = [
            ("model", NAME),
            ("temperature", "0"),
            ("max_completion_tokens", str(int(rng.integers(2, 12)))),
            ("response_format", "json" if is_stream else str(rng.choice(formats))),
        ]
        if rng.random() < 0.6:
            fields.append(("language", str(rng.choice(["en", "de", "zh"]))))
        if rng.random() < 0.3:
            fields.append(("prompt", "What is in the picture? Ü"))
        if is_stream:
            fields.append(("stream", "true"))
        if rng.random() < 0.2:
            fields += [("timestamp_granularities[]", each) for each in ("word", "segment")]
        path = "transcriptions" if rng.random() < 0.7 else "translations"
        format = FORMATS[index % len(FORMATS)]
        file = audio(
            float(rng.choice([0.3, 1.0, 1.9, 3.5, 11.0])),
            int(rng.choice([16_000, 44_100, 48_000])),
            int(rng.integers(1, 3)),
            format,
            index,
        )
        yield Asked(f"/v1/audio/{path}", fields, file, f"clip.{format.lower()}")


def ask(url: str, asked: Asked) -> tuple[int, Any]:
    """Return the status and the answer; of a stream, its text and the number of complete clips."""
    files: list[Any] = [(name, (None, value)) for name, value in asked.fields]
    files.append(("file", (asked.name, asked.file, "application/octet-stream")))
    answer = httpx.post(f"{url}{asked.path}", files=files, timeout=120)
    if "json" in answer.headers["content-type"]:
        return answer.status_code, answer.json()
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    return answer.status_code, (
        text,
        [choice.get("finish_reason") for choice in choices].count("stop"),
    )


def is_same(found: Any, expected: Any) -> bool:
    """Whether two answers have equal texts and, to a thousandth, equal log-probabilities."""
    match expected:
        case dict():
            return found.keys() == expected.keys() and all(
                is_same(found[name], each) for name, each in expected.items()
            )
        case list() | tuple():
            return len(found) == len(expected) and all(map(is_same, found, expected))
        case float():
            return math.isclose(found, expected, abs_tol=1e-3)
    return bool(found == expected)


@contextmanager
def behind_afferent(folder: Path) -> Iterator[Server]:
    limit = ("--max-mm-preprocess-concurrency", "1")
    with supervised("--served-model-name", NAME, *limit, model=folder) as server:
        yield server


WRONG = {
    "no audio": b"this is no audio",
    "cut": audio(1.0, 16_000, 1, "FLAC", 0)[:60],
    "a reference of a client": b"afferent:AAAA",
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_answers_are_those_of_a_stock_vllm(model: str, tmp_path: Path) -> None:
    MODELS[model](tmp_path)
    asked = list(forms(model))
    wrong = [
        Asked("/v1/audio/transcriptions", asked[0].fields, each, "x") for each in WRONG.values()
    ]
    with Stock(tmp_path, "--served-model-name", NAME) as stock:
        expected = [ask(stock.url, each) for each in asked]
        refused = [ask(stock.url, each)[0] for each in wrong]
    assert sum(status == 200 for status, _ in expected) >= 0.9 * NUM_REQUESTS, expected
    with behind_afferent(tmp_path) as server:
        found = [ask(server.url, each) for each in asked]
        assert [ask(server.url, each)[0] for each in wrong] == refused
        ways = server.metrics()
        wait_until(
            lambda: server.metrics().get('afferent_permits_taken{semaphore="preprocess"}') == 0
        )
    differing = [
        (each.path, each.fields, each.name, *answers)
        for each, *answers in zip(asked, expected, found, strict=True)
        if not is_same(answers[1], answers[0])
    ]
    assert not differing, f"{len(differing)} differ, seed {SEED}: {differing[:3]}"
    number = ways['afferent_upstream_items_total{modality="audio",way="bytes"}']
    assert number == len(asked) + len(wrong)


KEYS = {"one": "one-0123456789abcdef", "two": "two-0123456789abcdef"}


def hits(server: Server) -> float:
    page = httpx.get(f"{server.url}/metrics", headers=bearer("one"), timeout=60).text
    (number,) = re.findall(r"(?m)^vllm:prefix_cache_hits_total\{.*\} (\S+)$", page)
    return float(number)


def bearer(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


def test_tenants_find_no_prefix_of_each_others_audio(tmp_path: Path) -> None:
    """The clip has more tokens than a block of the prefix cache."""
    make_qwen3_asr(model := tmp_path / "model")
    (file := tmp_path / "afferent.toml").write_text(
        "".join(
            f'[[tenants]]\nname = "{name}"\napi_keys = ["{key}"]\n' for name, key in KEYS.items()
        )
    )
    long = audio(20.0, 16_000, 1, "FLAC", 1)
    form: list[Any] = [("model", (None, NAME)), ("file", ("a.flac", long, "audio/flac"))]
    for settings in ((), ("--config", str(file))):
        with supervised("--served-model-name", NAME, *settings, model=model) as server:
            url = f"{server.url}/v1/audio/transcriptions"
            before = hits(server)
            for tenant in KEYS:
                answer = httpx.post(url, files=form, headers=bearer(tenant), timeout=120)
                assert answer.status_code == 200, answer.text
            assert (hits(server) > before) == (not settings)
