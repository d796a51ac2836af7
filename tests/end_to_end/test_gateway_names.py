"""A gateway sends an item by its name alone to a server that has got it before."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.end_to_end.replicas import Replica, Replicas
from tests.images import encoded, photo
from tests.media_files import make_audio, tone
from tests.server import TINY_ENGINE, Server, image_part, wait_until

KNOWN, UNKNOWN = (
    f'afferent_upstream_named_items_total{{outcome="{outcome}"}}'
    for outcome in ("known", "unknown")
)
SOUND = base64.b64encode(make_audio(tone(0.3), 16_000)).decode()
STORE = "afferent.store.daemon.main"


def image(seed: int, kind: str = "PNG") -> dict[str, Any]:
    file = base64.b64encode(encoded(photo(64, 48, seed=seed), kind)).decode()
    return image_part(f"data:image/{kind.lower()};base64,{file}")


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": list(parts)}], **more}


def sent(replica: Replica) -> list[list[Any]]:
    """Return the media parts of each request that a stand-in has got, without types."""
    requests = [got.json["messages"][0]["content"] for got in replica.got]
    return [[(part.get("uuid"), part[part["type"]]) for part in parts] for parts in requests]


# Stand-ins


@pytest.fixture(scope="module", params=["afferent", "vllm"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with Replicas(1).running() as running:
        yield running


@pytest.fixture(scope="module")
def server(replicas: Replicas, kind: str) -> Iterator[Server]:
    arguments = ("--engine", "openai", "--engine-url", replicas.urls[0], "--engine-names", kind)
    with Server(*arguments) as running:
        yield running


@pytest.fixture
def replica(replicas: Replicas, kind: str) -> Replica:
    """Return the stand-in, which has lost all items: the gateway may take some for known."""
    replicas.reset()
    replicas.all[0].unknown_name = {"afferent": 409, "vllm": 400}[kind]
    return replicas.all[0]


def media(server: Server, body: Any) -> Any:
    answer = server.post(body)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.json()["choices"][0]["message"]["content"])["media"]


def test_repeat_is_sent_by_its_name(server: Server, replica: Replica) -> None:
    first = media(server, chat(image(1)))
    assert media(server, chat(image(1))) == first
    ((name, data),), ((again, nothing),) = sent(replica)[-2:]
    assert data["url"].startswith("data:image/png;base64,")
    assert (again, nothing) == (name, None)
    assert len(name) == 32
    assert int(replica.got[-1].headers["content-length"]) == len(replica.got[-1].body) < 400


def test_only_unknown_items_are_sent(server: Server, replica: Replica) -> None:
    media(server, chat(image(11)))
    both = media(server, chat(image(12), image(11), image(12)))
    assert both[0] == both[2] != both[1]
    (one, first), (other, second), (third, last) = sent(replica)[-1]
    assert one == third != other
    assert (second, first == last, first is None) == (None, True, False)


def test_server_that_has_lost_an_item_gets_it_at_once(server: Server, replica: Replica) -> None:
    media(server, chat(image(21)))
    before = server.metrics()
    replica.items.clear()
    replica.got.clear()
    media(server, chat(image(21)))
    assert [data is None for ((_, data),) in sent(replica)] == [True, False]
    media(server, chat(image(21)))
    assert sent(replica)[-1][0][1] is None
    after = server.metrics()
    assert after[UNKNOWN] - before.get(UNKNOWN, 0) == 1
    assert after[KNOWN] - before.get(KNOWN, 0) == 1


def test_failed_request_makes_nothing_known(server: Server, replica: Replica) -> None:
    replica.status = 422
    assert server.post(chat(image(31))).status_code == 422
    replica.status = 200
    media(server, chat(image(31)))
    assert all(data is not None for ((_, data),) in sent(replica))


def test_name_is_of_the_content_as_it_is_sent(server: Server, replica: Replica) -> None:
    bodies = [
        chat(image(41)),
        chat(image(42)),
        chat(image(41, "WEBP")),  # becomes a PNG
        chat(image(41), mm_processor_kwargs={"max_pixels": 50_000}),
    ]
    for body in bodies:
        media(server, body)
    names = [name for ((name, _),) in sent(replica)]
    assert len(set(names)) == 4
    assert replica.got[-1].json["mm_processor_kwargs"] == {"max_pixels": 50_000}


def test_name_of_a_client_does_not_count(server: Server, replica: Replica) -> None:
    media(server, chat({**image(51), "uuid": "mine"}))
    media(server, chat({**image(52), "uuid": "mine"}))
    ((first, _),), ((second, data),) = sent(replica)
    assert "mine" not in (first, second)
    assert first != second
    assert data is not None


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {**image(61)["image_url"], "detail": "low"}},
        {"type": "image_url", "image_url": image(62)["image_url"]["url"]},
        {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}},
    ],
)
def test_other_forms_are_always_sent(server: Server, replica: Replica, part: Any) -> None:
    for _ in range(2):
        server.post(chat(part))
    assert len(sent(replica)) == 2
    for ((name, data),) in sent(replica):
        assert name is None
        assert data is not None


# Real replicas


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Server, Server]]:
    """Yield a gateway and its replica."""
    with ExitStack() as stack:
        behind = stack.enter_context(Server(*TINY_ENGINE))
        arguments = ("--engine", "openai", "--engine-url", behind.url)
        yield stack.enter_context(Server(*arguments, "--engine-names", "afferent")), behind


def media_nbytes(server: Server) -> float:
    return server.metric("afferent_media_bytes_total") or 0.0


def answer_of(server: Server, seed: int) -> tuple[str, str]:
    question = chat(image(seed), {"type": "text", "text": "What?"}, model="shapes", max_tokens=4)
    answer = server.post(question)
    assert answer.status_code == 200, answer.text
    said = answer.json()["choices"][0]["message"]["content"]
    return said, answer.headers["x-afferent-items"]


def test_replica_answers_from_the_name_alone(real: tuple[Server, Server]) -> None:
    gateway, replica = real
    said, items = answer_of(gateway, 71)
    assert items == "made=1"
    nbytes = media_nbytes(replica)
    assert answer_of(gateway, 71) == (said, "hit=1")
    assert media_nbytes(replica) == nbytes > 0


def test_replica_that_was_started_again_gets_the_item(real: tuple[Server, Server]) -> None:
    gateway, replica = real
    said, _ = answer_of(gateway, 81)
    assert answer_of(gateway, 81) == (said, "hit=1")
    (daemon,) = replica.find(STORE)
    daemon.kill()
    wait_until(lambda: [each.pid for each in replica.find(STORE)] not in ([], [daemon.pid]))
    wait_until(lambda: replica.get("/ready").status_code == 200)
    before = gateway.metrics().get(UNKNOWN, 0.0)
    assert answer_of(gateway, 81) == (said, "made=1")
    assert gateway.metrics()[UNKNOWN] - before == 1
