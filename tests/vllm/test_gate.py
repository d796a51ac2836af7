"""The gate in front of a real vLLM: preparing one at a time, answering many at a time."""

from __future__ import annotations

import json
import re
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import psutil
import pytest

from afferent.store.client.daemon_store import DaemonStore
from afferent.testing.images import draw_image
from tests.images import encoded, photo
from tests.server import Server, data_url, wait_until
from tests.vllm.servers import TOOLS, supervised

pytestmark = pytest.mark.vllm

BYTES = {"mm_processor_kwargs": {"max_pixels": 12_544, "min_pixels": 3_136}}
"""An option that leaves an image to vLLM's processor."""
NUM_REQUESTS = 128
SIZE = (1600, 1200)


def gated(folder: Path, limit: int) -> Server:
    where = ("--store-path", str(folder / "store.sock"))
    many = ("--max-mm-preprocess-concurrency", str(limit), "--admission-timeout-s", "300")
    return supervised(*where, *many, vllm=TOOLS)


@pytest.fixture(scope="module")
def one_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("gate")
    with gated(folder, 1) as running:
        yield running, folder / "store.sock"


def body(url: str, **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return {"model": "shapes", "messages": [{"role": "user", "content": parts}], **more}


@pytest.mark.parametrize("options", [{}, BYTES], ids=["features", "bytes"])
def test_four_answers_are_written_at_a_time(
    one_at_a_time: tuple[Server, Path], options: dict[str, Any], rng: np.random.Generator
) -> None:
    server, store_path = one_at_a_time

    def ask(url: str) -> tuple[float, float]:
        """When the first token and the end of the answer came."""
        asked = body(url, stream=True, max_tokens=300, ignore_eos=True, **options)
        path, first_s = f"{server.url}/v1/chat/completions", 0.0
        with httpx.stream("POST", path, json=asked, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: "))["choices"]
                    if not first_s and choices and choices[0]["delta"].get("content"):
                        first_s = time.monotonic()
        return first_s, time.monotonic()

    urls = [data_url(draw_image(rng)) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads, DaemonStore(str(store_path), name="looker") as store:
        asked = [threads.submit(ask, url) for url in urls]
        most = 0
        while not all(each.done() for each in asked):
            held = store.stat().permits.get("preprocess")
            most = max(most, held.num_held if held else 0)
        times = [each.result() for each in asked]
        wait_until(lambda: store.stat().permits == {})
    firsts, ends = zip(*times, strict=True)
    spread_s, shortest_s = max(firsts) - min(firsts), min(ends) - min(firsts)
    print(f"first tokens within {spread_s:.2f} s, the first answer ends after {shortest_s:.2f} s")
    assert max(firsts) < min(ends), "all four are answered at a time"
    assert most == 1, "and prepared one at a time"


DIALECTS = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]


def unstreamed(path: str, url: str) -> dict[str, Any]:
    """A request for a long answer in one piece, without a name for its image."""
    if path == "/v1/responses":
        part = {"type": "input_image", "image_url": url}
        asked = {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 300}
        return {"model": "shapes", **asked, "ignore_eos": True}
    if path == "/v1/messages":  # which has no `ignore_eos`: at random, the end comes late
        media_type, data = url.removeprefix("data:").split(";base64,")
        source = {"type": "base64", "media_type": media_type, "data": data}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 300}
        return {"model": "shapes", **asked, "temperature": 2.0}
    return body(url, max_tokens=300, ignore_eos=True)


@pytest.mark.parametrize("path", DIALECTS)
def test_answer_in_one_piece_to_forwarded_media_keeps_no_permit(
    one_at_a_time: tuple[Server, Path], path: str
) -> None:
    """The permit comes back when vLLM's processor has returned, not with the first byte."""
    server, store_path = one_at_a_time
    picture = "data:image/bmp;base64," + b64encode(encoded(photo(200, 150), "BMP")).decode()

    def ask() -> float:
        answer = httpx.post(f"{server.url}{path}", json=unstreamed(path, picture), timeout=120)
        assert answer.status_code == 200, answer.text
        return time.monotonic()

    with ThreadPoolExecutor(1) as threads, DaemonStore(str(store_path), name="looker") as store:
        asked = threads.submit(ask)
        wait_until(lambda: "preprocess" in store.stat().permits)
        wait_until(lambda: store.stat().permits == {})
        left_s = time.monotonic()
        left_s = asked.result() - left_s
    print(f"{path}: the answer ends {left_s:.2f} s after its permit came back")
    assert left_s > 0.1


@pytest.mark.parametrize("path", DIALECTS[:2])
def test_four_answers_in_one_piece_are_written_at_a_time(
    one_at_a_time: tuple[Server, Path], path: str
) -> None:
    server, store_path = one_at_a_time
    files = [encoded(photo(200, 150, seed=seed), "BMP") for seed in range(4)]
    urls = ["data:image/bmp;base64," + b64encode(file).decode() for file in files]

    def ask(url: str) -> int:
        asked = unstreamed(path, url)
        return httpx.post(f"{server.url}{path}", json=asked, timeout=120).status_code

    most_running = most_held = 0
    with ThreadPoolExecutor(4) as threads, DaemonStore(str(store_path), name="looker") as store:
        asked = [threads.submit(ask, url) for url in urls]
        while not all(each.done() for each in asked):
            held = store.stat().permits.get("preprocess")
            most_held = max(most_held, held.num_held if held else 0)
            most_running = max(most_running, num_running(server))
            time.sleep(0.02)  # how often it is looked at
        assert {each.result() for each in asked} == {200}
    print(f"{path}: {most_running} answers at a time, {most_held} prepared at a time")
    assert (most_running, most_held) == (4, 1)


def num_running(server: Server) -> int:
    """The number of requests that vLLM's engine computes."""
    page = server.get("/metrics").text
    found = re.search(r"(?m)^vllm:num_requests_running(?:\{.*\})? ([0-9.]+)$", page)
    return int(float(found[1])) if found else 0


def test_memory_of_the_api_server_is_bounded(
    tmp_path: Path, one_at_a_time: tuple[Server, Path]
) -> None:
    with gated(tmp_path, 0) as server:
        free = grown_nbytes(server, seed=1)
    bounded = grown_nbytes(one_at_a_time[0], seed=2)
    print(
        f"the API server grows by {free / 2**20:.0f} MiB, by {bounded / 2**20:.0f} behind the gate"
    )
    assert bounded <= free / 4


def grown_nbytes(server: Server, *, seed: int) -> int:
    """By how much the API server's private memory grows at the most under many requests at once."""
    rng = np.random.default_rng(seed)
    files = [encoded(photo(*SIZE, seed=int(rng.integers(1 << 30))), "JPEG") for _ in range(8)]
    urls = [data_url(file + bytes([number])) for number in range(16) for file in files]
    process = api_server(server)

    def ask(url: str) -> int:
        asked = body(url, max_tokens=1, **BYTES)
        return httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=600).status_code

    assert ask(urls[0]) == 200
    before = most = process.memory_full_info().uss
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        asked = [threads.submit(ask, url) for url in urls[:NUM_REQUESTS]]
        while not all(each.done() for each in asked):
            most = max(most, process.memory_full_info().uss)
            time.sleep(0.05)  # how often it is looked at
        assert {each.result() for each in asked} == {200}
    return int(most - before)


def api_server(server: Server) -> psutil.Process:
    """The process of vLLM that has the API."""
    (found,) = [
        process
        for process in psutil.Process(server.popen.pid).children(recursive=True)
        if "vllm.entrypoints.cli.main" in process.cmdline() and "serve" in process.cmdline()
    ]
    return found
