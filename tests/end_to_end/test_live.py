"""Live sessions of a real server: an engine that keeps them, and frontends that are killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from websockets.exceptions import ConnectionClosed

from tests.builtin.live import Live, connected, image_part, text_part
from tests.images import encoded
from tests.models import make_one_token
from tests.server import Server, data_url, wait_until
from tests.server import ask as about
from training import one_token as training

pytestmark = pytest.mark.timeout(180)


MANY = ("--max-images", "33000", "--max-parts", "33000", "--max-json-nbytes", "16MiB")
"""Settings for requests of very many images."""


@pytest.fixture(scope="module")
def one_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model") / "one-token"
    make_one_token(folder)
    with Server("--model", str(folder), "--frontends", "2", *MANY) as server:
        yield server


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model") / "one-token"
    command = [sys.executable, "training/one_token.py", "--out", str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    with Server("--model", str(folder), *MANY) as server:
        yield server


def frames(number: int) -> list[dict[str, str]]:
    """Return the parts of different pictures."""
    rng = np.random.default_rng(number)
    drawn = [rng.integers(0, 256, (8, 8, 3)).astype(np.uint8) for _ in range(number)]
    return [image_part(encoded(Image.fromarray(pixels), "PNG")) for pixels in drawn]


async def fill(live: Live, parts: list[dict[str, str]]) -> None:
    for part in parts:
        await live.add(part)


async def ask(live: Live) -> Any:
    await live.add(text_part("And now?"))
    return await live.answer(temperature=0, max_output_tokens=8)


def text_of(response: Any) -> str:
    found: str = response.output[0].content[0].text
    return found


def test_frontend_is_killed_and_the_session_continues_with_the_same_answer(
    one_token: Server,
) -> None:
    """300 frames, and an answer that another frontend repeats.

    The answer is deleted before, so the engine's sequence is of no use; the next time, it is.
    """
    server, parts = one_token, frames(300)

    async def main() -> None:
        async with connected(server.url, model="one-token") as live:
            await fill(live, parts)
            expected = await ask(live)
            usage = expected.usage
            assert usage.input_tokens - usage.input_token_details.cached_tokens < 100
            answer = expected.output[0].id
            await live.send(type="conversation.item.delete", item_id=answer)
            await live.until("conversation.item.deleted")
            killed = live.frontend_of(server)
            psutil.Process(killed).kill()
            with pytest.raises(ConnectionClosed):
                await live.until("none")
        start_s = time.monotonic()
        async with connected(server.url, model="one-token", session_id=live.session_id) as again:
            assert again.created.session.conversation_items == 301
            assert again.frontend_of(server) != killed
            print(f"continued after {time.monotonic() - start_s:.3f} s")
            response = await again.answer(temperature=0, max_output_tokens=8)
            print(f"answered after {time.monotonic() - start_s:.3f} s")
            assert text_of(response) == text_of(expected)
            assert response.usage.input_tokens == usage.input_tokens
        start_s = time.monotonic()
        async with connected(server.url, model="one-token", session_id=live.session_id) as third:
            usage = (await ask(third)).usage
            print(f"answered by the engine's sequence after {time.monotonic() - start_s:.3f} s")
            assert usage.input_tokens - usage.input_token_details.cached_tokens < 100

    asyncio.run(main())
    wait_until(lambda: len(server.find("afferent.builtin.frontend")) == 2)


def test_session_is_lost_with_the_engine_and_begins_again(one_token: Server) -> None:
    server = one_token

    async def main() -> None:
        async with connected(server.url, model="one-token") as live:
            await fill(live, frames(20))
            expected = await ask(live)
            await live.send(type="conversation.item.delete", item_id=expected.output[0].id)
            (worker,) = server.engine_workers()
            worker.kill()
            wait_until(lambda: server.get("/ready").status_code == 503)
            wait_until(lambda: server.get("/ready").status_code == 200)
            response = await live.answer(temperature=0, max_output_tokens=8)
            assert response.usage.input_token_details.cached_tokens < response.usage.input_tokens
            assert text_of(response) == text_of(expected)

    asyncio.run(main())


def urls_of(colours: list[int]) -> list[str]:
    """Return URLs of pictures with these colours; of each colour, there are eight pictures."""
    rng = np.random.default_rng(0)
    drawn = [
        [encoded(Image.fromarray(training.draw(colour, rng)), "PNG") for _ in range(8)]
        for colour in range(len(training.COLOURS))
    ]
    urls = [[data_url(each, "png") for each in pictures] for pictures in drawn]
    return [urls[colour][number % 8] for number, colour in enumerate(colours)]


def test_request_of_thousands_of_images_is_answered_and_its_prefix_is_cached(
    one_token: Server,
) -> None:
    number = 4_200
    urls = urls_of([index % 3 for index in range(number)])
    first, second = (
        one_token.post({**about(urls, question, temperature=0, max_tokens=3), "model": "one-token"})
        for question in ("Most?", "Which?")
    )
    assert (first.status_code, second.status_code) == (200, 200), first.text[:500]
    usage = second.json()["usage"]
    assert usage["prompt_tokens"] > 2 * number  # each image is a token, behind another one
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 2 * number
    assert usage["completion_tokens"] <= 3


@pytest.mark.storm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("most", range(len(training.COLOURS)))
def test_request_of_32_000_images_is_answered_right(trained: Server, most: int) -> None:
    """Half of the pictures have one colour, and a quarter each of the others."""
    rng = np.random.default_rng(most)
    others = [colour for colour in range(len(training.COLOURS)) if colour != most]
    colours = rng.permutation([most] * 16_000 + others * 8_000).tolist()
    body = {**about(urls_of(colours), training.QUESTION, temperature=0), "model": "one-token"}
    answer = trained.client().with_options(timeout=900).chat.completions.create(**body)
    assert answer.choices[0].message.content == training.COLOURS[most]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 64_000


@pytest.mark.storm
@pytest.mark.timeout(1800)
def test_session_of_32_000_items_is_answered_right(trained: Server) -> None:
    """A quarter of the items are blue, and the others red; the last ones are blue."""
    colours = [0, 0, 0, 2] * 7_000 + [0] * 3_000 + [2] * 1_000
    parts = [{"type": "input_image", "image_url": url} for url in urls_of(colours)]

    async def main() -> None:
        async with connected(trained.url, model="one-token") as live:
            num_done = 0
            for number, part in enumerate(parts):
                item = {"type": "message", "role": "user", "content": [part]}
                await live.send(type="conversation.item.create", item=item)
                if number - num_done >= 15:
                    await live.until("conversation.item.done")
                    num_done += 1
            for _ in range(len(parts) - num_done):
                await live.until("conversation.item.done")
            live.events.clear()
            await live.add(text_part(training.QUESTION))
            async with asyncio.timeout(900):
                response = await live.answer(temperature=0)
            assert text_of(response) == "red"
            usage = response.usage
            assert usage.input_tokens > 96_000
            assert usage.input_tokens - usage.input_token_details.cached_tokens < 100

    asyncio.run(main())
