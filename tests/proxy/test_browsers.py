"""A page of another origin can't use a server without keys; programs and its own pages can."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx2 as httpx
import pytest
from starlette.responses import PlainTextResponse

from afferent.proxy.browsers import BrowserGuard
from afferent.proxy.http_server.origins import is_loopback, own_names

HOST = "localhost:8000"


def ask(
    headers: Mapping[str, str],
    *,
    method: str = "POST",
    names: frozenset[str] = own_names("127.0.0.1"),
    origins: tuple[str, ...] = (),
    is_loopback: bool = True,
    path: str = "/v1/chat/completions",
) -> httpx.Response:
    async def run() -> httpx.Response:
        app: Any = BrowserGuard(
            PlainTextResponse("here"), names=names, origins=origins, is_loopback=is_loopback
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "host", [HOST, "127.0.0.1:8000", "[::1]:8000", "LOCALHOST", "10.1.2.3", "llm.example.org"]
)
def test_guard_own_name_passes(host: str) -> None:
    names = own_names("127.0.0.1") | {"llm.example.org"}
    assert ask({"host": host}, names=names).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io:80"])
def test_guard_foreign_name_on_loopback_is_refused_with_the_setting(host: str) -> None:
    answer = ask({"host": host})
    assert answer.status_code == 421
    error = answer.json()["error"]
    assert error["code"] == "invalid_request"
    assert "--allowed-hosts" in error["message"]
    assert ask({"host": host}, is_loopback=False).status_code == 200


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_guard_page_whose_name_leads_here_is_refused(method: str) -> None:
    """DNS rebinding: the page's origin is this server, by a name that is not configured."""
    rebound = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    for is_here, more in ((True, {}), (False, {}), (False, {"sec-fetch-site": "same-origin"})):
        answer = ask({**rebound, **more}, method=method, is_loopback=is_here)
        assert answer.status_code == 421
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    names = own_names("0.0.0.0") | {"evil.example"}
    assert ask(rebound, method=method, names=names, is_loopback=False).status_code == 200
    allowed = ("http://evil.example:8000",)
    assert ask(rebound, method=method, origins=allowed, is_loopback=False).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/files/file-1/content", "/v1/uploads/upload-1", "/V1//files/"]
)
def test_guard_stored_files_are_not_read_by_an_unknown_name(path: str) -> None:
    """DNS rebinding: a browser sends a `GET` to the page's own origin without `Origin`."""
    unknown = {"host": "evil.example:8000"}
    names = own_names("0.0.0.0") | {"llm.example.org"}
    answer = ask(unknown, method="GET", path=path, names=names, is_loopback=False)
    assert answer.status_code == 421
    assert "--allowed-hosts" in answer.json()["error"]["message"]
    for host in ("llm.example.org", "10.1.2.3:8000", HOST):
        known = ask({"host": host}, method="GET", path=path, names=names, is_loopback=False)
        assert known.status_code == 200
    models = ask(unknown, method="GET", path="/v1/models", names=names, is_loopback=False)
    assert models.status_code == 200


@pytest.mark.parametrize("host", ["10.1.2.3:8000", "[fd00::1]:8000", HOST])
def test_guard_page_by_address_passes_on_a_network(host: str) -> None:
    headers = {"host": host, "origin": f"http://{host}"}
    assert ask(headers, is_loopback=False).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://[::1"},
        {"origin": ""},
        {"origin": "http://localhost:3000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": f"http://{HOST}", "sec-fetch-site": "cross-site"},
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET", "OPTIONS"])
def test_guard_page_of_another_origin_is_refused(headers: dict[str, str], method: str) -> None:
    for is_here in (True, False):
        sent = {"host": HOST, "content-type": "text/plain", **headers}
        answer = ask(sent, method=method, is_loopback=is_here)
        assert answer.status_code == 403
        assert "--cors-origin" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": f"http://{HOST}"},
        {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"},
        {"origin": "https://llm.example.org:8443", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ],
)
def test_guard_own_page_and_programs_pass(headers: dict[str, str]) -> None:
    assert ask({"host": HOST, **headers}).status_code == 200


@pytest.mark.parametrize("allowed", ["https://ours.example", "*"])
def test_guard_allowed_origin_passes(allowed: str) -> None:
    headers = {"host": HOST, "origin": "https://ours.example", "sec-fetch-site": "cross-site"}
    assert ask(headers, origins=(allowed,)).status_code == 200
    assert ask(headers, origins=("https://others.example",)).status_code == 403


def test_guard_websocket_of_another_origin_is_refused() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the application was called")

    async def keep(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "websocket",
        "path": "/v1/realtime",
        "headers": [(b"host", HOST.encode()), (b"origin", b"http://evil.example")],
        "extensions": {"websocket.http.response": {}},
    }

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    guard = BrowserGuard(app, names=own_names(""), origins=(), is_loopback=False)
    asyncio.run(guard(scope, receive, keep))
    assert sent[0]["type"] == "websocket.http.response.start"
    assert sent[0]["status"] == 403


@pytest.mark.parametrize(
    ("host", "is_it"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
    ],
)
def test_is_loopback(host: str, is_it: bool) -> None:
    assert is_loopback(host) is is_it
