"""Clients that read or write slowly: they hit a timeout, and use little memory."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from afferent.conformance.images import draw_image
from afferent.types import KiB, MiB
from tests.images import encoded, photo
from tests.server import TINY_ENGINE, Server, ask, data_url, wait_until

NUM_WRITERS = 50
IDLE_S, BODY_S = 2.0, 4.0
DEADLINE_S = 60.0
ON_HEAP_NBYTES = 240 * KiB
PER_WRITER_NBYTES = 512 * KiB
"""The heap's allowance, as much again for data in transit, and a connection's own memory."""


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    limits = ["--body-idle-timeout-s", str(IDLE_S), "--body-timeout-s", str(BODY_S)]
    with Server(*TINY_ENGINE, "--arena-nbytes", "64MiB", *limits) as own:
        yield own


@pytest.fixture
def frontend(own_server: Server) -> psutil.Process:
    (found,) = own_server.find("afferent.builtin.frontend")
    return found


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Writer:
    """Sends ``first``, and then single bytes, as chunks if ``is_chunked``."""

    def __init__(self, server: Server, first: bytes, *, is_chunked: bool) -> None:
        self.sock = connect(server)
        self.sock.sendall(first)
        self.sock.setblocking(False)
        self._drop = chunk(b"A") if is_chunked else b"A"
        self.answer, self.is_closed = b"", False

    def write(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.sendall(self._drop)

    def read(self) -> None:
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionError:
            data = b""
        self.answer += data
        self.is_closed = not data


def first_bytes(is_chunked: bool) -> bytes:
    """Return a header and the beginning of a body; a chunked body fills its part of the heap."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    body = json.dumps(ask([data_url(encoded(photo(500, 400), "PNG"))], "What?")).encode()
    if is_chunked:
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(body[:ON_HEAP_NBYTES])
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:1]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_slow_writers(own_server: Server, frontend: psutil.Process, is_chunked: bool) -> None:
    assert own_server.post(ask([], "Hello!")).status_code == 200
    num_threads, private_nbytes = frontend.num_threads(), frontend.memory_full_info().uss
    most_nbytes = most_threads = 0
    start = time.monotonic()
    first = first_bytes(is_chunked)
    with selectors.DefaultSelector() as selector:
        writers = [Writer(own_server, first, is_chunked=is_chunked) for _ in range(NUM_WRITERS)]
        for writer in writers:
            selector.register(writer.sock, selectors.EVENT_READ, writer)
        while not all(writer.is_closed for writer in writers):
            assert time.monotonic() - start < DEADLINE_S, "they were not ended"
            for key, _ in selector.select(0.3):
                key.data.read()
                if key.data.is_closed:
                    selector.unregister(key.fileobj)
            for writer in writers:
                writer.write()
            most_threads = max(most_threads, frontend.num_threads())
            most_nbytes = max(most_nbytes, frontend.memory_full_info().uss)
    print(f"{most_threads - num_threads} threads, {(most_nbytes - private_nbytes) / KiB:.0f} KiB")
    for writer in writers:
        writer.sock.close()
        assert writer.answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"body_too_slow"' in writer.answer
    assert most_threads == num_threads
    assert most_nbytes - private_nbytes < NUM_WRITERS * PER_WRITER_NBYTES
    wait_until(lambda: own_server.metric("afferent_arena_pinned_bytes") == 0)
    wait_until(lambda: own_server.metric("afferent_arena_reserved_bytes") == 0)


def test_slow_headers(own_server: Server, frontend: psutil.Process) -> None:
    num_fds = frontend.num_fds()
    first = b"POST /v1/chat/completions HTTP/1.1\r\nX: "
    writers = [Writer(own_server, first, is_chunked=False) for _ in range(NUM_WRITERS)]

    def all_closed() -> bool:
        for writer in writers:
            writer.write()
            with contextlib.suppress(BlockingIOError):
                writer.read()
        return all(writer.is_closed for writer in writers)

    wait_until(all_closed)
    wait_until(lambda: frontend.num_fds() <= num_fds)
    for writer in writers:
        writer.sock.close()
        assert writer.answer.startswith(b"HTTP/1.1 408 ")


def test_readers_that_never_read(
    own_server: Server, frontend: psutil.Process, rng: np.random.Generator
) -> None:
    """The length of an answer is bounded: the request ends even if the client never reads."""
    urls = [data_url(draw_image(rng)) for _ in range(20)]
    parameters = {"stream": True, "max_tokens": 1500, "ignore_eos": True, "logprobs": True}
    question = ask(urls, "Name all pictures.", **parameters)
    body = json.dumps(question).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    private_nbytes = frontend.memory_full_info().uss
    name = outcome("ok")
    ended = own_server.metrics().get(name, 0.0)
    with contextlib.ExitStack() as clients:
        for _ in range(4):
            sock = clients.enter_context(connect(own_server))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(head % len(body) + body)
        # The engine answers 6,000 tokens.
        wait_until(lambda: own_server.metrics().get(name, 0.0) == ended + 4, timeout_s=200)
        wait_until(lambda: own_server.metric("afferent_arena_pinned_bytes") == 0)
        assert frontend.memory_full_info().uss - private_nbytes < 16 * MiB


def outcome(name: str) -> str:
    return f'afferent_requests_total{{api="openai_chat",outcome="{name}"}}'
