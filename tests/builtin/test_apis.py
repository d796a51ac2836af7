"""Responses and Messages over HTTP, in this process, with a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import httpx2 as httpx
import pytest

from afferent.config import Tenant
from afferent.engines.protocol import EngineRequest
from afferent.errors import WorkerDied
from afferent.store.client.daemon_store import DaemonStore
from tests.builtin.dialogues import events
from tests.builtin.frontends import ScriptedEngine, frontend
from tests.builtin.test_holding import Saboteur, holds_nothing
from tests.images import encoded, photo
from tests.server import data_url, wait_until

TOKENS = [[20, 21], [22]]
IMAGE = {
    "type": "input_image",
    "image_url": data_url(encoded(photo(60, 50), "JPEG")),
    "detail": "auto",
}


def with_image(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [IMAGE, {"type": "input_text", "text": text}]}]


ACME = Tenant(name="acme", api_keys=("acme-key-0123456789",))
OTHER = Tenant(name="other", api_keys=("other-key-0123456789",))


async def respond(
    http: httpx.AsyncClient, given: Any, *, key: str = "none", **parameters: Any
) -> httpx.Response:
    body = {"model": "shapes", "input": given, **parameters}
    return await http.post("/v1/responses", json=body, headers=_as_openai(key))


def _as_openai(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def message(
    http: httpx.AsyncClient, *, key: str = "none", **parameters: Any
) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "shapes", "max_tokens": 9, "messages": messages, **parameters}
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    return await http.post("/v1/messages", json=body, headers=headers)


def run(
    address: str,
    work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]],
    engine: ScriptedEngine | None = None,
    tenants: Sequence[Tenant] = (),
) -> None:
    async def main() -> None:
        running = engine or ScriptedEngine(*TOKENS)
        async with frontend(address, engine=running, tenants=tenants) as http:
            await work(http)

    asyncio.run(asyncio.wait_for(main(), 60))
    with DaemonStore(address, name="other") as other:
        wait_until(lambda: holds_nothing(other))


def frames(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.content.split(b"\n\n")
    assert parts.pop() == b""
    return events([part + b"\n\n" for part in parts])


def test_the_engine_gets_the_whole_conversation(address: str) -> None:
    """The engine gets the same prompt and items as if all messages were sent at once."""
    engine = ScriptedEngine(*TOKENS)

    async def work(http: httpx.AsyncClient) -> None:
        first = (await respond(http, with_image("One?"), instructions="A.")).json()
        said = first["output"][0]["content"][0]["text"]
        second = await respond(
            http, with_image("Two?"), previous_response_id=first["id"], instructions="B."
        )
        assert second.status_code == 200
        sent = [
            *with_image("One?"),
            {"role": "assistant", "content": said},
            *with_image("Two?"),
        ]
        assert (await respond(http, sent, instructions="B.", store=False)).status_code == 200

    run(address, work, engine)
    _, resumed, whole = engine.requests
    assert resumed.token_ids == whole.token_ids
    assert _items(resumed) == _items(whole)
    assert len(resumed.items) == 2


def _items(request: EngineRequest) -> list[Any]:
    return [(item.key, item.placeholder) for item in request.items]


def test_tenants_have_conversations_of_their_own(address: str) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        (ours,), (theirs,) = ACME.api_keys, OTHER.api_keys
        first = (await respond(http, with_image("One?"), key=ours)).json()
        path = f"/v1/responses/{first['id']}"
        for key, status in (("none", 401), (theirs, 404), (ours, 200)):
            found = await http.get(path, headers=_as_openai(key))
            assert found.status_code == status
            resumed = await respond(http, "Two?", key=key, previous_response_id=first["id"])
            assert resumed.status_code == status
            deleted = await http.delete(path, headers=_as_openai(key))
            assert deleted.status_code == status
        assert found.json() == first
        assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}

    run(address, work, tenants=(ACME, OTHER))


def test_keys_of_messages(address: str) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        refused = await message(http)
        error = {"type": "authentication_error", "message": "the API key is not known"}
        assert (refused.status_code, refused.json()["error"]) == (401, error)
        (key,) = ACME.api_keys
        assert (await message(http, key=key)).status_code == 200

    run(address, work, tenants=(ACME,))


def test_log_probabilities(address: str) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        whole = (await respond(http, "One?", top_logprobs=2)).json()
        scored = whole["output"][0]["content"][0]["logprobs"]
        assert [entry["logprob"] for entry in scored] == [-0.2, -0.21, -0.22]
        assert [len(entry["top_logprobs"]) for entry in scored] == [2, 2, 2]
        seen = frames(await respond(http, "One?", top_logprobs=2, stream=True))
        deltas = [e for e in seen if e["type"] == "response.output_text.delta"]
        assert [entry for delta in deltas for entry in delta["logprobs"]] == scored
        assert whole["top_logprobs"] == 2
        without = (await respond(http, "One?")).json()
        assert without["output"][0]["content"][0]["logprobs"] == []

    run(address, work)


def test_a_response_that_fails_in_the_middle(address: str) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        seen = frames(await respond(http, "One?", stream=True))
        assert [event["type"] for event in seen[-3:]] == [
            "response.output_text.delta",
            "error",
            "response.failed",
        ]
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        assert seen[-2]["code"] == "worker_died"
        response_id = seen[-1]["response"]["id"]
        assert (await http.get(f"/v1/responses/{response_id}")).status_code == 404
        assert (await respond(http, "One?")).status_code == 503

    run(address, work, ScriptedEngine(*TOKENS, failure=WorkerDied("a worker died; try again")))


def test_a_message_that_fails_in_the_middle(address: str) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        seen = frames(await message(http, stream=True))
        assert [event["type"] for event in seen] == [
            "message_start",
            "content_block_start",
            "ping",
            "content_block_delta",
            "content_block_delta",
            "error",
        ]
        error = {"type": "overloaded_error", "message": "a worker died; try again"}
        assert seen[-1]["error"] == error
        whole = await message(http)
        assert (whole.status_code, whole.json()["error"]) == (503, error)
        assert whole.headers["retry-after"]

    run(address, work, ScriptedEngine(*TOKENS, failure=WorkerDied("a worker died; try again")))


def test_sampling_parameters_reach_the_engine(address: str) -> None:
    engine = ScriptedEngine(*TOKENS)

    async def work(http: httpx.AsyncClient) -> None:
        await message(http, temperature=0.5, top_p=0.25, top_k=7)
        await respond(http, "One?", temperature=1.5, top_p=0.5, max_output_tokens=3)

    run(address, work, engine)
    first, second = (request.sampling for request in engine.requests)
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k) == (9, 0.5, 0.25, 7)
    assert (second.max_tokens, second.temperature, second.top_p) == (3, 1.5, 0.5)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_what_the_router_refuses_has_the_form_of_the_api(address: str, path: str) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        refused = await http.get(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        body = refused.json()
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert body["request_id"] == refused.headers["request-id"]

    run(address, work)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/chat/completions/render", 400),
        ("/v1/nothing", 404),
        ("/v1/chat/completions/", 404),  # no redirect: a client would send its key to the new URL
    ],
)
def test_a_query_that_is_no_text(address: str, path: str, status: int) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        app = http._transport.app  # type: ignore[attr-defined]

        async def asked(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "query_string": b"features=\xff"}, receive, send)

        transport = httpx.ASGITransport(app=asked)
        async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as odd:
            refused = await odd.post(path, content=b"{}")
        assert refused.status_code == status
        assert refused.json()["error"]["code"] == "invalid_request"

    run(address, work)


def test_a_client_that_leaves_while_an_answer_is_looked_up(address: str) -> None:
    async def main() -> None:
        async with frontend(address) as http:
            kept = (await respond(http, "One?")).json()
        for at in range(2):
            async with frontend(
                address, wrap=lambda store, at=at: Saboteur(store, at, "cancelled after")
            ) as http:
                found = asyncio.create_task(http.get(f"/v1/responses/{kept['id']}"))
                await asyncio.gather(found, return_exceptions=True)
                assert found.cancelled()
                with DaemonStore(address, name="watcher") as watcher:
                    await asyncio.to_thread(wait_until, lambda: holds_nothing(watcher))

    asyncio.run(asyncio.wait_for(main(), 60))
