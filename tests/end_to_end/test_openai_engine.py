"""Afferent in front of servers with OpenAI's chat completions: what they get, and clients get."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from PIL import Image

from afferent.types import ObjectKind
from tests import animations, media_files, pdfs, plain_http
from tests.end_to_end.replicas import CHAT, Replicas
from tests.images import encoded, photo
from tests.media.media_host import media_host, send
from tests.server import Server, wait_until

MAX_PIXELS = 640 * 480


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with Replicas(3).running() as running:
        yield running


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    answers = {"/a.webp": send(encoded(photo(60, 40), "WEBP", lossless=True))}
    with media_host(answers) as address:
        yield address


@pytest.fixture(scope="module")
def server(
    replicas: Replicas, host: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    arguments = ["--engine", "openai", "--engine-url", ",".join(replicas.urls)]
    arguments += ["--engine-max-pixels", str(MAX_PIXELS), "--fetch-allow", host]
    arguments += ["--files-store", str(tmp_path_factory.mktemp("openai") / "files")]
    with Server(*arguments) as running:
        yield running


@pytest.fixture(scope="module")
def small(replicas: Replicas) -> Iterator[Server]:
    """A server with a small arena, which sends videos as the images of their frames."""
    arguments = ["--engine", "openai", "--engine-url", ",".join(replicas.urls)]
    arguments += ["--engine-video-frames", "--arena-nbytes", "64MiB", "--raw-share", "0.2"]
    with Server(*arguments) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(replicas: Replicas, server: Server) -> Iterator[None]:
    replicas.reset()
    yield
    replicas.hold(is_held=False)
    wait_until(lambda: pinned_nbytes(server) == 0)


def pinned_nbytes(server: Server) -> int:
    with server.store() as store:
        kinds = store.stat().kinds
    return sum(kinds[kind].held_nbytes for kind in (ObjectKind.FEATURES, ObjectKind.RAW))


def url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def image(address: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}, **more}


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": list(parts)}], **more}


def said(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return json.loads(answer.json()["choices"][0]["message"]["content"])


def pixels_of(file: bytes) -> Any:
    with Image.open(io.BytesIO(file)) as opened:
        return np.asarray(opened.convert("RGB"))


def only_request(replicas: Replicas) -> Any:
    (got,) = [got for replica in replicas.all for got in replica.got]
    return got


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_image_that_the_engine_reads_arrives_as_it_was_sent(
    server: Server, replicas: Replicas, kind: str
) -> None:
    file = encoded(photo(300, 200), kind)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": 1.50}}}
    body = chat({"type": "text", "text": "é"}, image(url(file, "image/x")), tools=[tool], top_k=-1)
    said(server.post(body))
    sent = only_request(replicas).json
    expected = chat(
        {"type": "text", "text": "é"},
        image(url(file, f"image/{kind.lower()}")),
        tools=[tool],
        top_k=-1,
    )
    assert sent == expected


@pytest.mark.parametrize(
    ("kind", "more"), [("WEBP", {"lossless": True}), ("GIF", {}), ("BMP", {}), ("TIFF", {})]
)
def test_image_that_the_engine_does_not_read_is_converted_without_loss(
    server: Server, replicas: Replicas, kind: str, more: dict[str, Any]
) -> None:
    file = encoded(photo(80, 50, seed=3), kind, **more)
    head = {"head": "data:image/png;base64", "format": "PNG", "size": [80, 50]}
    for _ in range(2):  # the second time from the arena
        (seen,) = said(server.post(chat(image(url(file)))))["media"]
        assert seen == {**head, "pixel": pixels_of(file)[0, 0].tolist()}
    first, again = (got.json for replica in replicas.all for got in replica.got)
    assert first == again
    data = first["messages"][0]["content"][0]["image_url"]["url"].partition(",")[2]
    np.testing.assert_array_equal(pixels_of(base64.b64decode(data)), pixels_of(file))


def test_video_arrives_as_it_came_or_as_the_images_of_its_frames(
    server: Server, small: Server, replicas: Replicas
) -> None:
    file = animations.saved("GIF", [photo(80, 50, seed) for seed in (1, 2, 3)], duration=500)
    video = {"type": "video_url", "video_url": {"url": url(file, "image/gif")}}
    said(server.post(chat(video)))
    assert only_request(replicas).json == chat(video)
    replicas.reset()
    for _ in range(2):
        said(small.post(chat(video, {"type": "text", "text": "?"})))
    wait_until(lambda: pinned_nbytes(small) == 0)
    first, again = (got.json for replica in replicas.all for got in replica.got)
    assert first == again
    *frames, _ = first["messages"][0]["content"]
    seen = [
        pixels_of(base64.b64decode(frame["image_url"]["url"].partition(",")[2])) for frame in frames
    ]
    np.testing.assert_array_equal(seen, animations.pillows_frames(file))


def test_document_arrives_as_the_images_of_its_pages(server: Server, replicas: Replicas) -> None:
    pages = [photo(80, 50, seed) for seed in (1, 2, 3)]
    data = url(pdfs.of_images(pages), "application/pdf")
    file = {"type": "file", "file": {"file_data": data, "filename": "a.pdf", "pages": "2-"}}
    for _ in range(2):
        seen = said(server.post(chat(file, {"type": "text", "text": "?"})))["media"]
        assert [(each["format"], each["size"]) for each in seen] == [("PNG", [80, 50])] * 2
    first, again = (got.json for replica in replicas.all for got in replica.got)
    assert first == again
    for part, page in zip(first["messages"][0]["content"], pages[1:], strict=False):
        image = pixels_of(base64.b64decode(part["image_url"]["url"].partition(",")[2]))
        assert np.abs(image.astype(int) - np.asarray(page)).mean() < 8
    wait_until(lambda: pinned_nbytes(server) == 0)


def test_large_image_is_made_smaller_with_the_ratio_of_its_sides(server: Server) -> None:
    (seen,) = said(server.post(chat(image(url(encoded(photo(1600, 900), "JPEG"))))))["media"]
    width, height = seen["size"]
    assert width * height <= MAX_PIXELS < (width + 2) * (height + 2)
    assert abs(width / height - 16 / 9) < 0.01


def test_items_of_a_request_keep_their_order(server: Server) -> None:
    files = [encoded(photo(40 + n, 30, seed=n), kind) for n, kind in enumerate(("PNG", "GIF") * 3)]
    parts = [image(url(file)) for file in files]
    parts.insert(2, {"type": "text", "text": "between"})
    seen = said(server.post(chat(*parts, parts[0])))["media"]
    assert [each["size"][0] for each in seen] == [40, 41, 42, 43, 44, 45, 40]


@pytest.mark.parametrize(
    ("file", "status", "code"),
    [
        (lambda: encoded(photo(20, 1), "BMP"), 400, "unsupported_media"),
        (lambda: b"no image at all", 400, "unsupported_media"),
        (lambda: encoded(photo(20, 20), "WEBP")[:40], 400, "invalid_media"),
        (lambda: encoded(Image.new("1", (16_384, 16_384)), "PNG"), 400, "media_too_large"),
    ],
)
def test_hostile_media_are_refused_before_the_engine(
    server: Server, replicas: Replicas, file: Callable[[], bytes], status: int, code: str
) -> None:
    answer = server.post(chat(image(url(file()))))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert not any(replica.got for replica in replicas.all)


def test_urls_are_fetched_here_under_the_policy(
    server: Server, replicas: Replicas, host: str
) -> None:
    (seen,) = said(server.post(chat(image(f"http://{host}/a.webp"))))["media"]
    assert (seen["format"], seen["size"]) == ("PNG", [60, 40])
    replicas.reset()
    answer = server.post(chat(image("http://169.254.169.254/latest/meta-data")))
    assert answer.json()["error"]["code"] == "forbidden_url", answer.text
    assert not any(replica.got for replica in replicas.all)


def test_audio_and_video_keep_their_form(server: Server, replicas: Replicas) -> None:
    clip = media_files.make_audio(media_files.tone(0.3), 16_000, "WAV")
    video = media_files.make_video(num_frames=3)
    audio = {"data": base64.b64encode(clip).decode(), "format": "wav"}
    parts = [
        {"type": "input_audio", "input_audio": audio},
        {"type": "video_url", "video_url": {"url": url(video, "video/mp4")}},
    ]
    said(server.post(chat(*parts)))
    assert only_request(replicas).json == chat(*parts)


def test_images_of_the_messages_api_keep_their_form(
    server: Server, replicas: Replicas, host: str
) -> None:
    file = encoded(photo(30, 20), "WEBP", lossless=True)
    data = base64.b64encode(file).decode()
    sources = [
        {"type": "base64", "media_type": "image/webp", "data": data},
        {"type": "url", "url": f"http://{host}/a.webp"},
    ]
    blocks = [{"type": "image", "source": source} for source in sources]
    body = {"model": "any", "max_tokens": 5, "messages": [{"role": "user", "content": blocks}]}
    assert server.post_to("/v1/messages", body).status_code == 200
    sent = only_request(replicas).json["messages"][0]["content"]
    for block, size in zip(sent, ((20, 30), (40, 60)), strict=True):
        assert (block["source"]["type"], block["source"]["media_type"]) == ("base64", "image/png")
        assert pixels_of(base64.b64decode(block["source"]["data"])).shape[:2] == size


def test_names_of_items_are_left_out_and_options_stay(server: Server, replicas: Replicas) -> None:
    file = encoded(photo(30, 20), "PNG")
    options = {"mm_processor_kwargs": {"max_pixels": 7}, "media_io_kwargs": {"video": {"fps": 1}}}
    said(server.post(chat(image(url(file), uuid="mine"), **options)))
    assert only_request(replicas).json == chat(image(url(file)), **options)
    answer = server.post(chat({"type": "image_url", "image_url": None, "uuid": "mine"}))
    assert answer.json()["error"]["code"] == "media_not_cached"


def test_data_that_look_like_media_stay_data(server: Server, replicas: Replicas) -> None:
    look_alike = url(os.urandom(50_000))
    body = chat({"type": "text", "text": "x"}, metadata={"image_url": {"url": look_alike}})
    said(server.post(body))
    assert only_request(replicas).json == body


def test_repeats_of_an_image_go_to_one_server(server: Server, replicas: Replicas) -> None:
    used = set()
    for number in range(40):  # with 12, each fortieth run leaves a server out
        file = encoded(photo(64, 64, seed=number), "PNG")
        bodies = [chat(image(url(file)), {"type": "text", "text": text}) for text in "abc"]
        (name,) = {said(server.post(body))["replica"] for body in bodies}
        used.add(name)
    assert used == {"replica-0", "replica-1", "replica-2"}


def test_bytes_are_free_when_the_answer_begins(server: Server, replicas: Replicas) -> None:
    """The budget limits requests that the engine has not begun to answer."""
    file = encoded(photo(500, 400), "PNG")
    body = chat(image(url(file)), stream=True)
    replicas.hold(is_held=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, body)
        wait_until(lambda: sum(replica.num_running for replica in replicas.all) == 1)
        assert pinned_nbytes(server) >= len(file)
        replicas.hold(is_held=False)
        assert waiting.result().status_code == 200
    replicas.hold(is_held=True, in_the_middle=True)
    with httpx.stream("POST", f"{server.url}{CHAT}", json=body, timeout=60) as streamed:
        lines = streamed.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["media"]
        wait_until(lambda: pinned_nbytes(server) == 0)
        replicas.hold(is_held=False)
        assert list(lines)[-2] == "data: [DONE]"


def test_failed_server_costs_no_request(server: Server, replicas: Replicas) -> None:
    file = encoded(photo(300, 300, seed=9), "WEBP")
    body = chat(image(url(file)))
    name = said(server.post(body))["replica"]
    (bad,) = [replica for replica in replicas.all if replica.name == name]
    bad.hangs_up = True
    other = said(server.post(body))
    assert other["replica"] != name
    assert other["media"][0]["format"] == "PNG"
    assert server.metric("afferent_upstream_retries_total") == 1
    for replica in replicas.all:
        replica.hangs_up = True
    answer = server.post(body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "retry-after" in answer.headers


def test_other_endpoints_are_passed_on(server: Server, replicas: Replicas) -> None:
    answer = httpx.get(f"{server.url}/v1/models?x=1", timeout=60)
    assert answer.status_code == 200
    assert only_request(replicas).path == "/v1/models"
    assert server.get("/health").json() == {"status": "ok"}


JSON = "application/json"


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        *(("POST", CHAT, "text/plain"), ("POST", CHAT, "application/x-www-form-urlencoded")),
        *(("POST", CHAT, "a; json"), ("GET", CHAT, JSON), ("QUERY", CHAT, JSON)),
        *(("POST", "/chat/completions", JSON), ("POST", f"{CHAT}/", JSON)),
        *(("POST", f"/openai{CHAT}", JSON), ("POST", "/v1/../v1//messages", JSON)),
    ],
)
def test_media_are_checked_whatever_the_request_is_called(
    server: Server, replicas: Replicas, method: str, path: str, kind: str
) -> None:
    """Some servers read JSON from such requests; they would fetch this URL themselves."""
    picture: dict[str, Any] = image("http://10.0.0.1/a.png")
    if path.endswith("messages"):
        picture = {"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/a.png"}}
    text = json.dumps(chat(picture))
    where, headers = f"{server.url}{path}", {"content-type": kind}
    with plain_http.Client(timeout=60) as client:
        answer = client.request(method, where, content=text, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "forbidden_url"
    assert all(not each.got for each in replicas.all)


def test_method_in_lower_case_is_refused(server: Server, replicas: Replicas) -> None:
    """The HTTP client behind would send it in upper case, with a body that no check has read."""
    text = json.dumps(chat(image("http://10.0.0.1/a.png"))).encode()
    head = f"post {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(text) + text)
        assert client.recv(64).startswith(b"HTTP/1.1 400 ")
    assert all(not each.got for each in replicas.all)


def test_form_is_no_json_whatever_its_boundary(server: Server, replicas: Replicas) -> None:
    kind = "multipart/form-data; boundary=aJSONb"
    form = b'--aJSONb\r\nContent-Disposition: form-data; name="a"\r\n\r\n{\r\n--aJSONb--\r\n'
    where = f"{server.url}/v1/audio/transcriptions"
    answer = plain_http.post(where, content=form, headers={"content-type": kind}, timeout=60)
    (got,) = [got for each in replicas.all for got in each.got]
    assert got.body == form
    assert answer.status_code == 500  # the stand-in reads JSON


def test_stored_files_reach_the_engine_as_bytes(server: Server, replicas: Replicas) -> None:
    files = server.client().files
    picture = encoded(photo(40, 30), "PNG")
    clip = media_files.make_audio(media_files.tone(0.3), 16_000, "WAV")
    ids = [
        files.create(file=("a.png", picture), purpose="vision").id,
        files.create(file=("a.wav", clip, "audio/wav"), purpose="user_data").id,
    ]
    parts = [{"type": "file", "file": {"file_id": id}} for id in ids]
    said(server.post(chat(*parts)))
    image_part, audio_part = only_request(replicas).json["messages"][0]["content"]
    assert image_part == {"type": "image_url", "image_url": {"url": url(picture)}}
    data = base64.b64encode(clip).decode()
    audio = {"data": data, "format": "wav"}
    assert audio_part == {"type": "input_audio", "input_audio": audio}
    for id in ids:
        files.delete(id)


def test_document_whose_pages_never_fit_is_refused_at_once(small: Server) -> None:
    """A request keeps its pages: it must not wait for space that it has itself."""
    noise = np.random.default_rng(1).integers(0, 256, (600, 600, 3), dtype=np.uint8)
    data = pdfs.of_one_image(Image.fromarray(noise), num_pages=20)
    file = {"type": "file", "file": {"file_data": url(data, "application/pdf"), "filename": "a"}}
    answer = small.post(chat(file))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "arena_too_small")
    said(small.post(chat({**file, "file": {**file["file"], "pages": "1-2"}})))
    wait_until(lambda: pinned_nbytes(small) == 0)
