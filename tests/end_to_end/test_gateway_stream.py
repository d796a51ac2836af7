"""A gateway that sends a body to a replica while the body arrives."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

from tests.end_to_end.replicas import CHAT, Replica, Replicas
from tests.end_to_end.test_openai_engine import chat, image, pinned_nbytes, url
from tests.images import encoded, photo
from tests.server import Server, wait_until

KEY = "key-of-the-replicas"
SECRET = "a-secret-of-the-fleet"
LARGE = encoded(photo(700, 500, seed=1), "PNG", compress_level=0)


def of_too_many_pixels(**options: Any) -> bytes:
    """Return a PNG of 16,384 pixels a side. It takes half a second to draw."""
    return encoded(Image.new("1", (16_384, 16_384)), "PNG", **options)


"""A megabyte: more than the heap takes of a body."""
STREAMED = "afferent_upstream_streamed_bodies_total"


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with Replicas(3).running() as running:
        yield running


@pytest.fixture(scope="module")
def server(replicas: Replicas) -> Iterator[Server]:
    arguments = ["--engine", "openai", "--engine-url", ",".join(replicas.urls)]
    arguments += ["--engine-stream-nbytes", "1KiB", "--engine-api-key", KEY]
    with Server(*arguments, "--fleet-secret", SECRET) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(replicas: Replicas, server: Server) -> Iterator[None]:
    replicas.reset()
    yield
    wait_until(lambda: pinned_nbytes(server) == 0)


class Upload:
    """Request whose body is sent in parts."""

    def __init__(self, server: Server, body: bytes, **headers: str) -> None:
        host = server.url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(host, timeout=60)
        self._connection.putrequest("POST", CHAT)
        self._connection.putheader("content-type", "application/json")
        self._connection.putheader("content-length", str(len(body)))
        for name, value in headers.items():
            self._connection.putheader(name, value)
        self._connection.endheaders()
        self._left = body

    def send(self, nbytes: int | None = None) -> None:
        """Send the next bytes; by default, all that are left."""
        sent, self._left = self._left[:nbytes], self._left[len(self._left[:nbytes]) :]
        self._connection.send(sent)

    def answer(self) -> tuple[int, Any]:
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def upload(server: Server, body: bytes, **headers: str) -> Iterator[Upload]:
    sending = Upload(server, body, **headers)
    try:
        yield sending
    finally:
        sending.close()


def body_of(*parts: Any, **more: Any) -> bytes:
    return json.dumps(chat(*parts, **more)).encode()


def arrived_nbytes(replicas: Replicas) -> int:
    return sum(replica.arrived_nbytes for replica in replicas.all)


def all_got(replicas: Replicas) -> list[tuple[Replica, bytes]]:
    return [(replica, got.body) for replica in replicas.all for got in replica.got]


def name_in(answer: Any) -> str:
    name: str = json.loads(answer["choices"][0]["message"]["content"])["replica"]
    return name


def counter(server: Server) -> Callable[[], tuple[float, float]]:
    """Return a function that returns how many bodies were completed and given up since then."""

    def now() -> tuple[float, float]:
        found = server.metrics()
        complete, given_up = (
            found.get(f'{STREAMED}{{outcome="{outcome}"}}', 0)
            for outcome in ("complete", "given_up")
        )
        return complete, given_up

    before = now()
    return lambda: (now()[0] - before[0], now()[1] - before[1])


def all_but_the_end(sending: Upload, body: bytes, replicas: Replicas) -> None:
    """Send a body without its last byte, and wait until a replica has got the most of it."""
    sending.send(len(body) - 1)
    wait_until(lambda: arrived_nbytes(replicas) > len(body) // 2)  # the latest chunk is held back


@pytest.mark.parametrize(
    "item",
    [
        image(url(LARGE)),
        {"type": "video_url", "video_url": {"url": url(b"...." + LARGE, "video/mp4")}},
    ],
)
def test_body_reaches_a_replica_while_it_arrives(
    server: Server, replicas: Replicas, item: Any
) -> None:
    counted = counter(server)
    body = body_of(item, {"type": "text", "text": "é"}, image(url(LARGE)), top_k=-1)
    with upload(server, body) as sending:
        all_but_the_end(sending, body, replicas)
        assert arrived_nbytes(replicas) < len(body)
        assert all_got(replicas) == []
        sending.send()
        status, answer = sending.answer()
    ((replica, got),) = all_got(replicas)
    assert (status, name_in(answer)) == (200, replica.name)
    assert got == body
    assert replica.got[0].headers["content-length"] == str(len(body))
    assert counted() == (1, 0)


def test_replica_gets_its_key_and_the_signature(server: Server, replicas: Replicas) -> None:
    counted = counter(server)
    body = body_of(image(url(LARGE)))
    with upload(server, body, authorization="Bearer of-the-client") as sending:
        sending.send()
        assert sending.answer()[0] == 200
    assert counted() == (1, 0)
    ((replica, _),) = all_got(replicas)
    headers = replica.got[0].headers
    assert headers["authorization"] == f"Bearer {KEY}"
    assert "x-afferent-tenant" in headers


def test_replica_is_that_of_a_body_that_is_read_first(server: Server, replicas: Replicas) -> None:
    counted = counter(server)
    for seed in range(4):
        file = encoded(photo(700, 500, seed=seed), "PNG", compress_level=0)
        body = body_of(image(url(file)))
        assert server.post(body).status_code == 200
        # A name of the client is left out, so that the body is changed.
        assert server.post(body_of(image(url(file), uuid="mine"))).status_code == 200
        (used,) = {replica.name for replica, _ in all_got(replicas)}
        assert used
        replicas.reset()
    assert counted() == (4, 4)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda: url(of_too_many_pixels()), "media_too_large"),
        (lambda: "http://169.254.169.254/latest/meta-data", "forbidden_url"),
        (lambda: url(b"no image at all" * 10), "unsupported_media"),
    ],
)
def test_body_that_is_refused_at_its_end_is_never_complete(
    server: Server, replicas: Replicas, end: Callable[[], str], code: str
) -> None:
    counted = counter(server)
    body = body_of(image(url(LARGE)), image(end()))
    with upload(server, body) as sending:
        all_but_the_end(sending, body, replicas)
        sending.send()
        status, answer = sending.answer()
    assert (status, answer["error"]["code"]) == (400, code)
    wait_until(lambda: not any(replica.num_arriving for replica in replicas.all))
    assert all_got(replicas) == []
    assert arrived_nbytes(replicas) < len(body)
    assert counted() == (0, 1)


def test_body_with_a_key_twice_is_never_complete(server: Server, replicas: Replicas) -> None:
    body = body_of(image(url(LARGE)))[:-1] + b', "model": "other"}'
    with upload(server, body) as sending:
        all_but_the_end(sending, body, replicas)
        sending.send()
        assert sending.answer()[0] == 400
    wait_until(lambda: not any(replica.num_arriving for replica in replicas.all))
    assert all_got(replicas) == []


def test_body_that_has_to_be_changed_is_sent_again(server: Server, replicas: Replicas) -> None:
    counted = counter(server)
    small = encoded(photo(30, 20), "WEBP", lossless=True)
    body = body_of(image(url(LARGE)), image(url(small, "image/webp")))
    with upload(server, body) as sending:
        all_but_the_end(sending, body, replicas)
        sending.send()
        assert sending.answer()[0] == 200
    ((_, got),) = all_got(replicas)
    first, second = json.loads(got)["messages"][0]["content"]
    assert first == image(url(LARGE))
    assert second["image_url"]["url"].startswith("data:image/png;base64,")
    assert counted() == (0, 1)


@pytest.mark.parametrize(
    "first",
    [
        lambda: url(LARGE, "image/jpeg"),
        lambda: url(encoded(photo(700, 500, seed=1), "BMP"), "image/bmp"),
        lambda: url(of_too_many_pixels(compress_level=0)),
    ],
)
def test_first_item_that_is_not_sent_as_it_came_is_read_first(
    server: Server, replicas: Replicas, first: Callable[[], str]
) -> None:
    counted = counter(server)
    with upload(server, body := body_of(image(first()))) as sending:
        sending.send(len(body) - 1)
        sending.send()
        sending.answer()
    assert counted() == (0, 0)
    assert all(b"data:image/png;" in got for _, got in all_got(replicas))


def test_other_spelling_of_base64_is_changed(server: Server, replicas: Replicas) -> None:
    counted = counter(server)
    body = body_of(image(url(LARGE)))
    other = body[:-1000] + body[-1000:].replace(b"A", b"\\u0041", 1)
    assert other != body
    assert server.post(other).status_code == 200
    ((_, got),) = all_got(replicas)
    assert got != other
    assert json.loads(got) == json.loads(body)
    assert counted() == (0, 1)


def test_client_that_stops_in_the_middle_ends_the_connection(
    server: Server, replicas: Replicas
) -> None:
    counted = counter(server)
    body = body_of(image(url(LARGE)))
    with upload(server, body) as sending:
        all_but_the_end(sending, body, replicas)
    wait_until(lambda: not any(replica.num_arriving for replica in replicas.all))
    assert all_got(replicas) == []
    wait_until(lambda: counted() == (0, 1))
    assert server.post(body).status_code == 200  # by another connection
    assert [got for _, got in all_got(replicas)] == [body]


@pytest.mark.parametrize("failure", ["hangs_up_early", "answers_early", "hangs_up"])
def test_failing_replica_costs_no_request(server: Server, replicas: Replicas, failure: str) -> None:
    counted = counter(server)
    body = body_of(image(url(LARGE)))
    name = name_in(server.post(body).json())
    replicas.reset()
    (bad,) = [replica for replica in replicas.all if replica.name == name]
    setattr(bad, failure, True)
    with upload(server, body) as sending:
        if failure == "hangs_up":
            all_but_the_end(sending, body, replicas)
        else:
            sending.send(len(body) - 1)
            wait_until(lambda: counted() == (1, 1))
        sending.send()
        status, answer = sending.answer()
    if failure == "answers_early":  # it refuses the whole body, too
        assert (status, answer["error"]["message"]) == (413, "too large")
        assert counted() == (1, 1)
        return
    assert status == 200
    assert name_in(answer) != name
    (other,) = [got for replica, got in all_got(replicas) if replica is not bad]
    assert json.loads(other) == json.loads(body)
    assert counted() == ((2, 0) if failure == "hangs_up" else (1, 1))


def test_all_replicas_failing_gives_a_retryable_error(server: Server, replicas: Replicas) -> None:
    for replica in replicas.all:
        replica.hangs_up = True
    answer = server.post(body_of(image(url(LARGE))))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "retry-after" in answer.headers


def test_small_media_and_texts_are_read_first(server: Server, replicas: Replicas) -> None:
    counted = counter(server)
    small = image(url(encoded(photo(60, 40), "PNG")))
    for body in (body_of(small), body_of({"type": "text", "text": "x" * (2 << 20)})):
        assert server.post(body).status_code == 200
    assert counted() == (0, 0)
    assert len(all_got(replicas)) == 2


def test_request_that_waits_at_the_gate_takes_no_space_of_a_replica(replicas: Replicas) -> None:
    """The tensors of one image fill the gate's limit for one replica."""
    only = replicas.all[0]
    small = ("--arena-nbytes", "16MiB", "--raw-share", "0.6", "--max-body-nbytes", "4MiB")
    arguments = ("--engine", "openai", "--engine-url", only.url, "--engine-stream-nbytes", "1KiB")
    body = body_of(image(url(LARGE)))
    with Server(*arguments, *small) as server, ThreadPoolExecutor(1) as pool:
        counted = counter(server)
        replicas.hold(is_held=True)
        first = pool.submit(server.post, body)
        wait_until(lambda: only.num_running == 1)
        only.arrived_nbytes = 0
        with upload(server, body) as sending:
            all_but_the_end(sending, body, replicas)
            sending.send()
            wait_until(lambda: counted() == (1, 1))
            wait_until(lambda: only.num_arriving == 0)
            assert len(only.got) == 1
            replicas.hold(is_held=False)
            assert sending.answer()[0] == 200
        assert first.result().status_code == 200
        assert [got.json for got in only.got] == [json.loads(body)] * 2
