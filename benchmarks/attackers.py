"""Clients that mean no good, for `benchmarks.attack`: ``python -m benchmarks.attackers KIND URL``.

Each kind does one thing over and over until the process is killed; twenty of them at a time.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import itertools
import json
import struct
import sys
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2 as httpx
import numpy as np
from PIL import Image

NUM: Final = 20
_SIDE = 7990
_ANNOUNCED_NBYTES = 64_000_000
_SENT_NBYTES = 400_000
_numbers = itertools.count()


def small_image(seed: int) -> bytes:
    """A PNG of 300 x 200 that nobody has seen."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (10, 15, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((300, 200)).save(out, "PNG", compress_level=1)
    return out.getvalue()


def body_of(images: list[tuple[str, bytes]], **more: Any) -> bytes:
    parts: list[dict[str, Any]] = [
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"},
        }
        for kind, data in images
    ]
    parts.append({"type": "text", "text": "What is this?"})
    messages = [{"role": "user", "content": parts}]
    return json.dumps({"model": "shapes", "max_tokens": 1, "messages": messages, **more}).encode()


def _unique(data: bytes) -> bytes:
    """The same image in a file that nobody has seen."""
    number = struct.pack(">I", next(_numbers))
    if data[:2] == b"\xff\xd8":
        return data[:2] + b"\xff\xfe\0\x06" + number + data[2:]
    text = b"tEXt" + b"n\0" + number.hex().encode()
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    return data[:33] + chunk + data[33:]


def _large_png() -> bytes:
    """64 million pixels in some 200 KB."""
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(b"\0" + b"\x10\x80\xf0" * _SIDE) for _ in range(_SIDE))
    data += packer.flush()
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(each)) + kind + each + struct.pack(">I", zlib.crc32(kind + each))
        for kind, each in chunks
    )


def _scanned_jpeg() -> bytes:
    """Progressive, as large as may be."""
    out = io.BytesIO()
    Image.new("RGB", (_SIDE, _SIDE), (9, 90, 200)).save(out, "JPEG", progressive=True)
    return out.getvalue()


async def _repeat(url: str, bodies: Callable[[], bytes]) -> None:
    async with httpx.AsyncClient(timeout=120) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                await client.post(f"{url}/v1/chat/completions", content=bodies())


async def _announce(url: str) -> None:
    """Half a megabyte of what is to be 64, and then four bytes a second."""
    where = urlsplit(url)
    start = body_of([("jpeg", b"\xff\xd8\xff" + bytes(_SENT_NBYTES))])[:_SENT_NBYTES]
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\n"
        f"Content-Length: {_ANNOUNCED_NBYTES}\r\n\r\n"
    ).encode()
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            writer.write(head + start)
            ended = asyncio.create_task(reader.read())
            while not ended.done():
                writer.write(b"AAAA")
                await asyncio.wait([ended], timeout=1.0)
            writer.close()


async def _stream_unread(url: str) -> None:
    where = urlsplit(url)
    body = body_of([], max_tokens=2000, stream=True, ignore_eos=True)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(where.hostname, where.port, limit=1)
            writer.write(head.encode() + body)
            await asyncio.sleep(20)
            writer.close()


async def _leave(url: str) -> None:
    """After a moment, in whatever stage the request is."""
    where, pauses = urlsplit(url), itertools.cycle((0.0, 0.002, 0.01, 0.03, 0.1))
    while True:
        body = body_of([("png", small_image(next(_numbers)))])
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(where.hostname, where.port)
            writer.write(head.encode() + body)
            await writer.drain()
            await asyncio.sleep(next(pauses))
            writer.close()


async def _drip(url: str) -> None:
    """Images at a host that sends one byte a second; the server has to allow it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 20000000\r\n\r\n")
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(1.0)

    host = await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[3]))
    async with host:
        parts = [
            {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{sys.argv[3]}/{n}"}}
            for n in range(20)
        ]
        body = {"model": "shapes", "messages": [{"role": "user", "content": parts}]}
        await asyncio.gather(*(_repeat(url, lambda: json.dumps(body).encode()) for _ in range(NUM)))


def _with(make: Callable[[], bytes], kind: str, number: int) -> Callable[[str], Awaitable[None]]:
    """Requests of so many images that nobody has seen."""

    made = functools.cache(make)

    async def attack(url: str) -> None:
        file = made()
        await _repeat(url, lambda: body_of([(kind, _unique(file)) for _ in range(number)]))

    return attack


async def _honest(url: str) -> None:
    await _repeat(url, lambda: body_of([("png", small_image(next(_numbers) + 10_000_000))]))


HONEST: Final = "honest"
CROWD: Final = "honest crowd"
"""As many honest ones as there are attackers of all kinds."""
DRIPPING: Final = "dripping URLs"
ALL: Final = "all of these"
KINDS: Final[dict[str, Callable[[str], Awaitable[None]]]] = {
    HONEST: _honest,
    "announced bodies": _announce,
    "large PNGs": _with(_large_png, "png", 4),
    "scanned JPEGs": _with(_scanned_jpeg, "jpeg", 4),
    "many images": _with(lambda: small_image(0), "png", 100),
    "unread streams": _stream_unread,
    "leavers": _leave,
}


async def main(kind: str, url: str) -> None:
    print("ready", flush=True)
    kinds = [each for each in KINDS if each == kind or (kind == ALL and each != HONEST)]
    if kind == CROWD:
        kinds = [HONEST] * len(KINDS)  # `DRIPPING` is in nobody's list, and `HONEST` is in this one
    attacks = [KINDS[each](url) for each in kinds for _ in range(NUM)]
    if kind in (DRIPPING, ALL):
        attacks.append(_drip(url))
    await asyncio.gather(*attacks)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
