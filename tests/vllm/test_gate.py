"""The gate in front of a real vLLM: it limits preprocessing, but not the generation of answers."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import psutil
import pytest

from afferent.conformance.images import draw_image
from afferent.store.client.daemon_store import DaemonStore
from tests.images import encoded, in_mode, photo
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
        """Return the times of the first token and of the end of the answer."""
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


def unstreamed(path: str, urls: Sequence[str]) -> dict[str, Any]:
    """Return a request for a long answer without streaming, and without media ids."""
    if path == "/v1/responses":
        shown = [{"type": "input_image", "image_url": url} for url in urls]
        asked = {"input": [{"role": "user", "content": shown}], "max_output_tokens": 200}
        return {"model": "shapes", **asked, "ignore_eos": True}
    if path == "/v1/messages":  # this API has no `ignore_eos`
        sources = [
            {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
            for url in urls
        ]
        shown = [{"type": "image", "source": source} for source in sources]
        return {**_spoken([*shown, {"type": "text", "text": "What?"}]), "max_tokens": 200}
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {**_spoken(shown), "max_tokens": 200, "ignore_eos": True}


def _spoken(content: list[Any]) -> dict[str, Any]:
    return {"model": "shapes", "messages": [{"role": "user", "content": content}]}


def forwarded_images(number: int, *, seed: int) -> list[str]:
    """Return images that Afferent forwards to vLLM's processor as bytes, in every API."""
    grey = [in_mode(photo(800, 600, seed=seed + at), "I;16") for at in range(number)]
    files = [encoded(each, "PNG") for each in grey]
    return ["data:image/png;base64," + b64encode(file).decode() for file in files]


@pytest.mark.parametrize("path", DIALECTS)
def test_answers_in_one_piece_to_forwarded_media_keep_no_permit(
    one_at_a_time: tuple[Server, Path], path: str
) -> None:
    """A permit is free when vLLM's processor has returned, before the first byte of the answer."""
    server, store_path = one_at_a_time
    number = 1 if path == "/v1/messages" else 4
    bodies = [
        unstreamed(path, forwarded_images(4, seed=100 * DIALECTS.index(path) + 10 * at))
        for at in range(number)
    ]

    def ask(asked: Any) -> float:
        answer = httpx.post(f"{server.url}{path}", json=asked, timeout=120)
        assert answer.status_code == 200, answer.text
        return time.monotonic()

    with ThreadPoolExecutor(number) as threads, DaemonStore(str(store_path), name="look") as store:
        running = [threads.submit(ask, each) for each in bodies]
        most = seen = 0
        while seen < number or store.stat().permits:
            if found := store.stat().permits.get("preprocess"):
                most = max(most, found.num_held)
                seen = max(seen, found.num_held + found.num_queued)
            assert not all(each.done() for each in running), f"{seen} were seen at the gate"
        back_s = time.monotonic()
        left_s = min(each.result() for each in running) - back_s
    print(f"{path}: the first of {number} ends {left_s:.2f} s after all permits came back")
    assert most == 1
    assert left_s > 0.05


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
    """Return the maximal growth of the API server's private memory under many requests."""
    rng = np.random.default_rng(seed)
    files = [encoded(photo(*SIZE, seed=int(rng.integers(1 << 30))), "JPEG") for _ in range(8)]
    urls = [data_url(file + bytes([number])) for number in range(16) for file in files]
    process = api_server(server)

    def ask(url: str) -> tuple[int, str]:
        asked = body(url, max_tokens=1, **BYTES)
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=600)
        return answer.status_code, "" if answer.status_code == 200 else answer.text

    assert ask(urls[0]) == (200, "")
    before = most = process.memory_full_info().uss
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        asked = [threads.submit(ask, url) for url in urls[:NUM_REQUESTS]]
        while not all(each.done() for each in asked):
            most = max(most, process.memory_full_info().uss)
            time.sleep(0.05)  # the interval of the measurements
        assert {each.result() for each in asked} == {(200, "")}
    return int(most - before)


def api_server(server: Server) -> psutil.Process:
    """Return vLLM's process for the API."""
    (found,) = [
        process
        for process in psutil.Process(server.popen.pid).children(recursive=True)
        if "vllm.entrypoints.cli.main" in process.cmdline() and "serve" in process.cmdline()
    ]
    return found
