"""A server that wakes up seldom still ends at once, and writes dates."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import httpx2 as httpx
import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from afferent.serve.http.calm import CalmServer

pytestmark = pytest.mark.timeout(60)

_PROGRAM = """
import asyncio, sys, uvicorn, uvloop
from starlette.responses import PlainTextResponse
from afferent.serve.http.calm import CalmServer

async def main():
    config = uvicorn.Config(PlainTextResponse("here"), port=0, lifespan="off", log_config=None)
    server = CalmServer(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print("started", flush=True)
    await serving

uvloop.run(main())
"""


def test_it_ends_when_it_is_told() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"started\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == -signal.SIGTERM  # which is raised again at its end


@pytest.mark.parametrize(
    "end", [CalmServer.end_soon, lambda s: s.handle_exit(signal.SIGTERM, None)]
)
def test_it_does_not_wait_for_its_next_tick(end: Callable[[CalmServer], None]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("here")(scope, receive, send)

    async def main() -> tuple[str, float]:
        listener = socket.create_server(("127.0.0.1", 0))
        server = CalmServer(uvicorn.Config(app, lifespan="off", log_config=None))
        serving = asyncio.create_task(server._serve([listener]))
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        start_s = time.monotonic()
        end(server)
        await serving
        return answer.headers["date"], time.monotonic() - start_s

    date, took_s = asyncio.run(main())
    assert date.endswith("GMT")
    assert took_s < 0.9
