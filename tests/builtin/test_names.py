"""Items with a client media id (``uuid``), which a client need not send again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2 as httpx
import pytest

from afferent.config import Tenant
from afferent.engines.protocol import EngineRequest
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import ObjectKind, ReserveItem
from tests.builtin.frontends import ScriptedEngine, frontend, post
from tests.images import encoded, photo
from tests.media_files import make_video
from tests.server import data_url, wait_until


@pytest.fixture
def watcher(address: str) -> Iterator[DaemonStore]:
    with DaemonStore(address, name="watcher", writable=True) as store:
        yield store


def image(seed: int) -> str:
    return data_url(encoded(photo(60, 50, seed=seed), "JPEG"))


def part(uuid: str | None, url: str | None = None, kind: str = "image_url") -> dict[str, Any]:
    return {"type": kind, kind: {"url": url}, "uuid": uuid}


def body(*parts: dict[str, Any]) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What?"}]
    return {"model": "shapes", "messages": [{"role": "user", "content": content}]}


def send(
    address: str, *bodies: dict[str, Any], tenants: Sequence[str] = ()
) -> tuple[list[httpx.Response], list[EngineRequest]]:
    """Send requests one after another; return the answers, and the requests that the engine got.

    Args:
        tenants: The tenant of each request.
    """
    engine = ScriptedEngine([71])
    known = [Tenant(name=name, api_keys=(name * 16,)) for name in sorted(set(tenants))]
    keys = [name * 16 for name in tenants] or [""] * len(bodies)

    async def main() -> list[httpx.Response]:
        async with frontend(address, engine=engine, tenants=known) as http:
            return [await post(http, b, key=k) for b, k in zip(bodies, keys, strict=True)]

    return asyncio.run(main()), engine.requests


def test_an_item_is_sent_once(address: str, watcher: DaemonStore) -> None:
    empty = {"type": "image_url", "image_url": None, "uuid": "cat"}
    answers, (sent, *named) = send(
        address,
        body(part("cat", image(1)), part(None, image(2))),
        body(part("cat")),
        body(part(None, image(3)), empty, part("cat")),
    )
    assert [answer.status_code for answer in answers] == [200] * 3
    first, second = named
    assert first.items[0].key == sent.items[0].key
    assert [item.key for item in second.items[1:]] == [sent.items[0].key] * 2
    lengths = {item.placeholder.length for item in [*sent.items, *first.items, *second.items]}
    assert len(lengths) == 1
    wait_until(lambda: watcher.stat().held_nbytes == 0)


def test_other_frontends_know_the_name(address: str) -> None:
    _, (sent,) = send(address, body(part("cat", image(1))))
    _, (named,) = send(address, body(part("cat")))
    assert named.items[0].key == sent.items[0].key


def test_a_name_within_the_request_that_sends_it(address: str) -> None:
    (answer,), (asked,) = send(address, body(part("cat"), part("cat", image(1)), part("cat")))
    assert answer.status_code == 200
    assert len({item.key for item in asked.items}) == 1


@pytest.mark.parametrize("is_one_request", [True, False])
def test_another_content_under_the_same_name(address: str, is_one_request: bool) -> None:
    one, other = part("cat", image(1)), part("cat", image(2))
    bodies = [body(one, other)] if is_one_request else [body(one), body(other), body(one)]
    answers, _ = send(address, *bodies)
    refused = answers[0 if is_one_request else 1]
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "invalid_media"
    assert "'cat'" in refused.json()["error"]["message"]
    assert is_one_request or answers[0].status_code == answers[2].status_code == 200


def test_another_modality_under_the_same_name(address: str) -> None:
    answers, _ = send(
        address,
        body(part("cat", image(1))),
        body(part("cat", kind="video_url")),
        body(part("cat", data_url(make_video(num_frames=4)), kind="video_url")),
    )
    assert [answer.status_code for answer in answers] == [200, 400, 400]


def test_what_can_not_be_used_is_bound_to_no_name(address: str) -> None:
    broken = data_url(encoded(photo(60, 50), "JPEG")[:300])
    answers, _ = send(address, body(part("cat", broken)), body(part("cat", image(1))))
    assert [answer.status_code for answer in answers] == [400, 200]


def test_everything_that_is_missing_is_named(address: str) -> None:
    known = body(part("cat", image(1)))
    missing = [f"dog-{index}" for index in range(40)]
    asked = body(part("cat"), *map(part, missing), part(missing[0]))
    (_, refused), _ = send(address, known, asked)
    error = refused.json()["error"]
    assert refused.status_code == 409
    assert refused.headers["x-should-retry"] == "false"
    assert error["code"] == "media_not_cached"
    assert error["uuids"] == missing
    assert "'dog-0'" in error["message"]
    assert "32 more" in error["message"]
    assert "cat" not in error["message"]


@pytest.mark.parametrize("kind", [ObjectKind.FEATURES, ObjectKind.RECORDS])
def test_what_is_here_is_not_called_gone_while_others_have_the_room(
    address: str, watcher: DaemonStore, kind: ObjectKind
) -> None:
    sent, named = body(part("cat", image(1))), body(part("cat"))
    send(address, sent)
    wait_until(lambda: watcher.stat().held_nbytes == 0)
    share = watcher.stat().kinds[kind].capacity_nbytes
    watcher.reserve("all of it", [ReserveItem(kind, share)], queue=False)
    (full,), _ = send(address, named)
    assert (full.status_code, full.json()["error"]["code"]) == (503, "store_full")
    assert "retry-after" in full.headers
    watcher.release("all of it")
    (answer,), _ = send(address, named)
    assert answer.status_code == 200


def test_without_room_a_name_is_not_bound(address: str, watcher: DaemonStore) -> None:
    """A full metadata region is no error for the request that defines the id."""
    share = watcher.stat().kinds[ObjectKind.RECORDS].capacity_nbytes
    watcher.reserve("all of it", [ReserveItem(ObjectKind.RECORDS, share)], queue=False)
    answers, _ = send(address, body(part("cat", image(1))), body(part("cat")))
    assert [answer.status_code for answer in answers] == [200, 409]


def test_the_data_again_after_an_eviction(address: str, watcher: DaemonStore) -> None:
    sent = body(part("cat", image(1)))
    _, (first,) = send(address, sent)
    watcher.delete([first.items[0].key])
    (gone,), _ = send(address, body(part("cat")))
    assert gone.json()["error"]["uuids"] == ["cat"]
    send(address, sent)
    (again,), _ = send(address, body(part("cat")))
    assert again.status_code == 200
    wait_until(lambda: watcher.stat().held_nbytes == 0)
    watcher.evict(ObjectKind.RECORDS)
    (gone, other), _ = send(address, body(part("cat")), body(part("cat", image(2))))
    assert gone.status_code == 409
    assert other.status_code == 200, "a name that nobody knows any more is free"


def test_tenants_share_nothing(address: str) -> None:
    """Tenants share neither ids nor features: a hit would reveal the media of another tenant."""
    answers, asked = send(
        address,
        body(part("cat", image(1))),
        body(part("cat")),
        body(part("cat", image(2))),
        body(part("cat", image(1))),
        body(part("cat")),
        body(part(None, image(1))),
        tenants="abbaab",
    )
    assert [answer.status_code for answer in answers] == [200, 409, 200, 200, 200, 200]
    key = {0: asked[0].items[0].key, 5: asked[4].items[0].key}
    assert key[0] != key[5]
    assert asked[3].items[0].key == key[0]


def test_neither_data_nor_a_name(address: str) -> None:
    without = [part(None), {"type": "video_url"}, {"type": "input_audio", "input_audio": {}}]
    odd = [part(""), part("x" * 257), part("\ud800"), part("cat", 3)]  # type: ignore[arg-type]
    answers, _ = send(address, *map(body, [*without, *odd]))
    codes = {(answer.status_code, answer.json()["error"]["code"]) for answer in answers}
    assert codes == {(400, "invalid_request")}


def test_two_at_once_agree_on_one(address: str, watcher: DaemonStore) -> None:
    """The first request defines the id; the other one is refused."""

    async def main() -> list[httpx.Response]:
        async with frontend(address) as one, frontend(address) as other:
            bodies = [body(part("cat", image(seed))) for seed in (1, 2)]
            return await asyncio.gather(post(one, bodies[0]), post(other, bodies[1]))

    statuses = [answer.status_code for answer in asyncio.run(main())]
    assert sorted(statuses) == [200, 400]
    wait_until(lambda: watcher.stat().held_nbytes == 0)
