"""The live page's site: answers, refusals, and forwarded questions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import pytest

from afferent.operations.live_page import asking as asking_module
from afferent.operations.live_page import site as site_module
from afferent.operations.live_page.feed import Feed
from afferent.operations.live_page.launch import PageSettings
from afferent.operations.live_page.observing import Observer
from afferent.operations.live_page.site import site

pytestmark = pytest.mark.timeout(60)

FOLDER = Path(site_module.__file__).parent / "page"
KEY = "k" * 20
PAGE = {"host": "127.0.0.1:9000", "sec-fetch-site": "same-origin"}


def settings(**changes: Any) -> PageSettings:
    known = PageSettings(
        sockets_folder="/nowhere",
        host="127.0.0.1",
        key="",
        api_url="http://127.0.0.1:9",
        api_key="",
        can_ask=True,
        timeout_s=30.0,
    )
    return msgspec.structs.replace(known, **changes)


def ask(
    method: str, path: str, headers: Mapping[str, str | bytes], *, body: bytes = b"", **changes: Any
) -> httpx.Response:
    async def run() -> httpx.Response:
        feed = Feed(Observer(Path("/nowhere"), name="page"))
        transport = httpx.ASGITransport(site(settings(**changes), feed))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9000") as own:
            sent = [(name, value) for name, value in headers.items()]
            return await own.request(method, path, headers=sent, content=body)

    return asyncio.run(run())


@pytest.mark.parametrize("path", ["/", "/page.css", "/page.js", "/words.js", "/icon.svg", "/about"])
def test_what_has_nothing_to_hide_is_shown(path: str) -> None:
    answer = ask("GET", path, {"host": "localhost:9000"}, key=KEY)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:9000", "localhost", "LOCALHOST:1", "[::1]:9000", "10.1.2.3:80", "my-host:9000"],
)
def test_the_page_is_reached_by_its_names(host: str) -> None:
    assert ask("GET", "/about", {"host": host}, host="my-host").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example:9000", "127.0.0.1.evil.example", "", "localhost.evil", "[::1", "a@b"]
)
def test_by_any_other_name_nothing_is_answered(host: str) -> None:
    """DNS rebinding: a foreign name resolves to this address."""
    for path in ("/", "/views", "/ask"):
        assert ask("GET", path, {"host": host}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1:9001"},
        {"origin": "null"},
    ],
)
def test_other_pages_can_not_ask(headers: dict[str, str]) -> None:
    sent = {"host": "127.0.0.1:9000", "content-type": "application/json", **headers}
    assert ask("POST", "/ask", sent, body=b"{}").status_code == 403
    assert ask("GET", "/views", sent).status_code == 403


def test_page_behind_a_tls_proxy_that_sends_another_host_can_ask() -> None:
    sent = {"content-type": "application/json", "origin": "https://page.example.org", **PAGE}
    assert ask("POST", "/ask", sent, body=b"{}").status_code not in (401, 403, 421)
    sent["host"] = "evil.example"
    assert ask("POST", "/ask", sent, body=b"{}").status_code == 421


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_form_can_send_is_no_question(kind: str) -> None:
    sent = {**PAGE, "content-type": kind}
    assert ask("POST", "/ask", sent, body=b"{}").status_code == 415


@pytest.mark.parametrize("sent", ["", KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xe9"])
def test_without_the_key_nothing_is_seen(sent: str) -> None:
    key = sent.encode("latin-1")
    headers = {**PAGE, "authorization": key, "content-type": "application/json"}
    assert ask("GET", "/views", headers, key=KEY).status_code == 401
    assert ask("POST", "/ask", headers, key=KEY, body=b"{}").status_code == 401
    assert json.loads(ask("GET", "/about", PAGE, key=KEY).content)["needs_key"] is True


def test_there_is_nothing_else() -> None:
    for method, path in (("GET", "/page/page.js"), ("GET", "/../main.py"), ("OPTIONS", "/ask")):
        assert ask(method, path, PAGE).status_code in (404, 405)
    assert "access-control-allow-origin" not in ask("OPTIONS", "/ask", PAGE).headers


# Questions


class Frontend:
    """A frontend with a fixed answer, which records the request."""

    def __init__(self, answer: bytes) -> None:
        self._answer, self.head, self.body = answer, b"", b""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server:
            yield f"http://{host}:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", self.head)
        assert length is not None
        self.body = await reader.readexactly(int(length[1]))
        writer.write(self._answer)
        await writer.drain()
        writer.close()


def passed(frontend: Frontend, body: bytes, **changes: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with frontend.running() as url:
            feed = Feed(Observer(Path("/nowhere"), name="page"))
            app = site(settings(api_url=url, **changes), feed)
            transport = httpx.ASGITransport(app)
            base = "http://127.0.0.1:9000"
            async with httpx.AsyncClient(transport=transport, base_url=base) as own:
                headers = {"sec-fetch-site": "same-origin", "content-type": "application/json"}
                return await own.post("/ask", headers=headers, content=body)

    return asyncio.run(run())


def test_a_question_is_passed_on_and_its_answer_comes_back() -> None:
    frontend = Frontend(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: chatcmpl-1\r\n"
        b"set-cookie: a=b\r\nconnection: close\r\n\r\ndata: {}\n\ndata: [DONE]\n\n"
    )
    answer = passed(frontend, b'{"stream": true}', api_key=KEY)
    assert (answer.status_code, answer.content) == (200, b"data: {}\n\ndata: [DONE]\n\n")
    assert answer.headers["x-request-id"] == "chatcmpl-1"
    assert "set-cookie" not in answer.headers
    assert frontend.head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert f"bearer {KEY}".encode() in frontend.head.lower()
    assert frontend.body == b'{"stream": true}'


def test_a_refusal_comes_back_as_it_is() -> None:
    frontend = Frontend(
        b"HTTP/1.1 503 X\r\ncontent-type: application/json\r\nretry-after: 3\r\n"
        b"content-length: 2\r\n\r\n{}"
    )
    answer = passed(frontend, b"{}")
    assert (answer.status_code, answer.headers["retry-after"], answer.content) == (503, "3", b"{}")
    assert b"authorization" not in frontend.head.lower()


def test_nobody_there_and_nobody_may() -> None:
    sent = {**PAGE, "content-type": "application/json"}
    assert ask("POST", "/ask", sent, body=b"{}").status_code == 502
    assert ask("POST", "/ask", sent, body=b"{}", can_ask=False).status_code == 403


def test_question_that_does_not_arrive_in_time_gets_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "_BODY_TIMEOUT_S", 0.1)

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(3600)

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    async def run() -> httpx.Response:
        server = await asyncio.start_server(take, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        feed = Feed(Observer(Path("/nowhere"), name="page"))
        app = site(settings(api_url=f"http://{host}:{port}"), feed)
        sent = {**PAGE, "content-type": "application/json", "content-length": "100"}
        async with server, httpx.AsyncClient(transport=httpx.ASGITransport(app)) as own:
            url = "http://127.0.0.1:9000/ask"
            found = await own.post(url, headers=sent, content=endless())
            await ended.wait()
            return found

    ended = asyncio.Event()
    answer = asyncio.run(run())
    assert answer.status_code == 408
    assert answer.json() == {"error": {"message": "the question did not arrive in time"}}


# The files


def test_the_page_is_small_and_needs_nobody_else() -> None:
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    text = {path.name: path.read_text() for path in files}
    assert sum(each.count("\n") for each in text.values()) <= 1100
    for name, content in text.items():
        places = re.findall(r"https?://[^\s\"')]+", content)
        assert set(places) <= {"http://www.w3.org/2000/svg"}, name
    assert set(re.findall(r'(?:src|href)="([^"]+)"', text["index.html"])) == {
        *("icon.svg", "page.css", "page.js")
    }
    imported = set(re.findall(r'from "\./([^"]+)"', scripts()))
    assert imported | {"icon.svg", "index.html", "page.css", "page.js"} == text.keys()
    for name in text.keys() - {"index.html"}:
        assert ask("GET", f"/{name}", {"host": "localhost:9000"}).status_code == 200


def scripts() -> str:
    """Return the text of all scripts of the page."""
    return "\n".join(path.read_text() for path in sorted(FOLDER.glob("*.js")))


def test_nothing_is_inserted_as_html() -> None:
    script = scripts()
    forbidden = "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\\(|new Function|srcdoc"
    assert re.findall(forbidden, script) == []
    html = (FOLDER / "index.html").read_text()
    assert re.findall(r"\son\w+=|style=|<style|<script(?! type=\"module\" src)", html) == []


def test_every_place_that_the_script_fills_is_there() -> None:
    html, script = (FOLDER / "index.html").read_text(), scripts()
    there = re.findall(r'id="([^"]+)"', html)
    assert len(set(there)) == len(there)
    wanted = set(re.findall(r'(?:\$|body)\("([^"]+)"\)', script))
    assert wanted <= set(there)
    labels = re.findall(r'(?:aria-labelledby|for)="([^"]+)"', html)
    assert set(labels) <= set(there)
