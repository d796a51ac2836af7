"""Behind real proxies, each client gets its own answers, for any request of another client."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop

from afferent.operations.live_page.feed import Feed
from afferent.operations.live_page.launch import PageSettings
from afferent.operations.live_page.observing import Observer
from afferent.operations.live_page.site import site
from afferent.proxy.http_server.server import HttpServer
from afferent.proxy.http_server.shared import ConnectionLimits
from tests import envoy
from tests.http_server.framing_cases import Case, upgrades_around
from tests.server import wait_until

LIMITS = ConnectionLimits(header_timeout_s=30.0, discard_timeout_s=30.0, write_timeout_s=30.0)
MUST_BE_THERE = "TESTS_NEED_PROXIES"
"""Lists programs, with spaces between them: the tests fail if one is not installed."""
ROUNDS = 2
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\nX-Client: attacker\r\n\r\n"
VICTIM = b"GET /victim HTTP/1.1\r\nHost: a\r\nX-Client: %s\r\n\r\n"
LAST = b"GET /victim HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-Client: %s\r\n\r\n"

CADDY = """
{{
    admin off
    auto_https off
}}
http:// {{
    bind unix/{path}
    reverse_proxy {server}
}}
"""
NGINX_HEAD = """
daemon off;
pid {folder}/nginx.pid;
error_log stderr warn;
worker_processes 1;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
"""
"""Begin of a configuration of nginx, whose files are in a folder of the test."""
# From nginx's documentation of WebSockets, with reused connections.
NGINX = (
    NGINX_HEAD
    + """\
    map $http_upgrade $connection_upgrade {{ default upgrade; '' close; }}
    upstream server {{ server {server}; keepalive 1; }}
    server {{
        listen unix:{path};
        location / {{
            proxy_pass http://server;
            proxy_http_version 1.1;
            proxy_request_buffering off;
            proxy_set_header Host $http_host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
        }}
    }}
}}
"""
)
HAPROXY = """
global
    maxconn 256
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    http-reuse always
frontend front
    bind unix@{path}
    default_backend back
backend back
    server afferent {server} pool-max-conn 1
"""


def _caddy(folder: Path, path: Path, server: str) -> list[str]:
    config = _written(folder / "Caddyfile", CADDY, path, server)
    return ["caddy", "run", "--adapter", "caddyfile", "--config", config]


def _nginx(folder: Path, path: Path, server: str) -> list[str]:
    config = _written(folder / "nginx.conf", NGINX, path, server)
    return ["nginx", "-e", "stderr", "-p", str(folder), "-c", config]


def _haproxy(folder: Path, path: Path, server: str) -> list[str]:
    return ["haproxy", "-db", "-f", _written(folder / "haproxy.cfg", HAPROXY, path, server)]


def _envoy(folder: Path, path: Path, server: str) -> list[str]:
    return envoy.configured(folder, path, [server], "ROUND_ROBIN")


def _written(file: Path, text: str, path: Path, server: str) -> str:
    file.write_text(text.format(path=path, folder=file.parent, server=server))
    return str(file)


PROXIES: dict[str, Callable[[Path, Path, str], list[str]]] = {
    "caddy": _caddy,
    "nginx": _nginx,
    "haproxy": _haproxy,
    "envoy": _envoy,
}
"""Each writes its configuration into a folder, and returns its command."""


@dataclass
class Echo:
    """An application that answers with the path, the client's name and the digest of the body."""

    paths: list[str] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        digest, has_more = hashlib.sha256(), True
        while has_more:
            message = await receive()
            digest.update(message["body"])
            has_more = message["more_body"]
        client = dict(scope["headers"]).get(b"x-client", b"-")
        body = b"%b %b %b\n" % (scope["path"].encode(), client, digest.hexdigest().encode())
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def serving(app: Any, *, websocket_paths: frozenset[str] = frozenset()) -> Iterator[int]:
    """Serve in a thread; yield the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port, started = listener.getsockname()[1], threading.Event()
    servers: list[HttpServer] = []

    async def main() -> None:
        servers.append(
            HttpServer(
                *(app, listener, LIMITS),
                refuse=lambda *_: b"{}",
                drain_timeout_s=5.0,
                websocket_paths=websocket_paths,
            )
        )
        asyncio.get_running_loop().call_soon(started.set)
        await servers[0].serve()

    thread = threading.Thread(target=uvloop.run, args=(main(),))
    thread.start()
    started.wait(30)
    try:
        yield port
    finally:
        servers[0].end_now()
        thread.join(30)


def need(program: str) -> None:
    """Skip the test if a program is not installed, or fail if it is required."""
    if shutil.which(program) is None:
        why = f"there is no {program} here"
        if program in os.environ.get(MUST_BE_THERE, "").split():
            pytest.fail(why)
        pytest.skip(why)


@contextlib.contextmanager
def proxied(name: str, port: int, folder: Path) -> Iterator[Path]:
    """Run a proxy in front of the port; yield the path of its socket."""
    path = folder / "socket"
    command = PROXIES[name](folder, path, f"127.0.0.1:{port}")
    if "/" not in command[0]:
        need(command[0])
    env = {"HOME": str(folder), "PATH": "/usr/bin:/usr/sbin:/bin:/sbin"}
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(command, stderr=log, stdout=log, env=env)
        try:
            wait_until(lambda: running.poll() is not None or can_connect(path))
            assert running.poll() is None, (folder / "log").read_text()
            yield path
        finally:
            running.terminate()
            running.wait(30)


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        sock.connect(str(path))
        return True
    return False


def connect(address: Path | int) -> socket.socket:
    if isinstance(address, int):
        return socket.create_connection(("127.0.0.1", address), timeout=30)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
    sock.connect(str(address))
    return sock


@dataclass(frozen=True)
class Answer:
    """One answer: its status and its body."""

    status: int
    body: bytes


class Client:
    """A client that reads whole answers from one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._data, self._has_ended = sock, b"", False

    def send(self, data: bytes) -> None:
        """Send this, unless the connection has ended."""
        with contextlib.suppress(ConnectionError):
            self._sock.sendall(data)

    def answer(self) -> Answer | None:
        """Return the next answer; ``None`` at the end of the connection."""
        if (head := self._until(b"\r\n\r\n")) is None:
            return None
        status = int(head.split(b" ", 2)[1])
        if status == 100:
            return self.answer()
        fields = dict(re.findall(rb"(?m)^([\w-]+):[ \t]*(.*?)\r?$", head.lower()))
        if (length := fields.get(b"content-length")) is not None:
            return Answer(status, self._take(int(length)))
        if fields.get(b"transfer-encoding") == b"chunked":
            return Answer(status, self._chunks())
        while self._receive():
            pass
        return Answer(status, self._take(len(self._data)))

    def rest(self) -> list[Answer]:
        """Return all answers up to the end of the connection."""
        found = []
        while (answer := self.answer()) is not None:
            found.append(answer)
        return found

    def _chunks(self) -> bytes:
        body = b""
        while nbytes := int(self._until(b"\r\n") or b"0", 16):
            body += self._take(nbytes + 2)[:-2]
        self._until(b"\r\n")
        return body

    def _until(self, end: bytes) -> bytes | None:
        while end not in self._data:
            if not self._receive():
                assert not self._data, self._data
                return None
        found, _, self._data = self._data.partition(end)
        return found

    def _take(self, nbytes: int) -> bytes:
        while len(self._data) < nbytes:
            assert self._receive(), self._data
        found, self._data = self._data[:nbytes], self._data[nbytes:]
        return found

    def _receive(self) -> bool:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = self._sock.recv(65_536)
        self._data += data
        return bool(data)


def attack(address: Path | int, case: Case, app: Echo) -> None:
    """Send the case as one client, and requests as another; each must get its own answers.

    Each client's last request closes its connection, so no answer can follow.
    """
    for round_ in range(ROUNDS):
        with connect(address) as first, connect(address) as second:
            attacker, victim = Client(first), Client(second)
            attacker.send(case.data)
            got = [attacker.answer()]
            mine = []
            for number in range(2):
                name = b"victim-%d-%d" % (round_, number)
                victim.send((VICTIM, LAST)[number] % name)
                mine.append(victim.answer())
                assert mine[-1] is not None
                assert (mine[-1].status, name in mine[-1].body) == (200, True), mine
            assert victim.rest() == []
            if got[0] is not None:
                attacker.send(LAST % b"attacker-last")
                got += attacker.rest()
                # The connection may end after the answer to the case.
                assert [
                    each for each in got[1:] if each and b"attacker-last" not in each.body
                ] == []
                assert len(got) <= 2, got
    assert "/smuggled" not in app.paths


VARIANTS = upgrades_around(SMUGGLED)


def test_there_are_variants_of_every_kind() -> None:
    assert len(VARIANTS) >= 13


@pytest.mark.parametrize("websocket_paths", [frozenset(), frozenset({"/read"})])
def test_direct_client_gets_one_answer(websocket_paths: frozenset[str]) -> None:
    app = Echo()
    with serving(app, websocket_paths=websocket_paths) as port:
        for case in VARIANTS:
            attack(port, case, app)
    assert "/read" in app.paths


def test_attack_sees_an_answer_that_comes_late() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab"
    listener = socket.create_server(("127.0.0.1", 0))

    def confuse() -> None:
        """Send the first answer twice, the second time later; answer other requests correctly."""
        attacker, victim = listener.accept()[0], listener.accept()[0]
        with listener, attacker, victim:
            attacker.recv(65_536)
            attacker.sendall(answer)
            for _ in range(2):
                name = victim.recv(65_536).partition(b"X-Client: ")[2].strip()
                victim.sendall(answer.replace(b"2\r", b"%d\r" % len(name))[:-2] + name)
            victim.shutdown(socket.SHUT_WR)
            attacker.recv(65_536)
            time.sleep(0.2)
            attacker.sendall(answer)

    thread = threading.Thread(target=confuse)
    thread.start()
    with pytest.raises(AssertionError, match=r"Answer\(status=200, body=b'ab'\)"):
        attack(listener.getsockname()[1], VARIANTS[0], Echo())
    thread.join(30)


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("path", [b"/ask", b"/about"])
def test_live_page_gives_one_answer(path: bytes, is_own: bool) -> None:
    """The page is asked, or the request is refused before its body is read."""
    fields = b"Host: localhost\r\nSec-Fetch-Site: same-origin\r\nContent-Type: application/json\r\n"
    settings = PageSettings(
        sockets_folder="/nowhere",
        host="127.0.0.1",
        key="",
        api_url="http://127.0.0.1:9",
        api_key="",
        can_ask=True,
        timeout_s=5.0,
    )
    page = site(settings, Feed(Observer(Path("/nowhere"), name="page")))
    with serving(page) as port:
        for case in VARIANTS:
            data = case.data.replace(b"/read", path)
            data = data.replace(b"Host: a\r\n", fields, 1) if is_own else data
            with connect(port) as sock:
                client = Client(sock)
                client.send(data)
                assert client.answer() is not None
                client.send(LAST % b"last")
                assert len(client.rest()) == 1, case.name


def test_program_that_must_be_there_and_is_not_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MUST_BE_THERE, "caddy no-such-program")
    with pytest.raises(pytest.fail.Exception, match="no-such-program"):
        need("no-such-program")
    with pytest.raises(pytest.skip.Exception):
        need("no-such-program-either")


@pytest.mark.parametrize(
    "proxy", ["caddy", "nginx", "haproxy", pytest.param("envoy", marks=pytest.mark.engines)]
)
def test_answers_behind_proxy_are_not_crossed(proxy: str, tmp_path: Path) -> None:
    app = Echo()
    with serving(app) as port, proxied(proxy, port, tmp_path) as path:
        for case in VARIANTS:
            attack(path, case, app)
        assert "/victim" in app.paths


# Clients that request HTTP/2 as the standard defines it

_JAVA = """
import java.net.URI;
import java.net.http.*;

public class Ask {
    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_2).build();
        for (int i = 0; i < 3; i++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(args[0] + "/java"))
                .POST(HttpRequest.BodyPublishers.ofString("abcd")).build();
            HttpResponse<String> answer =
                client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.print(answer.statusCode() + " " + answer.body());
        }
    }
}
"""
_DIGEST = hashlib.sha256(b"abcd").hexdigest()


def test_curl_asking_for_h2c_gets_its_answer() -> None:
    need("curl")
    with serving(Echo()) as port:
        url = f"http://127.0.0.1:{port}/curl"
        command = ["curl", "-sS", "--http2", "-d", "abcd", url, url]
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert done.stdout.decode() == f"/curl - {_DIGEST}\n" * 2


def test_java_client_asking_for_h2c_gets_its_answer(tmp_path: Path) -> None:
    need("javac")  # to compile Ask.java
    (tmp_path / "Ask.java").write_text(_JAVA)
    with serving(Echo()) as port:
        command = ["java", str(tmp_path / "Ask.java"), f"http://127.0.0.1:{port}"]
        done = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert done.stdout.decode() == f"200 /java - {_DIGEST}\n" * 3, done.stderr.decode()
