"""Real servers with OpenAI's chat completions behind Afferent, compared with themselves alone."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from afferent.conformance.images import draw_image
from tests import models
from tests.end_to_end.replicas import CHAT
from tests.images import encoded, photo
from tests.media.media_host import media_host, send
from tests.ports import free_port
from tests.server import Server, data_url, wait_until
from tests.vllm.servers import SHAPES, Stock
from tools import llama_env, serve_env

PYTHON = serve_env.FOLDER / "bin" / "python"
LLAMA = llama_env.FOLDER / "bin" / "python"
START_TIMEOUT_S = 300.0
LLAVA = "llava"

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@contextlib.contextmanager
def serving(folder: Path, command: list[str], path: str) -> Iterator[str]:
    """Run a server, whose port comes last in its command; yield its URL.

    Args:
        path: It is ready when it answers here.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for name in ("HOST", "PORT"):  # llama.cpp's server prefers them to its arguments
        env.pop(name, None)
    with (folder / "log").open("w") as log:
        engine = subprocess.Popen([*command, str(port)], env=env, stdout=log, stderr=log)
    try:
        wait_until(
            lambda: answers(url + path) or engine.poll() is not None, timeout_s=START_TIMEOUT_S
        )
        assert engine.poll() is None, (folder / "log").read_text()
        yield url
    finally:
        engine.terminate()
        engine.wait(30)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=5).status_code == 200
    return False


@dataclass(frozen=True, slots=True)
class Engine:
    url: str
    model: str


@contextlib.contextmanager
def transformers_serve(folder: Path) -> Iterator[Engine]:
    if not PYTHON.exists():
        pytest.skip("no environment for it: make setup-engines")
    models.make_llava(folder)
    command = [str(PYTHON), "-m", "transformers.cli.transformers", "serve", str(folder)]
    command += ["--device", "cpu", "--host", "127.0.0.1", "--port"]
    with serving(folder, command, "/health") as url:
        yield Engine(url, str(folder))


@contextlib.contextmanager
def llama_cpp(folder: Path) -> Iterator[Engine]:
    if not (llama_env.FOLDER / ".ready").exists():
        pytest.skip("no environment for it: make setup-llama")
    subprocess.run([LLAMA, "-m", "tests.gguf_llava", folder], check=True)
    command = [str(LLAMA), "-m", "llama_cpp.server", "--model", str(folder / "text.gguf")]
    command += ["--clip_model_path", str(folder / "vision.gguf"), "--chat_format", "llava-1-5"]
    command += [
        "--model_alias",
        LLAVA,
        "--n_ctx",
        "2048",
        "--n_threads",
        "1",
        "--host",
        "127.0.0.1",
        "--port",
    ]
    with serving(folder, command, "/v1/models") as url:
        yield Engine(url, LLAVA)


@contextlib.contextmanager
def stock_vllm(_: Path) -> Iterator[Engine]:
    """Run vLLM without Afferent's plugin."""
    with Stock() as stock:
        yield Engine(stock.url, str(SHAPES))


@pytest.fixture(scope="module", params=[transformers_serve, llama_cpp, stock_vllm])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with request.param(tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    with media_host({"/a.png": send(FILES["PNG"])}) as address:
        yield address


@pytest.fixture(scope="module")
def server(engine: Engine, host: str) -> Iterator[Server]:
    with Server("--engine", "openai", "--engine-url", engine.url, "--fetch-allow", host) as running:
        yield running


PHOTO = photo(90, 70, seed=1)
FILES = {
    "PNG": encoded(PHOTO, "PNG"),
    "WEBP": encoded(PHOTO, "WEBP", lossless=True),
    "GIF": encoded(PHOTO, "GIF"),
}


def url_of(kind: str) -> str:
    return f"data:image/{kind.lower()};base64,{base64.b64encode(FILES[kind]).decode()}"


def body(engine: Engine, url: str, **more: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    messages = [{"role": "user", "content": content}]
    return {"model": engine.model, "messages": messages, "max_tokens": 12, "temperature": 0, **more}


def text_of(url: str, asked: dict[str, Any]) -> str:
    answer = httpx.post(url + CHAT, json=asked, timeout=300)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_engine_behind_afferent_answers_as_alone(engine: Engine, server: Server) -> None:
    expected = text_of(engine.url, body(engine, url_of("PNG")))
    assert expected
    assert text_of(server.url, body(engine, url_of("PNG"))) == expected
    assert text_of(server.url, body(engine, url_of("WEBP"))) == expected, "it has the same pixels"
    other = text_of(engine.url, body(engine, url_of("GIF")))
    assert text_of(server.url, body(engine, url_of("GIF"))) == other


def test_format_that_the_engine_refuses_is_answered(engine: Engine, server: Server) -> None:
    if engine.model != LLAVA or shutil.which("ffmpeg"):
        pytest.skip("this engine reads WebP; llama.cpp's does with ffmpeg")
    asked = body(engine, url_of("WEBP"))
    assert httpx.post(engine.url + CHAT, json=asked, timeout=300).status_code == 500
    assert text_of(server.url, asked) == text_of(engine.url, body(engine, url_of("PNG")))
    other = encoded(photo(90, 70, seed=2), "PNG")
    assert text_of(server.url, asked) != text_of(server.url, body(engine, data_url(other, "png")))


def test_engine_gets_what_was_fetched_here(engine: Engine, server: Server, host: str) -> None:
    expected = text_of(engine.url, body(engine, url_of("PNG")))
    assert text_of(server.url, body(engine, f"http://{host}/a.png")) == expected


def test_engine_streams(engine: Engine, server: Server) -> None:
    asked = body(engine, url_of("WEBP"), stream=True)
    with httpx.stream("POST", server.url + CHAT, json=asked, timeout=300) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert answer.status_code == 200
    assert len(lines) > 2
    assert "[DONE]" in lines[-1] or '"finish_reason"' in lines[-1]


def test_models_are_those_of_the_engine(engine: Engine, server: Server) -> None:
    alone, behind = (httpx.get(f"{url}/v1/models", timeout=60) for url in (engine.url, server.url))
    names = [[each["id"] for each in answer.json()["data"]] for answer in (alone, behind)]
    assert names[0] == names[1]


def test_vllm_finds_an_item_by_the_name_of_a_gateway(engine: Engine) -> None:
    if engine.model != str(SHAPES):
        pytest.skip("only vLLM knows names")
    unknown = body(engine, "")
    unknown["messages"][0]["content"][1] = {"type": "image_url", "image_url": None, "uuid": "new"}
    assert httpx.post(engine.url + CHAT, json=unknown, timeout=300).status_code == 400
    rng = np.random.default_rng(0)
    drawn = [draw_image(rng, colour=colour, max_side=200) for colour in ("red", "blue")]
    bodies = [body(engine, data_url(each)) for each in drawn]
    expected = [text_of(engine.url, each) for each in bodies]
    assert expected[0] != expected[1], "the names would not matter"
    arguments = ("--engine", "openai", "--engine-url", engine.url, "--engine-names", "vllm")
    with Server(*arguments) as gateway:
        for _ in range(3):
            assert [text_of(gateway.url, each) for each in bodies] == expected
        counts = {key: value for key, value in gateway.metrics().items() if "named_items" in key}
    assert sorted(counts.values()) == [0, 4]
