"""A frontend in front of an upstream: bodies that stop coming, and pages in browsers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from starlette.types import ASGIApp

from afferent.admission.gate import Gate
from afferent.config import ServeConfig
from afferent.engines.upstream import Headers, UpstreamAnswer, UpstreamRequest
from afferent.errors import EngineUnavailable
from afferent.proxy.auth import Access
from afferent.proxy.frontend import Parts, in_front
from afferent.proxy.http_server.server import HttpServer
from afferent.proxy.http_server.shared import ConnectionLimits
from afferent.proxy.launch import FrontendSettings
from afferent.proxy.responses import refusal_body
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.types import MiB, ObjectKind

pytestmark = pytest.mark.timeout(60)

POST = (
    b"POST /v1/other HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: multipart/form-data; boundary=a\r\nContent-Length: 1000\r\n\r\n-"
)


@dataclass
class Echo:
    """An upstream that reads bodies to their end, and answers with their length."""

    headers: Headers = ()
    heard: list[UpstreamRequest] = field(default_factory=list)
    num_running: int = 0

    is_ready = reads_arena = takes_salt = takes_videos = True
    takes_any_file = takes_names = False
    min_streamed_nbytes = 0
    name_of = None
    salt_key = bytes(32)
    stats: Any = None

    @asynccontextmanager
    async def forward(self, request: UpstreamRequest) -> AsyncIterator[UpstreamAnswer]:
        self.heard.append(request)
        self.num_running += 1
        try:
            nbytes = 0
            if not isinstance(request.body, bytes):
                assert isinstance(request.body, AsyncIterator)
                try:
                    async for chunk in request.body:
                        nbytes += len(chunk)
                except Exception as error:
                    raise EngineUnavailable("the engine does not answer") from error

            async def chunks() -> AsyncIterator[bytes]:
                yield b"%d" % nbytes

            yield UpstreamAnswer(status=200, headers=self.headers, chunks=chunks())
        finally:
            self.num_running -= 1


def run(
    upstream: Any, life: Callable[[ASGIApp, AsyncDaemonStore], Awaitable[None]], **settings: Any
) -> None:
    """Run ``life`` with the application of a frontend in front of an upstream."""
    config = ServeConfig(model="m", engine="vllm", **settings)

    async def main() -> None:
        with StoreServer(4 * MiB, shares={ObjectKind.FEATURES: 1.0}) as server:
            store = await AsyncDaemonStore.connect(server.address, name="frontend")
            access = Access(store, api_key=config.api_key, tenants=config.tenants)
            parts = Parts(
                settings=FrontendSettings(
                    store_address=server.address,
                    link=msgspec.Raw(),
                    model_folder=str(Path("/")),
                    model_name="m",
                    family=None,
                    config=config,
                ),
                store=store,
                gate=Gate(store, timeout_s=1.0),
                access=access,
                board=None,
                tracing=None,
                timeout_s=config.timeout_s(is_upstream=True),
            )
            try:
                await life(in_front(upstream, parts).app, store)
            finally:
                await store.close()

    asyncio.run(main())


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    limits = ConnectionLimits(header_timeout_s=30.0, discard_timeout_s=30.0, write_timeout_s=30.0)
    server = HttpServer(app, listener, limits, refuse=refusal_body, drain_timeout_s=30.0)
    serving = asyncio.create_task(server.serve())
    try:
        yield listener.getsockname()
    finally:
        server.end_soon()
        await serving


@pytest.mark.parametrize(
    ("idle_s", "in_all_s", "pause_s"), [(0.1, 30.0, 0.0), (30.0, 0.1, 0.0), (30.0, 0.1, 0.01)]
)
def test_body_that_is_no_json_and_stops_or_drips_gets_408(
    idle_s: float, in_all_s: float, pause_s: float
) -> None:
    """A client sends one byte, and with ``pause_s`` another one after each pause."""
    upstream = Echo()

    async def drip(writer: asyncio.StreamWriter) -> None:
        while pause_s:
            writer.write(b"-")
            await asyncio.sleep(pause_s)

    async def life(app: ASGIApp, store: AsyncDaemonStore) -> None:
        async with served(app) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(POST)
            dripping = asyncio.create_task(drip(writer))
            answer = await reader.read()
            dripping.cancel()
            writer.close()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"\r\nconnection: close\r\n" in answer
        assert b'"code":"body_too_slow"' in answer
        assert b"the body did not arrive in time" in answer
        assert len(upstream.heard) == 1
        assert upstream.num_running == 0

    run(upstream, life, body_idle_timeout_s=idle_s, body_timeout_s=in_all_s)


def test_body_that_is_no_json_is_passed_on_as_it_comes() -> None:
    async def life(app: ASGIApp, store: AsyncDaemonStore) -> None:
        async with served(app) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(POST)
            await writer.drain()
            writer.write(b"-" * 999)
            answer = await reader.readuntil(b"0\r\n\r\n")
            writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"4\r\n1000\r\n0\r\n\r\n")

    run(Echo(), life)


PAGE = "https://ours.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
OF_ENGINE = [
    (b"Access-Control-Allow-Origin", b"*"),
    (b"Access-Control-Allow-Credentials", b"true"),
    (b"Access-Control-Expose-Headers", b"x-a"),
]
ALLOWED, EXPOSED = "access-control-allow-origin", "access-control-expose-headers"
CREDENTIALS = "access-control-allow-credentials"


def asked(
    upstream: Echo, *requests: tuple[str, dict[str, str]], **settings: Any
) -> list[httpx.Response]:
    """Return the answers of a server with the key ``k`` to requests to the same path."""
    answers: list[httpx.Response] = []

    async def life(app: ASGIApp, store: AsyncDaemonStore) -> None:
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for method, headers in requests:
                answers.append(await client.request(method, "/v1/models", headers=headers))

    run(upstream, life, api_key="k", **settings)
    return answers


def test_page_of_cors_origin_needs_a_key_only_for_the_request_itself() -> None:
    upstream = Echo(OF_ENGINE)
    preflight, got, refused = asked(
        upstream,
        ("OPTIONS", PREFLIGHT),
        ("GET", {"origin": PAGE, "authorization": "Bearer k"}),
        ("GET", {"origin": PAGE}),
        cors_origin=(PAGE,),
    )
    assert (preflight.status_code, got.status_code, refused.status_code) == (200, 200, 401)
    assert [request.method for request in upstream.heard] == ["GET"]
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    for answer in (preflight, got, refused):  # once: the upstream's header is replaced
        assert answer.headers.get_list(ALLOWED) == [PAGE]
        assert CREDENTIALS not in answer.headers
    assert len(got.headers.get_list(EXPOSED)) == 1
    assert "x-afferent-items" in got.headers[EXPOSED]


def test_page_of_another_origin_is_not_allowed_by_cors_origin() -> None:
    upstream, evil = Echo(OF_ENGINE), "https://evil.example"
    preflight, got = asked(
        upstream,
        ("OPTIONS", {**PREFLIGHT, "origin": evil}),
        ("GET", {"origin": evil, "authorization": "Bearer k"}),
        cors_origin=(PAGE,),
    )
    assert (preflight.status_code, got.status_code) == (400, 200)
    for answer in (preflight, got):
        assert ALLOWED not in answer.headers
        assert CREDENTIALS not in answer.headers
    assert [request.method for request in upstream.heard] == ["GET"]


def test_without_cors_origin_the_upstreams_headers_are_passed_on_and_a_key_is_needed() -> None:
    upstream = Echo(OF_ENGINE)
    preflight, got = asked(
        upstream,
        ("OPTIONS", PREFLIGHT),
        ("GET", {"origin": PAGE, "authorization": "Bearer k"}),
    )
    assert (preflight.status_code, got.status_code) == (401, 200)
    assert [request.method for request in upstream.heard] == ["GET"]
    assert got.headers.get_list(ALLOWED) == ["*"]
    assert got.headers[EXPOSED] == "x-a"
