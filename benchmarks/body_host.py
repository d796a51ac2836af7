"""A host for `benchmarks.body`, which receives bodies as Afferent does and as engines do.

    python -m benchmarks.body_host ADDRESS

It prints its port, and ends with its input. Each path receives in its own way. ``/heap`` measures
the maximal growth of the heap between an ``on`` and an ``off``, and answers ``off`` with it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import sys
import tracemalloc

import blake3
import pybase64
import uvloop
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from afferent import keys
from afferent.admission.gate import Gate
from afferent.builtin.apis.openai import MEDIA_KEYS
from afferent.config import RequestLimits
from afferent.proxy.body import BodyReader
from afferent.proxy.http_server.server import HttpServer
from afferent.proxy.http_server.shared import ConnectionLimits
from afferent.store.client.async_store import AsyncDaemonStore

_LIMITS = RequestLimits()
_BASE64 = b";base64,"


class Host:
    def __init__(self, store: AsyncDaemonStore) -> None:
        self._store, self._gate = store, Gate(store, timeout_s=30.0)
        self._known: set[bytes] = set()
        self._num = self._base_nbytes = 0

    def app(self) -> Starlette:
        paths = {
            "/cut": self.cut,
            "/parse": self.parse,
            "/decode": self.decode,
            "/floor": self.floor,
            "/heap": self.heap,
        }
        return Starlette(routes=[Route(path, do, methods=["POST"]) for path, do in paths.items()])

    async def cut(self, request: Request) -> Response:
        """Receive as Afferent does: media go into the arena while they arrive."""
        self._num += 1
        reader = BodyReader(self._store, self._gate, str(self._num), _LIMITS, MEDIA_KEYS)
        body = await reader.read(request)
        self._store.forget(str(self._num))
        return JSONResponse({"nbytes": sum(item.nbytes for item in body.media.values())})

    async def parse(self, request: Request) -> Response:
        """Receive as the baseline: read the whole body, parse it, decode it (vLLM and SGLang)."""
        return JSONResponse({"nbytes": len(await _media_of(request))})

    async def decode(self, request: Request) -> Response:
        """Look up as the baseline: decode the image and hash its pixels, as vLLM does."""
        image = Image.open(io.BytesIO(await _media_of(request))).convert("RGB")
        key = blake3.blake3(image.tobytes()).digest()
        is_known = key in self._known
        self._known.add(key)
        return JSONResponse({"is_known": is_known})

    async def floor(self, request: Request) -> Response:
        """Do the minimal work: receive the bytes, decode the base64, and digest the result."""
        body = await request.body()
        start = body.index(_BASE64) + len(_BASE64)
        text = memoryview(body)[start : body.index(b'"', start)]
        data = pybase64.b64decode(text, validate=True)
        return JSONResponse({"digest": keys.digest(data).hex()})

    async def heap(self, request: Request) -> Response:
        grown_nbytes = tracemalloc.get_traced_memory()[1] - self._base_nbytes
        if await request.body() == b"on":
            tracemalloc.start()
            self._base_nbytes = tracemalloc.get_traced_memory()[0]
        else:
            tracemalloc.stop()
        return JSONResponse({"nbytes": grown_nbytes})


async def _media_of(request: Request) -> bytes:
    body = json.loads(await request.body())
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    return base64.b64decode(url.partition(",")[2])


async def _run(address: str) -> None:
    store = await AsyncDaemonStore.connect(address, name="host", writable=True)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    limits = ConnectionLimits(header_timeout_s=60.0, discard_timeout_s=60.0, write_timeout_s=60.0)
    server = HttpServer(
        Host(store).app(), listener, limits, refuse=lambda *_: b"", drain_timeout_s=1.0
    )
    parent_is_gone = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    serving = asyncio.create_task(server.serve())
    await parent_is_gone
    server.end_now()
    await serving
    await store.close()


def main() -> None:
    uvloop.run(_run(sys.argv[1]))


if __name__ == "__main__":
    main()
