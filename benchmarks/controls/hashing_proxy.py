"""Baseline of a gateway: it streams a body, and hashes the first 64 KiB of its first image.

python -m benchmarks.controls.hashing_proxy PORT URL...

It checks, limits and fetches nothing.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
import uvloop
from aiohttp import web

_HEAD_NBYTES: Final = 64 << 10
_KEY: Final = b";base64,"


def _placed(head: bytes, urls: list[str]) -> str:
    start = head.find(_KEY)
    key = head[start:] if start >= 0 else head
    return max(urls, key=lambda url: hashlib.blake2b(key + url.encode(), digest_size=8).digest())


def _app(urls: list[str]) -> web.Application:
    async def passed_on(request: web.Request) -> web.StreamResponse:
        head = b""
        async for chunk in request.content.iter_any():
            head += chunk
            if len(head) >= _HEAD_NBYTES:
                break

        async def body() -> AsyncIterator[bytes]:
            yield head
            async for chunk in request.content.iter_any():
                yield chunk

        url = _placed(head[:_HEAD_NBYTES], urls)
        headers = {
            "content-length": str(request.content_length or 0),
            "content-type": "application/json",
        }
        session = request.app[_SESSION]
        async with session.post(url + request.path, data=body(), headers=headers) as answer:
            return web.Response(body=await answer.read(), content_type="application/json")

    async def sessions(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            app[_SESSION] = session
            yield

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=1 << 30)
    app.cleanup_ctx.append(sessions)
    app.add_routes([web.get("/health", health), web.post("/{path:.*}", passed_on)])
    return app


_SESSION: Final = web.AppKey("session", aiohttp.ClientSession)


if __name__ == "__main__":
    web.run_app(
        _app(sys.argv[2:]),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        print=None,
        access_log=None,
        loop=uvloop.new_event_loop(),
    )
