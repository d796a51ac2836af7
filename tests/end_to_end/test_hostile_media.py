"""Hostile files through the HTTP API are refused, while all other requests are served.

The server for hostile sounds is also that of the other tests with a model that hears.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx2 as httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from afferent.conformance.images import draw_image
from afferent.types import MiB
from tests import plain_http
from tests.builtin.live import connected, image_part
from tests.end_to_end.test_live import text_of
from tests.end_to_end.test_media import chat, media_part
from tests.hostile_av import hostile_files
from tests.hostile_images import hostile_images
from tests.images import encoded
from tests.media_files import make_audio, make_av_audio, tone
from tests.models import make_voxtral
from tests.server import Server, wait_until

QUESTION = "What is in the picture?"
NUM_IMAGES, NUM_FILES = 2350, 550  # the short form takes every eighth
Kind = Literal["image", "video", "audio"]
File = tuple[str, Kind, bytes]
ORDINARY_EVERY = 25
NUM_CLIENTS = 4
MAX_GROWTH_NBYTES = 160 * MiB  # includes what a worker keeps for its next item
HIT = 'afferent_items_total{modality="audio",outcome="hit"}'
CODES = {"invalid_media", "unsupported_media", "media_too_large", "context_length_exceeded"}


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model") / "voxtral"
    make_voxtral(folder)
    with Server("--model", str(folder)) as server:
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
    server: Server, rng: np.random.Generator, files: list[File]
) -> None:
    chosen = [file for file in files if file[1] != "audio"]
    run_all(server, Judge(server, rng, model="shapes"), chosen)


@pytest.mark.timeout(600)
def test_hostile_sounds(hearing: Server, rng: np.random.Generator, files: list[File]) -> None:
    chosen = [file for file in files if file[1] == "audio"]
    run_all(hearing, Judge(hearing, rng, model="voxtral"), chosen)


# Other sounds


def test_audio(hearing: Server) -> None:
    """A part in OpenAI's format and a URL are one item; another file of the same sound is not."""
    samples = tone(1.5, seed=15)  # which no other test sends
    wav, ogg = make_audio(samples, 16_000), make_av_audio(samples, 48_000, "libopus", "ogg")
    num_hits = hearing.metrics().get(HIT, 0)
    data = base64.b64encode(wav).decode()
    spelled = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    answers = [
        chat(hearing, "voxtral", [part], max_tokens=8)
        for part in (spelled, media_part("audio", wav), media_part("audio", ogg))
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert len({answer.usage.prompt_tokens for answer in answers}) == 1
    assert hearing.metrics()[HIT] - num_hits == 1
    wait_until(lambda: hearing.metric("afferent_arena_pinned_bytes") == 0)


def test_sound_of_the_buffer_and_of_an_item_is_heard(hearing: Server) -> None:
    samples = (32_000 * tone(1.0, 24_000)).astype("<i2").reshape(-1).tobytes()
    audio = base64.b64encode(samples).decode()
    picture = image_part(encoded(Image.new("RGB", (8, 8)), "PNG"))

    async def main(url: str) -> None:
        async with connected(url, model="voxtral") as live:
            half = len(samples) // 4 * 2
            for piece in (samples[:half], samples[half:]):
                sent = base64.b64encode(piece).decode()
                await live.send(type="input_audio_buffer.append", audio=sent)
            await live.send(type="input_audio_buffer.commit")
            committed = await live.until("input_audio_buffer.committed")
            done = await live.until("conversation.item.done")
            assert done.item.id == committed.item_id
            assert done.item.content[0].type == "input_audio"
            heard = await live.answer(max_output_tokens=4, temperature=0)
            await live.send(type="input_audio_buffer.append", audio=audio)
            await live.send(type="input_audio_buffer.clear")
            await live.until("input_audio_buffer.cleared")
            error = await live.refused(type="input_audio_buffer.commit")
            assert error.code == "invalid_media"
        async with connected(url, model="voxtral") as live:
            await live.add({"type": "input_audio", "audio": audio})
            same = await live.answer(max_output_tokens=4, temperature=0)
            assert same.usage.input_tokens == heard.usage.input_tokens > 10
            assert text_of(same) == text_of(heard)
            error = await live.refused(
                type="conversation.item.create",
                item={"type": "message", "role": "user", "content": [picture]},
            )
            assert error.code == "unsupported_media"

    asyncio.run(main(hearing.url))
