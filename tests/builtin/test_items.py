"""All items of a request together: their number, and the result of each."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import httpx2 as httpx

from afferent.store.client.daemon_store import DaemonStore
from afferent.types import ObjectKind
from tests.builtin.frontends import ScriptedEngine, frontend, post
from tests.builtin.test_holding import SlowEngine
from tests.images import encoded, photo
from tests.media_files import make_video
from tests.server import ask, data_url


def send(address: str, *bodies: dict[str, Any], **options: Any) -> list[httpx.Response]:
    """Send the requests one after another; return the answers."""

    async def main() -> list[httpx.Response]:
        async with frontend(address, **options) as http:
            return [await post(http, body) for body in bodies]

    return asyncio.run(main())


def watch(*videos: bytes) -> dict[str, Any]:
    """Return a request about videos."""
    body = ask([], "What?")
    body["messages"][0]["content"] += [
        {"type": "video_url", "video_url": {"url": data_url(video, "mp4")}} for video in videos
    ]
    return body


def test_as_many_items_as_are_allowed(address: str) -> None:
    url = data_url(encoded(photo(60, 50), "JPEG"))
    fits, refused = send(address, ask([url] * 2, "What?"), ask([url] * 3, "What?"), max_images=2)
    assert fits.status_code == 200
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        "the request has 3 images; at most 2 are accepted (--max-images)"
    )


def test_more_parts_than_are_allowed_are_refused_with_the_setting_in_all_apis(
    address: str,
) -> None:
    """Plain messages count as one part; the strings of the JSON are limited before it is parsed."""

    def turns(sizes: list[int], kind: str) -> list[dict[str, Any]]:
        part = {"type": kind, "text": "a"}
        return [{"role": "user", "content": [part] * size if size else "a"} for size in sizes]

    def bodies(sizes: list[int]) -> list[tuple[str, dict[str, Any]]]:
        given = {"model": "shapes", "max_tokens": 4}
        return [
            ("/v1/chat/completions", {**given, "messages": turns(sizes, "text")}),
            ("/v1/messages", {**given, "messages": turns(sizes, "text")}),
            ("/v1/responses", {"model": "shapes", "input": turns(sizes, "input_text")}),
        ]

    async def main() -> None:
        async with frontend(address, max_parts=20) as http:
            for sizes, number in (([20], 20), ([0, 7, 13], 21), ([0] * 21, 21)):
                for path, body in bodies(sizes):
                    answer = await http.post(path, json=body)
                    if number <= 20:
                        assert answer.status_code == 200, answer.text
                    else:
                        assert answer.status_code == 400, answer.text
                        assert f"have {number} parts" in answer.text
                        assert "at most 20 are accepted (--max-parts)" in answer.text
            for path, body in bodies([200]):
                answer = await http.post(path, json=body)
                assert answer.status_code == 400
                assert "320 strings, lists and objects" in answer.text
                assert "--max-parts" in answer.text

    asyncio.run(main())


def test_a_turned_photo_is_made_upright(address: str) -> None:
    """The header of a job has the orientation, which no plan has."""
    picture, out = photo(60, 40), io.BytesIO()
    exif = picture.getexif()
    exif[0x0112] = 6  # turned by a quarter
    picture.save(out, "JPEG", exif=exif)
    engine = ScriptedEngine([71])
    (answer,) = send(address, ask([data_url(out.getvalue())], "What?"), engine=engine)
    assert answer.status_code == 200, answer.text


def test_each_video_has_a_plan_of_its_own(address: str) -> None:
    small, large = make_video(num_frames=4), make_video(width=320, height=192, num_frames=4)
    engine = ScriptedEngine([71])
    bodies = [watch(small, large), watch(large), watch(small)]
    assert [answer.status_code for answer in send(address, *bodies, engine=engine)] == [200] * 3
    together, *alone = engine.requests
    lengths = [item.placeholder.length for item in together.items]
    assert lengths[0] < lengths[1]
    assert lengths[::-1] == [request.items[0].placeholder.length for request in alone]


def test_plans_are_let_go_when_they_are_read(address: str) -> None:
    async def main() -> None:
        engine = SlowEngine()
        async with frontend(address, engine=engine) as http:
            asked = asyncio.create_task(post(http, watch(make_video(num_frames=5))))
            await engine.asked.wait()
            with DaemonStore(address, name="watcher") as watcher:
                kinds = (await asyncio.to_thread(watcher.stat)).kinds
            engine.go_on.set()
            assert (await asked).status_code == 200
        assert kinds[ObjectKind.FEATURES].held_nbytes > 0
        assert kinds[ObjectKind.RECORDS].held_nbytes == 0

    asyncio.run(asyncio.wait_for(main(), 60))
