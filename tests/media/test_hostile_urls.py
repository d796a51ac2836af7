"""Hundreds of URLs that a server must not follow, lying names, and misbehaving hosts.

The fetcher dials a small internet with one public address, where a host answers from the tables
below. Every other address leads to a listener that must never get a connection.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpcore
import pytest

from afferent.config import Limits
from afferent.errors import FetchFailed, ForbiddenUrl, InvalidMedia, MediaTooLarge
from afferent.media.fetch.fetch import Fetcher
from afferent.media.fetch.fetch_policy import check_redirect, check_url
from afferent.types import KiB, MiB
from tests.media.media_host import Answer, media_host, send, send_raw, send_slowly
from tests.media.test_fetch_policy import NOT_PUBLIC

PUBLIC = "93.184.216.34"
MAX_NBYTES = 1000
SECOND_S = 0.4
"""The timeout for slow hosts; endless answers end here."""

HASTY = Limits(
    fetch_connect_timeout_s=SECOND_S,
    fetch_idle_timeout_s=SECOND_S,
    fetch_total_timeout_s=3 * SECOND_S,
    fetch_min_nbytes_per_s=400,
)


@dataclass
class Internet:
    """A small internet; ``names`` has the resolver's answers in turn, the last one repeated."""

    runner: asyncio.Runner
    internal: socket.socket
    names: dict[str, Iterator[list[str]]] = field(default_factory=dict)
    dialled: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    fetcher: Fetcher | None = None
    hasty: Fetcher | None = None

    def name(self, *answers: list[str]) -> str:
        """Return a new name with these answers."""
        name = f"name{next(self.numbers)}.example"
        self.names[name] = itertools.chain(answers, itertools.repeat(answers[-1]))
        return name

    async def resolve(self, host: str, port: int) -> list[str]:
        if host in self.names:
            return next(self.names[host])
        try:  # getaddrinfo decides which spellings are numbers
            flags = socket.AI_NUMERICHOST
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        except (OSError, UnicodeError) as error:
            raise FetchFailed("the media host's name was not found") from error
        return [str(entry[4][0]) for entry in found]

    def fetch(self, url: str, *, is_hasty: bool = False) -> bytes:
        async def main() -> bytes:
            fetcher = self.hasty if is_hasty else self.fetcher
            assert fetcher is not None
            session = fetcher.session(max_nbytes=10 * MAX_NBYTES)
            return await session.fetch(url, modality="image", max_nbytes=MAX_NBYTES)

        return self.runner.run(main())

    def refuses(self, url: str, error: type[InvalidMedia], *, is_hasty: bool = False) -> None:
        """Check that the URL is refused with this error, and no internal address was dialled."""
        self.dialled.clear()
        with pytest.raises(error) as caught:
            self.fetch(url, is_hasty=is_hasty)
        assert type(caught.value) is error
        for secret in ("127.0.0.1", "10.", "169.254", "secret", "passwd", "Errno"):
            assert secret not in caught.value.message
        self.check_nothing_internal()

    def check_nothing_internal(self) -> None:
        assert set(self.dialled) <= {PUBLIC}
        with pytest.raises(BlockingIOError):
            self.internal.accept()


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    over = threading.Event()
    with (
        socket.create_server(("127.0.0.1", 0)) as internal,
        media_host(answers(over)) as where,
        asyncio.Runner() as runner,
        pytest.MonkeyPatch.context() as patch,
    ):
        internal.setblocking(False)
        internet = Internet(runner, internal)
        ports = {PUBLIC: int(where.rsplit(":", 1)[1])}
        dial = httpcore.AnyIOBackend.connect_tcp

        async def connect_tcp(self: Any, host: str, port: int, *more: Any) -> Any:
            internet.dialled.append(host)
            port = ports.get(host, internal.getsockname()[1])
            return await dial(self, "127.0.0.1", port, *more)

        patch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect_tcp)
        internet.names["media.example"] = itertools.repeat([PUBLIC])

        async def start(limits: Limits) -> Fetcher:
            return Fetcher(limits, resolve=internet.resolve, grace_s=SECOND_S / 2)

        internet.fetcher, internet.hasty = runner.run(start(Limits())), runner.run(start(HASTY))
        yield internet
        over.set()
        for fetcher in (internet.fetcher, internet.hasty):
            runner.run(fetcher.close())


def test_the_small_internet(internet: Internet) -> None:
    """A harmless URL is fetched, and a harmful connection would be noticed."""
    assert internet.fetch("http://media.example/ok") == b"content"
    assert internet.fetch(f"http://{PUBLIC}/ok") == b"content"
    assert set(internet.dialled) == {PUBLIC}


# Refused by the text of the URL

SCHEMES = """
ftp gopher dict ldap ldaps ssh telnet sftp tftp smb nfs jar javascript unix http+unix ws wss blob
about s3 gs mailto view-source netdoc rtsp rtmp concat subfile tcp udp pipe hls expect php phar
"""
FILES = """
file:///etc/passwd file:/etc/passwd file:etc/passwd file://localhost/etc/passwd FILE:///etc/passwd
File://media.example/etc/passwd file:////etc/passwd file:///proc/self/environ file:///../etc/passwd
file:///%2e%2e/etc/passwd file://127.0.0.1/etc/passwd file:///dev/zero
"""
PORTS = """
1 21 22 23 25 53 81 110 444 2375 3306 5432 6379 8000 8080 8443 9200 11211 65535 65536 99999
4294967376 -1 -80 +80 0x50 80a 8_0 80.0 80,443
"""
USERS = """
http://me@media.example/ http://me:secret@media.example/ http://:@media.example/
http://@media.example/ http://media.example@127.0.0.1/ http://127.0.0.1@media.example/
http://media.example:80@127.0.0.1/ http://media.example%40127.0.0.1/
http://me:secret@@media.example/ http://media.example:secret@10.0.0.1:80/
"""
PARSERS = """
http://media.example\\@127.0.0.1/ http://127.0.0.1\\@media.example/ http:\\\\127.0.0.1\\ok
http:/\\127.0.0.1/ http://media.example/\\..\\ok http:///media.example/ok http:media.example/ok
http:/media.example/ok http:// http://? http://# http://:80/ //media.example/ok media.example/ok
/ok ? # http://[/ http://]/ http://[]/ http://[media.example]/ http://[::1/ http://::1/
http://[127.0.0.1]/ http://[::1]x/ http://[::1]80/ http://[v1.127.0.0.1]/ http://a,b/ http://a;b/
http://exa$mple/ http://(media)/ http://media.example&127.0.0.1/ http://*/ http://!/ http://'/
http://[::1%25lo]/ http://[fe80::1%25eth0]/ http://[fe80::1%eth0]/ http://[::1%2525lo]/
http://127%2e0%2e0%2e1/ http://%31%32%37.0.0.1/ http://media%2eexample/ http://localhost%00.example/
http://media.example%2f@127.0.0.1/ http://%6c%6f%63%61%6c%68%6f%73%74/ http://media.example%23/
"""
NOT_ASCII = """
http://\uff11\uff12\uff17.0.0.1/ http://127\u30020\u30020\u30021/ http://127\uff0e0\uff0e0\uff0e1/
http://\uff4cocalhost/ http://\u24db\u24de\u24d2\u24d0\u24db\u24d7\u24de\u24e2\u24e3/
http://local\u00adhost/ http://loca\u200blhost/ http://\u2025/ http://m\u00e9dia.example/
http://media.example\uff0f@127.0.0.1/ http://media.example\u2100.example/ http://fa\u00df.example/
http://media.example/\u00e9 http://media.example:\uff18\uff10/ http://\u2460.0.0.1/
"""
CONTROLS = [*map(chr, range(0x21)), "\x7f"]


@pytest.mark.parametrize(
    "url",
    [
        *(f"{scheme}://media.example/ok" for scheme in SCHEMES.split()),
        *FILES.split(),
        *(f"http://media.example:{port}/ok" for port in PORTS.split()),
        *USERS.split(),
        *PARSERS.split(),
        *NOT_ASCII.split(),
        *(f"http://media.example/{control}ok" for control in CONTROLS),
        *(f"http://media{control}.example/ok" for control in CONTROLS),
        "http://media.example/ok\r\nHost: 127.0.0.1",
        "http://" + "a" * 254 + "/ok",
        "http://media.example/" + "a" * 8192,
        "data:image/png;base64,AAAA",
        "",
    ],
)
def test_what_is_refused_unseen(internet: Internet, url: str) -> None:
    internet.refuses(url, ForbiddenUrl)
    assert not internet.dialled


# Refused by the address

NUMBERS = """
127.0.0.1 127.1 127.0.1 0 0.0 0x0 00 0x7f.1 0x7F.0x0.0x0.0x1 0x7f000001 0177.0.0.1 0177.1
017700000001 2130706433 127.0.0.01 127.0.0.0x1 0x7f.0.0.1 10.1 0xa.1 012.1 167772161 192.168.257
192.0xa80001 3232235521 169.254.43518 0xa9fea9fe 2852039166 0251.0376.0251.0376 0xa9.0xfe.0xa9.0xfe
169.0xfea9fe 0xa83f8110 2822734096 168.63.33040 172.16.1 172.1048577 100.64.1 255.255.255.255
4294967295 0xffffffff 224.1 [::] [::1] [0:0:0:0:0:0:0:1] [::127.0.0.1] [::ffff:7f00:1]
[0:0:0:0:0:ffff:127.0.0.1] [::ffff:0:127.0.0.1] [64:ff9b::169.254.169.254] [64:ff9b::a83f:8110]
[2002:a9fe:a9fe::] [fd00:ec2::254] [fec0::1] [ff02::1] [fe80::1]
"""
NO_NAMES = """
256.0.0.1 127.0.0.256 1.2.3.4.5 127.0.0.1. 0x7f.1. 127..1 .127.0.0.1 0x 0x1ffffffff 4294967296
08.0.0.1 localhost localhost. metadata metadata.google.internal kubernetes.default.svc a..b ..
xn--a xn--0000h www.xn--lgg.example
"""


@pytest.mark.parametrize("host", NUMBERS.split())
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_addresses_however_they_are_written(internet: Internet, scheme: str, host: str) -> None:
    internet.refuses(f"{scheme}://{host}/ok", ForbiddenUrl)
    assert not internet.dialled


@pytest.mark.parametrize("host", NO_NAMES.split())
def test_what_looks_like_an_address_and_is_none(internet: Internet, host: str) -> None:
    internet.refuses(f"http://{host}/ok", FetchFailed)
    assert not internet.dialled


def addresses() -> Iterator[str]:
    for text in NOT_PUBLIC.split():
        try:
            ipaddress.ip_address(text)
        except ValueError:
            continue
        yield text


@pytest.mark.parametrize("address", list(addresses()))
def test_names_that_lead_inside(internet: Internet, address: str) -> None:
    """A private address alone or among public ones, at once or after a public first answer."""
    for lying in ([address], [PUBLIC, address], [address, PUBLIC], [PUBLIC] * 20 + [address]):
        internet.refuses(f"http://{internet.name(lying)}/ok", FetchFailed)
        assert not internet.dialled
    rebinding = internet.name([PUBLIC], [address])
    assert internet.fetch(f"http://{rebinding}/closes") == b"content"
    internet.refuses(f"http://{rebinding}/ok", FetchFailed)
    # The checked address is the dialled one: the name is not resolved a third time.
    hiding = internet.name([PUBLIC], [address], [PUBLIC])
    assert internet.fetch(f"http://{hiding}/closes") == b"content"
    internet.refuses(f"http://{hiding}/ok", FetchFailed)
    assert internet.fetch(f"http://{hiding}/ok") == b"content"
    internet.check_nothing_internal()


# Refused on the way

REDIRECTS: dict[str, tuple[str, type[InvalidMedia]]] = {
    "loop": ("/loop", FetchFailed),
    "ping": ("/pong", FetchFailed),
    "pong": ("/ping", FetchFailed),
    "4": ("/3", FetchFailed),
    "empty": ("", FetchFailed),
    "fragment": ("#ok", FetchFailed),
    "private": ("http://127.0.0.1/ok", ForbiddenUrl),
    "relative": ("//127.0.0.1/ok", ForbiddenUrl),
    "number": ("http://2130706433/ok", ForbiddenUrl),
    "v6": ("http://[::1]/ok", ForbiddenUrl),
    "mapped": ("http://[::ffff:169.254.169.254]/latest", ForbiddenUrl),
    "metadata": ("http://169.254.169.254/latest/meta-data/iam", ForbiddenUrl),
    "azure": ("http://168.63.129.16/machine", ForbiddenUrl),
    "tls": ("https://127.0.0.1/ok", ForbiddenUrl),
    "file": ("file:///etc/passwd", ForbiddenUrl),
    "data": ("data:image/png;base64,AAAA", ForbiddenUrl),
    "gopher": ("gopher://127.0.0.1:6379/_INFO", ForbiddenUrl),
    "port": ("http://media.example:6379/", ForbiddenUrl),
    "relative-port": ("//media.example:22", ForbiddenUrl),
    "user": ("http://me:secret@media.example/ok", ForbiddenUrl),
    "backslash": ("http://media.example\\@127.0.0.1/ok", ForbiddenUrl),
    "backslashes": ("\\\\127.0.0.1\\ok", ForbiddenUrl),
    "space": ("http://media.example/ ok", ForbiddenUrl),
    "tab": ("ht\ttp://127.0.0.1/ok", ForbiddenUrl),
    "latin": ("http://m\u00e9dia.example/ok", ForbiddenUrl),
    "zone": ("http://[fe80::1%25eth0]/ok", ForbiddenUrl),
    "bracket": ("//[", ForbiddenUrl),
    "long": ("/" + "a" * 9000, ForbiddenUrl),
    "unknown": ("http://no-such-name.example/ok", FetchFailed),
}
GOOD_REDIRECTS = {"3": "/2", "2": "http://media.example/1", "1": "//media.example/ok"}


@pytest.mark.parametrize("path", REDIRECTS)
def test_redirects(internet: Internet, path: str) -> None:
    internet.refuses(f"http://media.example/{path}", REDIRECTS[path][1])
    assert internet.fetch("http://media.example/3") == b"content"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_every_kind_of_redirect_is_checked(internet: Internet, status: int) -> None:
    internet.refuses(f"http://media.example/private-{status}", ForbiddenUrl)


def test_a_redirect_to_a_name_that_has_changed(internet: Internet) -> None:
    internet.names["changing.example"] = iter([[PUBLIC], ["127.0.0.1"]])
    internet.refuses("http://changing.example/to-itself", FetchFailed)
    internet.names["changing.example"] = iter([[PUBLIC, "10.0.0.1"]])
    internet.refuses("http://media.example/to-changing", FetchFailed)


@pytest.mark.parametrize(
    "location", ["http://media.example/", "HTTP://media.example/", "http://media.example:443/"]
)
def test_https_never_leads_to_http(location: str) -> None:
    with pytest.raises(ForbiddenUrl):
        check_redirect(check_url("https://media.example/"), location)


# Refused by the answer

OK = b"HTTP/1.1 200 OK\r\n"
GOOD = b"Content-Length: 7\r\n\r\ncontent"
BOMB = zlib.compress(bytes(4 * MiB))
RAW: dict[str, tuple[bytes, type[InvalidMedia]]] = {
    "longer": (OK + b"Content-Length: 900\r\n\r\nshort", FetchFailed),
    "too-long": (OK + b"Content-Length: 1001\r\n\r\n", MediaTooLarge),
    "huge": (OK + b"Content-Length: 99999999999999999999\r\n\r\n", MediaTooLarge),
    "digits": (OK + b"Content-Length: " + b"9" * 4000 + b"\r\n\r\n", FetchFailed),
    "negative": (OK + b"Content-Length: -1\r\n\r\nx", FetchFailed),
    "hex": (OK + b"Content-Length: 0x7\r\n\r\ncontent", FetchFailed),
    "two": (OK + b"Content-Length: 7\r\nContent-Length: 8\r\n\r\ncontent!", FetchFailed),
    "list": (OK + b"Content-Length: 7, 8\r\n\r\ncontent", FetchFailed),
    "no-length": (OK + b"\r\n" + b"x" * (MAX_NBYTES + 1), MediaTooLarge),
    "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n7d0\r\n" + b"x" * 2000, MediaTooLarge),
    "bad-chunk": (OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", FetchFailed),
    "long-chunk": (OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 30 + b"\r\n", FetchFailed),
    "cut-chunk": (OK + b"Transfer-Encoding: chunked\r\n\r\n7\r\npic", FetchFailed),
    "gzip": (OK + b"Content-Encoding: gzip\r\n" + GOOD, FetchFailed),
    "GZIP": (OK + b"content-encoding: GZIP\r\n" + GOOD, FetchFailed),
    "brotli": (OK + b"Content-Encoding: br\r\n" + GOOD, FetchFailed),
    "zstd": (OK + b"Content-Encoding: zstd\r\n" + GOOD, FetchFailed),
    "deflate": (
        OK + b"Content-Encoding: deflate\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB,
        FetchFailed,
    ),
    "twice": (OK + b"Content-Encoding: gzip, gzip\r\n" + GOOD, FetchFailed),
    "hidden": (
        OK + b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\n" + GOOD,
        FetchFailed,
    ),
    "transfer-gzip": (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n", FetchFailed),
    "header": (OK + b"X: " + b"x" * (4 * MiB) + b"\r\n" + GOOD, FetchFailed),
    "headers": (OK + b"X: x\r\n" * (MiB // 2) + GOOD, FetchFailed),
    "name": (OK + b"x" * (4 * MiB) + b": x\r\n" + GOOD, FetchFailed),
    "status-line": (b"HTTP/1.1 200 " + b"x" * (4 * MiB) + b"\r\n" + GOOD, FetchFailed),
    "interim": (b"HTTP/1.1 103 Early\r\nX: x\r\n\r\n" * 200_000, FetchFailed),
    "nothing": (b"", FetchFailed),
    "http0.9": (b"content", FetchFailed),
    "http2": (b"HTTP/2 200 OK\r\n" + GOOD, FetchFailed),
    "ssh": (b"SSH-2.0-OpenSSH_9.9\r\n", FetchFailed),
    "redis": (b"-ERR unknown command\r\n", FetchFailed),
    "nul": (OK + b"X: a\x00b\r\n" + GOOD, FetchFailed),
    "folded": (OK + b"X: a\r\n b\r\nContent-Encoding: gzip\r\n" + GOOD, FetchFailed),
    "switching": (b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\n\r\n", FetchFailed),
    "created": (b"HTTP/1.1 201 Created\r\n" + GOOD, FetchFailed),
    "empty": (b"HTTP/1.1 204 No Content\r\n\r\n", FetchFailed),
    "partial": (b"HTTP/1.1 206 Partial Content\r\n" + GOOD, FetchFailed),
    "unmodified": (b"HTTP/1.1 304 Not Modified\r\n\r\n", FetchFailed),
    "proxy": (b"HTTP/1.1 305 Use Proxy\r\nLocation: http://10.0.0.1/\r\n" + GOOD, FetchFailed),
    "asking": (b"HTTP/1.1 401 No\r\nWWW-Authenticate: Basic\r\n" + GOOD, FetchFailed),
    "not-found": (b"HTTP/1.1 404 Not Found\r\n" + GOOD, FetchFailed),
    "broken": (b"HTTP/1.1 500 Oh\r\n" + GOOD, FetchFailed),
    "late": (b"HTTP/1.1 503 Later\r\nRetry-After: 0\r\n" + GOOD, FetchFailed),
    "no-status": (b"HTTP/1.1 999 \r\n" + GOOD, FetchFailed),
}
TIMED: dict[str, tuple[str, type[InvalidMedia]]] = {
    "silent": ("too long", FetchFailed),
    "silent-body": ("too long", FetchFailed),
    "silent-header": ("too long", FetchFailed),
    "dripping-header": ("too long", FetchFailed),
    "trickle": ("fewer than 400 bytes", FetchFailed),
    "trickle-of-a-length": ("fewer than 400 bytes", FetchFailed),
    "endless": ("more than 1000 bytes", MediaTooLarge),
}


@pytest.mark.parametrize("path", RAW)
def test_answers(internet: Internet, path: str) -> None:
    internet.refuses(f"http://media.example/raw/{path}", RAW[path][1])


@pytest.mark.parametrize("path", TIMED)
def test_answers_that_take_their_time(internet: Internet, path: str) -> None:
    words, error = TIMED[path]
    start = time.monotonic()
    internet.refuses(f"http://media.example/{path}", error, is_hasty=True)
    assert time.monotonic() - start < 100 * SECOND_S
    with pytest.raises(error, match=words):
        internet.fetch(f"http://media.example/{path}", is_hasty=True)


def test_what_is_behind_the_announced_length_is_not_looked_at(internet: Internet) -> None:
    assert internet.fetch("http://media.example/shorter") == b"con"
    assert internet.fetch("http://media.example/ok") == b"content"


def answers(over: threading.Event) -> dict[str, Answer]:
    """Return all answers of the public host."""

    def dripping(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(OK + b"X: ")
        while not over.wait(SECOND_S / 8):
            request.wfile.write(b"x")

    def silent(first: bytes) -> Answer:
        def answer(request: BaseHTTPRequestHandler) -> None:
            request.wfile.write(first)
            over.wait(200 * SECOND_S)

        return answer

    private = {
        f"/private-{status}": send(b"", status, Location="http://127.0.0.1/ok")
        for status in (301, 302, 303, 307, 308)
    }
    places = {path: place for path, (place, _) in REDIRECTS.items()} | GOOD_REDIRECTS
    return {
        "/ok": send(b"content", Content_Type="text/html"),
        "/closes": send(b"content", Connection="close"),
        "/shorter": send_raw(OK + b"Connection: close\r\nContent-Length: 3\r\n\r\ncontent"),
        **private,
        **{f"/{path}": send(b"", 302, Location=place) for path, place in places.items()},
        "/to-itself": send(b"", 302, Location="/ok", Connection="close"),
        "/to-changing": send(b"", 302, Location="http://changing.example/ok"),
        **{f"/raw/{path}": send_raw(answer) for path, (answer, _) in RAW.items()},
        "/silent": silent(b""),
        "/silent-header": silent(OK + b"X: x"),
        "/silent-body": silent(OK + b"Content-Length: 7\r\n\r\ncon"),
        "/dripping-header": dripping,
        "/trickle": send_slowly(b"x", num=1000, pause_s=SECOND_S / 20, wait=over),
        "/trickle-of-a-length": send_slowly(
            b"x", num=1000, pause_s=SECOND_S / 20, length=900, wait=over
        ),
        "/endless": send_slowly(b"x" * KiB, num=1 << 30, pause_s=0, wait=over),
    }
