"""Hostile files through the HTTP API are refused, while all other requests are served."""

from __future__ import annotations

import base64
import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx2 as httpx
import numpy as np
import psutil
import pytest

from afferent.conformance.images import draw_image
from afferent.types import MiB
from tests import plain_http
from tests.hostile_av import hostile_files
from tests.hostile_images import hostile_images
from tests.media_files import make_audio, tone
from tests.models import make_voxtral
from tests.server import Server, wait_until

QUESTION = "What is in the picture?"
NUM_IMAGES, NUM_FILES = 2350, 550  # the short form takes every eighth
Kind = Literal["image", "video", "audio"]
File = tuple[str, Kind, bytes]
ORDINARY_EVERY = 25
NUM_CLIENTS = 4
MAX_GROWTH_NBYTES = 160 * MiB  # includes what a worker keeps for its next item
_ARGUMENTS = ("--arena-nbytes", "256MiB", "--prefix-cache-tokens", "0")
CODES = {"invalid_media", "unsupported_media", "media_too_large", "context_length_exceeded"}


@pytest.fixture
def seeing() -> Iterator[Server]:
    with Server(*_ARGUMENTS) as server:
        yield server


@pytest.fixture
def hearing(tmp_path: Path) -> Iterator[Server]:
    make_voxtral(tmp_path / "voxtral")
    with Server(str(tmp_path / "voxtral"), *_ARGUMENTS) as server:
        yield server


@pytest.fixture(scope="module")
def files(request: pytest.FixtureRequest) -> list[File]:
    images: list[File] = [(name, "image", data) for name, data in hostile_images(1, NUM_IMAGES)]
    everything = [*images, *hostile_files(1, NUM_FILES)]
    return everything if request.config.getoption("--storm") else everything[::8]


class Judge:
    """Sends files from several clients, and counts the outcomes."""

    def __init__(self, server: Server, rng: np.random.Generator, *, model: str) -> None:
        self._server, self._rng, self._model = server, rng, model
        self._lock = threading.Lock()
        self.codes: Counter[str] = Counter()
        self.mistakes: list[str] = []
        self.num_ordinary = self.num_right = 0

    def run(self, files: Iterable[File]) -> None:
        numbered = enumerate(files)
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            for client in [threads.submit(self._client, numbered) for _ in range(NUM_CLIENTS)]:
                client.result()

    def _client(self, numbered: Iterator[tuple[int, File]]) -> None:
        with plain_http.Client(base_url=self._server.url, timeout=60) as client:
            while True:
                with self._lock:
                    entry = next(numbered, None)
                    if entry is None:
                        return
                    number, (name, kind, data) = entry
                    # Drawn under the lock and in order, so that they do not depend on the number of
                    # files.
                    is_ordinary = number % ORDINARY_EVERY == 0
                    shown = draw_image(self._rng) if is_ordinary else None
                    sound = make_tone(self._rng) if is_ordinary else b""
                self._judge(name, self._post(client, kind, data, "", max_tokens=1))
                if shown is not None and self._model == "shapes":
                    answer = self._post(client, "image", shown.encode(), QUESTION)
                    self._judge_ordinary(answer, shown.answer)
                elif shown is not None:
                    self._judge_ordinary(self._post(client, "audio", sound, "", max_tokens=1))

    def _post(
        self, client: httpx.Client, kind: Kind, data: bytes, text: str, **parameters: Any
    ) -> httpx.Response:
        url = f"data:{kind}/any;base64," + base64.b64encode(data).decode()
        content = [{"type": f"{kind}_url", f"{kind}_url": {"url": url}}]
        content += [{"type": "text", "text": text}] if text else []  # type: ignore[list-item]
        messages = [{"role": "user", "content": content}]
        body = {"model": self._model, "messages": messages, **parameters}
        return client.post("/v1/chat/completions", json=body)

    def _judge(self, name: str, response: httpx.Response) -> None:
        code = "ok" if response.status_code == 200 else response.json()["error"]["code"]
        with self._lock:
            self.codes[code] += 1
            # A slightly damaged file may be valid, or longer than the model's context.
            if not (response.status_code == 200 or (response.status_code == 400 and code in CODES)):
                self.mistakes.append(f"{name}: {response.status_code} {response.text}")

    def _judge_ordinary(self, response: httpx.Response, answer: str | None = None) -> None:
        with self._lock:
            self.num_ordinary += 1
            if response.status_code == 200:
                said = response.json()["choices"][0]["message"]["content"]
                self.num_right += answer is None or said == answer
            else:
                self.mistakes.append(f"an ordinary request: {response.text}")


def make_tone(rng: np.random.Generator) -> bytes:
    """Return a second of sound that the server has not seen."""
    return make_audio(tone(1.0, seed=int(rng.integers(1 << 30))), 16_000)


def private_nbytes(server: Server) -> Counter[str]:
    """Return the private memory of each process, when no worker is being replaced."""
    wait_until(lambda: len(server.preprocess_workers()) == 2)
    used: Counter[str] = Counter()
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            used[f"{process.cmdline()[2]} {process.pid}"] = process.memory_full_info().uss
    return used


def run_all(server: Server, judge: Judge, files: list[File]) -> None:
    """Each file gets a 4xx or an answer, memory stays flat, and no worker is missing at the end."""
    judge.run(files[::2])  # the first half causes one-time allocations
    before = private_nbytes(server)
    pids = {worker.pid for worker in server.preprocess_workers()}
    judge.run(files[1::2])
    after = private_nbytes(server)
    growth = after.total() - before.total()
    for name in after:
        print(f"{name}: {(after[name] - before[name]) / MiB:+.1f} MiB")
    wait_until(lambda: len(server.preprocess_workers()) == 2)
    replaced = len({worker.pid for worker in server.preprocess_workers()} - pids)
    print(f"{judge.codes.total()} files: {dict(judge.codes)}; memory {growth / MiB:+.1f} MiB")
    print(f"{judge.num_right} of {judge.num_ordinary} ordinary answers right; replaced: {replaced}")
    assert judge.mistakes == []
    assert judge.codes.total() == len(files)
    assert judge.num_right >= 0.85 * judge.num_ordinary
    assert growth < MAX_GROWTH_NBYTES
    wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)
    assert server.metric("afferent_store_jobs_running") == 0


@pytest.mark.timeout(600)
def test_hostile_images_and_videos(
    seeing: Server, rng: np.random.Generator, files: list[File]
) -> None:
    chosen = [file for file in files if file[1] != "audio"]
    run_all(seeing, Judge(seeing, rng, model="shapes"), chosen)


@pytest.mark.timeout(600)
def test_hostile_sounds(hearing: Server, rng: np.random.Generator, files: list[File]) -> None:
    chosen = [file for file in files if file[1] == "audio"]
    run_all(hearing, Judge(hearing, rng, model="voxtral"), chosen)
