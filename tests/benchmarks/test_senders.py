"""Prepared requests are sent by all processes, and a refusal is no result."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator

import pytest

from benchmarks import senders
from benchmarks.peers.load import post_all

NUM_BODIES = 40


class Host(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[bytes] = []
        self.status = 200
        self.chunks: list[bytes] = []


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Host

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append(self.path.encode() + b" " + body)
        self.send_response(self.server.status)
        if not self.server.chunks:
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in (*self.server.chunks, b""):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def host() -> Iterator[Host]:
    with Host() as host:
        thread = threading.Thread(target=host.serve_forever)
        thread.start()
        yield host
        host.shutdown()
        thread.join()


def test_each_body_is_sent_once(host: Host) -> None:
    bodies = [b"body %d" % number for number in range(NUM_BODIES)]
    url = f"http://127.0.0.1:{host.server_port}/a?b=1"
    with senders.on_cores([0, 0]) as send:
        took = send(url, bodies, 6)
        assert sorted(host.got) == sorted(b"/a?b=1 " + body for body in bodies)
        assert took.wall_s > 0
        assert took.cpu_s > 0
        host.status = 503
        with pytest.raises(RuntimeError, match="503"):
            send(url, bodies[:2], 2)


def test_answers_in_chunks_are_read_to_their_ends(host: Host) -> None:
    host.chunks = [b"a" * 3_000_000, b"b", b"c" * 70_000]
    bodies = [b"body %d" % number for number in range(6)]
    url = f"http://127.0.0.1:{host.server_port}/a"
    seconds, took_s = asyncio.run(post_all(url, bodies, 2))
    assert sorted(host.got) == sorted(b"/a " + body for body in bodies)
    assert len(seconds) == len(bodies)
    assert max(seconds) <= took_s <= sum(seconds)
    host.status = 400
    with pytest.raises(RuntimeError, match="400"):
        asyncio.run(post_all(url, bodies[:1], 1))
