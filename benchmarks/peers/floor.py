"""A server with the minimal work for a request with an image: its bytes, base64 and a digest.

python -m benchmarks.peers.floor PORT

It reads no JSON, looks nothing up, checks and counts nothing, and has no real answer. The HTTP
server is that of Afferent's frontends.
"""

from __future__ import annotations

import sys
from typing import Any

import pybase64
import uvicorn

from afferent.keys import digest

_BEFORE, _BEHIND = b"base64,", b'"'


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    pieces, more = [], True
    while more:
        message = await receive()
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"".join(pieces)
    if (start := body.find(_BEFORE)) >= 0:
        start += len(_BEFORE)
        text = memoryview(body)[start : body.find(_BEHIND, start)]
        digest(pybase64.b64decode(text, validate=True))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        log_level="warning",
        access_log=False,
        loop="uvloop",
        http="httptools",
        lifespan="off",
    )
