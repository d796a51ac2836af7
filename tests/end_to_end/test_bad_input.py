"""Bad input gets a 4xx in OpenAI's format that explains it, and the next request works."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest
from PIL import Image

from afferent.conformance.images import draw_image
from tests import plain_http
from tests.server import TINY_ENGINE, Server, ask, data_url, image_part, wait_until

QUESTION = "What is in the picture?"


def png_header(width: int, height: int) -> bytes:
    """Return a PNG file that claims a size and has almost no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(b"\0"))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def encoded(image: Image.Image, format: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, format)
    return out.getvalue()


@pytest.fixture
def good(server: Server, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """A valid request, which is sent after each bad one."""
    request = ask([data_url(draw_image(rng))], QUESTION)
    yield request
    assert server.post(request).status_code == 200
    wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)


def check(response: httpx.Response, status: int, code: str, *words: str) -> dict[str, Any]:
    """Check for an error in OpenAI's format with this code, and these words in the message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    for word in words:
        assert word in error["message"]
    for secret in ("/work", "/root", "Traceback", "0x", "site-packages"):
        assert secret not in error["message"]
    assert response.headers["x-request-id"].startswith("chatcmpl-")
    return error


JPEG = encoded(Image.effect_noise((300, 200), 60).convert("RGB"), "JPEG")


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        pytest.param(JPEG[: len(JPEG) // 2], "invalid_media", ["truncated"], id="half a JPEG"),
        pytest.param(JPEG[:40], "invalid_media", ["cut off"], id="a JPEG's first 40 bytes"),
        pytest.param(b"", "unsupported_media", ["JPEG"], id="nothing"),
        pytest.param(b"hello, world", "unsupported_media", ["JPEG"], id="text called image/png"),
        pytest.param(
            b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unsupported_media", [], id="SVG"
        ),
        pytest.param(
            encoded(Image.new("RGB", (1, 1))), "invalid_media", ["1 x 1", "at least 2"], id="1 x 1"
        ),
        pytest.param(
            png_header(10_000, 8_000), "media_too_large", ["10000 x 8000", "64000000"], id="80 Mpx"
        ),
        pytest.param(png_header(17_000, 90), "media_too_large", ["16384"], id="a long side"),
        pytest.param(png_header(1_200, 2), "media_too_large", ["factor of 200"], id="a sliver"),
        pytest.param(png_header(500, 500), "invalid_media", ["truncated"], id="a PNG without data"),
        pytest.param(
            encoded(Image.new("RGB", (64, 64)), "PCX"),
            "unsupported_media",
            ["JPEG, PNG, WebP", "or TGA"],
            id="a PCX",
        ),
    ],
)
def test_bad_image(
    server: Server, good: dict[str, Any], data: bytes, code: str, words: list[str]
) -> None:
    check(server.post(ask([data_url(data, "png")], QUESTION)), 400, code, *words)


@pytest.mark.parametrize("num_frames", [1, 2])
def test_video_as_images_is_refused_and_named(
    server: Server, good: dict[str, Any], num_frames: int
) -> None:
    text = ",".join([base64.b64encode(JPEG).decode()] * num_frames)
    part = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{text}"}}
    request = {**good, "messages": [{"role": "user", "content": [part]}]}
    check(server.post(request), 400, "unsupported_media", "data:video/jpeg", "MP4")


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("file:///etc/passwd", "forbidden_url"),
        ("http://127.0.0.1/", "forbidden_url"),
        ("http://169.254.169.254/", "forbidden_url"),
        ("http://169.254.169.254/latest/meta-data/", "forbidden_url"),
        ("http://localhost/a.png", "fetch_failed"),
        ("http://0.0.0.0/", "forbidden_url"),
        ("http://[::1]/", "forbidden_url"),
        ("http://[::ffff:127.0.0.1]/", "forbidden_url"),
        ("http://[64:ff9b::7f00:1]/", "forbidden_url"),
        ("http://2130706433/", "forbidden_url"),
        ("http://0x7f.1/", "forbidden_url"),
        ("http://10.0.0.1/", "forbidden_url"),
        ("http://168.63.129.16/", "forbidden_url"),
        ("http://user:secret@example.com/", "forbidden_url"),
        ("http://example.com:22/", "forbidden_url"),
        ("http://ex\u00e4mple.com/a.png", "forbidden_url"),
        ("http://a..b/", "fetch_failed"),
        ("http://" + "a" * 70 + "/", "fetch_failed"),
        ("http://127.0.0.1\\@example.com/", "forbidden_url"),
        ("ftp://example.com/a.png", "forbidden_url"),
        ("unix:///run/docker.sock", "forbidden_url"),
        ("", "forbidden_url"),
        ("data:image/png,plain", "forbidden_url"),
        ("data:image/png;base64,!!!!", "invalid_media"),
    ],
)
def test_bad_url(server: Server, good: dict[str, Any], url: str, code: str) -> None:
    error = check(server.post(ask([url], QUESTION)), 400, code)
    assert "secret" not in error["message"]


def test_too_many_pictures(server: Server, good: dict[str, Any]) -> None:
    url = good["messages"][0]["content"][0]["image_url"]["url"]
    check(server.post(ask([url] * 129, QUESTION)), 400, "too_many_items", "129", "128")


def test_more_than_the_model_has_room_for(server: Server, good: dict[str, Any]) -> None:
    words = "picture " * 40_000
    check(server.post(ask([], words)), 400, "context_length_exceeded", "32768")
    given = {"max_tokens": 32_768, "min_tokens": 32_768}
    check(server.post({**good, **given}), 400, "context_length_exceeded")


def test_long_text_is_refused_by_its_length(server: Server, good: dict[str, Any]) -> None:
    """It is refused before tokenization, which would cost minutes and gigabytes."""
    check(server.post(ask([], "a" * 900_000)), 400, "context_length_exceeded", "900000")


def test_json_besides_media_is_bounded(server: Server, good: dict[str, Any]) -> None:
    check(server.post({**good, "tools": [[]] * 300_000}), 400, "invalid_request", "65536")
    check(server.post(ask([], "a" * 1_100_000)), 413, "body_too_large", "1048576")
    padding = data_url(b"\0" * 2_000_000)
    check(server.post(ask([padding], QUESTION)), 400, "unsupported_media")


def test_unknown_model(server: Server, good: dict[str, Any]) -> None:
    error = check(server.post({**good, "model": "gpt-5"}), 404, "model_not_found", "gpt-5")
    assert error["param"] == "model"
    with pytest.raises(openai.NotFoundError):
        server.client().chat.completions.create(**{**good, "model": "gpt-5"})


@pytest.mark.parametrize(
    "body", [b"", b"hello", b"{", b'{"model": "shapes"', b"\xff\xfe", b"[" * 100_000]
)
def test_not_json(server: Server, good: dict[str, Any], body: bytes) -> None:
    check(server.post(body), 400, "invalid_request")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"max_token": 3}, "max_token"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ["a"] * 5}, "stop"),
    ],
)
def test_wrong_parameter(
    server: Server, good: dict[str, Any], change: dict[str, Any], word: str
) -> None:
    check(server.post({**good, **change}), 400, "invalid_request", word)


def test_unsupported_parameter(server: Server, good: dict[str, Any]) -> None:
    body = {**good, "best_of": 2}
    error = check(server.post(body), 400, "unsupported_parameter", "best_of is not")
    assert error["param"] == "best_of"


def test_picture_of_the_assistant(server: Server, good: dict[str, Any]) -> None:
    url = good["messages"][0]["content"][0]["image_url"]["url"]
    message = {"role": "assistant", "content": [image_part(url)]}
    body = {**good, "messages": [message]}
    check(server.post(body), 400, "invalid_request", "user")


def test_one_bad_picture_among_good_ones(server: Server, good: dict[str, Any]) -> None:
    url = good["messages"][0]["content"][0]["image_url"]["url"]
    bad = data_url(JPEG[: len(JPEG) // 2])
    check(server.post(ask([url, bad, url], QUESTION)), 400, "invalid_media")


def test_a_body_over_the_limit() -> None:
    with Server(*TINY_ENGINE, "--max-body-nbytes", "100KiB") as server:
        body = json.dumps(ask([], "x" * 200_000)).encode()
        response = plain_http.post(f"{server.url}/v1/chat/completions", content=body, timeout=30)
        check(response, 413, "body_too_large", "102400")

        def chunks() -> Iterator[bytes]:
            for start in range(0, len(body), 10_000):
                yield body[start : start + 10_000]

        response = plain_http.post(
            f"{server.url}/v1/chat/completions", content=chunks(), timeout=30
        )
        check(response, 413, "body_too_large", "102400")
        assert server.post(ask([], "Hello!")).status_code == 200


def test_errors_while_streaming_are_ordinary_answers(server: Server, good: dict[str, Any]) -> None:
    bad = base64.b64encode(b"hello").decode()
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(
            **ask([f"data:image/png;base64,{bad}"], QUESTION), stream=True
        )
    assert caught.value.code == "unsupported_media"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"origin": "http://evil.example", "content-type": "text/plain"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_request_of_a_foreign_page_is_refused(
    server: Server, good: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    url = f"{server.url}/v1/chat/completions"
    answer = plain_http.post(url, content=json.dumps(good), headers=headers, timeout=60)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == "invalid_request"


def test_body_with_a_key_twice_is_refused(server: Server, good: dict[str, Any]) -> None:
    body = json.dumps(good)[:-1] + ', "model": "another"}'
    answer = plain_http.post(f"{server.url}/v1/chat/completions", content=body, timeout=60)
    assert answer.status_code == 400
    assert "the key 'model' stands twice" in answer.json()["error"]["message"]


def test_no_such_endpoint(server: Server) -> None:
    wrong = {("GET", "/v1/chat/completions"): 405, ("POST", "/v1/nonsense"): 404}
    for (method, path), status in wrong.items():
        refused = plain_http.request(method, f"{server.url}{path}", timeout=30)
        assert refused.status_code == status
        assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
        assert refused.headers["x-request-id"]
