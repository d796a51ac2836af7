"""Behind real proxies, each client gets its own answer, whatever another client sends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
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

from afferent.http_server.server import HttpServer
from afferent.http_server.shared import ConnectionLimits
from tests.http_server.framing_cases import Case, upgrades_around
from tests.server import wait_until

LIMITS = ConnectionLimits(header_timeout_s=30.0, discard_timeout_s=30.0, write_timeout_s=30.0)
ROUNDS = 2
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\nX-Client: attacker\r\n\r\n"
VICTIM = b"GET /victim HTTP/1.1\r\nHost: a\r\nX-Client: %s\r\n\r\n"

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
# As nginx's own page on WebSockets has it, with connections that are used again.
NGINX = """
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
PROXIES: dict[str, tuple[str, str, Callable[[Path], list[str]]]] = {
    "caddy": (
        "Caddyfile",
        CADDY,
        lambda config: ["caddy", "run", "--adapter", "caddyfile", "--config", str(config)],
    ),
    "nginx": (
        "nginx.conf",
        NGINX,
        lambda config: ["nginx", "-e", "stderr", "-p", str(config.parent), "-c", str(config)],
    ),
    "haproxy": ("haproxy.cfg", HAPROXY, lambda config: ["haproxy", "-db", "-f", str(config)]),
}


@dataclass
class Echo:
    """Answers with the path, the client's name and the digest of the body."""

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
def serving(app: Echo) -> Iterator[int]:
    """Serve in a thread of its own; yield the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port, started = listener.getsockname()[1], threading.Event()
    servers: list[HttpServer] = []

    async def main() -> None:
        servers.append(
            HttpServer(app, listener, LIMITS, refuse=lambda *_: b"{}", drain_timeout_s=5.0)
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


@contextlib.contextmanager
def proxied(name: str, port: int, folder: Path) -> Iterator[Path]:
    """Run a proxy in front of the port; yield the path of its socket."""
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name} here")
    file, text, command = PROXIES[name]
    path = folder / "socket"
    config = folder / file
    config.write_text(text.format(path=path, folder=folder, server=f"127.0.0.1:{port}"))
    env = {"HOME": str(folder), "PATH": "/usr/bin:/usr/sbin:/bin:/sbin"}
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(command(config), stderr=log, stdout=log, env=env)
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


def answers_of(sock: socket.socket, *, within_s: float) -> bytes:
    """Return all that comes until the connection ends, or nothing comes for a while."""
    found, deadline = b"", time.monotonic() + 30
    sock.settimeout(30)
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline and (data := sock.recv(65_536)):
            found += data
            sock.settimeout(within_s)
    return found


def attack(address: Path | int, case: Case, app: Echo) -> None:
    """Send the case as one client, and ask as another; each must get its own answer."""
    for round_ in range(ROUNDS):
        with connect(address) as attacker, connect(address) as victim:
            attacker.sendall(case.data)
            got = answers_of(attacker, within_s=0.05)
            name = b"victim-%d" % round_
            victim.sendall(VICTIM % name)
            mine = answers_of(victim, within_s=0.05)
            assert got.count(b"HTTP/1.1 ") <= 1 + got.count(b"HTTP/1.1 100"), got
            assert mine.count(b"HTTP/1.1 200") == 1, mine
            assert b"/victim " + name + b" " in mine, mine
    assert "/smuggled" not in app.paths


VARIANTS = upgrades_around(SMUGGLED)


def test_there_are_variants_of_every_kind() -> None:
    assert len(VARIANTS) >= 13


def test_direct_client_gets_one_answer() -> None:
    app = Echo()
    with serving(app) as port:
        for case in VARIANTS:
            attack(port, case, app)


@pytest.mark.parametrize("proxy", PROXIES)
def test_answers_behind_proxy_are_not_crossed(proxy: str, tmp_path: Path) -> None:
    app = Echo()
    with serving(app) as port, proxied(proxy, port, tmp_path) as path:
        for case in VARIANTS:
            attack(path, case, app)
        assert "/victim" in app.paths


# Clients that ask for HTTP/2 in the legal way

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
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    with serving(Echo()) as port:
        url = f"http://127.0.0.1:{port}/curl"
        command = ["curl", "-sS", "--http2", "-d", "abcd", url, url]
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert done.stdout.decode() == f"/curl - {_DIGEST}\n" * 2


def test_java_client_asking_for_h2c_gets_its_answer(tmp_path: Path) -> None:
    if shutil.which("java") is None:
        pytest.skip("there is no java here")
    (tmp_path / "Ask.java").write_text(_JAVA)
    with serving(Echo()) as port:
        command = ["java", str(tmp_path / "Ask.java"), f"http://127.0.0.1:{port}"]
        done = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert done.stdout.decode() == f"200 /java - {_DIGEST}\n" * 3, done.stderr.decode()
