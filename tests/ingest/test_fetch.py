"""The fetch policy: which URLs, which addresses, how much, how long."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from afferent.config import ServeConfig
from afferent.errors import FetchFailed, ForbiddenUrl, InvalidMedia, MediaTooLarge
from afferent.ingest import fetch
from afferent.ingest.fetch import Fetcher, check_url, is_public
from afferent.ingest.source import read_media

NOT_PUBLIC = """
127.0.0.1 127.8.8.8 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1
192.0.0.1 192.0.2.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1
255.255.255.255 168.63.129.16 :: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::a00:1
64:ff9b:1::1 2002:7f00:1:: 2001:0:1::1 fe80::1 fe80::1%eth0 fc00::1 fd00:ec2::254 fec0::1
ff02::1 2001:db8::1
"""


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1"]
)
def test_addresses_that_are(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.com/",
        "gopher://example.com/",
        "//example.com/",
        "example.com/a.png",
        "http://",
        "http:///a",
        "http://user@example.com/",
        "http://user:pass@example.com/",
        "http://@example.com/",
        "http://example.com:8080/",
        "http://example.com:99999/",
        "http://example.com\\@127.0.0.1/",
        "http://example.com/a b",
        "http://example.com/\r\nHost: evil",
        "http://example.com/\x00",
        "http://[::1/",
        "http://example.com/" + "a" * 9000,
    ],
)
def test_urls_that_are_refused_unseen(url: str) -> None:
    with pytest.raises(ForbiddenUrl):
        check_url(url)


def test_urls_that_are_not() -> None:
    assert check_url("https://example.com/a.png?b#c").port == 443
    assert check_url("http://example.com:443/").port == 443
    assert check_url("http://example.com:8080/", allow=["example.com:8080"]).port == 8080


Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def media_host(answers: dict[str, Answer]) -> Iterator[str]:
    """A server on loopback; its ``HOST:PORT``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers[self.path](self)

        def log_message(self, *_: Any) -> None:
            pass

    host = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    host.daemon_threads = True
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{host.server_address[1]}"
    finally:
        host.shutdown()
        thread.join()
        host.server_close()


def send(body: bytes, status: int = 200, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    return answer


def get(where: str, path: str, *, allowed: bool = True, **limits: Any) -> bytes:
    async def main() -> bytes:
        allow = (where,) if allowed else ()
        fetcher = Fetcher(ServeConfig(fetch_allow=allow, **limits))
        try:
            return await fetcher.fetch(f"http://{where}{path}", max_nbytes=1000)
        finally:
            await fetcher.close()

    return asyncio.run(main())


def test_a_host_of_ones_own_can_be_allowed() -> None:
    seen: list[dict[str, str]] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        seen.append(dict(request.headers))
        send(b"picture")(request)

    with media_host({"/a": answer}) as where:
        assert get(where, "/a") == b"picture"
        with pytest.raises(ForbiddenUrl):
            get(where, "/a", allowed=False)
    assert seen == [{"Host": where, "Accept": "image/*", "Accept-Encoding": "identity"}]


def test_redirects_are_checked_again() -> None:
    with media_host({}) as forbidden:
        answers = {
            "/ok": send(b"picture"),
            "/once": send(b"", 302, Location="/ok"),
            "/loop": send(b"", 302, Location="/loop"),
            "/metadata": send(b"", 302, Location="http://169.254.169.254/latest"),
            "/file": send(b"", 302, Location="file:///etc/passwd"),
            "/other": send(b"", 302, Location=f"http://{forbidden}/"),
            "/nowhere": send(b"", 302),
        }
        with media_host(answers) as where:
            assert get(where, "/once") == b"picture"
            for path in ("/metadata", "/file", "/other"):
                with pytest.raises(ForbiddenUrl):
                    get(where, path)
            for path in ("/loop", "/nowhere"):
                with pytest.raises(FetchFailed):
                    get(where, path)


def test_hosts_that_misbehave() -> None:
    release = threading.Event()

    def endless(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        while True:
            try:
                request.wfile.write(b"x" * 500)
            except OSError:
                return

    def silent(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "10")
        request.end_headers()
        release.wait(20)

    def short(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000")
        request.end_headers()
        request.wfile.write(b"x")

    answers = {
        "/large": send(b"x" * 1001),
        "/endless": endless,
        "/silent": silent,
        "/short": short,
        "/missing": send(b"", 404),
        "/broken": send(b"", 500),
        "/garbage": lambda request: request.wfile.write(b"\x00\x01nonsense\r\n\r\n"),
    }
    with media_host(answers) as where:
        for path in ("/large", "/endless"):
            with pytest.raises(MediaTooLarge):
                get(where, path)
        for path in ("/short", "/missing", "/broken", "/garbage"):
            with pytest.raises(FetchFailed):
                get(where, path)
        with pytest.raises(FetchFailed, match="too long"):
            get(where, "/silent", fetch_idle_timeout_s=0.2)
        with pytest.raises(FetchFailed, match="too long"):
            get(where, "/silent", fetch_total_timeout_s=0.2)
        release.set()


def test_every_answer_of_the_resolver_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One public address among private ones does not open the door; a name is resolved once."""
    lookups = []

    async def resolve(host: str, port: int) -> list[str]:
        lookups.append((host, port))
        return ["1.1.1.1", "127.0.0.1"]

    monkeypatch.setattr(fetch, "_resolve", resolve)
    with pytest.raises(ForbiddenUrl):
        get("rebind.example:80", "/", allowed=False)
    assert lookups == [("rebind.example", 80)]


def test_the_checked_address_is_the_one_that_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name keeps its place in the Host header; the connection goes to the pinned address."""
    with media_host({"/a": send(b"picture")}) as where:
        port = int(where.rsplit(":", 1)[1])

        async def resolve(host: str, _: int) -> list[str]:
            assert host == "pictures.example"
            return ["127.0.0.1"]

        monkeypatch.setattr(fetch, "_resolve", resolve)
        monkeypatch.setattr(socket, "getaddrinfo", _no_lookup)
        assert get(f"pictures.example:{port}", "/a") == b"picture"


def _no_lookup(host: str, *arguments: Any, **parameters: Any) -> Any:
    assert host == "127.0.0.1", "a name was looked up a second time"
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, arguments[0]))]


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("data:image/png;base64,aGVsbG8=", None),
        ("DATA:image/png;BASE64,aGVsbG8=", None),
        ("data:;base64,aGVsbG8=", None),
        ("data:image/png;base64,aGVsbG8", InvalidMedia),
        ("data:image/png;base64,aGVs bG8=", InvalidMedia),
        ("data:image/png;base64,aGVsbG8=\n", InvalidMedia),
        ("data:image/png;base64,ä", InvalidMedia),
        ("data:image/png,hello", ForbiddenUrl),
        ("data:image/png;base64", ForbiddenUrl),
        ("data:image/png;base64," + "A" * 4000, MediaTooLarge),
    ],
)
def test_data_urls(url: str, error: type[Exception] | None) -> None:
    limits = ServeConfig(max_image_nbytes=2000)

    async def main() -> bytes:
        return (
            await read_media(url, limits=limits, fetches=Fetcher(limits).session(max_nbytes=1))
        ).data

    if error is None:
        assert asyncio.run(main()) == b"hello"
    else:
        with pytest.raises(error):
            asyncio.run(main())
