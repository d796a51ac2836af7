"""A proxy for a server with an API of its own: what it forwards, and what clients get."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import websockets.exceptions
import websockets.sync.client
from aiohttp import web
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from afferent.config import Limits
from afferent.conformance.images import draw_image
from afferent.engines.references import SCHEME, FeaturesReference, RawReference, out_of_reach, sign
from afferent.engines.vllm.plugin.arena import Gone, told_to_the_client
from afferent.errors import DeadlineExceeded
from afferent.media.decode.image import decode_image, read_image_header
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.launch import DAEMON
from afferent.types import Handle, Modality, ObjectKind
from tests import animations, media_files, pdfs, plain_http
from tests.end_to_end.standing_in import StandIn
from tests.images import encoded, heic, in_mode, oriented, photo
from tests.media.folders import make_llava
from tests.media.media_host import Answer, media_host, send
from tests.server import Server, data_url, wait_until

CHAT = "/v1/chat/completions"
LIMITS = Limits()
XMP_TEXT = PngInfo()
XMP_TEXT.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>', zip=True)


@dataclass(slots=True)
class Hosted:
    """A media host, and the files that it has."""

    where: str
    answers: dict[str, Answer]


@dataclass(slots=True)
class Front:
    server: Server
    engine: StandIn
    store_path: Path

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return plain_http.post(f"{self.server.url}{path}", json=body, headers=headers, timeout=60)

    def streamed(self, body: Any) -> contextlib.AbstractContextManager[httpx.Response]:
        url = f"{self.server.url}/v1/chat/completions"
        return plain_http.stream("POST", url, json=body, timeout=60)

    def pinned_nbytes(self) -> int:
        with DaemonStore(str(self.store_path), name="looker") as store:
            kinds = store.stat().kinds
        return sum(kinds[kind].held_nbytes for kind in (ObjectKind.FEATURES, ObjectKind.RAW))


@contextlib.contextmanager
def standing(folder: Path, *arguments: str) -> Iterator[Front]:
    store_path = folder / "store.sock"
    engine = StandIn(folder, store_path)
    where = ["--engine", "vllm", "--engine-url", engine.url, "--store-path", str(store_path)]
    with engine, Server(*arguments, *where) as server:
        yield Front(server, engine, store_path)
    assert not list(folder.glob("store.sock*")), "neither the socket nor the secret is left"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("upstream")
    with standing(folder, "--files-store", str(folder / "files")) as front:
        yield front


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, with the engine's number of frames in a video."""
    folder = tmp_path_factory.mktemp("usual") / "model"
    shutil.copytree(BUILT_IN_MODELS / "shapes", folder)
    path = folder / "video_preprocessor_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "min_frames": 4, "max_frames": 768}))
    return folder


@pytest.fixture(scope="module")
def hosted() -> Iterator[Hosted]:
    answers: dict[str, Answer] = {}
    with media_host(answers) as where:
        yield Hosted(where, answers)


@pytest.fixture(scope="module")
def lenient(
    usual: Path, hosted: Hosted, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    """A server that takes all formats, and files of ``hosted``.

    It reads short bodies only, and it prepares two requests at a time.
    """
    folder = tmp_path_factory.mktemp("lenient")
    settings = ("--media-formats", "all", "--document-content", "text")
    limits = ("--max-body-nbytes", "1MiB", "--max-mm-preprocess-concurrency", "2")
    allowed = ("--fetch-allow", hosted.where)
    with standing(folder, str(usual), *settings, *limits, *allowed) as front:
        yield front


@pytest.fixture(scope="module")
def strict(usual: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A server that takes few and small items, and forwards documents and videos as they came."""
    forwarding = ("--document-content", "forward", "--engine-video-bytes")
    small = ("--max-images", "1", "--max-videos", "1", "--max-audio-clips", "1")
    most = [f"--max-{kind}-nbytes=40000" for kind in ("image", "video", "audio")]
    folder = tmp_path_factory.mktemp("strict")
    with standing(folder, str(usual), *forwarding, *small, *most) as front:
        yield front


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A server that prepares one request at a time, and whose model takes no videos."""
    folder = tmp_path_factory.mktemp("gate")
    model = folder / "model"
    model.mkdir()
    make_llava(model)
    settings = ("--max-mm-preprocess-concurrency", "1", "--files-store", str(folder / "files"))
    with standing(folder, str(model), *settings) as front:
        yield front


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest, front: Front) -> Iterator[None]:
    """Let each test begin with engines that have heard nothing, and end without pinned items."""
    front.engine.heard.clear()
    yield
    for used in request.node.funcargs.values():
        if isinstance(used, Front):
            used.engine.before_reading = None
            used.engine.may_end.set()
            used.engine.tells_gate = True
            wait_until(lambda used=used: used.pinned_nbytes() == 0)  # type: ignore[misc]
            used.engine.heard.clear()


@pytest.fixture
def picture(rng: np.random.Generator) -> str:
    return data_url(draw_image(rng))


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": list(parts)}], **more}


def image(url: str | None, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": None if url is None else {"url": url}, **more}


# Forwarded requests


def test_media_become_references_and_all_else_stays(front: Front, picture: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": 1.50, "y": 1e3}}}
    body = chat({"type": "text", "text": "é \u2028"}, image(picture), tools=[tool], top_k=-1)
    answer = front.post("/v1/chat/completions?trace=1", body)
    assert answer.status_code == 200, answer.text
    (heard,) = front.engine.heard
    assert heard.target == "/v1/chat/completions?trace=1"
    (reference,) = heard.references
    assert isinstance(reference, FeaturesReference)
    sent = json.loads(heard.body)
    url = sent["messages"][0]["content"][1]["image_url"]["url"]
    assert len(heard.body) < 1000
    assert sent == chat({"type": "text", "text": "é \u2028"}, image(url), tools=[tool], top_k=-1)
    assert answer.json()["said"][0]["rows"] == reference.num_embeds


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", lambda url: chat(image(url))),
        ("/v1/chat/completions/render", lambda url: chat(image(url))),
        ("/tokenize", lambda url: chat(image(url))),
        ("/pooling", lambda url: {"messages": chat(image(url))["messages"], "task": "embed"}),
        ("/score", lambda url: {"queries": "a", "documents": {"content": [image(url)]}}),
        (
            "/v1/responses",
            lambda url: {
                "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
            },
        ),
        (
            "/v1/messages",
            lambda url: {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "content": [
                                    {
                                        "type": "image",
                                        "source": {
                                            "type": "base64",
                                            "media_type": "image/png",
                                            "data": url.partition(",")[2],
                                        },
                                    }
                                ],
                            }
                        ],
                    }
                ]
            },
        ),
    ],
)
def test_every_endpoint_with_media(front: Front, path: str, body: Any, picture: str) -> None:
    answer = front.post(path, body(picture))
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["said"]) == 1
    assert picture[30:90] not in front.engine.heard[-1].body.decode()


def test_bodies_without_media_are_not_touched(front: Front) -> None:
    text = b'{ "model":"m" , "messages" : [{"role":"user","content":"image_url \\ud83d"}],"n":1e0}'
    for body in (text, b'{"data": "' + base64.b64encode(bytes(300)) + b'"}', b"[]", b"nonsense {"):
        front.engine.heard.clear()
        headers = {"content-type": "application/json", "x-mine": "1", "authorization": "Bearer k"}
        plain_http.post(f"{front.server.url}/v1/any", content=body, headers=headers, timeout=60)
        (heard,) = front.engine.heard
        assert heard.body == body
        assert (heard.headers["x-mine"], heard.headers["authorization"]) == ("1", "Bearer k")


def test_what_is_no_media_is_put_back_beside_media(front: Front, picture: str) -> None:
    """Long text beside media is forwarded, too: only the body has a limit."""
    path, document = "/v1/chat/completions", base64.b64encode(os.urandom(300_000)).decode()
    front.post(path, chat(image(picture)))  # the next one is a hit, and is released at once
    part = {"type": "document", "source": {"type": "base64", "data": document}}
    answer = front.post(path, chat(part, image(picture), part))
    assert answer.status_code == 200, answer.text
    sent = json.loads(front.engine.heard[-1].body)
    first, shown, last = sent["messages"][0]["content"]
    assert first == last == part
    assert shown["image_url"]["url"].startswith(SCHEME)
    assert front.post(path, chat(*[part] * 5, image(picture))).status_code == 200


DATA: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"response_format": {"json_schema": {"image_url": "here"}}}),
    ("/v1/chat/completions", {"metadata": {"image_url": "data:image/png;base64,iVBO..."}}),
    (
        "/v1/chat/completions",
        {"tools": [{"function": {"parameters": {"image_url": {"url": "x"}}}}]},
    ),
    (
        "/v1/chat/completions",
        {"chat_template_kwargs": {"video_url": "x"}, "documents": [{"url": "y"}]},
    ),
    ("/v1/responses", {"input": [{"type": "function_call", "arguments": "{}", "audio_url": "x"}]}),
    (
        "/v1/messages",
        chat(
            {"type": "tool_use", "id": "1", "name": "f", "input": {"image_url": "http://a/b.png"}}
        ),
    ),
    ("/v1/unknown", chat({"type": "image_url", "image_url": {"url": "http://a/b.png"}})),
]


@pytest.mark.parametrize(("path", "body"), DATA)
def test_data_with_keys_of_media_pass_byte_for_byte(
    front: Front, path: str, body: dict[str, Any]
) -> None:
    text = json.dumps({"model": "any", **body}, indent=1).encode()
    answer = plain_http.post(f"{front.server.url}{path}", content=text, timeout=60)
    assert answer.status_code == 200, answer.text
    assert front.engine.heard[-1].body == text


def document(data: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    return {"type": "document", "source": source}


def test_forwarded_documents_have_no_limits_of_media_and_keep_their_bytes(
    strict: Front, picture: str
) -> None:
    """Neither their number nor their size is limited, and malformed base64 is no error."""
    png = picture.partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": png}
    shown = {"type": "image", "source": source}
    texts = [png] * 5 + ["QUJD" * 20 + "\n" + "QUJD", "QUJD" * 90 + "*", "QUJD" * 90_000 + "QR=="]
    blocks = [document(text) for text in texts]
    answer = strict.post("/v1/messages", chat(*blocks))
    assert answer.status_code == 200, answer.text
    assert json.loads(strict.engine.heard[-1].body) == chat(*blocks)
    answer = strict.post("/v1/messages", chat(*blocks, shown))
    assert answer.status_code == 200, answer.text
    sent = json.loads(strict.engine.heard[-1].body)["messages"][0]["content"]
    assert sent[:-1] == blocks
    assert sent[-1]["source"]["url"].startswith(SCHEME)
    for refused in ([shown, shown], [*blocks, shown, shown]):
        answer = strict.post("/v1/messages", chat(*refused))
        assert (answer.status_code, "--max-images" in answer.text) == (400, True), answer.text
    for data, said in (
        ("QUJD" * 90 + "*", "malformed"),
        ("QUJD" * 90_000, "--max-image-nbytes"),
    ):
        block = {"type": "image", "source": {**source, "data": data}}
        answer = strict.post("/v1/messages", chat(block))
        assert (answer.status_code, said in answer.text) == (400, True), answer.text


def files_of(data: bytes) -> dict[str, Any]:
    """Return the part of a PDF in the form of each API."""
    url = f"data:application/pdf;base64,{base64.b64encode(data).decode()}"
    return {
        CHAT: {"type": "file", "file": {"file_data": url, "filename": "a.pdf"}},
        "/v1/responses": {"type": "input_file", "file_data": url, "pages": "1-2"},
        "/v1/messages": {**document(url.partition(",")[2]), "title": "T"},
    }


def body_of(path: str, *parts: Any) -> dict[str, Any]:
    key = "input" if path == "/v1/responses" else "messages"
    return {"model": "any", key: [{"role": "user", "content": list(parts)}]}


def content_of(front: Front, path: str) -> list[Any]:
    body = json.loads(front.engine.heard[-1].body)
    found = body["input" if path == "/v1/responses" else "messages"][0]["content"]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_pages_of_a_document_reach_the_engine_as_images_and_texts(front: Front, path: str) -> None:
    data = pdfs.of_texts([f"{number} {path[4:12]}" for number in (1, 2)])
    question = {"type": "input_text" if path == "/v1/responses" else "text", "text": "?"}
    file = files_of(data)[path]
    for _ in range(2):
        answer = front.post(path, body_of(path, file, question))
        assert answer.status_code == 200, answer.text
        parts = content_of(front, path)
        texts = [part["text"] for part in parts if "text" in part["type"]]
        assert texts == [
            *(["T"] if path == "/v1/messages" else []),
            *(f"{number} {path[4:12]}" for number in (1, 2)),
            "?",
        ]
        references = front.engine.heard[-1].references
        assert [type(each) for each in references] == [FeaturesReference] * 2
        assert [part["type"] for part in parts if "text" not in part["type"]] == [
            {CHAT: "image_url", "/v1/responses": "input_image"}.get(path, "image")
        ] * 2
    assert answer.headers["x-afferent-items"] == "hit=2"


def test_document_beside_an_image_and_other_files(front: Front, picture: str) -> None:
    data = pdfs.of_images([photo(64, 48, seed) for seed in (1, 2)])
    file = files_of(data)[CHAT]
    image_file = {"type": "file", "file": {"file_data": picture, "filename": "a.jpg"}}
    answer = front.post(CHAT, chat(image(picture), file, image_file, file))
    assert answer.status_code == 200, answer.text
    parts = content_of(front, CHAT)
    assert [part["type"] for part in parts] == ["image_url"] * 3 + ["file"] + ["image_url"] * 2
    assert parts[3] == image_file
    keys = [each.key for each in front.engine.heard[-1].references]
    assert (keys[1:3], len(set(keys))) == (keys[3:5], 3)


def animation() -> dict[str, Any]:
    file = animations.saved("GIF", [photo(64, 48, seed) for seed in range(3)], duration=500)
    url = f"data:image/gif;base64,{base64.b64encode(file).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def test_frames_of_a_video_reach_an_engine_whose_model_takes_no_videos(one_by_one: Front) -> None:
    question = {"type": "text", "text": "?"}
    for outcome in ("made", "hit"):
        answer = one_by_one.post(CHAT, chat(animation(), question))
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-afferent-items"] == f"{outcome}=3"
        parts = content_of(one_by_one, CHAT)
        assert [part["type"] for part in parts] == ["image_url"] * 3 + ["text"]
        references = one_by_one.engine.heard[-1].references
        assert [type(each) for each in references] == [FeaturesReference] * 3
    film = ("a.mp4", media_files.make_video(num_frames=90), "video/mp4")
    id = one_by_one.server.client().files.create(file=film, purpose="user_data").id
    answer = one_by_one.post(CHAT, chat({"type": "file", "file": {"file_id": id}}))
    assert answer.headers["x-afferent-items"] == "made=6", answer.text
    wait_until(lambda: one_by_one.pinned_nbytes() == 0)


def test_animation_reaches_an_engine_with_videos_as_it_came(front: Front) -> None:
    assert front.post(CHAT, chat(animation())).status_code == 200
    (reference,) = front.engine.heard[-1].references
    assert isinstance(reference, RawReference)
    assert reference.modality is Modality.VIDEO


def test_document_that_is_text_alone_becomes_text(front: Front, lenient: Front) -> None:
    plain = {"type": "document", "source": {"type": "text", "data": "tea", "media_type": "x/y"}}
    answer = front.post("/v1/messages", chat({**plain, "context": "C"}))
    assert answer.status_code == 200, answer.text
    assert content_of(front, "/v1/messages") == [
        {"type": "text", "text": "C"},
        {"type": "text", "text": "tea"},
    ]
    file = files_of(pdfs.of_texts(["one", "two"]))[CHAT]
    assert lenient.post(CHAT, chat(file)).status_code == 200
    assert [part["text"] for part in content_of(lenient, CHAT)] == ["one", "two"]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (files_of(pdfs.encrypted())[CHAT], "encrypted"),
        (files_of(b"%PDF-1.7")[CHAT], "broken"),
        ({"type": "file", "file": {**files_of(b"%PDF")[CHAT]["file"], "pages": "3-1"}}, "pages"),
        (
            {"type": "document", "source": {"type": "url", "url": "http://127.0.0.1:1/a"}},
            "127.0.0.1",
        ),
    ],
)
def test_unusable_documents_are_refused_here(front: Front, file: Any, said: str) -> None:
    path = "/v1/messages" if file["type"] == "document" else CHAT
    answer = front.post(path, chat(file))
    assert 400 <= answer.status_code < 500, answer.text
    assert said in answer.text
    assert not front.engine.heard


def test_long_and_deep_text_passes(front: Front) -> None:
    """The upstream has no such limits."""
    deep = "[" * 500 + "]" * 500
    many = json.dumps(["a"] * 100_000)
    text = f'{{"prompt": "{"a" * 3_000_000}", "x": {deep}, "y": {many}}}'.encode()
    answer = plain_http.post(f"{front.server.url}/v1/completions", content=text, timeout=60)
    assert answer.status_code == 200, answer.text
    assert front.engine.heard[-1].body == text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be", "utf-8-sig"])
def test_a_body_in_another_encoding_is_refused(front: Front, encoding: str, picture: str) -> None:
    """The upstream would guess the encoding, and might find media that were not checked."""
    text = json.dumps(chat(image(picture))).encode(encoding)
    answer = plain_http.post(f"{front.server.url}/v1/chat/completions", content=text, timeout=60)
    assert answer.status_code == 400
    assert "UTF-8" in answer.json()["error"]["message"]
    assert front.engine.heard == []


def test_other_bodies_methods_and_answers_pass(front: Front) -> None:
    files = {"file": ("a.wav", bytes(700_000), "audio/wav")}
    answer = plain_http.post(f"{front.server.url}/v1/other", files=files, timeout=60)
    assert answer.json()["nbytes"] > 700_000
    tea = plain_http.request("DELETE", f"{front.server.url}/tea", timeout=60)
    assert (tea.status_code, tea.content) == (418, b"\x00teapot")
    assert tea.headers["x-kind"] == "green"
    assert len(tea.headers.get_list("date")) == 1


def test_websockets_pass(front: Front) -> None:
    """Text and bytes in both directions, the subprotocol, and both directions of a close."""
    url = front.server.url.replace("http:", "ws:") + "/v1/realtime?model=m"
    with websockets.sync.client.connect(url, subprotocols=["a", "b"]) as client:  # type: ignore[list-item]
        assert client.subprotocol == "b"
        for said in ("hello", b"\0\xff", "", "x" * 400_000):
            client.send(said)
            assert client.recv(60) == said * 2
        client.send("go")
        with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
            client.recv(60)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4321
    heard = front.engine.heard[-1]
    assert (heard.target, heard.headers["user-agent"][:6]) == ("/v1/realtime?model=m", "Python")
    with websockets.sync.client.connect(url) as client:
        client.send("hello")
        client.recv(60)
        client.close(4000)
    wait_until(lambda: front.engine.closed_with[-1] == 4000)
    with pytest.raises(websockets.exceptions.InvalidStatus):  # `Upgrade` is ignored for other paths
        websockets.sync.client.connect(url.replace("/v1/realtime", "/v1/other"))
    assert front.engine.heard[-1].target == "/v1/other?model=m"
    assert "upgrade" not in front.engine.heard[-1].headers
    with websockets.sync.client.connect(url) as client:
        front.engine.__exit__(None, None, None)
        with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
            client.recv(60)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code in (1001, 1013)  # the upstream closes, or is gone
    wait_until(lambda: front.server.get("/ready").status_code == 503)
    assert refusal_of(url) == (503, "engine_unavailable")
    front.engine.__enter__()
    wait_until(lambda: front.server.get("/ready").status_code == 200)


def refusal_of(url: str) -> tuple[int, str]:
    """Return the status and the error code of the answer to a WebSocket request."""
    with pytest.raises(websockets.exceptions.InvalidStatus) as refused:
        websockets.sync.client.connect(url)
    response = refused.value.response
    return response.status_code, json.loads(response.body)["error"]["code"]


def test_a_repeat_is_found_and_has_the_same_name(front: Front, picture: str) -> None:
    for _ in range(2):
        assert front.post("/v1/chat/completions", chat(image(picture))).status_code == 200
    one, other = (heard.references[0] for heard in front.engine.heard)
    assert isinstance(one, FeaturesReference)
    assert isinstance(other, FeaturesReference)
    assert (one.name, one.name_of_block) == (other.name, other.name_of_block)


def test_known_media_do_not_count_against_the_limit_of_a_body(lenient: Front) -> None:
    urls = [data_url(encoded(photo(500, 400, seed=seed), "PNG"), "png") for seed in range(4)]
    too_large = lenient.post(CHAT, chat(*map(image, urls)))
    assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "body_too_large")
    for url in urls[:3]:
        assert lenient.post(CHAT, chat(image(url))).status_code == 200
    answer = lenient.post(CHAT, chat(*map(image, urls)))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-afferent-items"] == "hit=3, made=1"
    alone = [heard.references[0] for heard in lenient.engine.heard[:3]]
    together = lenient.engine.heard[-1].references
    assert [each.handle for each in together[:3]] == [each.handle for each in alone]
    as_data = chat({"type": "text", "text": "?"}, extra={"image_url": urls[0]})
    as_data["filler"] = "x" * (1 << 20)
    assert lenient.post(CHAT, as_data).status_code == 413


def test_names_are_ours_to_keep(front: Front, picture: str) -> None:
    """An image is found by the client's own media id, which can't be used for another image."""
    path = "/v1/chat/completions"
    assert front.post(path, chat(image(None, uuid="nobody"))).status_code == 409
    assert front.post(path, chat(image(picture, uuid="one"))).status_code == 200
    known = front.post(path, chat(image(None, uuid="one")))
    assert known.status_code == 200, known.text
    assert all(b"uuid" not in heard.body for heard in front.engine.heard)
    first, second = (heard.references[0] for heard in front.engine.heard)
    assert first.handle == second.handle
    other = data_url(draw_image(np.random.default_rng(99)))
    assert front.post(path, chat(image(other, uuid="one"))).status_code == 400


def test_fewer_pixels_are_made_here(front: Front) -> None:
    png = encoded(photo(600, 600), "PNG")
    large = "data:image/png;base64," + base64.b64encode(png).decode()
    rows = []
    for options in ({}, {"mm_processor_kwargs": {"max_pixels": 16000}}):
        answer = front.post("/v1/chat/completions", chat(image(large), **options))
        rows.append(answer.json()["said"][0]["rows"])
    assert rows[0] > rows[1]
    assert "mm_processor_kwargs" not in json.loads(front.engine.heard[-1].body)


def test_options_of_the_engine_leave_the_work_to_it(front: Front, picture: str) -> None:
    """Such media are forwarded as bytes; so are items of a modality without features."""
    options = {"mm_processor_kwargs": {"max_pixels": 12544, "min_pixels": 3136}}
    answer = front.post("/v1/chat/completions", chat(image(picture, uuid="a"), **options))
    (heard,) = front.engine.heard
    nbytes = len(base64.b64decode(picture.partition(",")[2]))
    assert answer.json() == {"said": [{"bytes": nbytes}]}
    sent = json.loads(heard.body)
    assert sent["mm_processor_kwargs"] == options["mm_processor_kwargs"]
    name = sent["messages"][0]["content"][0]["uuid"]
    assert bytes.fromhex(name), "the content's, not the client's"
    assert len(name) == 64
    other = {"mm_processor_kwargs": {"max_pixels": 12544, "min_pixels": 6272}}
    front.post("/v1/chat/completions", chat(image(picture, uuid="b"), **other))
    of_other = json.loads(front.engine.heard[-1].body)["messages"][0]["content"][0]["uuid"]
    assert (len(of_other), of_other != name) == (64, True), "vLLM makes something else of it"
    front.engine.heard.clear()
    sound = base64.b64encode(media_files.make_audio(media_files.tone(0.2), 16_000)).decode()
    part = {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}}
    answer = front.post("/v1/chat/completions", chat(part, image(picture)))
    assert [list(each) for each in answer.json()["said"]] == [["bytes"], ["bytes"]]
    assert all(isinstance(each, RawReference) for each in front.engine.heard[0].references)


def video(file: bytes) -> dict[str, Any]:
    url = "data:video/mp4;base64," + base64.b64encode(file).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def test_videos_are_features_where_every_decoder_shows_the_same(
    lenient: Front, picture: str
) -> None:
    """Other videos, and videos of requests with options, are forwarded as bytes."""
    plain = media_files.make_video(num_frames=20, width=640, height=360)  # does not fit on the heap
    body = chat(video(plain), image(picture))
    answer = lenient.post("/v1/chat/completions", body)
    assert [list(each) for each in answer.json()["said"]] == [["sum", "rows"]] * 2
    shown, _ = lenient.engine.heard[-1].references
    assert isinstance(shown, FeaturesReference)
    assert shown.small["video_grid_thw"][0] == 2, "pairs of frames"  # type: ignore[index]
    others: list[dict[str, Any]] = [
        chat(video(media_files.make_video("vp9", num_frames=20))),
        {**body, "mm_processor_kwargs": {"max_pixels": 12544}},
        {**body, "media_io_kwargs": {"video": {"num_frames": 6}}},
    ]
    for each in others:
        answer = lenient.post("/v1/chat/completions", each)
        assert {"bytes"} == {key for said in answer.json()["said"] for key in said}
        sent = json.loads(lenient.engine.heard[-1].body)
        assert sent.keys() == each.keys()


@pytest.mark.parametrize("what", ["images and videos", "videos"])
def test_what_the_engine_is_to_process_itself(
    what: str, strict: Front, usual: Path, picture: str, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        other = strict
        if what == "images and videos":
            settings = ("--processor", "reference")
            other = stack.enter_context(standing(tmp_path, str(usual), *settings))
        answer = other.post("/v1/chat/completions", chat(image(picture)))
        assert ("bytes" in answer.json()["said"][0]) == (what == "images and videos")
        answer = other.post("/v1/chat/completions", chat(video(media_files.make_video())))
        assert "bytes" in answer.json()["said"][0]


# Forms with audio


def form_of(file: bytes, key: str = "file", *more: tuple[str, str]) -> tuple[bytes, str]:
    """Return a form with two fields around a file, and its content type."""
    form = httpx.Request(
        *("POST", "http://x"),
        files=[
            ("model", (None, "m")),
            *((name, (None, value)) for name, value in more),
            (key, ("é.wav", file, "audio/wav")),
            ("timestamp_granularities[]", (None, "word")),
            ("timestamp_granularities[]", (None, "segment")),
        ],
    )
    return form.read(), form.headers["content-type"]


def transcribe(
    front: Front, form: tuple[bytes, str], path: str = "/v1/audio/transcriptions"
) -> httpx.Response:
    body, media_type = form
    headers = {"content-type": media_type}
    return plain_http.post(f"{front.server.url}{path}", content=body, headers=headers, timeout=60)


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
@pytest.mark.parametrize("nbytes", [10, 700_000, 3_000_001])
def test_audio_in_a_form_reaches_the_engine_by_reference(
    front: Front, rng: np.random.Generator, path: str, nbytes: int
) -> None:
    """Small files come on the heap, others in the arena; all other parts are as they were sent."""
    file = b"\r\n--" + rng.bytes(nbytes - 4)
    form, media_type = form_of(file)
    assert transcribe(front, (form, media_type), path).json() == {"said": [{"bytes": nbytes}]}
    (heard,) = front.engine.heard
    (reference,) = heard.references
    assert isinstance(reference, RawReference)
    assert reference.modality is Modality.AUDIO
    url = re.search(rb"afferent:[\w=-]+", heard.body)
    assert url is not None
    head, _, tail = form.partition(file)
    names = re.compile(rb"(?m)^[A-Za-z-]+:")

    def lower(text: bytes) -> bytes:
        return names.sub(lambda name: name[0].lower(), text)

    assert heard.body == lower(head) + url[0] + lower(tail)
    assert heard.headers["content-type"] == media_type
    wait_until(lambda: front.pinned_nbytes() == 0)


def test_audio_in_a_form_leaves_the_gate_before_its_answer(one_by_one: Front) -> None:
    one_by_one.engine.may_end.clear()
    try:
        with ThreadPoolExecutor(2) as threads:
            asked = [
                threads.submit(transcribe, one_by_one, form_of(bytes(1000 + at))) for at in range(2)
            ]
            try:
                wait_until(lambda: len(one_by_one.engine.heard) == 2)
                wait_until(lambda: permits(one_by_one) == {})
            finally:
                one_by_one.engine.may_end.set()
            assert [each.result().status_code for each in asked] == [200, 200]
    finally:
        one_by_one.engine.heard.clear()


def shortened(num_left_out: int) -> tuple[bytes, str]:
    form, media_type = form_of(bytes(3000))
    return form[:-num_left_out], media_type


WRONG_FORMS = {
    "empty file": (form_of(b""), 400, "the audio file is empty"),
    "cut": (shortened(2000), 400, "the form is incomplete"),
    "without its end": (shortened(6), 400, "the form is incomplete"),
    "long field": (form_of(b"x", "file", ("prompt", "a" * 70_000)), 413, "beside its file"),
}


@pytest.mark.parametrize("name", WRONG_FORMS)
def test_wrong_forms_with_audio_are_refused_here(front: Front, name: str) -> None:
    form, status, said = WRONG_FORMS[name]
    answer = transcribe(front, form)
    assert (answer.status_code, front.engine.heard) == (status, []), answer.text
    assert said in answer.json()["error"]["message"]
    wait_until(lambda: front.pinned_nbytes() == 0)


def test_audio_in_a_form_has_a_limit(strict: Front) -> None:
    assert transcribe(strict, form_of(bytes(40_000))).json() == {"said": [{"bytes": 40_000}]}
    answer = transcribe(strict, form_of(bytes(40_001)))
    assert (answer.status_code, len(strict.engine.heard)) == (400, 1), answer.text
    assert "--max-audio-nbytes" in answer.json()["error"]["message"]
    wait_until(lambda: strict.pinned_nbytes() == 0)


def test_form_without_a_file_is_the_engines_to_refuse(front: Front) -> None:
    assert "nbytes" in transcribe(front, form_of(b"abc", "other")).json()
    (heard,) = front.engine.heard
    assert b"\r\n\r\nabc\r\n" in heard.body


# Files of other formats


def shown(data: bytes, media_type: str = "image/x") -> str:
    return f"data:{media_type};base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("format", "parameters"),
    [
        ("HEIC", {}),
        ("AVIF", {}),
        ("TIFF", {"exif": oriented(6)}),
        ("BMP", {}),
        ("ICO", {"sizes": [(37, 29)]}),
        ("JPEG2000", {"no_jp2": True}),
        ("PPM", {}),
        ("TGA", {}),
        ("JPEG", {"xmp": b'<x tiff:Orientation="8"/>'}),
        ("PNG", {"pnginfo": XMP_TEXT}),
    ],
)
def test_images_of_each_format_become_features_of_their_upright_pixels(
    front: Front, format: str, parameters: dict[str, Any]
) -> None:
    """The features of a lossless file are those of a PNG file with the same pixels."""
    source = photo(37, 29)
    data = heic(source) if format == "HEIC" else encoded(source, format, **parameters)
    upright = decode_image(memoryview(data), read_image_header(data, LIMITS), LIMITS).pixels
    same = encoded(Image.fromarray(upright), "PNG")
    answer = front.post("/v1/chat/completions", chat(image(shown(data)), image(shown(same))))
    assert answer.status_code == 200, answer.text
    found, expected = answer.json()["said"]
    assert "bytes" not in found
    assert found == expected
    assert front.post("/v1/chat/completions", chat(image(shown(data)))).json() == {"said": [found]}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(encoded(Image.new("RGB", (1, 7)), "PNG"), id="a side of one pixel"),
        pytest.param(encoded(Image.new("RGB", (1, 7)), "TIFF"), id="the same in a TIFF file"),
        pytest.param(encoded(in_mode(photo(37, 29), "I;16"), "PNG"), id="grey of 16 bits"),
        pytest.param(encoded(in_mode(photo(37, 29), "I;16"), "TIFF"), id="the same in a TIFF file"),
    ],
)
def test_images_that_become_something_else_here_go_as_bytes(
    front: Front, data: bytes, picture: str
) -> None:
    """The other images of the request are forwarded as bytes, too: the engine mixes no kinds."""
    answer = front.post("/v1/chat/completions", chat(image(shown(data)), image(picture)))
    assert answer.status_code == 200, answer.text
    nbytes = len(base64.b64decode(picture.partition(",")[2]))
    assert answer.json() == {"said": [{"bytes": len(data)}, {"bytes": nbytes}]}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_that_an_answer_repeats_have_no_media_handles(
    front: Front, picture: str, path: str
) -> None:
    document = {"content": [image(picture)]}
    answer = front.post(path, {"query": "red", "documents": [document, "a text"]})
    assert answer.status_code == 200, answer.text
    (said,) = answer.json()["said"]
    assert said["rows"] > 0
    repeated = {"content": [image("(media)")]}
    assert answer.json()["results"] == [repeated, "a text"]


def test_limits_hold_for_headers_of_other_formats(front: Front) -> None:
    data = struct.pack("<2sIHHIIii", b"BM", 54, 0, 0, 54, 40, 20_000, 20_000) + bytes(28)
    answer = front.post("/v1/chat/completions", chat(image(shown(data))))
    assert answer.status_code == 400
    assert "--max-image-pixels" in answer.json()["error"]["message"]
    assert front.engine.heard == []


def test_unknown_formats_pass_with_all_media_formats_only(front: Front, lenient: Front) -> None:
    data = encoded(photo(37, 29), "PCX")
    answer = front.post("/v1/chat/completions", chat(image(shown(data))))
    assert answer.status_code == 400
    assert "--media-formats all" in answer.json()["error"]["message"]
    answer = lenient.post("/v1/chat/completions", chat(image(shown(data))))
    assert answer.json() == {"said": [{"bytes": len(data)}]}


@pytest.mark.parametrize("side", [16, 1200])
def test_frames_as_images_reach_the_engine_as_text(front: Front, side: int) -> None:
    """Small frames, and frames that do not fit on the heap."""
    frame = base64.b64encode(encoded(photo(side, side), "JPEG", quality=95)).decode()
    text = ",".join([frame] * 3)
    part = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{text}"}}
    answer = front.post("/v1/chat/completions", chat(part))
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"said": [{"bytes": len(text)}]}
    (reference,) = front.engine.heard[0].references
    assert isinstance(reference, RawReference)
    assert reference.is_frames


def test_frames_beside_other_media_and_in_data_stay_what_they_were(
    front: Front, picture: str
) -> None:
    frame = base64.b64encode(encoded(photo(20, 20), "JPEG")).decode()
    url = f"data:video/jpeg;base64,{frame},{frame}"
    part = {"type": "video_url", "video_url": {"url": url}}
    note = {"type": "text", "text": "x", "video_url": {"url": url}}
    answer = front.post("/v1/chat/completions", chat(image(picture), note, part))
    assert [list(each) for each in answer.json()["said"]] == [["bytes"], ["bytes"]]
    sent = json.loads(front.engine.heard[0].body)
    assert sent["messages"][0]["content"][1] == note


def test_frames_that_are_broken_are_refused(front: Front) -> None:
    part = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,QUJD,QUJD"}}
    answer = front.post("/v1/chat/completions", chat(part))
    assert answer.status_code == 400
    assert front.engine.heard == []


def test_an_item_known_by_name_beside_a_forwarded_one_has_to_be_sent_again(
    front: Front, picture: str
) -> None:
    assert front.post("/v1/chat/completions", chat(image(picture, uuid="seen"))).status_code == 200
    bmp = image(shown(encoded(Image.new("RGB", (1, 7)), "BMP")))
    answer = front.post("/v1/chat/completions", chat(image(None, uuid="seen"), bmp))
    assert answer.status_code == 409, answer.text
    answer = front.post("/v1/chat/completions", chat(image(picture, uuid="seen"), bmp))
    assert answer.status_code == 200, answer.text


def test_an_image_known_by_its_url_is_fetched_again_beside_a_forwarded_one(
    lenient: Front, hosted: Hosted, picture: str
) -> None:
    png = base64.b64decode(picture.partition(",")[2])
    bmp = encoded(Image.new("RGB", (1, 7)), "BMP")
    hosted.answers.update({"/a.png": send(png), "/b.bmp": send(bmp)})
    known = image(f"http://{hosted.where}/a.png")
    answer = lenient.post("/v1/chat/completions", chat(known))
    assert "sum" in answer.json()["said"][0]
    answer = lenient.post(
        "/v1/chat/completions", chat(known, image(f"http://{hosted.where}/b.bmp"))
    )
    assert answer.json() == {"said": [{"bytes": len(png)}, {"bytes": len(bmp)}]}


_ELSEWHERE = """
import sys
from afferent.engines.place import Place
from afferent.engines.vllm.plugin.arena import Arena
arena = Arena(Place(sys.argv[1]), name="elsewhere")
reference = arena.verify(sys.argv[2])
with arena.request("read") as request:
    assert arena.pin(request, [(reference.key, reference.handle)]) == [True]
    print(int(arena.view(reference.handle)["pixel_values"].long().sum()))
arena.close()
"""


def test_a_container_beside_ours_reads_the_arena(front: Front, picture: str) -> None:
    """The container has the same user and pid namespace, and a network and mounts of its own."""
    answer = front.post("/v1/chat/completions", chat(image(picture)))
    sent = json.loads(front.engine.heard[-1].body)
    url = sent["messages"][0]["content"][0]["image_url"]["url"]
    unshare = ["unshare", "--net", "--mount", "--ipc", "--uts"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces can be made here")
    command = [*unshare, sys.executable, "-c", _ELSEWHERE, str(front.store_path), url]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == answer.json()["said"][0]["sum"]
    names = oct(front.store_path.stat().st_mode & 0o777)
    secret = front.store_path.with_name(front.store_path.name + ".secret")
    assert (names, oct(secret.stat().st_mode & 0o777)) == ("0o600", "0o600")


# Refused requests


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/chat/completions", {"message", "type", "param", "code"}),
        ("/v1/messages", {"type", "message"}),
        ("/pooling", {"message", "type", "param", "code"}),
    ],
)
def test_media_that_cant_be_used_are_refused_here(front: Front, path: str, form: set[str]) -> None:
    key = bytes(32)
    forged = sign(
        FeaturesReference(Modality.IMAGE, key, key, Handle(1, 0, 64, 1), 5, 5, ((5, 4),), {}, 1e12),
        bytes(32),
    )
    for url in (
        "data:image/png;base64," + "QUJD" * 100,
        "http://127.0.0.1:1/secret.png",
        "file:///etc/passwd",
        "ftp://x/y",
        forged,
        SCHEME,
        "",
    ):
        part = {"type": "image", "source": {"type": "url", "url": url}}
        answer = front.post(path, chat(part if path == "/v1/messages" else image(url)))
        assert answer.status_code == 400, (url[:40], answer.text)
        assert set(answer.json()["error"]) == form
    assert front.engine.heard == []


# The end of a request


def test_pins_last_until_the_answer_has_ended(front: Front, picture: str) -> None:
    front.engine.may_end.clear()
    with front.streamed(chat(image(picture), stream=True)) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["rows"] > 0
        assert front.pinned_nbytes() > 0
        front.engine.may_end.set()
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    wait_until(lambda: front.pinned_nbytes() == 0)


def test_who_hangs_up_aborts(front: Front, picture: str) -> None:
    front.engine.may_end.clear()
    before = front.engine.num_aborted
    with front.streamed(chat(image(picture), stream=True)) as answer:
        next(answer.iter_lines())
    wait_until(lambda: front.pinned_nbytes() == 0)
    front.engine.may_end.set()
    wait_until(lambda: front.engine.num_aborted > before)


def test_an_answer_to_nothing_is_not_passed_on(front: Front, picture: str) -> None:
    """The store dies before the engine reads the features, so its answer is dropped."""
    died = threading.Event()

    async def kill() -> None:
        if not died.is_set():
            died.set()
            (daemon,) = front.server.find(DAEMON)
            os.kill(daemon.pid, signal.SIGKILL)
            await asyncio.sleep(0.05)

    for stream in (False, True):
        died.clear()
        front.engine.before_reading = kill
        answer = front.post("/v1/chat/completions", chat(image(picture), stream=stream))
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "store_restarted"
        front.engine.before_reading = None
        wait_until(lambda: front.server.get("/ready").status_code == 200)
        again = front.post("/v1/chat/completions", chat(image(picture)))
        assert again.status_code == 200, again.text
        assert again.json()["said"][0] != "nothing"


def test_media_out_of_the_engines_reach_are_an_error_that_clients_retry(
    front: Front, picture: str
) -> None:
    """To vLLM it is the client's error: it knows no other kind for media."""

    async def refuse() -> None:
        (url,) = re.findall(f"{SCHEME}[A-Za-z0-9_=-]+", front.engine.heard[-1].body.decode())
        try:
            with told_to_the_client(url):
                raise DeadlineExceeded("the store did not answer in time")
        except ValueError as error:
            raise web.HTTPBadRequest(text=json.dumps({"error": {"message": str(error)}})) from error

    front.engine.before_reading = refuse
    for stream in (False, True):
        answer = front.post("/v1/chat/completions", chat(image(picture), stream=stream))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert answer.headers["retry-after"]
    front.engine.before_reading = None
    assert front.post("/v1/chat/completions", chat(image(picture))).status_code == 200


def test_client_that_writes_the_words_itself_gets_the_engines_error(
    front: Front, picture: str
) -> None:
    words = out_of_reach("afferent:0")

    async def refuse() -> None:
        raise web.HTTPBadRequest(text=f"no such model: {words}")

    front.engine.before_reading = refuse
    answer = front.post("/v1/chat/completions", {**chat(image(picture)), "user": words})
    assert (answer.status_code, answer.text) == (400, f"no such model: {words}")


def test_features_that_the_engine_misses_are_made_again(front: Front, picture: str) -> None:
    """The reader reports the missing features to the store, which drops them from its index."""
    front.post("/v1/chat/completions", chat(image(picture)))
    (old,) = front.engine.heard[-1].references
    assert isinstance(old, FeaturesReference)

    async def lose() -> None:
        with DaemonStore(str(front.store_path), name="thief") as store:
            await asyncio.to_thread(store.delete, [old.key])

    front.engine.before_reading = lose
    answer = front.post("/v1/chat/completions", chat(image(picture)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_restarted")
    front.engine.before_reading = None
    assert front.post("/v1/chat/completions", chat(image(picture))).status_code == 200
    (new,) = front.engine.heard[-1].references
    assert isinstance(new, FeaturesReference)
    assert new.name == old.name
    assert new.name_of_block != old.name_of_block


def test_without_the_engine_it_says_so_and_comes_back(front: Front) -> None:
    """The engine's socket disappears, and comes back."""
    front.engine.__exit__(None, None, None)
    wait_until(lambda: front.server.get("/ready").status_code == 503)
    health = front.server.get("/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_unavailable")
    answer = front.post("/v1/messages", chat())
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.json()["type"] == "error"
    front.engine._arena = None
    front.engine.__enter__()
    wait_until(lambda: front.server.get("/ready").status_code == 200)
    assert front.server.get("/health").status_code == 200
    assert front.post("/v1/messages", chat()).status_code == 200


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("/v1/models/?a=b%20c", "/v1/models/?a=b%20c"),
        ("//evil.example/x", "/.//evil.example/x"),
    ],
)
def test_redirects_lead_to_the_host_that_the_client_named(
    front: Front, there: str, here: str
) -> None:
    answer = plain_http.get(f"{front.server.url}/moved", params={"to": there})
    assert answer.status_code == 307
    assert answer.headers["location"] == here


def test_a_failure_of_an_engine_that_has_ended_is_worth_another_try(front: Front) -> None:
    """An error of an engine that is still running is forwarded."""
    answer = front.post("/broken", {})
    assert (answer.status_code, answer.json()) == (500, {"error": {"message": "broken"}})
    front.engine.is_well = False
    try:
        answer = front.post("/broken", {})
    finally:
        front.engine.is_well = True
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    wait_until(lambda: plain_http.get(f"{front.server.url}/health").status_code == 200)


def test_errors_repeat_no_reference(front: Front, picture: str) -> None:
    answer = front.post("/tokenize", {**chat(image(picture)), "repeat": 1})
    assert answer.status_code == 400
    assert "afferent:" not in answer.text
    assert "(media)" in answer.text
    assert answer.text.endswith("...[truncated]")


def test_metrics_are_of_both(front: Front, picture: str) -> None:
    front.post("/v1/chat/completions", chat(image(picture)))
    page = front.server.get("/metrics").text
    assert "vllm:num_requests_running 0.0" in page
    assert 'afferent_upstream_items_total{modality="image",way="features"}' in page
    assert 'afferent_requests_total{api="openai_chat",outcome="ok"}' in page
    assert 'afferent_requests_total{api="upstream",outcome="ok"}' in page
    # Each series exists before its first event. Earlier tests may have raised it.
    for modality, way in itertools.product(("image", "video", "audio"), ("features", "bytes")):
        assert f'afferent_upstream_items_total{{modality="{modality}",way="{way}"}}' in page


# State of the engine


def test_stored_responses_hold_no_references(front: Front, picture: str) -> None:
    """A stored response could be continued, but its media handles are invalid after the answer."""
    part = {"type": "input_image", "image_url": picture}
    body = {"model": "any", "input": [{"role": "user", "content": [part]}], "store": True}
    assert front.post("/v1/responses", body).status_code == 200
    assert json.loads(front.engine.heard[-1].body)["store"] is False
    text = {"model": "any", "input": "no media", "store": True}
    assert front.post("/v1/responses", text).status_code == 200
    assert json.loads(front.engine.heard[-1].body) == text


FLEET = "of-one-fleet-0123"
KEYS = {name: f"{name}-0123456789abcdef" for name in ("first", "second")}


def _tenants_file(folder: Path) -> Path:
    file = folder / "afferent.toml"
    file.write_text(
        "".join(
            f'[[tenants]]\nname = "{name}"\napi_keys = ["{key}"]\n' for name, key in KEYS.items()
        )
    )
    return file


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A server with two tenants, and a key of the default tenant."""
    folder = tmp_path_factory.mktemp("apart")
    file = str(_tenants_file(folder))
    with standing(folder, "--config", file, "--api-key", "default-0123456789") as front:
        yield front


@pytest.fixture(scope="module")
def in_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A server with the same tenants, which shares a secret with its fleet."""
    folder = tmp_path_factory.mktemp("fleet")
    with standing(folder, *_of_fleet(folder, FLEET)) as front:
        yield front


def _of_fleet(folder: Path, secret: str) -> tuple[str, ...]:
    return ("--config", str(_tenants_file(folder)), "--fleet-secret", secret)


def of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_tenants_share_nothing_that_the_engine_remembers(apart: Front, picture: str) -> None:
    salts = []
    for key in (*KEYS.values(), "default-0123456789", KEYS["first"]):
        for body in (chat(image(picture)), chat({"type": "text", "text": "What?"})):
            answer = apart.post("/v1/chat/completions", body, **of(key))
            assert answer.status_code == 200, answer.text
            salts.append(json.loads(apart.engine.heard[-1].body)["cache_salt"])
        num_heard = len(apart.engine.heard)
        continued = {"model": "any", "input": "go on", "previous_response_id": "resp_1"}
        stored = f"{apart.server.url}/v1/responses/resp_1"
        refused = [
            apart.post("/v1/responses", continued, **of(key)),
            apart.post("/v1/responses/resp_1/cancel", {}, **of(key)),
            plain_http.get(stored, headers=of(key)),
        ]
        assert [answer.status_code for answer in refused] == [404] * 3
        assert len(apart.engine.heard) == num_heard
    assert all(one == other for one, other in zip(salts[::2], salts[1::2], strict=True))
    assert len(set(salts)) == 3
    assert salts[0] == salts[-1]


def test_servers_with_one_fleet_secret_give_a_tenant_equal_names_and_salts(
    in_fleet: Front, tmp_path: Path, picture: str
) -> None:
    found = [_names_and_salts(in_fleet, picture)]
    for number, secret in enumerate((FLEET, "of-another-01234")):
        folder = tmp_path / str(number)
        folder.mkdir()
        with standing(folder, *_of_fleet(folder, secret)) as server:
            found.append(_names_and_salts(server, picture))
    one, again, other = found
    assert one == again
    assert len({text for pair in (*one, *other) for text in pair}) == 8


def _names_and_salts(server: Front, picture: str) -> list[tuple[str, str]]:
    """Return the name of a picture and the salt of a request in vLLM, for each tenant."""
    for key in KEYS.values():
        answer = server.post(CHAT, chat(image(picture)), **of(key))
        assert answer.status_code == 200, answer.text
    heard = server.engine.heard
    references = [each.references[0] for each in heard]
    assert all(each.of.has_tenants for each in references)
    names = [each.name for each in references if isinstance(each, FeaturesReference)]
    salts = [json.loads(each.body)["cache_salt"] for each in heard]
    return list(zip(names, salts, strict=True))


def test_renderer_gives_the_name_and_the_salt_that_a_tenant_has_in_vllm(
    in_fleet: Front, tmp_path: Path, picture: str
) -> None:
    """A router computes hashes of blocks from both."""
    settings = (*_of_fleet(tmp_path, FLEET), "--served-model-name", "any")
    with Server(*settings, command="render") as renderer:
        for key in KEYS.values():
            body = chat(image(picture), cache_salt="the client's own")
            answer = in_fleet.post(CHAT, body, **of(key))
            assert answer.status_code == 200, answer.text
            url = f"{renderer.url}{CHAT}/render"
            prompt = plain_http.post(url, json=body, headers=of(key), timeout=60).json()
            heard = in_fleet.engine.heard[-1]
            (reference,) = heard.references
            assert isinstance(reference, FeaturesReference)
            assert prompt["features"]["mm_hashes"]["image"] == [reference.name]
            assert prompt["cache_salt"] == json.loads(heard.body)["cache_salt"]


def test_no_client_names_the_salt_of_another(apart: Front) -> None:
    """Neither lenient JSON nor an unusual path lets a client choose another tenant's salt."""
    path, client = f"{apart.server.url}/v1/chat/completions", of(KEYS["second"])
    victim = apart.post("/v1/chat/completions", chat(), **of(KEYS["first"]))
    assert victim.status_code == 200
    salt = json.loads(apart.engine.heard[-1].body)["cache_salt"]
    own = f'"cache_salt": "{salt}", "messages": []'
    for member in ('"n": NaN', '"x": "\\ud800"', '"n": -Infinity', '"deep": ' + "[" * 9000):
        apart.engine.heard.clear()
        body = f"{{{own}, {member}}}".encode()
        answer = plain_http.post(path, content=body, headers=client, timeout=60)
        assert answer.status_code in (200, 400)
        assert all(salt not in heard.body.decode() for heard in apart.engine.heard)
    apart.engine.heard.clear()
    for tail in ("%0a", "%0A", "%00", "#x", "%0d"):
        head = f"POST /v1/chat/completions{tail} HTTP/1.1\r\nHost: localhost\r\n"
        assert raw_status(apart, head + f"Authorization: {client['authorization']}\r\n") == 400
    assert apart.engine.heard == []


def raw_status(front: Front, head: str) -> int:
    """Return the status of the answer to a request with a body of two bytes."""
    where = httpx.URL(front.server.url)
    with socket.create_connection((where.host, where.port)) as sock:
        sock.sendall((head + "Content-Length: 2\r\nConnection: close\r\n\r\n{}").encode())
        answer = sock.makefile("rb").read()
    return int(answer.split()[1])


def test_endpoint_without_a_salt_is_refused_with_tenants(apart: Front, front: Front) -> None:
    answer = apart.post("/v2/embed", {"texts": ["a"]}, **of(KEYS["first"]))
    assert answer.status_code == 400
    assert "/v1/embeddings" in answer.json()["error"]["message"]
    assert front.post("/v2/embed", {"texts": ["a"]}).status_code == 200


# The gate


@pytest.mark.parametrize("tells_gate", [True, False], ids=["plugin", "first byte"])
def test_a_request_leaves_the_gate_long_before_its_answer_ends(
    one_by_one: Front, rng: np.random.Generator, tells_gate: bool
) -> None:
    with contextlib.ExitStack() as answers:
        one_by_one.engine.tells_gate = tells_gate
        one_by_one.engine.may_end.clear()
        options = {"mm_processor_kwargs": {"max_pixels": 12544, "min_pixels": 3136}}
        for more in ({}, {}, options, options):
            body = chat(image(data_url(draw_image(rng))), stream=True, **more)
            answer = answers.enter_context(one_by_one.streamed(body))
            assert next(answer.iter_bytes()).startswith(b"data: {")
        kinds = [type(heard.references[0]) for heard in one_by_one.engine.heard]
        assert kinds == [FeaturesReference] * 2 + [RawReference] * 2
        one_by_one.engine.may_end.set()


def forwarded(path: str, seed: int) -> dict[str, Any]:
    """Return a request with two images that are forwarded as bytes, without client media ids."""
    deep = [in_mode(photo(37, 29, seed=seed + at), "I;16") for at in range(2)]
    urls = [shown(encoded(each, "PNG"), "image/png") for each in deep]
    if path == "/v1/responses":
        parts = [{"type": "input_image", "image_url": url} for url in urls]
        return {"input": [{"role": "user", "content": parts}]}
    if path == "/v1/messages":
        data = [url.partition(",")[2] for url in urls]
        sources = [{"type": "base64", "media_type": "image/png", "data": each} for each in data]
        return chat(*({"type": "image", "source": source} for source in sources))
    if path in ("/v1/chat/completions/batch", "/v1/embeddings"):  # two prompts in one request
        return {"messages": [chat(image(url))["messages"] for url in urls]}
    return chat(*map(image, urls))


FORWARDED = [
    *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages"),
    *("/pooling", "/v1/embeddings"),
]


def permits(front: Front) -> dict[str, Any]:
    with DaemonStore(str(front.store_path), name="looker") as store:
        return store.stat().permits


@pytest.mark.parametrize("path", FORWARDED)
def test_answer_in_one_piece_to_forwarded_media_keeps_no_permit(
    one_by_one: Front, path: str
) -> None:
    one_by_one.engine.heard.clear()
    one_by_one.engine.may_end.clear()
    try:
        with ThreadPoolExecutor(2) as threads:
            asked = [
                threads.submit(one_by_one.post, path, forwarded(path, seed)) for seed in (1, 11)
            ]
            try:
                wait_until(lambda: len(one_by_one.engine.heard) == 2)
                wait_until(lambda: permits(one_by_one) == {})
                assert not any(each.done() for each in asked)
            finally:
                one_by_one.engine.may_end.set()
            assert [each.result().status_code for each in asked] == [200, 200]
        references = [each for heard in one_by_one.engine.heard for each in heard.references]
        assert [type(each) for each in references] == [RawReference] * 4
    finally:
        one_by_one.engine.heard.clear()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/batch", "/pooling"])
def test_permit_of_a_client_that_leaves_comes_back(
    one_by_one: Front, path: str, is_stream: bool
) -> None:
    """One client's request is with the engine, the other's waits at the gate."""
    one_by_one.engine.heard.clear()
    reached = threading.Event()

    async def hang() -> None:
        reached.set()
        await asyncio.sleep(60)

    one_by_one.engine.before_reading = hang
    where = httpx.URL(one_by_one.server.url)
    text = json.dumps({**forwarded(path, 3), "stream": is_stream, "n": 3}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    message = head.encode() + b"Content-Length: %d\r\n\r\n" % len(text) + text
    try:
        with contextlib.ExitStack() as clients:
            for _ in range(2):
                sock = socket.create_connection((where.host, where.port))
                clients.enter_context(sock).sendall(message)
            assert reached.wait(30)
            wait_until(lambda: permits(one_by_one)["preprocess"].num_queued == 1)
        wait_until(lambda: permits(one_by_one) == {})
    finally:
        one_by_one.engine.before_reading = None


def test_permit_of_a_refused_request_comes_back(one_by_one: Front) -> None:
    refused = {**forwarded("/tokenize", 5), "repeat": 1}
    assert one_by_one.post("/tokenize", refused).status_code == 400
    wait_until(lambda: permits(one_by_one) == {})


def test_permit_of_an_engine_that_dies_comes_back(one_by_one: Front) -> None:
    reached = threading.Event()

    async def hang() -> None:
        reached.set()
        await asyncio.sleep(60)

    one_by_one.engine.before_reading = hang
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(one_by_one.post, CHAT, forwarded(CHAT, 7))
        assert reached.wait(30)
        one_by_one.engine.__exit__(None, None, None)
        assert asked.result().status_code == 503
    wait_until(lambda: permits(one_by_one) == {})
    one_by_one.engine.before_reading = None
    one_by_one.engine.__enter__()
    wait_until(lambda: one_by_one.server.get("/ready").status_code == 200)
    assert one_by_one.post(CHAT, forwarded(CHAT, 9)).status_code == 200


@pytest.mark.parametrize("is_made_here", [True, False], ids=["features", "bytes"])
def test_as_many_as_may_be_are_between_the_gate_and_the_engine(
    lenient: Front, rng: np.random.Generator, is_made_here: bool
) -> None:
    options = {"mm_processor_kwargs": {"max_pixels": 12544, "min_pixels": 3136}}
    at_once: list[int] = []

    async def look() -> None:
        await asyncio.sleep(0.05)  # other requests would arrive in between
        at_once.append(permits(lenient)["preprocess"].num_held)

    lenient.engine.before_reading = look
    with ThreadPoolExecutor(8) as threads:
        bodies = [
            chat(image(data_url(draw_image(rng))), **({} if is_made_here else options))
            for _ in range(8)
        ]
        answers = list(threads.map(lambda body: lenient.post(CHAT, body), bodies))
    assert {answer.status_code for answer in answers} == {200}
    wait_until(lambda: permits(lenient) == {})
    assert len(at_once) == 8
    assert max(at_once) <= 2


def test_a_reference_leads_nowhere_after_its_request(front: Front, picture: str) -> None:
    assert front.post(CHAT, chat(image(picture))).status_code == 200
    (reference,) = front.engine.heard[0].references
    wait_until(lambda: front.pinned_nbytes() == 0)
    with pytest.raises(Gone, match="has ended"):
        front.engine.arena().admit(reference.of, is_processed=True)


# Stored files


def test_stored_files_are_answered_here_and_become_references(
    front: Front, rng: np.random.Generator
) -> None:
    data = encoded(photo(60, 40, int(rng.integers(1 << 30))), "PNG")
    client = front.server.client()
    made = client.files.create(file=("a.png", data), purpose="vision")
    assert [file.id for file in client.files.list()] == [made.id]
    assert client.files.content(made.id).content == data
    assert front.engine.heard == [], "the upstream is not asked"
    parts: dict[str, Any] = {
        CHAT: chat({"type": "file", "file": {"file_id": made.id}}),
        "/v1/responses": {
            "model": "any",
            "input": [{"role": "user", "content": [{"type": "input_image", "file_id": made.id}]}],
        },
        "/v1/messages": chat(
            {"type": "image", "source": {"type": "file", "file_id": made.id}}, max_tokens=5
        ),
    }
    for path, body in parts.items():
        answer = front.post(path, body)
        assert answer.status_code == 200, answer.text
    found = [heard.references for heard in front.engine.heard]
    assert len(found) == 3
    assert all(len(references) == 1 for references in found)
    names = {reference.key for (reference,) in found if isinstance(reference, FeaturesReference)}
    assert len(names) == 1, "one file is one item"
    client.files.delete(made.id)
    refused = front.post(CHAT, parts[CHAT])
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "file_not_found")
    for method, path, status in (("GET", "/v1/files/x/y", 404), ("PUT", "/v1/files", 405)):
        answer = plain_http.request(method, f"{front.server.url}{path}")
        assert answer.status_code == status
        assert "error" in answer.json()
    assert len(front.engine.heard) == 3


def test_content_of_a_damaged_file_breaks_off(front: Front, tmp_path: Path) -> None:
    client = front.server.client()
    made = client.files.create(file=("a", bytes(3 << 20)), purpose="user_data")
    (path,) = front.store_path.parent.glob(f"files/*/{made.id}")
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"x")
    with pytest.raises(httpx.HTTPError):
        plain_http.get(f"{front.server.url}/v1/files/{made.id}/content")
    client.files.delete(made.id)


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_stored_document_reaches_the_engine_as_the_pages_that_were_chosen(
    front: Front, path: str
) -> None:
    data = pdfs.of_texts([f"{number} {path[4:12]}" for number in (1, 2, 3)])
    client = front.server.client()
    id = client.files.create(file=("a.pdf", data), purpose="user_data").id
    part = {
        CHAT: {"type": "file", "file": {"file_id": id, "pages": "2-3"}},
        "/v1/responses": {"type": "input_file", "file_id": id, "pages": "2-3"},
    }.get(path, {"type": "document", "source": {"type": "file", "file_id": id}, "pages": "2-3"})
    answer = front.post(path, body_of(path, part))
    assert answer.status_code == 200, answer.text
    texts = [part["text"] for part in content_of(front, path) if "text" in part["type"]]
    assert texts == [f"{number} {path[4:12]}" for number in (2, 3)]
    assert len(front.engine.heard[-1].references) == 2
    client.files.delete(id)
    assert front.post(path, body_of(path, part)).status_code == 404
