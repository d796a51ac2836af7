"""One request over HTTP: its timeout, its quota, and the beginning of its answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import pytest

from afferent.builtin.http import endpoint
from afferent.builtin.http.sse import EventStream
from afferent.config import RequestLimits, Tenant
from afferent.engines.protocol import EngineEvent, EngineRequest
from afferent.errors import StoreFull
from afferent.proxy import counting
from afferent.store.client.daemon_store import DaemonStore
from tests.builtin.frontends import (
    ScriptedEngine,
    WordEngine,
    frontend,
    post,
    preprocess_worker,
)
from tests.builtin.test_holding import holds_nothing
from tests.images import encoded, photo
from tests.server import ask, data_url, wait_until


class PatientEngine(WordEngine):
    """An engine that accepts at once, and whose first answer waits until `go_on` is set."""

    def __init__(self) -> None:
        self.accepted, self.go_on = asyncio.Event(), asyncio.Event()

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        said = super().submit(request)
        yield await anext(said)
        if not self.accepted.is_set():
            self.accepted.set()  # the test waits for it
            await self.go_on.wait()
        async for event in said:
            yield event


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_has_so_much_time(store_address: str, is_stream: bool) -> None:
    async def main() -> None:
        async with frontend(store_address, engine=PatientEngine(), request_timeout_s=0.1) as http:
            refused = await post(http, ask([], "What?", stream=is_stream))
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "deadline_exceeded"

    asyncio.run(asyncio.wait_for(main(), 10))


def test_the_time_of_a_stream_begins_with_its_request(
    store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[float] = []

    class Noting(EventStream):
        def __init__(self, *args: Any, deadline: float, **kwargs: Any) -> None:
            deadlines.append(deadline)
            super().__init__(*args, deadline=deadline, **kwargs)

    class Slow(WordEngine):
        asked_s = 0.0

        async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
            self.asked_s = asyncio.get_running_loop().time()
            await asyncio.sleep(0.05)
            async for event in super().submit(request):
                yield event

    async def main() -> None:
        engine, now_s = Slow(), asyncio.get_running_loop().time
        async with frontend(store_address, engine=engine, request_timeout_s=60.0) as http:
            before_s = now_s()
            answer = await post(http, ask([], "What?", stream=True))
        assert answer.status_code == 200
        (deadline,) = deadlines
        assert before_s + 60.0 <= deadline < engine.asked_s + 60.0

    monkeypatch.setattr(endpoint, "EventStream", Noting)
    asyncio.run(main())


def test_an_error_before_the_first_token_is_an_ordinary_answer(store_address: str) -> None:
    async def main() -> None:
        engine = ScriptedEngine(failure=StoreFull("sabotage"))
        async with frontend(store_address, engine=engine) as http:
            refused = await post(http, ask([], "What?", stream=True))
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "store_full"
        assert refused.headers["retry-after"]

    asyncio.run(main())


def test_a_stream_that_fails_is_counted_by_its_error(store_address: str) -> None:
    async def main() -> None:
        engine = ScriptedEngine([71], failure=StoreFull("sabotage"))
        async with frontend(store_address, engine=engine) as http:
            assert (await post(http, ask([], "What?", stream=True))).status_code == 200

    asyncio.run(main())
    counted = {
        outcome: counting.REQUESTS.labels("openai_chat", outcome).values[0]
        for outcome in ("ok", "store_full")
    }
    assert counted == {"ok": 0, "store_full": 1}


def test_what_a_refused_request_had_come_to_is_given_back(store_address: str) -> None:
    """A request with an invalid field, whose body has been read, is released at once."""
    large = ask([data_url(encoded(photo(500, 400), "PNG"), "png")], "What?", n=0)

    async def main() -> None:
        async with frontend(store_address) as http:
            assert (await post(http, large)).status_code == 400
            with DaemonStore(store_address, name="watcher") as watcher:
                given_back = partial(wait_until, lambda: holds_nothing(watcher), timeout_s=5)
                await asyncio.to_thread(given_back)

    asyncio.run(main())


def test_a_tenant_may_have_closer_limits_than_others(store_address: str) -> None:
    key, other = "acme-key-0123456789", "other-key-0123456789"
    acme = Tenant(
        name="acme", api_keys=(key,), max_images=2, max_image_pixels=64 * 64, max_body_nbytes=40_000
    )
    free = Tenant(name="free", api_keys=(other,), max_images=4000)
    small, large = (
        data_url(encoded(photo(side, side, seed=side), "PNG"), "png") for side in (28, 84)
    )
    refused = {
        "too_many_items": ask([small] * 3, "What?"),
        "media_too_large": ask([large], "What?"),
        "body_too_large": ask([], "What?" * 20_000),
    }

    async def main() -> None:
        async with frontend(store_address, tenants=(acme, free)) as http:
            for code, body in refused.items():
                answer = await post(http, body, key=key)
                assert answer.json()["error"]["code"] == code
            allowed = await post(http, refused["body_too_large"], key=other)
            assert allowed.json()["error"]["code"] == "context_length_exceeded"
            assert acme.within(RequestLimits()).max_images == 2
            assert free.within(RequestLimits()).max_images == RequestLimits().max_images

    asyncio.run(asyncio.wait_for(main(), 60))


def test_request_refused_before_its_body_was_read_is_logged_as_unread(
    store_address: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = "acme-key-0123456789"
    acme = Tenant(name="acme", api_keys=(key,), max_requests=1)
    caplog.set_level(logging.INFO)

    async def main() -> None:
        engine = PatientEngine()
        async with frontend(store_address, engine=engine, tenants=(acme,)) as http:
            running = asyncio.create_task(post(http, ask([], "What?"), key=key))
            await engine.accepted.wait()
            assert (await post(http, ask([], "What?"), key=key)).status_code == 429
            assert (await post(http, ask([], "What?"))).status_code == 401
            engine.go_on.set()
            await running
            assert (await http.post("/v1/chat/completions", content=b"{")).status_code == 401
            broken = {"content": b"{", "headers": {"x-api-key": key}}
            assert (await http.post("/v1/chat/completions", **broken)).status_code == 400

    asyncio.run(asyncio.wait_for(main(), 30))
    lines = [vars(record) for record in caplog.records if record.getMessage() == "request"]
    assert [(line["outcome"], line["media"]) for line in lines] == [
        ("rate_limit_exceeded", "unread"),
        ("invalid_api_key", "unread"),
        ("ok", "none"),
        ("invalid_api_key", "unread"),
        ("invalid_request", "unknown"),
    ]


def test_a_tenants_place_is_taken_until_its_request_has_ended(store_address: str) -> None:
    """The quota counts a request until its end, not only until the engine accepts it."""
    key = "acme-key-0123456789"
    acme = Tenant(name="acme", api_keys=(key,), max_requests=1)
    question = ask([data_url(encoded(photo(56, 56), "PNG"), "png")], "What?")

    async def main() -> None:
        engine = PatientEngine()
        async with frontend(store_address, engine=engine, tenants=(acme,)) as http:
            running = asyncio.create_task(post(http, question, key=key))
            await engine.accepted.wait()
            refused = await post(http, question, key=key)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            engine.go_on.set()
            answers = [await running, await post(http, question, key=key)]
            assert [answer.status_code for answer in answers] == [200, 200]
            for answer in (refused, *answers):
                assert answer.headers["x-ratelimit-limit-requests"] == "1"
                assert answer.headers["x-ratelimit-remaining-requests"] == "0"

    with preprocess_worker(store_address):
        asyncio.run(asyncio.wait_for(main(), 30))
