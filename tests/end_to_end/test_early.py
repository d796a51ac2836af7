"""Features of a body's first images, made while the rest of the body arrives."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from afferent.conformance.images import draw_image
from afferent.types import ObjectKind
from tests.end_to_end.test_gateway_stream import upload
from tests.end_to_end.test_openai_engine import pinned_nbytes
from tests.end_to_end.test_upstream import standing
from tests.images import encoded
from tests.server import TINY_ENGINE, Server, ask, data_url, wait_until

EARLY = "afferent_early_items_total"
MADE = 'afferent_items_total{modality="image",outcome="made"}'
HIT = 'afferent_items_total{modality="image",outcome="hit"}'
SIDE = 800
"""Width and height of an image whose plain PNG file has 1.9 MB."""
QUESTION = "What is in the images?"
RNG = np.random.default_rng(38)


@pytest.fixture(scope="module", params=["of an engine", "in front"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if request.param == "in front":
        with standing(tmp_path_factory.mktemp("front"), "shapes") as front:
            yield front.server
    else:
        with Server(*TINY_ENGINE) as running:
            yield running


@pytest.fixture(autouse=True)
def _nothing_is_left(server: Server) -> Iterator[None]:
    yield
    wait_until(lambda: pinned_nbytes(server) == 0)


def new_files(number: int) -> list[bytes]:
    """Return files that no test has sent before."""
    images = [draw_image(RNG).image for _ in range(number)]
    large = [image.resize((SIDE, SIDE), Image.Resampling.NEAREST) for image in images]
    return [encoded(image, "PNG", compress_level=0) for image in large]


def body_of(files: list[bytes], **options: Any) -> bytes:
    asked = ask([data_url(file) for file in files], QUESTION)
    for part in asked["messages"][0]["content"]:
        if part["type"] == "image_url":
            part["image_url"] |= options
    return json.dumps(asked).encode()


def through(files: list[bytes], body: bytes, number: int) -> int:
    """Return the length of the body up to the end of so many files, and a little of the next."""
    text = base64.b64encode(files[number - 1])
    return body.index(text) + len(text) + 1000


def changes(server: Server, before: dict[str, float]) -> dict[str, float]:
    now = server.metrics()
    return {name: now.get(name, 0) - before.get(name, 0) for name in (EARLY, MADE, HIT)}


def num_features(server: Server) -> int:
    with server.store() as store:
        return store.stat().kinds[ObjectKind.FEATURES].num_objects


def text_of(answer: Any) -> str:
    """Return the answer's text; that of the stand-in is the whole answer."""
    return str(answer["choices"][0]["message"]["content"] if "choices" in answer else answer)


def test_features_exist_before_the_last_byte(server: Server) -> None:
    files = new_files(3)
    body, before, had = body_of(files), server.metrics(), num_features(server)
    with upload(server, body) as sending:
        sending.send(through(files, body, 2))
        wait_until(lambda: num_features(server) == had + 2)
        sending.send()
        status, answer = sending.answer()
    assert status == 200
    assert changes(server, before) == {EARLY: 2, MADE: 3, HIT: 0}
    again = server.post(json.loads(body)).json()
    assert text_of(again) == text_of(answer)
    assert changes(server, before)[MADE] == 3


def test_a_body_of_unknown_length(server: Server) -> None:
    files = new_files(2)
    body, before, had = body_of(files), server.metrics(), num_features(server)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        first = through(files, body, 1)
        sock.sendall(b"%x\r\n%s\r\n" % (first, body[:first]))
        wait_until(lambda: num_features(server) == had + 1)
        rest = body[first:]
        sock.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(rest), rest))
        answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert changes(server, before)[MADE] == 2


def test_an_image_that_comes_twice_is_begun_once(server: Server) -> None:
    one, two = new_files(2)
    files = [one, one, two]
    body, before, had = body_of(files), server.metrics(), num_features(server)
    with upload(server, body) as sending:
        sending.send(body.rindex(base64.b64encode(one)) + len(one) * 4 // 3 + 1000)
        wait_until(lambda: num_features(server) == had + 1)
        sending.send()
        assert sending.answer()[0] == 200
    assert changes(server, before) == {EARLY: 1, MADE: 2, HIT: 0}


def test_a_client_that_leaves_in_the_middle(server: Server) -> None:
    files = new_files(2)
    body, had = body_of(files), num_features(server)
    with upload(server, body) as sending:
        sending.send(through(files, body, 1))
        wait_until(lambda: num_features(server) == had + 1)
    wait_until(lambda: pinned_nbytes(server) == 0)
    before = server.metrics()
    assert server.post(json.loads(body)).status_code == 200
    assert changes(server, before) == {EARLY: 0, MADE: 1, HIT: 1}


def test_a_broken_image_gets_the_same_answer(server: Server) -> None:
    broken, good = new_files(2)
    broken = broken[: len(broken) // 2]
    body, before = body_of([broken, good]), server.metrics()
    with upload(server, body) as sending:
        sending.send(through([broken, good], body, 1))
        wait_until(lambda: changes(server, before)[EARLY] == 1)
        sending.send()
        status, answer = sending.answer()
    at_once = server.post(json.loads(body))
    assert status == at_once.status_code == 400
    assert answer["error"]["code"] == at_once.json()["error"]["code"]


def test_after_an_option_behind_an_image_nothing_is_begun() -> None:
    with Server(*TINY_ENGINE) as own:
        for expected in (1, 0):
            files = new_files(2)
            body, before = body_of(files, detail="low"), own.metrics()
            with upload(own, body) as sending:
                sending.send(body.index(base64.b64encode(files[0])) + len(files[0]) * 4 // 3)
                sending.send(1 << 19)
                sending.send()
                assert sending.answer()[0] == 200
            assert changes(own, before)[EARLY] <= expected
