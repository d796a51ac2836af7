"""A stream whose client disconnects before the first byte, or reads no further."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx2 as httpx
import pytest

from afferent.config import Tenant
from afferent.engines.protocol import EngineEvent, EngineRequest
from tests.builtin.frontends import ScriptedEngine, frontend, post
from tests.server import ask

KEY = "acme-key-0123456789"
BODY = json.dumps(ask([], "What?", stream=True, n=2)).encode()
SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "method": "POST",
    "path": "/v1/chat/completions",
    "query_string": b"",
    "headers": [(b"x-api-key", KEY.encode())],
}


@pytest.mark.parametrize("num_frames", [0, 1, 3])
def test_it_ends_what_it_began(address: str, num_frames: int) -> None:
    """The stream ends and is counted at the disconnect, and not at a garbage collection."""

    async def main() -> None:
        engine = ScriptedEngine(*([71] for _ in range(50)))
        async with frontend(address, engine=engine) as http:
            messages = [{"type": "http.request", "body": BODY}]
            sent: list[Any] = []
            is_enough = asyncio.Event()

            async def receive() -> Any:
                if messages:
                    return messages.pop(0)
                if num_frames:
                    await is_enough.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                await asyncio.sleep(0)
                sent.append(message)
                if len(sent) > num_frames:
                    is_enough.set()

            before = await num_gone(http)
            await http._transport.app(SCOPE, receive, send)  # type: ignore[attr-defined]
            assert engine.num_running == 0
            assert engine.num_finished == 0
            assert len(sent) < 40
            assert await num_gone(http) == before + 1

    asyncio.run(main())


async def num_gone(http: httpx.AsyncClient) -> float:
    name = 'afferent_requests_total{api="openai_chat",outcome="client_gone"} '
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


class Clumsy(ScriptedEngine):
    """An engine that fails when it is cancelled."""

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        try:
            async for event in super().submit(request):
                yield event
        finally:
            raise RuntimeError("clumsy")


@pytest.mark.parametrize("num_answers", [1, 2])
def test_its_place_is_free_even_if_the_engine_can_not_be_stopped(
    address: str, num_answers: int
) -> None:
    body = json.dumps(ask([], "What?", stream=True, n=num_answers)).encode()
    acme = Tenant(name="acme", api_keys=(KEY,), max_requests=1)

    async def main() -> None:
        async with frontend(address, engine=Clumsy([71], [71]), tenants=(acme,)) as http:
            messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]

            async def receive() -> Any:
                return messages.pop(0)

            async def send(_: Any) -> None:
                await asyncio.sleep(60)

            with contextlib.suppress(RuntimeError):
                await http._transport.app(SCOPE, receive, send)  # type: ignore[attr-defined]
            assert (await post(http, ask([], "What?"), key=KEY)).status_code != 429

    asyncio.run(asyncio.wait_for(main(), 60))
