"""Live sessions of a real server: an engine that keeps them, and frontends that are killed."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from websockets.exceptions import ConnectionClosed

from tests.builtin.live import Live, connected, image_part, text_part
from tests.images import encoded
from tests.media_files import tone
from tests.models import make_one_token, make_voxtral
from tests.server import Server, wait_until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def one_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model") / "one-token"
    make_one_token(folder)
    with Server("--model", str(folder), "--frontends", "2") as server:
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
    """300 frames, more than a request may have, and an answer that another frontend repeats.

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
            killed = _frontend_of(server, live)
            psutil.Process(killed).kill()
            with pytest.raises(ConnectionClosed):
                await live.until("none")
        start_s = time.monotonic()
        async with connected(server.url, model="one-token", session_id=live.session_id) as again:
            assert again.created.session.conversation_items == 301
            assert _frontend_of(server, again) != killed
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


def _frontend_of(server: Server, live: Live) -> int:
    """Return the process that serves a session."""
    port = live.connection._connection.local_address[1]
    (pid,) = [
        process.pid
        for process in server.find("afferent.builtin.frontend")
        if any(each.raddr and each.raddr.port == port for each in process.net_connections("tcp"))
    ]
    return pid


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


def test_sound_of_the_buffer_and_of_an_item_is_heard(tmp_path: Path) -> None:
    folder = tmp_path / "voxtral"
    make_voxtral(folder)
    samples = (32_000 * tone(1.0, 24_000)).astype("<i2").reshape(-1).tobytes()
    audio = base64.b64encode(samples).decode()

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
                item={"type": "message", "role": "user", "content": frames(1)},
            )
            assert error.code == "unsupported_media"

    with Server("--model", str(folder)) as server:
        asyncio.run(main(server.url))
