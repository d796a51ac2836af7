"""No callback of a frontend's event loop takes long, for any input of a client."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import struct
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx

from afferent.engines.protocol import Engine
from afferent.proxy.http_server.server import HttpServer
from afferent.proxy.http_server.shared import ConnectionLimits
from afferent.proxy.responses import refusal_body
from tests import plain_http
from tests.builtin.frontends import ScriptedEngine, frontend
from tests.callbacks import Meter
from tests.collector import frozen
from tests.images import encoded, photo
from tests.server import ask, data_url


async def watched(
    address: str, sends: Mapping[str, Callable[[int], Any]], *, engine: Engine | None = None
) -> dict[str, Any]:
    """Call each function in a thread with a frontend's port; return the results."""
    listener = socket.create_server(("127.0.0.1", 0))
    port, found = listener.getsockname()[1], {}
    limits = ConnectionLimits(header_timeout_s=10, discard_timeout_s=60, write_timeout_s=60)
    async with frontend(address, engine=engine, admission_timeout_s=60) as client:
        app: Any = client._transport.app  # type: ignore[attr-defined]
        server = HttpServer(app, listener, limits, refuse=refusal_body, drain_timeout_s=30.0)
        serving = asyncio.create_task(server.serve())
        warm = json.dumps(ask([data_url(encoded(photo(64, 64), "PNG"))], "What?")).encode()
        await asyncio.to_thread(post, port, warm)
        with frozen():
            for name, send in sends.items():
                gc.collect()
                meter = Meter()
                with meter.watching():
                    found[name] = await asyncio.to_thread(send, port)
                meter.check(f"{name}, {found[name]!r}")
        server.end_soon()
        await serving
    return found


def post(port: int, body: bytes) -> tuple[int, str]:
    response = send(port, "/v1/chat/completions", body)
    return response.status_code, response.json().get("error", {}).get("code", "")


def send(port: int, path: str, body: bytes) -> httpx.Response:
    return plain_http.post(f"http://127.0.0.1:{port}{path}", content=body, timeout=60)


# Bodies


def jpeg_of_segments(number: int) -> bytes:
    size = struct.pack(">HBHHB", 8, 8, 64, 64, 0)
    return b"\xff\xd8" + b"\xff\xe5\0\4ab" * number + b"\xff\xc0" + size + bytes(100)


def jpeg_of_exif(num_entries: int) -> bytes:
    entries = struct.pack("<HHII", 1, 3, 1, 1) * num_entries
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", num_entries) + entries
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    return b"\xff\xd8" + segment + jpeg_of_segments(0)[2:]


def png_of_chunks(number: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I4s", len(data), kind) + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"tEXt", b"") * number + chunk(b"IDAT", b"")


def images(make: Callable[[int], bytes], number: int) -> bytes:
    """Return a body with 128 files that differ only in two bytes behind their end."""
    files = [make(number) + index.to_bytes(2, "big") for index in range(128)]
    return json.dumps(ask([data_url(file) for file in files], "What?")).encode()


def filled(unit: str, prefix: str, suffix: str) -> bytes:
    number = ((1 << 20) - len(prefix) - len(suffix) - 10) // (len(unit) + 1)
    return (prefix + ",".join([unit] * number) + suffix).encode()


IN_CONTENT = '{"model":"shapes","messages":[{"role":"user","content":['
IN_MESSAGES = '{"model":"shapes","messages":['
TEXT = '{"model":"shapes","messages":[{"role":"user","content":"%s"}]}'


def named(unit: Callable[[int], str], prefix: str, suffix: str) -> bytes:
    found, nbytes, index = [], len(prefix) + len(suffix) + 10, 0
    while nbytes < (1 << 20) - 100:
        found.append(unit(index))
        nbytes, index = nbytes + len(found[-1]) + 1, index + 1
    return (prefix + ",".join(found) + suffix).encode()


BODIES: dict[str, Callable[[], bytes]] = {
    "128 JPEGs of segments": lambda: images(jpeg_of_segments, 2046),
    "128 JPEGs of EXIF": lambda: images(jpeg_of_exif, 512),
    "128 PNGs of chunks": lambda: images(png_of_chunks, 2047),
    "128 images": lambda: images(lambda n: encoded(photo(n, n), "PNG"), 64),
    "parts": lambda: filled('{"type":"text","text":"a"}', IN_CONTENT, "]}]}"),
    "media parts": lambda: filled(
        '{"type":"image_url","image_url":{"url":"a"}}', IN_CONTENT, "]}]}"
    ),
    "messages": lambda: filled('{"role":"user","content":"a"}', IN_MESSAGES, "]}"),
    "urls": lambda: filled('{"url":"a"}', IN_CONTENT, "]}]}"),
    "keys": lambda: filled('"url"', IN_CONTENT, "]}]}"),
    "escaped keys": lambda: filled('"\\\\u0075rl":"\\\\u0064"', IN_CONTENT, "]}]}"),
    "data": lambda: filled('{"data":"aaaaaaa"}', IN_CONTENT, "]}]}"),
    "brackets": lambda: filled("[]", '{"tools":[', "]}"),
    "objects": lambda: ('{"tools":[' + "{}," * 20_000 + "0]}").encode(),
    "metadata": lambda: named(lambda n: f'"k{n}":"v"', TEXT[:-1] % "a" + ',"metadata":{', "}}"),
    "unknown keys": lambda: named(lambda n: f'"k{n}":0', '{"model":"shapes",', "}"),
    "long text": lambda: (TEXT % ("a" * 1_000_000)).encode(),
    "words": lambda: (TEXT % ("word " * 5_000)).encode(),
    "specials": lambda: (TEXT % ("<|im_start|>" * 3_000)).encode(),
    "escapes": lambda: (TEXT % ("\\u00e9" * 170_000)).encode(),
    "calls of tools": lambda: filled(
        '{"role":"assistant","function_call":{"name":"f","arguments":[%s1]}}' % ("1," * 95),
        IN_MESSAGES,
        ',{"role":"user","content":"a"}]}',
    ),
    "bytes of base64": lambda: json.dumps(ask([data_url(bytes(8 << 20))], "?")).encode(),
    "escaped base64": lambda: (
        json.dumps(ask([data_url(b"\xff" * (3 << 20))], "?")).replace("/", "\\/").encode()
    ),
    "long stop": lambda: (TEXT[:-1] % "a" + ',"stop":["' + "a" * 900_000 + '"]}').encode(),
}


def test_bodies(address: str) -> None:
    def sender(make: Callable[[], bytes]) -> Callable[[int], tuple[int, str]]:
        return lambda port: post(port, make())

    answers = asyncio.run(watched(address, {name: sender(make) for name, make in BODIES.items()}))
    assert {status for status, _ in answers.values()} <= {200, 400, 413}
    assert answers["128 images"][0] == 200


def test_many_at_once(address: str) -> None:
    """Send more media than the arena holds at a time."""
    bodies = [
        json.dumps(ask([data_url(encoded(photo(500, 400, seed=n), "PNG"))] * 2, "What?")).encode()
        for n in range(12)
    ]

    def send_all(port: int) -> set[int]:
        with ThreadPoolExecutor(len(bodies)) as threads:
            answers = list(threads.map(lambda body: post(port, body), bodies * 3))
        return {status for status, _ in answers}

    assert asyncio.run(watched(address, {"many": send_all}))["many"] == {200}


# Answers


def test_log_probabilities_of_a_long_answer(address: str) -> None:
    """The Responses API repeats the log-probabilities four times."""
    request = {"model": "shapes", "input": "a", "top_logprobs": 20, "stream": True}
    body = json.dumps(request).encode()
    engine = ScriptedEngine(*([73] for _ in range(1000)))
    sends = {"a stream": lambda port: len(send(port, "/v1/responses", body).content)}
    assert asyncio.run(watched(address, sends, engine=engine))["a stream"] > 4_000_000


# Floods below HTTP

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
FLOODS: dict[str, bytes] = {
    "chunks": POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 400_000,
    "headers": POST + b"a:\r\n" * 400_000,
    "pipelined": b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 60_000,
    "body": POST + b"Content-Length: 4000000\r\n\r\n" + b" " * 4_000_000,
}


def test_floods(address: str) -> None:
    def sender(data: bytes) -> Callable[[int], bytes]:
        return lambda port: flood(port, data)

    answers = asyncio.run(watched(address, {name: sender(data) for name, data in FLOODS.items()}))
    assert answers["headers"].startswith(b"HTTP/1.1 431")
    assert answers["chunks"].startswith(b"HTTP/1.1 400")
    assert answers["pipelined"].startswith(b"HTTP/1.1 200")


def flood(port: int, data: bytes) -> bytes:
    """Return the first line of the answer; empty if there is none."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            return sock.recv(4096)[:12]
    return b""
