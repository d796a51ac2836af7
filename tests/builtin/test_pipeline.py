"""A request in the pipeline: the request to the engine, and the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx2 as httpx
import pytest

from afferent.builtin.pipeline.pipeline import TOKENS
from afferent.engines.protocol import Accepted, EngineEvent, EngineInfo, EngineRequest
from tests.builtin.frontends import ScriptedEngine, frontend, post
from tests.server import ask

A_RED_CIRCLE = ([73], [390], [371])


def send(
    address: str, *bodies: dict[str, Any], engine: ScriptedEngine | None = None
) -> list[httpx.Response]:
    """Send the requests one after another; return the answers."""

    async def main() -> list[httpx.Response]:
        async with frontend(address, engine=engine) as http:
            return [await post(http, body) for body in bodies]

    return asyncio.run(main())


def test_all_the_room_that_is_left_can_be_asked_for(store_address: str) -> None:
    engine = ScriptedEngine([73])
    send(store_address, ask([], "What?"), engine=engine)
    (asked,) = engine.requests
    left = engine.info.max_model_len - len(asked.token_ids)
    assert asked.sampling.max_tokens == left, "without a limit it is all of it"
    bodies = [ask([], "What?", max_tokens=number) for number in (left, left + 1)]
    fits, reduced = send(store_address, *bodies, engine=engine)
    assert (fits.status_code, reduced.status_code) == (200, 200)
    assert "x-afferent-max-tokens" not in fits.headers
    assert reduced.headers["x-afferent-max-tokens"] == str(left)
    assert [request.sampling.max_tokens for request in engine.requests] == [left] * 3
    engine.info = EngineInfo(engine.info.max_model_len, [2], supported=("min_tokens",))
    bodies = [ask([], "What?", min_tokens=number) for number in (left, left + 1)]
    fits, refused = send(store_address, *bodies, engine=engine)
    assert fits.status_code == 200
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_the_engine_stops_with_a_stop_string(store_address: str) -> None:
    engine = ScriptedEngine(*A_RED_CIRCLE)
    (answer,) = send(store_address, ask([], "What?", stop=" red"), engine=engine)
    (choice,) = answer.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("a", "stop")
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert (engine.num_running, engine.num_finished) == (0, 0)


def test_what_the_engine_can_not_do_does_not_come_to_it(store_address: str) -> None:
    engine = ScriptedEngine([73])
    engine.info = EngineInfo(4096, [2], unsupported=("seed",))
    refused, answer = send(store_address, ask([], "What?", seed=1), ask([], "What?"), engine=engine)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "seed"
    assert answer.status_code == 200
    assert len(engine.requests) == 1


def test_a_prompt_is_counted_once_however_many_answers_there_are(store_address: str) -> None:
    engine = ScriptedEngine(*A_RED_CIRCLE)
    (answer,) = send(store_address, ask([], "What?", n=3), engine=engine)
    usage = answer.json()["usage"]
    counted = {kind: TOKENS.labels(kind).values[0] for kind in ("prompt", "completion")}
    assert counted == {"prompt": len(engine.requests[0].token_ids), "completion": 9}
    assert counted == {kind: usage[f"{kind}_tokens"] for kind in counted}


class ForgetsToAccept(ScriptedEngine):
    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        async for event in super().submit(request):
            if not isinstance(event, Accepted):
                yield event


class AcceptsTwice(ScriptedEngine):
    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        yield Accepted()
        async for event in super().submit(request):
            yield event


@pytest.mark.parametrize("kind", [ForgetsToAccept, AcceptsTwice])
def test_an_engine_accepts_once_and_first(
    store_address: str, kind: type[ScriptedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """A violation fails the request and is logged: it is unclear which process has the pins."""
    engine = kind(*A_RED_CIRCLE)
    (answer,) = send(store_address, ask([], "What?"), engine=engine)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "promise 1 of an engine: `Accepted` comes once, and first" in caplog.text
    assert engine.num_running == 0
