"""Hostile clients for `benchmarks.attack`: ``python -m benchmarks.attackers KIND URL``.

Twenty clients of one kind repeat one attack until the process is killed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import itertools
import json
import os
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


def small_image(seed: int, width: int = 300, height: int = 200) -> bytes:
    """Return a PNG that no server knows."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (10, 15, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((width, height)).save(out, "PNG", compress_level=1)
    return out.getvalue()


@functools.cache
def _photo(width: int, height: int, quality: int) -> bytes:
    """Return a JPEG with the detail of a photo: 1 MB for 1600 x 1200 at quality 90."""
    rng = np.random.default_rng(7)
    fine = rng.normal(0, 24, (height, width, 3))
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize((width, height))
    out = io.BytesIO()
    pixels = np.clip(np.asarray(coarse) + fine, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(out, "JPEG", quality=quality)
    return out.getvalue()


def new_photo() -> bytes:
    """Return a JPEG of 1 MB that no server knows."""
    return unique(_photo(1600, 1200, 90))


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


def unique(data: bytes) -> bytes:
    """Return the same image in a file that no server knows."""
    number = struct.pack(">II", os.getpid(), next(_numbers))  # several processes count
    if data[:2] == b"\xff\xd8":
        return data[:2] + b"\xff\xfe\0\x0a" + number + data[2:]
    text = b"tEXt" + b"n\0" + number.hex().encode()
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    return data[:33] + chunk + data[33:]


def _bomb() -> bytes:
    """Return a request with a new schema that takes long to compile."""
    number = next(_numbers)
    item = {"type": "string", "pattern": f"^(a?{number}b{{0,60}}){{1,60}}$"}
    properties = {f"p{number}_{n}": item for n in range(60)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    return body_of([], response_format=form)


def _large_png() -> bytes:
    """Return a PNG of 64 million pixels in some 200 KB."""
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
    """Return a progressive JPEG of the largest size that is allowed."""
    out = io.BytesIO()
    Image.new("RGB", (_SIDE, _SIDE), (9, 90, 200)).save(out, "JPEG", progressive=True)
    return out.getvalue()


async def _repeat(url: str, bodies: Callable[[], bytes]) -> None:
    async with httpx.AsyncClient(timeout=120) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                await client.post(f"{url}/v1/chat/completions", content=bodies())


async def _announce(url: str) -> None:
    """Announce 64 MB, send half a megabyte, and then four bytes a second."""
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


async def _send_streams(url: str, *, num: int, n: int, is_read: bool) -> None:
    """Send streams of ``n`` answers each, one after another on each connection."""
    where = urlsplit(url)
    body = body_of([], max_tokens=2000, stream=True, ignore_eos=True, n=n)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(
                    where.hostname, where.port, limit=2**18 if is_read else 1
                )
                writer.write(head + body)
                if is_read:
                    while await reader.read(2**18):
                        pass
                else:
                    await asyncio.sleep(20)
                writer.close()

    await asyncio.gather(*(one() for _ in range(num)))


async def _leave(url: str) -> None:
    """Send a request and disconnect after a moment, at any stage of the request."""
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


async def _host(
    url: str, answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> None:
    """Send requests for 20 images each at a host of our own, which the server has to allow."""
    async with await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[3])):
        parts = [
            {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{sys.argv[3]}/{n}"}}
            for n in range(20)
        ]
        body = {"model": "shapes", "messages": [{"role": "user", "content": parts}]}
        await asyncio.gather(*(_repeat(url, lambda: json.dumps(body).encode()) for _ in range(NUM)))


async def _drip(url: str) -> None:
    """Send requests for images of a host that sends one byte a second."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 20000000\r\n\r\n")
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(1.0)

    await _host(url, answer)


async def _redirect(url: str) -> None:
    """Send requests for images of a host that redirects each URL to itself."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ", 2)[1]
                writer.write(
                    b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + path + b"\r\n\r\n"
                )
        writer.close()

    await _host(url, answer)


def _with(make: Callable[[], bytes], kind: str, number: int) -> Callable[[str], Awaitable[None]]:
    """Return an attack with this number of new images in each request."""

    made = functools.cache(make)

    async def attack(url: str) -> None:
        file = made()
        await _repeat(url, lambda: body_of([(kind, unique(file)) for _ in range(number)]))

    return attack


async def _honest(url: str) -> None:
    """Send an image of 1 MB, and the next one when it is answered."""
    await _repeat(url, lambda: body_of([("jpeg", new_photo())]))


async def _honest_paced(url: str) -> None:
    """Send an image of 1 MB a second, whether the previous one is answered or not."""
    await asyncio.sleep(next(_numbers) / NUM)
    async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as tasks:

        async def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                body = body_of([("jpeg", new_photo())])
                await client.post(f"{url}/v1/chat/completions", content=body)

        while True:
            tasks.create_task(ask())
            await asyncio.sleep(1.0)


CLOSED: Final = "honest clients, closed loop"
OPEN: Final = "honest clients, open loop"
CROWD: Final = "honest crowd"
"""As many honest clients as there are attackers of all kinds."""
ALL: Final = "all of these"
HOSTED: Final = {"dripping URLs": _drip, "redirect loops": _redirect}
KINDS: Final[dict[str, Callable[[str], Awaitable[None]]]] = {
    "8 answers, read": functools.partial(_send_streams, num=4, n=8, is_read=True),
    "8 answers, unread": functools.partial(_send_streams, num=4, n=8, is_read=False),
    "128 images": _with(lambda: small_image(0, 112, 112), "png", 128),
    "8 photos": _with(lambda: _photo(1400, 1400, 75), "jpeg", 8),
    "schema bombs": lambda url: _repeat(url, _bomb),
    "large PNGs": _with(_large_png, "png", 4),
    "leavers": _leave,
    "scanned JPEGs": _with(_scanned_jpeg, "jpeg", 4),
    "announced bodies": _announce,
    "unread streams": functools.partial(_send_streams, num=1, n=1, is_read=False),
}
_REFERENCES: Final[dict[str, Callable[[str], Awaitable[None]]]] = {
    CLOSED: _honest,
    OPEN: _honest_paced,
}


async def main(kind: str, url: str) -> None:
    print("ready", flush=True)
    kinds = list(KINDS.values()) if kind == ALL else []
    if kind == CROWD:
        kinds = [_honest] * len(KINDS)
    if found := (KINDS | _REFERENCES).get(kind):
        kinds = [found]
    attacks = [each(url) for each in kinds for _ in range(NUM)]
    attacks += [HOSTED[kind](url)] if kind in HOSTED else []
    await asyncio.gather(*attacks)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
